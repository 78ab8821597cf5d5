r"""Fixed-step gradient descent: Theorems 4 and 6, Remark 5, and why Assumption 4 is not needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq, minimize_scalar

from curvestep.checks import check_nonnegative
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from curvestep.theory.rules import FixedStep
from curvestep.theory.theorems.guarantee import (
    Assumption,
    Guarantee,
    check_numbers,
    check_version,
    in_class,
    require,
    smooth_within,
)


def wall_height(M: float, *, L0: float, L1: float) -> float:
    r"""The least gap :math:`f(x) - f^*` of a point with gradient norm M.

    .. math::
        \psi(M) = \frac{M}{L_1} - \frac{L_0}{L_1^2}\ln\left(1 + \frac{L_1M}{L_0}\right)
        \ \ge\ \frac{M^2}{2(L_0 + L_1M)}

    Every (L0, L1)-smooth function has :math:`\psi(\lVert\nabla f(x)\rVert) \le f(x) - f^*`: follow the
    normalized gradient down, where the gradient norm falls no faster than
    :math:`L_0 + L_1\lVert\nabla f\rVert` per unit of length, and integrate. ``ExponentialWall`` attains it
    everywhere.

    Example:
        >>> wall = ExponentialWall(L0=2.0, L1=3.0)
        >>> round(wall_height(7.0, L0=2.0, L1=3.0), 12) == round(float(wall.value(wall.start(M=7.0))), 12)
        True
    """
    check_numbers(L0=L0, L1=L1, M=M)
    if L1 == 0:
        return M * M / (2 * L0)
    growth = L1 * M / L0
    if growth < 1e-4:  # the difference loses its digits: its series instead
        return L0 / L1**2 * growth**2 * (0.5 - growth / 3 + growth**2 / 4)
    return L0 / L1**2 * (growth - math.log1p(growth))


def gradient_bound(gap: float, *, L0: float, L1: float, version: str = "sharp") -> float:
    r"""Largest gradient norm of any point with :math:`f(x) - f^* \le` ``gap``: Assumption 4, for free.

    The paper assumes a finite :math:`M = \sup\{\lVert\nabla f(x)\rVert : f(x) \le f(x_0)\}` and calls that
    necessary. It follows from the other assumptions (row 14): ``"sharp"`` solves
    :math:`\psi(M) = \Delta` (:func:`wall_height`), ``"corrected"`` is its closed consequence
    :math:`M \le L_1\Delta + \sqrt{L_1^2\Delta^2 + 2L_0\Delta}`.

    Example:
        >>> round(gradient_bound(1.0, L0=1.0, L1=2.0), 4)
        2.9684
        >>> round(gradient_bound(1.0, L0=1.0, L1=2.0, version="corrected"), 4)
        4.4495
    """
    check_numbers(L0=L0, L1=L1, gap=gap)
    check_version(version, ("corrected", "sharp"))
    closed = L1 * gap + math.sqrt((L1 * gap) ** 2 + 2 * L0 * gap)
    if version == "corrected" or gap == 0 or L1 == 0:
        return closed
    root = brentq(lambda M: wall_height(M, L0=L0, L1=L1) - gap, 0.0, closed * (1 + 1e-9), xtol=1e-300)
    return float(root)  # pyright: ignore[reportArgumentType]  # full_output is off


def assumption4(*, L0: float, L1: float, gap: float, version: str = "sharp") -> float:
    r"""Assumption 4: how large M is, since it is finite anyway.

    ``"printed"`` assumes that M is finite and says no more, so it is ``inf``. The others are those of
    :func:`gradient_bound` (row 14).

    Example:
        >>> numbers = dict(L0=1.0, L1=2.0, gap=1.0)
        >>> [round(assumption4(**numbers, version=v), 3) for v in ("printed", "corrected", "sharp")]
        [inf, 4.449, 2.968]
    """
    check_version(version)
    if version == "printed":
        return math.inf
    return gradient_bound(gap, L0=L0, L1=L1, version=version)


@dataclass(frozen=True, kw_only=True)
class LowerBoundPair:
    """The two functions between which a fixed step size has to choose."""

    wall: ExponentialWall  # the fast function: steps above `largest_step` never reach the minimum
    wall_start: float  # where to start on it, with gradient norm M
    valley: SlowValley  # the slow function, on which small steps take long
    valley_start: float  # where to start on it, with the given gap
    largest_step: float  # the step size at which descent on the wall begins to diverge


def lower_bound_pair(
    *, L0: float, L1: float, M: float, gap: float, eps: float, version: str = "corrected"
) -> LowerBoundPair:
    """The functions behind :func:`theorem4`, in the same versions.

    Example:
        >>> pair = lower_bound_pair(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1, version="printed")
        >>> pair.wall.frontier(5.0)  # the printed wall does not belong to the class with L0 = 1
        5.0
    """
    guarantee = theorem4(L0=L0, L1=L1, M=M, gap=gap, eps=eps, version=version)
    wall = ExponentialWall(L0=L0, L1=L1)
    valley = SlowValley(guarantee.eps)
    if version == "printed":
        wall = PrintedWall(L1=L1)
    elif version == "sharp":
        slope, width = _sharp_shape(L0, M, gap, eps)
        valley = SlowValley(guarantee.eps, slope=slope, width=width)
    return LowerBoundPair(
        wall=wall,
        wall_start=wall.start(M=M),
        valley=valley,
        valley_start=valley.start(gap=gap),
        largest_step=wall.largest_step(M=M),
    )


def theorem4(
    *, L0: float, L1: float, M: float, gap: float, eps: float, version: str = "corrected"
) -> Guarantee:
    r"""Theorem 4: whatever its step size, fixed-step descent is slow on some function of the class.

    ========== ==================================================== =========================================
    version    iterations at least                                  for
    ========== ==================================================== =========================================
    printed    L1 M (Δ − 5ε/8) / (8 ε² (ln M + 1))                  L0 ≥ 1, L1 ≥ 1, M > 1
    corrected  L1 M Δ / (8 ε² ln(1 + L1 M/L0))                      ε ≤ min{L0/3, M/2}, Δ ≥ max{ψ(M), 5ε/4}
    sharp      L1 M (Δ − c(s) s²ε²/L0) / (2 s²ε² ln(1 + L1 M/L0))   sε ≤ M, Δ ≥ ψ(M); the best s in (1, 2]
    ========== ==================================================== =========================================

    Rows 14 to 16 say what was wrong. For the sharp version the valley has slope sε just above ε, and the
    least width that L0 allows. ``M`` is the largest gradient norm on the sublevel set; the other arguments
    are those of ``theorem3``, with :math:`L_1 > 0`.

    Example:
        >>> numbers = dict(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1)
        >>> [round(theorem4(**numbers, version=v).bound) for v in ("printed", "corrected", "sharp")]
        [7595, 6787, 27126]
    """
    numbers = check_numbers("L1", "M", "gap", L0=L0, L1=L1, M=M, gap=gap, eps=eps)
    check_version(version)
    growth = L1 * M / L0
    height = wall_height(M, L0=L0, L1=L1)
    tall = Assumption(f"gap ≥ ψ(M) = {height:.6g}", gap >= height * (1 - 1e-12))
    if version == "printed":
        bound = L1 * M * (gap - 5 * eps / 8) / (8 * eps**2 * (math.log(M) + 1)) if M > 1 else -math.inf
        needs = (Assumption("L0 ≥ 1", L0 >= 1), Assumption("L1 ≥ 1", L1 >= 1), Assumption("M > 1", M > 1))
        needs = (*needs, Assumption("gap ≥ 5·eps/4, where the slope begins", gap >= 1.25 * eps))
    elif version == "corrected":
        bound = growth * L0 * gap / (8 * eps**2 * math.log1p(growth))
        needs = (
            Assumption("eps ≤ L0/3", eps <= L0 / 3 * (1 + 1e-12)),
            Assumption("eps ≤ M/2", eps <= M / 2),
            tall,
            Assumption("gap ≥ 5·eps/4", gap >= 1.25 * eps),
        )
    else:
        needs = require(Assumption("eps < M", eps < M), tall)
        bound = _valley_distance(_sharp_shape(L0, M, gap, eps)[0], L0, gap, eps) * growth * L0
        bound /= 2 * math.log1p(growth)
    return Guarantee(
        theorem="Theorem 4",
        version=version,
        bound=bound,
        rule=None,
        assumptions=(Assumption("a fixed step size"), *require(*needs)),
        checks=in_class(L0=L0, L1=L1, gap=gap),
        **numbers,
    )


def _valley_distance(slope: float, L0: float, gap: float, eps: float) -> float:
    """Distance from start to gradient norm ε over the length sε·(step size 1), for the narrowest valley."""
    width = 1.5 * slope * eps / L0
    edge = 0.625 * slope * eps * width
    # Where u(3 − u²)/2 = 1/s: inside, in units of the width, the gradient norm is at most ε.
    flat = 2 * math.sin(math.asin(1 / slope) / 3)
    return ((gap - edge) / (slope * eps) + width * (1 - flat)) / (slope * eps)


def _sharp_shape(L0: float, M: float, gap: float, eps: float) -> tuple[float, float]:
    """The slope that makes the valley slowest, and its width."""
    steepest = min(2.0, M / eps)

    def fits(slope: float) -> bool:  # the start must lie on the slope
        return 0.9375 * (slope * eps) ** 2 / L0 <= gap

    require(Assumption("gap ≥ 15·eps²/(16·L0), or the valley is too small", fits(1.0 + 1e-9)))
    while not fits(steepest):
        steepest = 1 + 0.9 * (steepest - 1)
    best = minimize_scalar(
        lambda s: -_valley_distance(s, L0, gap, eps), bounds=(1 + 1e-6, steepest), method="bounded"
    )
    slope = float(best.x)
    return slope, 1.5 * slope * eps / L0


def remark5(
    *, L0: float, L1: float, M: float, gap: float, eps: float, version: str = "corrected"
) -> Guarantee:
    r"""Remark 5: the order of iterations that fixed-step descent cannot beat.

    ``"printed"``: :math:`(L_1M/\ln M + L_0)\Delta/\varepsilon^2`. ``"corrected"`` reads the logarithm as
    :math:`\ln(1 + L_1M/L_0)` (row 17). It is an order, not a bound: constants are left out. Clipped descent
    needs the order :math:`L_0\Delta/\varepsilon^2`, so it is faster by
    :math:`(c-1)/\ln c` with the condition number :math:`c = 1 + L_1M/L_0`.

    Example:
        >>> round(remark5(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1).bound)
        55494
    """
    numbers = check_numbers("L1", "M", "gap", L0=L0, L1=L1, M=M, gap=gap, eps=eps)
    check_version(version, ("printed", "corrected"))
    needs = ()
    log = math.log1p(L1 * M / L0)
    if version == "printed":
        needs = require(Assumption("M > 1", M > 1))
        log = math.log(M)
    return Guarantee(
        theorem="Remark 5",
        version=version,
        bound=(L1 * M / log + L0) * gap / eps**2,
        rule=None,
        assumptions=(Assumption("a fixed step size"), *needs),
        up_to_constant=True,
        checks=in_class(L0=L0, L1=L1, gap=gap),
        **numbers,
    )


def theorem6(
    *, L0: float, L1: float, gap: float, eps: float, M: float | None = None, version: str = "corrected"
) -> Guarantee:
    r"""Theorem 6: fixed-step gradient descent reaches gradient norm ε, slowly if M is large.

    With :math:`K = L_0 + L_1M`:

    ========== ================ =====================
    version    step size        iterations at most
    ========== ================ =====================
    printed    1/(2K)           4 K Δ/ε²
    corrected  1/(2K)           (8/3) K Δ/ε²
    sharp      1/K              2 K Δ/ε²
    ========== ================ =====================

    The printed bound is true; its proof needs repair and loses constants (row 18). ``M`` is the largest
    gradient norm on the sublevel set; if not given, :func:`gradient_bound` of the gap. The other arguments
    are those of ``theorem3``.

    Example:
        >>> numbers = dict(L0=1.0, L1=2.0, gap=1.0, eps=0.1, M=3.0)
        >>> [round(theorem6(**numbers, version=v).bound) for v in ("printed", "corrected", "sharp")]
        [2800, 1867, 1400]
    """
    numbers = check_numbers(L0=L0, L1=L1, gap=gap, eps=eps)
    check_version(version)
    M = gradient_bound(gap, L0=L0, L1=L1) if M is None else check_nonnegative("M", M)
    K = L0 + L1 * M
    radius = 1.0 if version == "printed" else 0.0
    constant = {"printed": 4.0, "corrected": 8 / 3, "sharp": 2.0}[version]
    lr = 1 / K if version == "sharp" else 0.5 / K
    return Guarantee(
        theorem="Theorem 6",
        version=version,
        bound=constant * K * gap / eps**2,
        rule=FixedStep(lr=lr),
        assumptions=(*smooth_within(radius), Assumption(f"‖∇f‖ ≤ M = {M:.6g} on {{f ≤ f(x0)}}")),
        M=M,
        decrease=lambda g: g * g / (constant * K),
        checks=in_class(L0=L0, L1=L1, gap=gap, radius=radius),
        **numbers,
    )
