r"""ℓ-smoothness, Remark 1 in its sharp form: any law of smoothness that the gradient norm bounds (row 31).

.. math::
    \lVert\nabla^2 f(x)\rVert \le \ell(\lVert\nabla f(x)\rVert), \qquad \ell > 0 \text{ continuous}

on :math:`S = \{f \le f(x_0)\}`, which is closed. (Li, Qian, Tian, Rakhlin and Jadbabaie, 2023, introduced the
class; the doubling step is Tyurin's, 2025.)

**The gradient.** Follow :math:`x' = -\nabla f/\lVert\nabla f\rVert`. There f falls at the rate
:math:`u = \lVert\nabla f\rVert`, and u falls at most at the rate :math:`\ell(u)`. So f loses at least
:math:`\int v/\ell(v)\,dv` until the gradient vanishes, and

.. math::
    \Psi(\lVert\nabla f(x)\rVert) \le f(x) - f^*, \qquad \Psi(u) = \int_0^u \frac{v}{\ell(v)}\,dv .

Gradients on S are at most :math:`M = \Psi^{-1}(\Delta)`. From here on ℓ does not decrease.

**The constant step** :math:`1/\ell(M)`. Up to where a step would leave S, f has changed by at most
:math:`-t(1 - t\ell(M)/2)g^2 < 0`: it does not leave S, and f falls by :math:`g^2/(2\ell(M))`.

**The step** :math:`1/k(g)` with :math:`k(g) = g\sup_{g\le v\le M}\ell(v)/v`. Along a step in the direction
:math:`u = -\nabla f/g` project the gradient G on the ball of radius g. The projection moves at most at the
rate :math:`k(g)`: inside the ball since :math:`\ell(\lVert G\rVert) \le \ell(g)`, outside since only the
tangential part survives, scaled by :math:`g/\lVert G\rVert`. So its product with u stays below
:math:`-g + kt \le 0`. That of G is no larger, and f falls by :math:`h(1 - hk/2)g^2` for :math:`h \le 1/k`.
Where :math:`\ell(v)/v` does not increase, as for affine and concave laws, k is ℓ.

**The doubling step.** With :math:`\ell_M(u) = \ell(\min\{u, M\})`, a step of
:math:`h = \int_0^1 dv/\ell_M(g + gv)` at most doubles the gradient, and f falls by
:math:`D(g) = g^2\int_0^1(1 - v)/\ell_M(g + gv)\,dv` or more. It is the longer step for laws that grow fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from curvestep.checks import check_choice, check_positive
from curvestep.steps import Parameter
from curvestep.theory.problems.base import Array
from curvestep.theory.rules import Step, StepRule
from curvestep.theory.theorems.guarantee import Assumption, AssumptionError, Guarantee, Law, check_gap

_OCTAVES = np.arange(-300.0, 501.0)  # powers of two between which Ψ is integrated
_NUM_NORMS = 2400  # gradient norms at which ℓ, k and D are looked at
_HALVINGS = 45  # of a cell in which the law bends sharply, to the last digit


def _lobatto(num: int) -> tuple[Array, Array]:
    """Nodes and weights on [0, 1] with both ends, or a law that bends beside an end would go unnoticed."""
    last = np.polynomial.Legendre.basis(num - 1)
    nodes = np.concatenate([[-1.0], np.sort(last.deriv().roots().real), [1.0]])
    return (nodes + 1) / 2, 1 / (num * (num - 1) * last(nodes) ** 2)


_NODES, _WEIGHTS = _lobatto(16)


def ell_height(ell: Law, grad_norm: float) -> float:
    r"""The least gap :math:`f - f^*` of a point with this gradient norm, :math:`\int_0^u v/\ell(v)\,dv`.

    Attained by the function of one variable with :math:`f'' = \ell(|f'|)`.

    Example:
        >>> round(ell_height(lambda u: 1 + u**2, 3.0), 12) == round(math.log(10) / 2, 12)
        True
    """
    check_positive("grad_norm", grad_norm)
    octaves = 2.0**_OCTAVES
    edges = np.append(octaves[octaves < grad_norm], grad_norm)
    return float(_integrals(partial(_over_law, ell), edges[:-1], edges[1:]).sum())


def ell_gradient_bound(ell: Law, gap: float) -> float:
    r"""Largest gradient norm where :math:`f - f^*` is at most ``gap``: M with :math:`\Psi(M) = \Delta`.

    The law need not be monotone, and may vanish at 0.

    Raises:
        AssumptionError: If Ψ stays below the gap, so that no gradient norm is excluded.

    Example:
        >>> round(ell_gradient_bound(lambda u: 1 + u**2, 1.0), 6)  # √(e² − 1), attained by −ln cos
        2.527658
    """
    check_positive("gap", gap)
    edges = 2.0**_OCTAVES
    with np.errstate(over="ignore", invalid="ignore"):  # far beyond M
        pieces = _integrals(partial(_over_law, ell), edges[:-1], edges[1:])
        heights = np.cumsum(pieces)
    if heights[-1] <= gap:
        raise AssumptionError(
            f"`ell` grows too fast: a gap of {gap:g} bounds no gradient. The gap must be less than the "
            f"integral of u/ell(u), {heights[-1]:g}."
        )
    i = int(np.searchsorted(heights, gap, side="right"))
    missing = gap - (heights[i] - pieces[i])

    def excess(u: float) -> float:
        return float(_integrals(partial(_over_law, ell), edges[i : i + 1], np.array([u]))[0]) - missing

    if excess(edges[i]) >= 0:  # by rounding
        return float(edges[i])
    return float(brentq(excess, edges[i], edges[i + 1], xtol=1e-300))  # pyright: ignore[reportArgumentType]


def ell_step(ell: Law, grad_norm: ArrayLike, *, M: float = math.inf) -> Array:
    r"""The doubling step :math:`\int_0^1 dv/\ell_M(g + gv)`, up to which the gradient at most doubles.

    Args:
        ell: ℓ of an array of gradient norms; positive and nondecreasing.
        grad_norm: Gradient norms :math:`g > 0`.
        M: Largest gradient norm, beyond which ℓ is not asked.

    Example:
        >>> float(ell_step(lambda u: 1 + 2 * u, 3.0).round(12))    # ln(1 + 6/7)/6
        0.103173201401
    """
    g = np.asarray(grad_norm, dtype=np.float64)
    top = np.minimum(2 * g, M)
    return (_integrals_over(ell, g, top, lambda u: 1.0) + (2 * g - top) / ell(top)) / g


def ell_decrease(ell: Law, grad_norm: ArrayLike, *, M: float = math.inf) -> Array:
    r"""Decrease :math:`g^2\int_0^1 (1 - v)/\ell_M(g + gv)\,dv` that the step :func:`ell_step` is sure of.

    Example:
        >>> float(ell_decrease(lambda u: 4.0 + 0 * u, 2.0).round(12))    # g²/(2L)
        0.5
    """
    g = np.asarray(grad_norm, dtype=np.float64)
    top = np.minimum(2 * g, M)
    return _integrals_over(ell, g, top, lambda u: 2 * g[..., None] - u) + (2 * g - top) ** 2 / (2 * ell(top))


def ell_secant(ell: Law, M: float, *, least: float) -> Law:
    r"""The function :math:`k(g) = g\sup_{g\le v\le M}\ell(v)/v`, between ``least`` and M.

    It is ℓ itself where :math:`\ell(v)/v` does not increase; else at most half a percent too large, never too
    small.

    Example:
        >>> k = ell_secant(lambda u: 1 + u**2, 10.0, least=0.1)
        >>> float(k(np.array(0.5)).round(2))  # 0.5·(1 + 10²)/10, rounded up
        5.06
    """
    norms = np.geomspace(least, max(M, least), _NUM_NORMS)
    law = ell(norms)
    ratios = law / norms
    if np.all(np.diff(ratios) <= 1e-12 * ratios[1:]):
        return ell
    # In a cell no ratio exceeds that of its largest law to its least norm.
    of_cells = law[1:] / norms[:-1]
    from_here_on = np.maximum.accumulate(of_cells[::-1])[::-1]

    def secant(grad_norm: Array) -> Array:
        cell = np.searchsorted(norms, grad_norm, side="right") - 1
        steepest = from_here_on[np.clip(cell, 0, len(of_cells) - 1)]
        return np.minimum(np.maximum(grad_norm * steepest, ell(grad_norm)), law[-1])

    return secant


@dataclass(frozen=True)
class LawStep(StepRule):
    """A step size from the gradient norm, made of a law."""

    size: Callable[[Array], Array]  # step size at each gradient norm

    def __post_init__(self) -> None:
        pass  # it has no parameters to check

    @property
    def parameters(self) -> dict[str, Parameter]:
        """None."""
        return {}

    def at_norm(self, grad_norm: Array | float) -> Array:
        """Step sizes at these gradient norms."""
        return self.size(np.asarray(grad_norm, dtype=np.float64))

    def stepper(self, shape: tuple[int, ...]) -> Step:
        """The step itself."""
        return self


def ell_smooth(ell: Law, *, gap: float, eps: float, step: str = "adaptive") -> Guarantee:
    r"""Remark 1: descent on an ℓ-smooth function reaches gradient norm ε.

    ============ ======================================= ============================================
    step         step size                               iterations at most
    ============ ======================================= ============================================
    constant     1/ℓ(M)                                  2 ℓ(M) Δ/ε²
    secant       1/k(g)                                  (2Δ/ε) sup ℓ(v)/v over ε ≤ v ≤ M
    doubling     ∫₀¹ dv/ℓ_M(g + gv)                      Δ/min D(u) over ε ≤ u ≤ M
    adaptive     of the last two that with more promise  Δ/min max{D(u), u²/(2k(u))} over ε ≤ u ≤ M
    ============ ======================================= ============================================

    For the affine law the secant's step is :math:`1/(L_0 + L_1g)`, that of Theorem 3 with constant 2. Suprema
    and minima are taken on a grid of gradient norms, as is the check that ℓ does not decrease.

    Args:
        ell: ℓ of an array of gradient norms; positive and nondecreasing.
        gap: :math:`\Delta = f(x_0) - f^* > 0`.
        eps: Gradient norm :math:`\varepsilon > 0` to reach.
        step: ``"constant"``, ``"secant"``, ``"doubling"`` or ``"adaptive"``.

    Raises:
        AssumptionError: If ℓ is not positive and nondecreasing, or grows too fast for a gradient bound.

    Example:
        >>> guarantee = ell_smooth(lambda u: 2.0 + 0 * u, gap=1.0, eps=0.1)
        >>> round(guarantee.bound), round(guarantee.M, 6)      # 2LΔ/ε² and √(2LΔ)
        (400, 2.0)

        The law 1 + u² is as steep as −ln cos x, and its gradients are bounded all the same:

        >>> guarantee = ell_smooth(lambda u: 1 + u**2, gap=1.0, eps=0.1, step="constant")
        >>> round(guarantee.bound), round(guarantee.M, 3)      # 2e²Δ/ε² and √(e² − 1)
        (1478, 2.528)
    """
    check_positive("eps", eps)
    check_choice("step", step, ("constant", "secant", "doubling", "adaptive"))
    _check_law(ell, eps)
    M = ell_gradient_bound(ell, gap)
    _check_nondecreasing(ell, min(eps, M), M)
    K = float(ell(np.array(M)))
    k = ell_secant(ell, M, least=min(eps, M) * 1e-6)
    doubling = partial(ell_step, ell, M=M)
    of_doubling = partial(ell_decrease, ell, M=M)

    def of_secant(g: Array) -> Array:
        return g**2 / (2 * k(g))

    def adaptive(g: Array) -> Array:
        return np.where(of_doubling(g) > of_secant(g), doubling(g), 1 / k(g))

    sizes: dict[str, tuple[Law, Law]] = {
        "constant": (partial(np.full_like, fill_value=1 / K), lambda g: g**2 / (2 * K)),
        "secant": (lambda g: 1 / k(g), of_secant),
        "doubling": (doubling, of_doubling),
        "adaptive": (adaptive, lambda g: np.maximum(of_doubling(g), of_secant(g))),
    }
    size, decrease = sizes[step]
    norms = np.geomspace(eps, max(M, eps), _NUM_NORMS)
    return Guarantee(
        theorem="Remark 1",
        version="sharp",
        bound=gap / float(decrease(norms).min()),
        rule=LawStep(size),
        assumptions=(
            Assumption("f bounded below and twice differentiable, {f ≤ f(x0)} closed"),
            Assumption("‖∇²f‖ ≤ ℓ(‖∇f‖) on {f ≤ f(x0)}"),
        ),
        checks=(partial(check_gap, gap=gap),),
        gap=gap,
        eps=eps,
        M=M,
        decrease=decrease,
        law=ell,
    )


def _check_law(ell: Law, eps: float) -> None:
    law = ell(np.geomspace(min(eps, 1.0) * 1e-6, 1e6, _NUM_NORMS))
    if not np.all(law > 0):
        raise AssumptionError("`ell` must be positive.")


def _check_nondecreasing(ell: Law, low: float, high: float) -> None:
    law = ell(np.geomspace(low * 1e-6, high, _NUM_NORMS))
    if not np.all(np.diff(law) >= -1e-12 * law[1:]):
        raise AssumptionError("`ell` must be nondecreasing in the gradient norm.")


def _over_law(ell: Law, v: Array) -> Array:
    return v / ell(v)


def _integrals(function: Law, low: Array, high: Array, halvings: int = _HALVINGS) -> Array:
    """Integrals over cells, each halved until its halves say what it says as a whole."""
    middle = (low + high) / 2
    whole = _lobatto_sum(function, low, high)
    halves = _lobatto_sum(function, low, middle) + _lobatto_sum(function, middle, high)
    rough = np.abs(halves - whole) > 1e-13 * np.abs(halves)
    if halvings > 0 and rough.any():
        left = _integrals(function, low[rough], middle[rough], halvings - 1)
        right = _integrals(function, middle[rough], high[rough], halvings - 1)
        halves[rough] = left + right
    return halves


def _lobatto_sum(function: Law, low: Array, high: Array) -> Array:
    width = (high - low)[..., None]
    return (function(low[..., None] + width * _NODES) * _WEIGHTS).sum(axis=-1) * width[..., 0]


def _integrals_over(ell: Law, low: Array, high: Array, weight: Callable[[Array], Array | float]) -> Array:
    """Integrals of weight(u)/ℓ(u) from ``low`` to ``high``."""
    return _lobatto_sum(lambda u: weight(u) / ell(u), low, high)
