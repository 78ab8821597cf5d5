r"""ℓ-smoothness, the provable form of Remark 1: any law of smoothness that the gradient norm bounds.

.. math::
    \lVert\nabla^2 f(x)\rVert \le \ell(\lVert\nabla f(x)\rVert), \qquad \ell > 0 \text{ nondecreasing}

(Li, Qian, Tian, Rakhlin and Jadbabaie, 2023; the step rule is Tyurin's, 2025.) Proof. Along a segment of
length s from x the gradient norm stays below G(s), :math:`G' = \ell(G)`, :math:`G(0) = g`, and the gradient
changes by at most :math:`G(s) - g`. So f falls along :math:`-\nabla f` at a rate of at least
:math:`2g - G(s)`, until G has doubled. With u = G(s) as the variable, the step that ends there has

.. math::
    h(g) = \int_0^1 \frac{dv}{\ell(g + gv)}, \qquad
    f(x) - f(x^+) \ge D(g) = g^2\int_0^1 \frac{1 - v}{\ell(g + gv)}\,dv \ge \frac{g^2}{2\ell(2g)}.

Since f cannot fall below f*, :math:`D(\lVert\nabla f\rVert) \le f - f^*` everywhere: gradients on the
sublevel set of x0 are at most :math:`M = \sup\{u : D(u) \le \Delta\}`, and steps h reach ε after at most
:math:`\Delta/\min_{\varepsilon\le u\le M} D(u)`. The constant step :math:`1/\ell(2M)` never goes further than
h, sees Hessians of at most :math:`\ell(2M)`, lowers f by :math:`g^2/(2\ell(2M))` or more, and needs at most
:math:`2\ell(2M)\Delta/\varepsilon^2` iterations. M is finite where ℓ grows more slowly than a square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.optimize import root_scalar

from curvestep.checks import check_choice, check_count, check_positive
from curvestep.theory.problems.base import Array
from curvestep.theory.theorems.guarantee import TOLERANCE, AssumptionError

Ell = Callable[[Array], Array]
_LARGEST_NORM = 1e30  # gradient norm up to which a bound is looked for
_NUM_NORMS = 600  # gradient norms at which ℓ and D are looked at
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)


@dataclass(frozen=True, kw_only=True)
class EllGuarantee:
    """Descent on an ℓ-smooth function."""

    ell: Ell  # the law ℓ
    gap: float  # f(x0) − f*
    eps: float  # the gradient norm to reach
    M: float  # largest gradient norm on the sublevel set of x0
    bound: float  # iterations until the gradient norm is at most `eps`
    step_size: Ell  # step size at each gradient norm
    decrease: Ell  # least decrease of f by a step from each gradient norm


def ell_step(ell: Ell, grad_norm: Array) -> Array:
    r"""Step size :math:`\int_0^1 dv/\ell(g + gv)`, up to which the gradient at most doubles.

    Example:
        >>> float(ell_step(lambda u: 1 + 2 * u, np.array(3.0)).round(12))    # ln(1 + 6/7)/6
        0.103173201401
    """
    return _integral(ell, np.asarray(grad_norm, dtype=np.float64), lambda v: np.ones_like(v))


def ell_decrease(ell: Ell, grad_norm: Array) -> Array:
    r"""Decrease :math:`g^2\int_0^1 (1 - v)/\ell(g + gv)\,dv` that the step :func:`ell_step` is promised.

    Example:
        >>> float(ell_decrease(lambda u: 4.0 + 0 * u, np.array(2.0)).round(12))    # g²/(2L)
        0.5
    """
    g = np.asarray(grad_norm, dtype=np.float64)
    return g**2 * _integral(ell, g, lambda v: 1 - v)


def ell_smooth(ell: Ell, *, gap: float, eps: float, step: str = "adaptive") -> EllGuarantee:
    r"""Gradient bound, step rule and iteration bound of an ℓ-smooth function.

    Args:
        ell: ℓ of an array of gradient norms; positive and nondecreasing.
        gap: :math:`\Delta = f(x_0) - f^* > 0`.
        eps: Gradient norm to reach.
        step: ``"adaptive"``, h(g), or ``"constant"``, 1/ℓ(2M).

    Raises:
        AssumptionError: If ℓ is not positive and nondecreasing, or grows too fast for a gradient bound.

    Example:
        >>> guarantee = ell_smooth(lambda u: 2.0 + 0 * u, gap=1.0, eps=0.1)
        >>> round(guarantee.bound), round(guarantee.M, 6)      # 2LΔ/ε² and √(2LΔ)
        (400, 2.0)
    """
    check_positive("gap", gap)
    check_positive("eps", eps)
    check_choice("step", step, ("adaptive", "constant"))
    M = _gradient_bound(ell, gap, eps)
    step_size, decrease = partial(ell_step, ell), partial(ell_decrease, ell)
    norms = np.geomspace(eps, max(M, eps), _NUM_NORMS)
    bound = gap / float(decrease(norms).min())
    if step == "constant":
        K = float(ell(np.array(2 * M)))
        step_size, decrease = partial(np.full_like, fill_value=1 / K), lambda g: g**2 / (2 * K)
        bound = 2 * K * gap / eps**2
    return EllGuarantee(ell=ell, gap=gap, eps=eps, M=M, bound=bound, step_size=step_size, decrease=decrease)


def certify_ell(
    guarantee: EllGuarantee,
    value: Callable[[Array], Array],
    gradient: Callable[[Array], Array],
    curvature: Callable[[Array], Array],
    x0: float,
    *,
    max_steps: int = 100_000,
) -> tuple[str, int]:
    r"""Run the recipe on a function of one variable and hold each step to its hypotheses and its promise.

    The law :math:`|f''| \le \ell(|f'|)` is checked on nine points of every step, the gap by the values met.

    Returns:
        ``"holds"``, ``"violated"``, ``"outside-class"`` (a hypothesis is false) or ``"undecided"`` (stopped
        too early to tell), and the iterations.

    Example:
        >>> guarantee = ell_smooth(lambda u: 1 + u, gap=np.cosh(3.0) - 1, eps=1e-3)
        >>> certify_ell(guarantee, np.cosh, np.sinh, np.cosh, 3.0)
        ('holds', 8)
    """
    check_count("max_steps", max_steps)
    x, first = float(x0), float(value(np.array(x0)))
    room = 1 + TOLERANCE
    for num in range(max_steps + 1):
        slope = float(gradient(np.array(x)))
        g = abs(slope)
        if g <= guarantee.eps:
            return ("holds" if num <= math.ceil(guarantee.bound) else "violated"), num
        after = x - float(guarantee.step_size(np.array(g))) * slope
        way = np.linspace(x, after, 9)
        values = value(way)
        allowed = guarantee.ell(np.abs(gradient(way)))
        if np.any(np.abs(curvature(way)) > allowed * room) or first - values.min() > guarantee.gap * room:
            return "outside-class", num
        short = guarantee.decrease(np.array(g)) - (values[0] - values[-1])
        if num > guarantee.bound or g > guarantee.M * room or short > TOLERANCE * np.abs(values).max():
            return "violated", num
        x = after
    return "undecided", max_steps


def _integral(ell: Ell, g: Array, weight: Callable[[Array], Array]) -> Array:
    v = (_NODES + 1) / 2
    return (weight(v) / ell(g[..., None] * (1 + v)) * _WEIGHTS / 2).sum(axis=-1)


def _gradient_bound(ell: Ell, gap: float, eps: float) -> float:
    """The largest u with D(u) at most the gap."""
    norms = np.geomspace(min(eps, 1.0) * 1e-6, _LARGEST_NORM, 4 * _NUM_NORMS)
    law = ell(norms)
    if not (np.all(law > 0) and np.all(np.diff(law) >= 0)):
        raise AssumptionError("`ell` must be positive and nondecreasing in the gradient norm.")
    promised = ell_decrease(ell, norms)
    below = np.flatnonzero(~(promised > gap))
    if len(below) == 0:
        return float(norms[0])
    last = int(below[-1])
    if last == len(norms) - 1:
        raise AssumptionError(
            f"`ell` grows too fast: a gap of {gap:g} bounds no gradient. It must grow more slowly than a "
            "square."
        )
    bracket = (norms[last], norms[last + 1])
    return float(root_scalar(lambda u: float(ell_decrease(ell, np.array(u))) - gap, bracket=bracket).root)
