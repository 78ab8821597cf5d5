"""How often clipping fires and which steps are left out: numbers that a checkpoint keeps.

On an accelerator they are device scalars, which only :func:`read_counters` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any, TypedDict

import torch
from torch import Tensor

from curvestep._checks import check_positive

# Steps that `recent_clipped_fraction` and the running median look back on.
RECENT_STEPS = 100
# Gradient norms that a running median needs before it can leave out a step.
FEWEST_NORMS = 10
# Where a state dict keeps the counters: an entry of the first parameter group.
COUNTERS = "clip_stats"


class ClipStats(TypedDict):
    """What ``clip_stats()`` returns.

    Attributes:
        grad_norm: Norm of the last gradient, before clipping.
        coefficient: Factor on the last step, 1 where nothing was clipped; the smallest if there were several.
        steps: Steps taken, without the skipped ones.
        clipped_fraction: Share of these steps that were clipped.
        recent_clipped_fraction: The same over the last 100 steps.
        skipped: Steps skipped because the gradient was not finite, or its norm larger than ``skip_above``.
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
    counters: dict[str, Any], norm: Any, coefficients: list[Any], fired: list[Any], skip: Any
) -> None:
    """Add one step, with a coefficient for each clipping decision and whether it fired."""
    taken = 1 - skip if isinstance(skip, Tensor) else 1
    clipped = 1.0 * taken * reduced(fired, lambda values: sum(values) / len(values), torch.mean)
    counters["grad_norm"] = norm
    counters["coefficient"] = reduced(coefficients, min, torch.min)
    counters["steps"] = counters["steps"] + taken
    counters["skipped"] = counters["skipped"] + (1 - taken)
    counters["clipped"] = counters["clipped"] + clipped
    counters["recent"].append(clipped)
    del counters["recent"][:-RECENT_STEPS]


def read_counters(counters: dict[str, Any]) -> dict[str, Any]:
    """The counters as plain numbers: an accelerator is waited for here, once."""
    lists = {name: value for name, value in counters.items() if isinstance(value, list)}
    names = [name for name in counters if name not in lists]
    numbers = [*(counters[name] for name in names), *(v for values in lists.values() for v in values)]
    together = stacked(numbers)
    left = iter(numbers if together is None else together.tolist())
    plain: dict[str, Any] = {name: next(left) for name in names}
    plain |= {name: [next(left) for _ in values] for name, values in lists.items()}
    return plain | {"steps": int(plain["steps"]), "skipped": int(plain["skipped"])}


def clip_stats_of(counters: dict[str, Any]) -> ClipStats:
    """What ``clip_stats()`` says of the counters."""
    plain = read_counters(counters)
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
    if not isinstance(skip_above, str):
        above = norm > skip_above
    else:
        norms = counters.setdefault("norms", [])
        above = False
        if len(norms) >= FEWEST_NORMS:
            above = norm > float(skip_above[:-1]) * reduced(norms, median, torch.nanmedian)
        if isinstance(norm, Tensor) or math.isfinite(norm):
            norms.append(norm)
            del norms[:-RECENT_STEPS]
    return above.to(torch.float32) if isinstance(above, Tensor) else above


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
        [v.detach().to(**kind) if isinstance(v, Tensor) else torch.full((), v, **kind) for v in values]
    )
