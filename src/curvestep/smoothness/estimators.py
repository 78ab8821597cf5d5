r"""Local smoothness from gradients: along a segment (the paper's), along a direction, over all directions.

Each estimator takes a gradient as a function of a point: a tensor, or one tensor for each parameter. A
:class:`~curvestep.smoothness.replay.Replay` is such a function, so the same line measures a formula and a
network::

    with cs.Replay(model, loss_fn) as replay:
        cs.local_smoothness(replay, replay.point, direction)

Over all directions it is the norm of the Hessian, by Lanczos over Hessian products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from curvestep.checks import check_count, check_positive
from curvestep.smoothness.schedule import check_fractions
from curvestep.tensors.distributed import whole
from curvestep.tensors.vectors import difference, global_norm, precision

Point = Tensor | Sequence[Tensor]
Gradient = Callable[[Any], Any]
T = TypeVar("T")


def segment_smoothness(
    gradient: Gradient, start: Point, end: Point, *, fractions: Iterable[float] = (0.5, 1.0)
) -> Tensor:
    r"""The paper's estimate of smoothness along the segment of a step.

    .. math::
        \hat L = \max_{\gamma \in \{\delta, 2\delta, \dots, 1\}}
            \frac{\lVert \nabla f(x + \gamma d) - \nabla f(x) \rVert}{\lVert \gamma d \rVert},
            \qquad d = x' - x

    It is a lower bound on the largest Hessian norm along the segment and sees one direction only.

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        start: :math:`x`.
        end: :math:`x'`.
        fractions: Every :math:`\gamma`, in (0, 1].

    Returns:
        A scalar tensor.

    Raises:
        ValueError: ``start`` and ``end`` coincide.

    Example:
        >>> segment_smoothness(lambda x: 4.0 * x, torch.zeros(3), torch.ones(3)).item()
        4.0
    """
    fractions = check_fractions(fractions)
    x = listed(start)
    ends = listed(end)
    d = _step(x, ends)
    here = listed(gradient(start))
    length = global_norm(d)
    secants = []
    for fraction in fractions:
        inner = ends if fraction == 1 else _moved(x, d, fraction)
        there = listed(gradient(shaped_like(start, inner)))
        secants.append(global_norm(difference(there, here)) / (fraction * length))
    return torch.stack(secants).max()


def critical_lr(
    loss: Callable[[Any], float | Tensor], start: Point, end: Point, *, lr: float = 1.0, num_passes: int = 6
) -> tuple[float, float]:
    r"""Bracket of the learning rate at which the optimizer's own step first raises the loss.

    .. math::
        \eta_c = \eta \cdot \inf\{c > 0 : f(x + c\,d) > f(x)\}, \qquad d = x' - x

    by forward passes alone, for any optimizer. The multiple c is doubled or halved from 1 until the loss has
    been seen to rise and not to, then bisected on a logarithmic scale. On a quadratic a gradient step has
    :math:`\eta_c = 2/\lambda` along its direction.

    Args:
        loss: :math:`f` at a point, on the same data at every call: of the step's batch, or of others.
        start: :math:`x`.
        end: :math:`x'`, after the step at ``lr``.
        lr: Learning rate of the step.
        num_passes: Evaluations of the loss, the one at the start included; at least 3.

    Returns:
        The largest lr below it that was seen not to raise the loss, and the least seen to raise it; 0 and inf
        where none was seen.

    Raises:
        ValueError: an argument is outside of the range above.

    Example:
        >>> x = torch.tensor([1.0])
        >>> low, high = critical_lr(lambda x: 2 * x.square().sum(), x, x - 0.1 * 4 * x, lr=0.1)
        >>> low < 0.5 < high      # 2/λ, λ = 4
        True
    """
    check_positive("lr", lr)
    check_count("num_passes", num_passes, least=3)
    x = listed(start)
    d = _step(x, listed(end))
    here = float(loss(start))

    def rises(multiple: float) -> bool:
        there = shaped_like(start, _moved(x, d, multiple))
        return not float(loss(there)) <= here  # a loss that is not finite has risen

    low = 0.0
    high = math.inf
    multiple = 1.0
    for _ in range(num_passes - 1):
        if rises(multiple):
            high = multiple
        else:
            low = multiple
        if math.isinf(high):
            multiple = 2 * low
        elif low == 0:
            multiple = high / 2
        else:
            multiple = math.sqrt(low * high)
    return lr * low, lr * high


def _step(start: Sequence[Tensor], end: Sequence[Tensor]) -> list[Tensor]:
    """The way between two points, which must not be one."""
    d = [b.detach() - a.detach() for a, b in zip(start, end, strict=True)]
    if not global_norm(d) > 0:
        raise ValueError(
            "`start` and `end` coincide, so there is no step to measure. "
            "Skip steps that did not move the parameters."
        )
    return d


def local_smoothness(gradient: Gradient, point: Point, direction: Point) -> Tensor:
    r"""Smoothness at a point along one direction: the limit of the segment estimate for ever shorter steps.

    .. math::
        \frac{\lVert \nabla^2 f(x)\, d \rVert}{\lVert d \rVert}

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        point: :math:`x`.
        direction: :math:`d`, not zero.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: ``direction`` is zero.

    Example:
        >>> H = torch.diag(torch.tensor([3.0, 4.0]))
        >>> local_smoothness(lambda x: H @ x, torch.ones(2), torch.tensor([1.0, 1.0])).item()
        3.5355...
    """
    size = global_norm(listed(direction))
    if not size > 0:
        raise ValueError("`direction` must not be zero. Skip steps that did not move the parameters.")
    product = hessian_product(gradient, point, direction)
    return global_norm(listed(product)) / size


@dataclass(frozen=True, kw_only=True)
class SpectralSmoothness:
    r"""The Hessian's norm, and how far it is to be trusted.

    Attributes:
        value: :math:`\lVert \nabla^2 f(x) \rVert`, the largest absolute eigenvalue; a lower bound on it
            if not ``converged``.
        eigenvalue: That eigenvalue with its sign.
        residual: :math:`\lVert Hv - \lambda v \rVert / |\lambda|` for the unit vector :math:`v` found.
        converged: Whether the residual is within ten times the tolerance (Lanczos stops at its own estimate
            of it, which rounding spoils) and no product seen on the way was longer.
        num_products: How many Hessian products it took.
    """

    value: float
    eigenvalue: float
    residual: float
    converged: bool
    num_products: int


def spectral_smoothness(
    gradient: Gradient,
    point: Point,
    *,
    eps: float | None = None,
    tol: float | None = None,
    max_products: int = 200,
) -> SpectralSmoothness:
    r"""The norm of the Hessian, :math:`\lVert \nabla^2 f(x) \rVert = \max_i |\lambda_i|`, by Lanczos.

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        point: :math:`x`.
        eps: Relative precision of the gradients; default: that of their dtype.
        tol: Residual at which to stop, relative to the eigenvalue. Default: 1e-4, or what the precision
            allows if that is more. The eigenvalue itself is then far more accurate.
        max_products: Where to give up; the result then says ``converged=False``.

    Returns:
        The norm, with its residual and whether it converged.

    Raises:
        ValueError: an argument is outside of the range above.

    Example:
        >>> H = torch.diag(torch.tensor([3.0, -5.0, 1.0]))
        >>> result = spectral_smoothness(lambda x: H @ x, torch.ones(3))
        >>> round(result.value, 6), round(result.eigenvalue, 6), result.converged
        (5.0, -5.0, True)
    """
    x = listed(point)
    check_count("max_products", max_products)
    if tol is None:
        tol = max(1e-4, 10 * (eps or precision(x)) ** (2 / 3))
    check_positive("tol", tol)

    def product(v: np.ndarray) -> np.ndarray:
        direction = shaped_like(point, _unflattened(v, x))
        full = listed(hessian_product(gradient, point, direction, eps=eps))
        return np.concatenate([_flattened(part, p) for part, p in zip(full, x, strict=True)])

    size = sum(p.numel() for p in x)
    return _largest_eigenvalue(product, size, tol=tol, max_products=max_products)


def hessian_product(gradient: Gradient, point: Point, direction: Point, *, eps: float | None = None) -> Any:
    r""":math:`\nabla^2 f(x)\, d`: of a Replay exactly where torch can, else by a central difference."""
    exact = getattr(gradient, "hessian_product", None)
    if exact is not None:
        with suppress(RuntimeError, NotImplementedError):
            return exact(listed(direction), origin=listed(point))
    return central_difference(gradient, point, direction, length=central_length(listed(point), eps=eps))


def central_difference(gradient: Gradient, point: Point, direction: Point, *, length: float) -> Any:
    r""":math:`\nabla^2 f(x)\, d` by two gradients.

    .. math::
        \nabla^2 f(x)\, d \approx \frac{\nabla f(x + t d) - \nabla f(x - t d)}{2t},
            \qquad \lVert t d \rVert = \text{length}
    """
    x = listed(point)
    d = listed(direction)
    t = check_positive("length", length) / global_norm(d).item()
    ahead = _moved_gradient(gradient, point, x, d, t)
    change = difference(ahead, _moved_gradient(gradient, point, x, d, -t))
    return shaped_like(point, each(lambda c: c / (2 * t), change))


def central_length(point: Sequence[Tensor], *, eps: float | None = None) -> float:
    r"""The length of a difference step in general, :math:`\sqrt[3]{\varepsilon}\,\lVert x\rVert`.

    So the errors of rounding, :math:`O(\varepsilon / t)`, and of the difference, :math:`O(t^2)`, are alike.
    """
    if eps is None:
        eps = precision(point)
    return check_positive("eps", eps) ** (1 / 3) * (global_norm(point).item() or 1.0)


def _moved_gradient(gradient: Any, point: Point, x: Sequence[Tensor], d: Sequence[Tensor], t: float) -> Any:
    if hasattr(gradient, "gradient_at"):  # a Replay moves in place, without another copy of the point
        return gradient.gradient_at(d, t, origin=x).gradients
    return listed(gradient(shaped_like(point, _moved(x, d, t))))


def _moved(x: Sequence[Tensor], d: Sequence[Tensor], t: float) -> list[Tensor]:
    return [a.detach() + t * b for a, b in zip(x, d, strict=True)]


def each(function: Callable[[Tensor], T], tensors: Iterable[Tensor | None]) -> list[T | None]:
    """The function of every tensor; None stays None."""
    return [None if tensor is None else function(tensor) for tensor in tensors]


def listed(value: Any) -> list[Any]:
    """One tensor as a list of one, anything else as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def shaped_like(point: Point, tensors: Sequence[Any]) -> Any:
    """The tensors in the form of ``point``: one tensor, or a list."""
    return tensors[0] if isinstance(point, Tensor) else list(tensors)


def _largest_eigenvalue(
    product: Callable[[np.ndarray], np.ndarray], size: int, *, tol: float, max_products: int
) -> SpectralSmoothness:
    products = _Products(product, size, most=max_products)
    is_found = False
    v: np.ndarray = products.vector
    image: np.ndarray = products.image
    with suppress(_Stopped, ArpackError):
        if size < 3:  # too small for ARPACK: the whole matrix
            matrix = np.stack([products(v) for v in np.eye(size)])
            values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
            v = vectors[:, np.argmax(np.abs(values))]
            image = matrix @ v
            is_found = True
        else:
            start = np.random.default_rng(0).standard_normal(size)
            # eigsh hands over unit vectors, but only nearly: the operator is linear in them.
            make: Any = LinearOperator  # whose stubs know subclasses only
            operator = make((size, size), matvec=lambda v: products(v) * np.linalg.norm(v), dtype=np.float64)
            _, vectors = eigsh(operator, k=1, which="LM", v0=start, tol=tol)  # pyright: ignore[reportArgumentType] (scipy-stubs: int)
            v = vectors[:, 0]
            image = products(v)
            is_found = bool(abs(v @ image) >= (1 - tol) * products.length)
    if not is_found:
        v = products.vector
        image = products.image
    eigenvalue = float(v @ image)
    value = abs(eigenvalue) if is_found else float(np.linalg.norm(image))
    residual = float(np.linalg.norm(image - eigenvalue * v)) / (value or 1.0)
    return SpectralSmoothness(
        value=value,
        eigenvalue=eigenvalue,
        residual=residual,
        converged=is_found and residual <= 10 * tol,
        num_products=products.count,
    )


class _Products:
    """Products of the Hessian with unit vectors: their number, and the longest of them."""

    def __init__(self, product: Callable[[np.ndarray], np.ndarray], size: int, *, most: int) -> None:
        self._product = product
        self._most = most
        self.count = 0
        self.length = -1.0
        self.vector = np.zeros(size)
        self.image = np.zeros(size)

    def __call__(self, v: np.ndarray) -> np.ndarray:
        """The product with v/‖v‖; stops where no more may be taken, or one is not finite."""
        if self.count >= self._most:
            raise _Stopped
        self.count += 1
        v = v.ravel() / np.linalg.norm(v)
        image = self._product(v)
        if not np.isfinite(image).all():
            self.length = math.inf
            self.vector = v
            self.image = np.full(len(v), np.nan)
            raise _Stopped
        length = float(np.linalg.norm(image))
        if length > self.length:
            self.length = length
            self.vector = v
            self.image = image
        return image


class _Stopped(Exception):
    """No more products: they are used up, or one is not finite."""


def _flattened(tensor: Tensor | None, like: Tensor) -> np.ndarray:
    """The numbers of a tensor as a vector; zeros for None."""
    if tensor is None:
        return np.zeros(like.numel())
    return whole(tensor).detach().to_dense().reshape(-1).double().cpu().numpy()


def _unflattened(v: np.ndarray, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.from_numpy(v).split([p.numel() for p in like])
    return [_shaped(piece, p) for piece, p in zip(pieces, like, strict=True)]


def _shaped(piece: Tensor, p: Tensor) -> Tensor:
    piece = piece.to(p.device, p.dtype).reshape(p.shape)
    return distribute_tensor(piece, p.device_mesh, p.placements) if isinstance(p, DTensor) else piece
