r"""Theorem 3, clipped gradient descent, and its equivalence with normalized descent.

Everything rests on what one step of size h from gradient norm g is sure to lower f by. Two proofs promise it.

**Taylor** (row 12), for every h: the remainder grows like :math:`\varphi(a) = e^a - a - 1`, so

.. math::
    f(x) - f(x^+) \ \ge\ D(h, g) = hg^2 - \frac{L_0 + L_1g}{L_1^2}\,\varphi(L_1hg) .

**Projection** (row 31), for :math:`hK \le 1` with :math:`K = L_0 + L_1g`: project the gradient along the step
on the ball of radius g. The projection moves at most at the rate K: inside the ball because the Hessian is at
most K there, outside because only the tangential part survives, shortened. So the slope along the step stays
below :math:`-g + Kt`, and

.. math::
    f(x) - f(x^+) \ \ge\ hg^2\left(1 - \tfrac12hK\right) .

It is the larger of the two, and its best step is :math:`h = 1/K`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from curvestep.checks import check_choice, check_nonnegative
from curvestep.steps import (
    check_threshold,
    clipped_step,
    normalized_from_clipped,
    normalized_from_smoothness,
    normalized_step,
)
from curvestep.theory.problems.base import Array
from curvestep.theory.problems.walls import ExponentialWall, phi
from curvestep.theory.rules import (
    ClippedStep,
    LogarithmicStep,
    NormalizedStep,
    SmoothClippedStep,
    StepRule,
)
from curvestep.theory.theorems.guarantee import (
    Assumption,
    Guarantee,
    check_numbers,
    check_version,
    in_class,
    ratio,
    require,
    smooth_within,
)

# min{a/L0, b/(L1 g)}: D alone gives 2.69298 at these round numbers. Rounded up, or it would not be proved.
SHARP_LR, SHARP_CAP, SHARP_CONSTANT = 0.5, 0.57, 2.693
LOGARITHMIC_CONSTANT = 2.2079  # descent_constant gives 2.20783


def taylor_decrease(step: ArrayLike, grad_norm: ArrayLike, *, L0: float, L1: float) -> Array:
    r"""Decrease :math:`D(h, g)` that Taylor's theorem promises of a step of size h from gradient norm g.

    It is a promise, not the worst case: where it is negative nothing follows.

    Example:
        >>> taylor_decrease(1.0, 1.0, L0=1.0, L1=1.0).round(3)  # g = L0/L1, h = 1/L0
        np.float64(-0.437)
    """
    check_nonnegative("L0", L0)
    check_nonnegative("L1", L1)
    h = np.asarray(step, dtype=np.float64)
    g = np.asarray(grad_norm, dtype=np.float64)
    if L1 == 0:
        return h * g * g * (1 - 0.5 * L0 * h)
    return h * g * g - (L0 + L1 * g) * phi(L1 * h * g) / L1**2


def guaranteed_decrease(step: ArrayLike, grad_norm: ArrayLike, *, L0: float, L1: float) -> Array:
    r"""Decrease of f that a step of size h from gradient norm g is sure of: the larger of the two promises.

    Example:
        >>> guaranteed_decrease(1 / 2, 1.0, L0=1.0, L1=1.0)  # h = 1/(L0 + L1 g): g²/(2(L0 + L1 g))
        np.float64(0.25)
        >>> taylor_decrease(1 / 2, 1.0, L0=1.0, L1=1.0).round(3)
        np.float64(0.203)
    """
    taylor = taylor_decrease(step, grad_norm, L0=L0, L1=L1)
    h = np.asarray(step, dtype=np.float64)
    g = np.asarray(grad_norm, dtype=np.float64)
    share = h * (L0 + L1 * g)
    projected = h * g * g * (1 - 0.5 * share)
    # A step of exactly 1/K may be longer by rounding; the promise does not change there.
    return np.where(share <= 1 + 1e-12, np.maximum(taylor, projected), taylor)[()]


def wall_decrease(step: ArrayLike, grad_norm: ArrayLike, *, L0: float, L1: float) -> Array:
    r"""Decrease of the exponential wall by a step of size h from gradient norm g: no promise can be larger.

    For :math:`hK \le 1` no function was found on which a step gains less, in any dimension; that is a
    numerical search, not a proof (row 31).

    Example:
        >>> wall_decrease(1 / 2, 1.0, L0=1.0, L1=1.0).round(3)
        np.float64(0.287)
    """
    wall = ExponentialWall(L0=L0, L1=L1)
    g = np.asarray(grad_norm, dtype=np.float64)
    start = np.log1p(L1 * g / L0) / L1
    return wall.value(start) - wall.value(start - np.asarray(step, dtype=np.float64) * g)


def descent_constant(rule: StepRule, *, decrease: Callable[..., Array] = guaranteed_decrease) -> float:
    r"""The smallest C of a rule in :math:`T \le C\Delta(L_0/\varepsilon^2 + L_1/\varepsilon)`.

    The rule is given for L0 = L1 = 1; by scaling the constant is that of all (L0, L1):
    :math:`C = \sup_g g^2/\big((1 + g)\,D(h(g), g)\big)`. It is ``inf`` if some gradient norm has no sure
    decrease. The supremum is over a fine grid of gradient norms.

    Args:
        rule: A step rule with hyperparameters for L0 = L1 = 1.
        decrease: Promised decrease of a step at a gradient norm: :func:`guaranteed_decrease`, or that of one
            proof alone.

    Example:
        The paper's clip, the simplest good one, and the best step:

        >>> round(descent_constant(ClippedStep(lr=1 / 10, max_norm=1.0)), 2)
        10.53
        >>> round(descent_constant(ClippedStep(lr=1 / 2, max_norm=1.0)), 2)
        2.67
        >>> round(descent_constant(SmoothClippedStep(L0=1.0, L1=1.0)), 2)
        2.0

        By Taylor's theorem alone:

        >>> round(descent_constant(ClippedStep(lr=1 / 2, max_norm=1.0), decrease=taylor_decrease), 2)
        2.85
    """

    def constant(log: Array) -> Array:
        g = 10.0**log
        with np.errstate(divide="ignore"):
            sure = decrease(rule.at_norm(g), g, L0=1.0, L1=1.0)
            return np.where(sure > 0, g * g / ((1 + g) * sure), math.inf)

    logs = np.linspace(-12, 12, 24_001)
    constants = constant(logs)
    worst = int(np.argmax(constants))
    if math.isinf(constants[worst]):
        return math.inf
    around = logs[max(0, worst - 1)], logs[min(len(logs) - 1, worst + 1)]
    refined = minimize_scalar(lambda log: -constant(log), bounds=around, method="bounded").fun
    return max(float(constants[worst]), -float(refined))


def theorem3(
    *,
    L0: float,
    L1: float,
    gap: float,
    eps: float,
    version: str = "corrected",
    radius: float = math.inf,
    form: str = "clipped",
) -> Guarantee:
    r"""Theorem 3: clipped gradient descent reaches gradient norm ε.

    ========== =============================================== =============================================
    version    step rule                                       iterations at most
    ========== =============================================== =============================================
    printed    lr 1/(10 L0), max_norm min{10 L0, L0/L1}        20 L0 Δ/ε² + 20 max{1, L1²} Δ/L0
    corrected  lr 1/(10 L0), max_norm min{10 L0 R, L0/L1}      Δ max{20 L0/ε², 20 L1/ε, 2/(Rε)}
    sharp      lr 1/(2 L0), max_norm 1.14 L0/L1                2.693 Δ (L0/ε² + L1/ε)
    … smooth   h = 1/(L0 + L1 g)                               2 Δ (L0/ε² + L1/ε)
    … log.     h = ln(1 + L1 g/(L0 + L1 g))/(L1 g)             2.2079 Δ (L0/ε² + L1/ε)
    ========== =============================================== =============================================

    The printed bound is true, its proof is not (row 12). The smooth form is the shortest bound (row 31).

    Smoothness is needed on the paper's set S, within distance R of :math:`\{f \le f(x_0)\}`; printed, R is 1.
    The sharp version needs it on :math:`\{f \le f(x_0)\}` alone: both promises of the decrease are positive
    for every shorter step too, so that a step cannot leave the set.

    Args:
        L0: :math:`L_0 > 0`.
        L1: :math:`L_1 \ge 0` (printed: > 0).
        gap: :math:`\Delta = f(x_0) - f^*`.
        eps: The gradient norm :math:`\varepsilon > 0` to reach.
        version: ``"printed"``, ``"corrected"`` or ``"sharp"``.
        radius: R, for the corrected version.
        form: For the sharp version: ``"clipped"``, ``"smooth"`` or ``"logarithmic"``.

    Example:
        >>> numbers = dict(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-2)
        >>> [f"{theorem3(**numbers, version=v).bound:.3g}" for v in ("printed", "corrected", "sharp")]
        ['3.6e+10', '2.59e+10', '5.67e+09']
        >>> theorem3(**numbers, version="sharp").hyperparameters
        {'lr': 3.125, 'max_norm': 0.01824}
    """
    numbers = check_numbers(L0=L0, L1=L1, gap=gap, eps=eps)
    check_version(version)
    needs: tuple[Assumption, ...] = ()
    check_choice("form", form, ("clipped", "smooth", "logarithmic"))
    if form != "clipped" and version != "sharp":
        raise ValueError(f"`form` must be 'clipped' unless `version` is 'sharp', got {form!r}.")
    if version == "printed":
        radius = 1.0
        rule: StepRule = ClippedStep(lr=1 / (10 * L0), max_norm=min(10 * L0, ratio(L0, L1)))
        bound = 20 * L0 * gap / eps**2 + 20 * max(1.0, L1**2) * gap / L0
        needs = (Assumption("L1 > 0", L1 > 0),)
    elif version == "corrected":
        cap = min(check_threshold("radius", radius), ratio(1.0, 10 * L1))
        rule = ClippedStep(lr=1 / (10 * L0), max_norm=10 * L0 * cap)
        bound = gap * max(20 * L0 / eps**2, 2 / (cap * eps))
    elif form == "smooth":
        rule = SmoothClippedStep(L0=L0, L1=L1)
        bound = 2 * gap * (L0 / eps**2 + L1 / eps)
    elif form == "logarithmic":
        rule = LogarithmicStep(L0=L0, L1=L1)
        bound = LOGARITHMIC_CONSTANT * gap * (L0 / eps**2 + L1 / eps)
    else:
        rule = ClippedStep(lr=SHARP_LR / L0, max_norm=ratio(SHARP_CAP / SHARP_LR * L0, L1))
        bound = SHARP_CONSTANT * gap * (L0 / eps**2 + L1 / eps)
    if version == "sharp":
        radius = 0.0
    return Guarantee(
        theorem="Theorem 3",
        version=version,
        bound=bound,
        rule=rule,
        assumptions=require(*smooth_within(radius), *needs),
        decrease=_decrease_of(rule, version, L0, L1),
        checks=in_class(L0=L0, L1=L1, gap=gap, radius=radius),
        **numbers,
    )


def normalized_gd(*, L0: float, L1: float, gap: float, eps: float, version: str = "corrected") -> Guarantee:
    r"""Theorem 3 for normalized gradient descent, through the equivalence with clipping.

    ``"corrected"`` takes the clipped recipe over, :math:`\eta_n = \gamma\eta_c`, :math:`\beta = \gamma`: each
    step is at least half and never more than the clipped one, so the bound doubles. ``"sharp"`` needs no
    detour: :math:`1/(L_0 + L_1g)` *is* normalized descent.
    With noise nothing follows from the equivalence (row 10).

    Example:
        >>> numbers = dict(L0=1.0, L1=2.0, gap=1.0, eps=0.1)
        >>> normalized_gd(**numbers).bound / theorem3(**numbers).bound
        2.0
        >>> {k: round(v, 4) for k, v in normalized_gd(**numbers, version="sharp").hyperparameters.items()}
        {'lr': 0.5, 'offset': 0.5}
    """
    check_version(version, ("corrected", "sharp"))
    form = {"corrected": "clipped", "sharp": "smooth"}[version]
    clipped = theorem3(L0=L0, L1=L1, gap=gap, eps=eps, version=version, form=form)
    positive = require(Assumption("L1 > 0 (with L1 = 0 use fixed steps)", L1 > 0))
    if version == "corrected":
        assert isinstance(clipped.rule, ClippedStep)
        lr = float(clipped.rule.lr)
        max_norm = float(clipped.rule.max_norm)
        rule = NormalizedStep(**normalized_from_clipped(lr=lr, max_norm=max_norm))
        bound = 2 * clipped.bound
    else:
        rule = NormalizedStep(**normalized_from_smoothness(L0=L0, L1=L1))
        bound = clipped.bound
    return replace(
        clipped,
        theorem="Theorem 3 for normalized descent",
        bound=bound,
        rule=rule,
        assumptions=(*clipped.assumptions, *positive),
        decrease=_decrease_of(rule, version, L0, L1),
    )


@dataclass(frozen=True, kw_only=True)
class StepEquivalence:
    """Normalized step over clipped step: what is promised, and what the given gradient norms show."""

    lower: float  # the ratio is at least this
    upper: float  # the ratio is at most this
    ratios: Array  # the ratio at each gradient norm

    @property
    def holds(self) -> bool:
        """Whether every ratio keeps both limits, up to rounding."""
        return bool(((self.ratios >= self.lower - 1e-12) & (self.ratios <= self.upper + 1e-12)).all())


def ngd_equivalence(
    grad_norm: ArrayLike, *, lr: float, max_norm: float, version: str = "sharp"
) -> StepEquivalence:
    r"""Normalized step over clipped step, :math:`\tfrac12 \le h_n/h_c \le 1` for matched parameters.

    With :math:`\eta_n = \gamma\eta_c` and :math:`\beta = \gamma`, :math:`h_c = \eta_n/\max(g, \beta)` and
    :math:`h_n = \eta_n/(g + \beta)`; the ratio is ½ exactly at :math:`g = \beta`. The paper prints the upper
    limit 2 (row 10), which is true and loose.

    Example:
        >>> ngd_equivalence([0.0, 0.25, 5.0], lr=30.0, max_norm=0.25).ratios.round(3)
        array([1.   , 0.5  , 0.952])
    """
    check_version(version, ("printed", "sharp"))
    g = np.asarray(grad_norm, dtype=np.float64)
    matched = normalized_from_clipped(lr=lr, max_norm=max_norm)
    ratios = normalized_step(g, **matched) / clipped_step(g, lr=lr, max_norm=max_norm)
    upper = {"printed": 2.0, "sharp": 1.0}[version]
    return StepEquivalence(lower=0.5, upper=upper, ratios=ratios)


def _decrease_of(rule: StepRule, version: str, L0: float, L1: float) -> Callable[[Array], Array]:
    if version == "sharp":
        return lambda g: guaranteed_decrease(rule.at_norm(g), g, L0=L0, L1=L1)
    return lambda g: 0.5 * rule.at_norm(g) * g * g
