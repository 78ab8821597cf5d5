r"""Smoothness over all directions: the norm of the Hessian, by Lanczos over Hessian products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from curvestep._checks import check_count, check_positive
from curvestep.smoothness.estimators import (
    Gradient,
    Groups,
    Point,
    hessian_product,
    listed,
    shaped_like,
)
from curvestep.vectors import global_norm, precision


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

    def __float__(self) -> float:
        return self.value


def spectral_smoothness(
    gradient: Gradient,
    point: Point,
    *,
    method: str = "auto",
    eps: float | None = None,
    tol: float | None = None,
    max_products: int = 200,
    seed: int = 0,
    groups: Groups | None = None,
    length: float | None = None,
    inverse_roots: Sequence[Tensor] | None = None,
) -> Any:
    r"""The norm of the Hessian, :math:`\lVert \nabla^2 f(x) \rVert = \max_i |\lambda_i|`, by Lanczos.

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        point: :math:`x`.
        method: How to compute Hessian products, see :func:`hessian_product`.
        eps: Relative precision of the gradients; default: that of their dtype.
        tol: Residual at which to stop, relative to the eigenvalue. Default: 1e-4, or what the precision
            allows if that is more. The eigenvalue itself is then far more accurate.
        max_products: Where to give up; the result then says ``converged=False``.
        seed: Of the random first vector.
        groups: Names with the indices of the tensors they cover: the norm of each diagonal block.
        length: Length of the difference step, see :func:`hessian_product`.
        inverse_roots: :math:`P^{-1/2}` of a diagonal metric P, shaped like ``point``: then the norm of
            :math:`P^{-1/2} H P^{-1/2}`, whose eigenvalues are those of :math:`P^{-1} H`.

    Returns:
        A :class:`SpectralSmoothness`, or one for each group.

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
    roots: list[Any] = [1.0] * len(x) if inverse_roots is None else listed(inverse_roots)

    def block_norm(part: Sequence[int]) -> SpectralSmoothness:
        def product(v: np.ndarray) -> np.ndarray:
            direction = [d * r for d, r in zip(_unflattened(v, x, part), roots, strict=True)]
            if global_norm(direction) == 0:  # only parameters that the metric leaves out
                return np.zeros(v.size)
            settings = {"method": method, "eps": eps, "length": length}
            full = listed(hessian_product(gradient, point, shaped_like(point, direction), **settings))
            scaled = [None if full[i] is None else full[i] * roots[i] for i in part]
            return _flattened(scaled, [x[i] for i in part])

        size = sum(x[i].numel() for i in part)
        return _largest_eigenvalue(product, size, tol=tol, max_products=max_products, seed=seed)

    if groups is None:
        return block_norm(range(len(x)))
    return {name: block_norm(tuple(indices)) for name, indices in groups.items()}


def _largest_eigenvalue(
    product: Callable[[np.ndarray], np.ndarray], size: int, *, tol: float, max_products: int, seed: int
) -> SpectralSmoothness:
    longest: Any = (-1.0, np.zeros(size), np.zeros(size))  # of all products: its length, vector and image
    count = 0

    def counted(v: np.ndarray) -> np.ndarray:
        nonlocal longest, count
        if count >= max_products:
            raise _OutOfProducts
        count += 1
        v = v.ravel() / np.linalg.norm(v)
        image = product(v)
        if not np.isfinite(image).all():
            raise _NotFinite
        length = float(np.linalg.norm(image))
        if length > longest[0]:
            longest = (length, v, image)
        return image

    found = False
    try:
        if size < 3:  # too small for ARPACK: the whole matrix
            matrix = np.stack([counted(e) for e in np.eye(size)])
            values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
            v = vectors[:, np.argmax(np.abs(values))]
            longest = (np.inf, v, matrix @ v)
            found = True
        else:
            start = np.random.default_rng(seed).standard_normal(size)
            # eigsh hands over unit vectors, but only nearly: the operator is linear in them.
            make: Any = LinearOperator  # whose stubs know subclasses only
            operator = make((size, size), matvec=lambda v: counted(v) * np.linalg.norm(v), dtype=np.float64)
            _, vectors = eigsh(operator, k=1, which="LM", v0=start, tol=tol)  # pyright: ignore[reportArgumentType] (scipy-stubs: int)
            v = vectors[:, 0]
            image, seen = counted(v), longest[0]
            found = bool(abs(v @ image) >= (1 - tol) * seen)
            longest = (seen, v, image) if found else longest
    except (_OutOfProducts, ArpackError):
        pass
    except _NotFinite:
        return SpectralSmoothness(
            value=np.nan, eigenvalue=np.nan, residual=np.nan, converged=False, num_products=count
        )
    _, v, image = longest
    eigenvalue = float(v @ image)
    value = abs(eigenvalue) if found else float(np.linalg.norm(image))
    residual = float(np.linalg.norm(image - eigenvalue * v)) / value if value else 0.0
    return SpectralSmoothness(
        value=value,
        eigenvalue=eigenvalue,
        residual=residual,
        converged=found and residual <= 10 * tol,
        num_products=count,
    )


class _OutOfProducts(Exception):
    pass


class _NotFinite(Exception):
    pass


def _flattened(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> np.ndarray:
    parts = []
    for t, p in zip(tensors, like, strict=True):
        whole = torch.zeros(p.numel()) if t is None else (t.full_tensor() if isinstance(t, DTensor) else t)
        parts.append(whole.detach().to_dense().reshape(-1).double().cpu().numpy())
    return np.concatenate(parts)


def _unflattened(v: np.ndarray, like: Sequence[Tensor], part: Iterable[int]) -> list[Tensor]:
    tensors = [torch.zeros_like(p).detach() for p in like]
    offset = 0
    for i in part:
        p = like[i]
        piece = torch.from_numpy(v[offset : offset + p.numel()]).to(p.device, p.dtype).reshape(p.shape)
        tensors[i] = (
            distribute_tensor(piece, p.device_mesh, p.placements) if isinstance(p, DTensor) else piece
        )
        offset += p.numel()
    return tensors
