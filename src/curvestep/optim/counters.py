"""How often clipping fires and which steps are left out: numbers that a checkpoint keeps.

On an accelerator they are tensors there, changed in place, which only :func:`read_counters` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any, TypedDict

import torch
from torch import Tensor

from curvestep._checks import check_positive
from curvestep.optim.double_clipping import DoubleClipping

# Steps that `recent_clipped_fraction` and the running median look back on.
RECENT_STEPS = 100
# Gradient norms that a running median needs before it can leave out a step.
FEWEST_NORMS = 10
# Numbers that are one tensor on an accelerator, in this order.
TOTALS = ("grad_norm", "coefficient", "steps", "clipped", "skipped")
# Where a state dict keeps the counters: an entry of the first parameter group.
COUNTERS = "clip_stats"


class ClipStats(TypedDict):
    """What ``clip_stats()`` returns.

    Attributes:
        grad_norm: Norm of the last gradient, before clipping.
        coefficient: Factor on the last step, 1 where nothing was clipped; the smallest if there were several.
        steps: Steps taken, without the skipped ones.
        clipped_fraction: Share of these steps whose gradient norm was above the threshold.
        recent_clipped_fraction: The same over the last 100 steps.
        skipped: Steps skipped because the gradient was not finite, or its norm larger than ``skip_above``.
            With ``fused=True`` also those of a ``GradScaler``, which else leaves them out without a call.
    """

    grad_norm: float
    coefficient: float
    steps: int
    clipped_fraction: float
    recent_clipped_fraction: float
    skipped: int


def new_counters() -> dict[str, Any]:
    """Counters before the first step."""
    return {"grad_norm": 0.0, "coefficient": 1.0, "steps": 0, "clipped": 0.0, "recent": [], "skipped": 0}


def count_step(
    counters: dict[str, Any],
    norm: Any,
    coefficients: list[Any],
    fired: list[Any],
    skip: Any,
    counts: Any = True,
) -> None:
    """Add one step, with a coefficient for each clipping decision and whether it fired.

    ``skip`` says whether the step was left out, ``counts`` whether to count it at all. All may be device
    scalars, of which none is read.
    """
    coefficient = reduced(coefficients, min, torch.min)
    clipped = reduced(fired, lambda values: sum(values) / len(values), torch.mean)
    numbers = [norm, coefficient, counts * (1 - skip), clipped, counts * skip]
    together = stacked(numbers)
    if together is None and "totals" not in counters:
        if counts:
            counters["grad_norm"] = norm
            counters["skipped"] += int(skip)
        if counts and not skip:
            counters["coefficient"] = coefficient
            counters["steps"] += 1
            counters["clipped"] += clipped
            counters["recent"].append(float(clipped))
            del counters["recent"][:-RECENT_STEPS]
        return
    if together is None:
        together = torch.tensor(numbers, dtype=torch.float64)
    if "totals" not in counters:
        totals = [float(counters.pop(name)) for name in TOTALS]
        counters["totals"] = _on_device(totals, together) if any(totals[2:]) else together * 0
        counters["recent"] = _ring(counters["recent"], together)
    totals, recent = counters["totals"], counters["recent"]
    norm, coefficient, taken, clipped, skipped = together.to(totals).unbind()
    _push_(recent, clipped, taken)
    totals[0].copy_(torch.where(taken + skipped > 0, norm, totals[0]))
    totals[1].copy_(torch.where(taken > 0, coefficient, totals[1]))
    totals[2:].add_(torch.stack([taken, taken * clipped, skipped]))


def read_counters(counters: dict[str, Any], double_clipping: DoubleClipping | None = None) -> dict[str, Any]:
    """The counters as plain numbers, with what ``double_clipping`` kept: one wait for an accelerator."""
    rings = [name for name, value in counters.items() if name != "totals" and isinstance(value, Tensor)]
    if "totals" not in counters and not rings:
        return {name: list(v) if isinstance(v, list) else v for name, v in counters.items()}
    plain = dict(counters)
    first = [counters["totals"]] if "totals" in counters else []
    seen = [] if double_clipping is None else double_clipping.unread()
    together = [*first, *(counters[name] for name in rings)]
    numbers = torch.cat([*together, *(part.to(together[0]) for part in seen)]).tolist()
    if plain.pop("totals", None) is not None:
        plain |= dict(zip(TOTALS, numbers, strict=False))
        numbers = numbers[len(TOTALS) :]
    for name in rings:
        *values, count = numbers[: RECENT_STEPS + 1]
        next_one = int(count) % RECENT_STEPS
        plain[name] = (values[next_one:] if count >= RECENT_STEPS else []) + values[:next_one]
        numbers = numbers[RECENT_STEPS + 1 :]
    for part in seen:
        double_clipping.judge(*numbers[: len(part)])  # pyright: ignore[reportOptionalMemberAccess]
        numbers = numbers[len(part) :]
    return plain | {"steps": int(plain["steps"]), "skipped": int(plain["skipped"])}


def clip_stats_of(counters: dict[str, Any], double_clipping: DoubleClipping) -> ClipStats:
    """What ``clip_stats()`` says of the counters; ``double_clipping`` is read with them."""
    plain = read_counters(counters, double_clipping)
    steps, recent = plain["steps"], plain["recent"]
    return {
        "grad_norm": plain["grad_norm"],
        "coefficient": plain["coefficient"],
        "steps": steps,
        "clipped_fraction": plain["clipped"] / steps if steps else 0.0,
        "recent_clipped_fraction": sum(recent) / len(recent) if recent else 0.0,
        "skipped": plain["skipped"],
    }


def check_skip_above(value: float | str | None) -> float | str | None:
    """``value`` if it is a bound on the gradient norm, a multiple of its running median, or None."""
    if isinstance(value, str):
        try:
            usable = value.endswith("x") and 1.0 < float(value[:-1]) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(
                "`skip_above` must be a gradient norm, or a multiple above 1 of the running median such as "
                f'"10x", got {value!r}.'
            )
    elif value is not None:
        check_positive("skip_above", value)
    return value


def is_above(norm: Any, skip_above: float | str, counters: dict[str, Any]) -> Any:
    """Whether ``norm`` is larger than ``skip_above`` allows: a bool, or a device scalar that is 1 or 0.

    A multiple looks back on the last 100 finite norms, those of skipped steps among them: where gradients
    grow for good, the median follows and steps are taken again after at most 50.
    """
    norms, above = counters.setdefault("norms", []), False
    if not isinstance(skip_above, str):
        del counters["norms"]
        above = norm > skip_above
    elif isinstance(norm, Tensor):
        if not isinstance(norms, Tensor):
            norms = counters["norms"] = _ring(norms, norm)
        norm = norm.to(norms)
        count = norms[-1].clamp(1, RECENT_STEPS)
        middle = torch.stack([(count - 1) // 2, count // 2]).long()
        running = norms[:-1].sort().values.index_select(0, middle).mean()  # NaN, no value yet, comes last
        above = (norms[-1] >= FEWEST_NORMS) & (norm > float(skip_above[:-1]) * running)
        _push_(norms, norm, norm.isfinite())
    else:
        if len(norms) >= FEWEST_NORMS:
            above = norm > float(skip_above[:-1]) * median(norms)
        if math.isfinite(norm):
            norms.append(norm)
            del norms[:-RECENT_STEPS]
    return above.to(torch.float32) if isinstance(above, Tensor) else above


def _on_device(numbers: list[float], like: Tensor) -> Tensor:
    """Numbers as a tensor where ``like`` is; from the host, which need not be waited for."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)


def _ring(values: list[float], like: Tensor) -> Tensor:
    """The last values as a tensor that does not grow; its last entry is the number of values so far."""
    if values:
        return _on_device([*values, *[math.nan] * (RECENT_STEPS - len(values)), float(len(values))], like)
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    ring = torch.full((RECENT_STEPS + 1,), math.nan, dtype=dtype, device=like.device)
    ring[-1].zero_()
    return ring


def _push_(ring: Tensor, value: Tensor, keep: Tensor) -> None:
    """Add a value in place of the oldest, if the device scalar ``keep`` is not zero."""
    count = ring[-1:]
    at = (count % RECENT_STEPS).long()
    ring.index_copy_(0, at, torch.where(keep > 0, value, ring.index_select(0, at)))
    count.add_(keep)


def joint_norm(norms: list[Any], scope: str) -> Any:
    """Norm of the whole gradient from the norms of the parts that are clipped alone."""
    parts = norms[:1] if scope == "global" else norms
    return reduced(parts, lambda values: math.hypot(*values), torch.linalg.vector_norm)


def reduced(values: list[Any], on_host: Callable[..., Any], on_device: Callable[..., Any]) -> Any:
    """One number from several, some of which may be device scalars; then so is the result."""
    if len(values) == 1:
        return values[0].detach() if isinstance(values[0], Tensor) else values[0]
    together = stacked(values)
    return on_host(values) if together is None else on_device(together)


def stacked(values: list[Any]) -> Tensor | None:
    """Numbers, some of them device scalars, as a tensor on that device; None if all are plain."""
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    if device is None:
        return None
    kind: Any = {"device": device, "dtype": torch.float32 if device.type == "mps" else torch.float64}
    return torch.stack(
        [
            v.detach().to(**kind).view(()) if isinstance(v, Tensor) else torch.full((), v, **kind)
            for v in values
        ]
    )
