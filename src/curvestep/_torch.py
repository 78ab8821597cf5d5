"""The parts of torch with an underscore in their name, behind one check.

They are fast and stable in practice, but torch promises nothing about them: each is used only where it is
there and gives the right answer on a small case, and every caller has a path that does without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

# Hooks that run at every step of every optimizer; None where torch keeps them elsewhere, see `is_observed`.
_hooks_for_all: Any = tuple(
    getattr(import_module("torch.optim.optimizer"), name, None)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)


def is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler or a hook looks at the steps of ``optimizer``; yes, if torch does not tell."""
    try:
        return bool(
            torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or any(map(len, _hooks_for_all))
        )
    except (AttributeError, TypeError):
        return True


@cache
def fused_sgd() -> Callable[..., None] | None:
    """``torch._fused_sgd_`` if it is there and follows the formula that the optimizers fold into it."""
    kernel = getattr(torch, "_fused_sgd_", None)
    return kernel if kernel is not None and _follows_formula(kernel) else None


def _follows_formula(kernel: Callable[..., None]) -> bool:
    """Try b <- mu*b + (1 - d)(g + w*p), p <- p - lr*b on five numbers."""
    p, g = torch.arange(5, dtype=torch.float64), torch.full((5,), 2.0, dtype=torch.float64)
    b = torch.ones(5, dtype=torch.float64)
    expected_b = 0.5 * b + 0.25 * (g + 3.0 * p)
    expected_p = p - 0.1 * expected_b
    try:
        kernel(
            [p], [g], [b], lr=0.1, weight_decay=3.0, momentum=0.5, dampening=0.75,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
    except (RuntimeError, TypeError):
        return False
    return torch.allclose(b, expected_b) and torch.allclose(p, expected_p)
