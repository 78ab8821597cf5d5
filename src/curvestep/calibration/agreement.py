r"""How far the gradients of several batches agree: signal, or noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvestep.vectors import global_norm

HALF = (torch.float16, torch.bfloat16)


class Agreement:
    r"""Mean cosine of the angles between the gradients of batches.

    .. math::
        \rho = \frac{1}{n(n-1)} \sum_{i \ne j} \langle u_i, u_j\rangle
        = \frac{\lVert \sum_i u_i \rVert^2 - n}{n(n-1)}, \qquad u_i = g_i/\lVert g_i\rVert

    One where all batches pull the same way, about zero where each shows its own noise. Only the sum of the
    directions is kept.

    Example:
        >>> agreement = Agreement()
        >>> for angle in (0.0, math.pi / 3):
        ...     agreement.add([torch.tensor([math.cos(angle), math.sin(angle)])])
        >>> round(agreement.cosine, 6)
        0.5
    """

    def __init__(self) -> None:
        self._sum: list[Tensor | None] = []
        self._count = 0

    def add(self, gradients: list[Tensor | None]) -> None:
        """Count one more batch's gradient in; None is a parameter without one."""
        norm = global_norm([g for g in gradients if g is not None]).item()
        before = self._sum or [None] * len(gradients)
        with torch.no_grad():
            units = [None if g is None else (g.float() if g.dtype in HALF else g) / norm for g in gradients]
            self._sum = [
                u if s is None else s if u is None else s.add_(u) for s, u in zip(before, units, strict=True)
            ]
        self._count += 1

    @property
    def cosine(self) -> float:
        """The mean cosine; NaN for fewer than two batches."""
        if self._count < 2:
            return math.nan
        length = global_norm([s for s in self._sum if s is not None]).item()
        return (length**2 - self._count) / (self._count * (self._count - 1))
