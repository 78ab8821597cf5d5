r"""With noise: Theorem 7 (clipped), Theorem 8 (plain), and the floor below which clipping does not come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.checks import check_nonnegative, check_positive
from curvestep.theory.rules import FixedStep, ShiftedClippedStep
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


def theorem7(
    *, L0: float, L1: float, gap: float, eps: float, tau: float, version: str = "corrected"
) -> Guarantee:
    r"""Theorem 7: stochastic clipped descent reaches gradient norm ε with probability at least ½.

    With :math:`V = (5L_0 + 2L_1\tau)\tau^2`, :math:`\Delta_0 = f(x_0) - f^*` and
    :math:`\Delta = \Delta_0 + V + 9\tau L_0^2/L_1`:

    ========== ================================ ==============================================================
    version    step size, η = min{1/(20 L0),    iterations at most
               1/(128 L1 τ), …}
    ========== ================================ ==============================================================
    printed    min{η, 1/(16 **η** L1 (g + τ))}, Δ max{128 L1/ε, 4Δ/ε⁴, (80 L0 + 512 L1 τ)/ε²}
               … = 1/√T
    corrected  min{η, 1/(16 L1 (g + τ))},       Δ max{256 L1/ε, 64Δ/ε⁴, 160 L0/ε², 1024 L1 τ/ε²}
               … = 1/√T
    sharp      min{η, 1/(16 L1 (g + τ))},       8(1+θ) Δ0 max{A, 8(1+θ)V/(θε⁴)}, with
               … = √(θ Δ0/(T V))                A = max{32 L1/ε, 20 L0/ε², 128 L1 τ/ε²}
    ========== ================================ ==============================================================

    Row 19 says what was wrong: an extra η in the clip, and a T up to 16 times too small. The sharp version's
    θ, the noise's share of the budget, is the best in (0, 1]: with :math:`B = V/\varepsilon^4`, it is 1 for
    :math:`A \le 16B`, else :math:`8B/(A - 8B)`. ``tau`` is the radius :math:`\tau \ge 0` of the noise, the
    other arguments are those of ``theorem3`` with :math:`L_1 > 0` and a positive gap.

    Example:
        >>> numbers = dict(L0=1.0, L1=5.0, gap=1.0, eps=0.5, tau=0.1)
        >>> [round(theorem7(**numbers, version=v).bound) for v in ("printed", "corrected", "sharp")]
        [1667, 3174, 2623]
        >>> theorem7(**numbers).hyperparameters["cap"]  # the longest step
        0.0125
        >>> round(theorem7(**numbers, version="printed").hyperparameters["cap"], 4)
        0.8
    """
    numbers = check_numbers("gap", L0=L0, L1=L1, gap=gap, eps=eps, tau=tau)
    check_version(version)
    needs = require(Assumption("L1 > 0", L1 > 0))
    V = (5 * L0 + 2 * L1 * tau) * tau**2
    delta = gap + V + 9 * tau * L0**2 / L1
    budget = 1.0  # η ≤ √(budget/T)
    if version == "printed":
        bound = delta * max(128 * L1 / eps, 4 * delta / eps**4, (80 * L0 + 512 * L1 * tau) / eps**2)
    elif version == "corrected":
        terms = (256 * L1 / eps, 64 * delta / eps**4, 160 * L0 / eps**2, 1024 * L1 * tau / eps**2)
        bound = delta * max(terms)
    else:
        A = max(32 * L1 / eps, 20 * L0 / eps**2, 128 * L1 * tau / eps**2)
        B = V / eps**4
        share = 8 * B / max(A - 8 * B, 8 * B)  # θ: 1 for A ≤ 16B
        bound = 8 * (1 + share) * gap * max(A, 16 * B)
        budget = ratio(share * gap, V)
    T = max(1, math.ceil(bound))
    lr = min(1 / (20 * L0), ratio(1.0, 128 * L1 * tau), math.sqrt(budget) / math.sqrt(T))
    cap = 1 / (16 * L1)
    if version == "printed":
        cap /= lr
    return Guarantee(
        theorem="Theorem 7",
        version=version,
        bound=bound,
        rule=ShiftedClippedStep(lr=lr, cap=cap, shift=tau),
        assumptions=(*smooth_within(math.inf), *needs, *_noise(tau)),
        checks=in_class(L0=L0, L1=L1, gap=gap),
        **numbers,
    )


def theorem8(
    *, L0: float, L1: float, gap: float, eps: float, M: float, tau: float, version: str = "corrected"
) -> Guarantee:
    r"""Theorem 8: plain stochastic descent reaches gradient norm ε with probability at least ½.

    With :math:`V = (5L_0 + 4L_1M)(M + \tau)^2` and :math:`K = L_0 + L_1M`:

    ========== ============================ ========================================
    version    step size                    iterations at most
    ========== ============================ ========================================
    printed    min{1/√T, 1/(L1 (M + τ))}    (Δ + V)²/ε⁴
    corrected  1/√T                         max{(2Δ + V)²/ε⁴, L1² (M + τ)²}
    sharp      min{1/K, ε²/(4 K τ²)}        (8 K Δ/ε²) max{1, 4τ²/ε²}
    ========== ============================ ========================================

    Row 21 says what was wrong. ``M`` is the largest gradient norm, *everywhere*: noise leaves the sublevel
    set. The other arguments are those of :func:`theorem7`, with :math:`L_1 \ge 0`.

    Example:
        >>> numbers = dict(L0=1.0, L1=1.0, gap=1.0, eps=0.5, M=2.0, tau=0.5)
        >>> [round(theorem8(**numbers, version=v).bound) for v in ("printed", "corrected", "sharp")]
        [108241, 110889, 384]
    """
    numbers = check_numbers("M", L0=L0, L1=L1, gap=gap, eps=eps, M=M, tau=tau)
    check_version(version)
    V = (5 * L0 + 4 * L1 * M) * (M + tau) ** 2
    K = L0 + L1 * M
    where = "everywhere"
    if version == "printed":
        bound = (gap + V) ** 2 / eps**4
        where = "where f ≤ f(x0)"
    elif version == "corrected":
        bound = max((2 * gap + V) ** 2 / eps**4, (L1 * (M + tau)) ** 2)
    else:
        bound = 8 * K * gap / eps**2 * max(1.0, 4 * tau**2 / eps**2)
    T = max(1, math.ceil(bound))
    lr = {
        "printed": min(1 / math.sqrt(T), ratio(1.0, L1 * (M + tau))),
        "corrected": 1 / math.sqrt(T),
        "sharp": min(1 / K, ratio(eps**2, 4 * K * tau**2)),
    }[version]
    return Guarantee(
        theorem="Theorem 8",
        version=version,
        bound=bound,
        rule=FixedStep(lr=lr),
        assumptions=(*smooth_within(math.inf), Assumption(f"‖∇f‖ ≤ M {where}"), *_noise(tau)),
        checks=in_class(L0=L0, L1=L1, gap=gap),
        **numbers,
    )


def _noise(tau: float) -> tuple[Assumption, ...]:
    return (Assumption(f"unbiased gradients with noise at most τ = {tau:g}, always"),)


@dataclass(frozen=True, kw_only=True)
class SkewedNoise:
    """Noise of two values with mean 0."""

    values: tuple[float, float]  # the two values, the rare one last
    probabilities: tuple[float, float]  # theirs

    def clipped_mean(self, gradient: float, max_norm: float) -> float:
        """Expected clipped gradient where the true one is ``gradient``."""
        seen = np.clip(gradient + np.array(self.values), -max_norm, max_norm)
        return float(seen @ np.array(self.probabilities))


def clipping_floor(sigma: float, max_norm: float) -> float:
    r"""Gradient norm at which clipped SGD stays in the worst case known, however small its steps.

    Koloskova, Hendrikx and Stich (2023) show that the bias of clipping at c leaves a gradient of order
    :math:`\min\{\sigma, \sigma^2/c\}`, and that no step size removes it. The constants here are our own. On
    :math:`f(x) = x^2/2` with noise B with probability p, else −b, of mean 0 and variance
    :math:`\sigma^2 = bB`, the expected clipped gradient vanishes where

    .. math::
        (1 - p)(x - b) + p c = 0 \quad\Longleftrightarrow\quad x = \frac{\sigma^2 (B - c)}{B^2},

    as long as :math:`|x - b| \le c \le x + B`. The best choice is B = 2c, or B = σ where c < σ/2:

    .. math::
        \lVert\nabla f\rVert = \frac{\sigma^2}{4c} \ \Bigl(c \ge \frac\sigma2\Bigr), \qquad
        \sigma - c \ \Bigl(c \le \frac\sigma2\Bigr)

    Args:
        sigma: Root mean square :math:`\sigma \ge 0` of the gradient noise.
        max_norm: Threshold :math:`c > 0`.

    Example:
        >>> clipping_floor(1.0, 0.25), clipping_floor(1.0, 0.5), clipping_floor(1.0, 5.0)
        (0.75, 0.5, 0.05)
    """
    check_nonnegative("sigma", sigma)
    check_positive("max_norm", max_norm)
    return sigma - max_norm if max_norm < sigma / 2 else sigma**2 / (4 * max_norm)


def floor_noise(sigma: float, max_norm: float) -> SkewedNoise:
    """The noise with which x²/2 attains :func:`clipping_floor`.

    Example:
        >>> noise = floor_noise(1.0, 1.0)
        >>> noise.values, noise.probabilities, noise.clipped_mean(0.25, 1.0)
        ((-0.5, 2.0), (0.8, 0.2), 0.0)
    """
    check_positive("sigma", sigma)
    large = max(2 * check_positive("max_norm", max_norm), sigma)
    small = sigma**2 / large
    rare = small / (small + large)
    return SkewedNoise(values=(-small, large), probabilities=(1 - rare, rare))
