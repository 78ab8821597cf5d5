r"""Clipped and normalized SGD and the smoothness estimate of Zhang, He, Sra and Jadbabaie (ICLR 2020).

Plain torch and nothing else, in the paper's own formulas: to read, and to test faster code against.

.. math::
    x_{k+1} = x_k - \min\{\eta,\ \gamma\eta / \lVert g_k \rVert\}\, g_k, \qquad
    x_{k+1} = x_k - \frac{\eta}{\lVert g_k \rVert + \beta}\, g_k, \qquad
    \hat L(x_k) = \max_{\gamma \in \{\delta, 2\delta, \dots, 1\}}
        \frac{\lVert \nabla f(x_k + \gamma d) - \nabla f(x_k) \rVert}{\lVert \gamma d \rVert},
    \quad d = x_{k+1} - x_k
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of tensors as one vector."""
    return torch.sqrt(sum((t.square().sum() for t in tensors), start=torch.zeros(())))


def clipped_step(x: Sequence[Tensor], g: Sequence[Tensor], *, lr: float, max_norm: float) -> list[Tensor]:
    """The point after one step of clipped SGD from x along the gradient g."""
    length = norm(g)
    h = min(lr, max_norm * lr / float(length)) if length > 0 else lr
    return [one - h * gradient for one, gradient in zip(x, g, strict=True)]


def normalized_step(x: Sequence[Tensor], g: Sequence[Tensor], *, lr: float, offset: float) -> list[Tensor]:
    """The point after one step of normalized SGD from x along the gradient g."""
    h = lr / float(norm(g) + offset)
    return [one - h * gradient for one, gradient in zip(x, g, strict=True)]


def smoothness(
    gradient: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    start: Sequence[Tensor],
    end: Sequence[Tensor],
    *,
    delta: float,
) -> float:
    """The estimate of appendix H along the step from start to end; the same data give every gradient."""
    at_start = gradient(start)
    largest = -math.inf
    for number in range(1, round(1 / delta) + 1):
        along = number * delta
        point = [x + along * (y - x) for x, y in zip(start, end, strict=True)]
        change = [b - a for a, b in zip(at_start, gradient(point), strict=True)]
        moved = [b - a for a, b in zip(start, point, strict=True)]
        largest = max(largest, float(norm(change) / norm(moved)))
    return largest


def smoothness_as_released(
    gradients: Callable[[Sequence[Tensor]], Sequence[Sequence[Tensor]]],
    start: Sequence[Tensor],
    end: Sequence[Tensor],
) -> float:
    """The same in the authors' code: at the middle of the step alone, and a sum over pieces of the data.

    ``gradients`` gives one gradient a piece, of pieces that their code cuts anew at each point.
    """
    middle = [x + 0.5 * (y - x) for x, y in zip(start, end, strict=True)]
    before = [sum(parts, start=torch.zeros(())) for parts in zip(*gradients(start), strict=True)]
    after = [sum(parts, start=torch.zeros(())) for parts in zip(*gradients(middle), strict=True)]
    change = [b - a for a, b in zip(before, after, strict=True)]
    moved = [b - a for a, b in zip(start, middle, strict=True)]
    return float(norm(change) / norm(moved))
