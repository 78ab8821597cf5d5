"""How often clipping fires: the counters behind ``clip_stats()``."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

# Steps that `recent_clipped_fraction` looks back on.
RECENT_STEPS = 100


class ClipStats(TypedDict):
    """What ``clip_stats()`` returns.

    Attributes:
        grad_norm: Norm of the last gradient, before clipping.
        coefficient: Factor on the last step, 1 where nothing was clipped; the smallest if there were several.
        steps: Steps taken, without the skipped ones.
        clipped_fraction: Share of these steps that were clipped.
        recent_clipped_fraction: The same over the last 100 steps.
        skipped: Steps skipped because the gradient was not finite.
    """

    grad_norm: float
    coefficient: float
    steps: int
    clipped_fraction: float
    recent_clipped_fraction: float
    skipped: int


def new_counters() -> dict[str, Any]:
    """Counters of an optimizer that has not stepped yet."""
    return {"grad_norm": 0.0, "coefficient": 1.0, "steps": 0, "clipped": 0.0, "recent": [], "skipped": 0}


def count_step(
    counters: dict[str, Any], grad_norm: Any, coefficient: Any, clipped: Any, taken: Any = 1
) -> None:
    """Add one step. On an accelerator the numbers are tensors that nobody has waited for."""
    counters["grad_norm"] = grad_norm
    counters["coefficient"] = coefficient
    counters["steps"] = counters["steps"] + taken
    counters["skipped"] = counters["skipped"] + (1 - taken)
    counters["clipped"] = counters["clipped"] + clipped
    recent = counters["recent"]
    recent.append(clipped)
    del recent[:-RECENT_STEPS]


def count_skip(counters: dict[str, Any], grad_norm: float) -> None:
    """Add one step that was not taken."""
    counters["grad_norm"] = grad_norm
    counters["skipped"] += 1


def read_counters(counters: dict[str, Any]) -> dict[str, Any]:
    """The counters as plain numbers: this is where an accelerator is waited for."""
    return {
        "grad_norm": _number(counters["grad_norm"]),
        "coefficient": _number(counters["coefficient"]),
        "steps": int(_number(counters["steps"])),
        "clipped": _number(counters["clipped"]),
        "recent": [_number(c) for c in counters["recent"]],
        "skipped": int(_number(counters["skipped"])),
    }


def summarise(counters: dict[str, Any]) -> ClipStats:
    """The counters in the form that users see."""
    plain = read_counters(counters)
    recent = plain["recent"]
    return {
        "grad_norm": plain["grad_norm"],
        "coefficient": plain["coefficient"],
        "steps": plain["steps"],
        "clipped_fraction": plain["clipped"] / plain["steps"] if plain["steps"] else 0.0,
        "recent_clipped_fraction": sum(recent) / len(recent) if recent else 0.0,
        "skipped": plain["skipped"],
    }


def _number(x: Any) -> float:
    return x.item() if isinstance(x, Tensor) else x
