r"""Normalized SGD with momentum whose steps need no constant of the function (row 34).

Hübler, Yang, Li and He (2024) set, for t = 1, 2, …,

.. math::
    m_t = \beta_t m_{t-1} + (1 - \beta_t)g_t, \quad x_{t+1} = x_t - \eta_t\frac{m_t}{\lVert m_t\rVert}, \quad
    \beta_t = 1 - t^{-1/2}, \quad \eta_t = \eta t^{-3/4} .

The constants here are our own. Noise has mean zero, given the past, and mean square at most :math:`\sigma^2`.

Let :math:`e_t = m_t - \nabla f(x_t)`. Steps have length :math:`\eta_t`, so f falls by at least
:math:`\eta_t\lVert\nabla f\rVert - 2\eta_t\lVert e_t\rVert - (L_0 + L_1\lVert\nabla f\rVert)B_t\eta_t^2`. The
error is :math:`e_t = \beta_t(e_{t-1} + \nabla f(x_{t-1}) - \nabla f(x_t)) + t^{-1/2}\xi_t`: its noise part
has root mean square at most :math:`\sigma V_t`, and what step t changes the gradient by counts
:math:`W_{t+1}` times. The sum is

.. math::
    \sum_{t\le T} c_t\,\mathbb E\lVert\nabla f(x_t)\rVert \le Q_T, \qquad
    c_t = \eta_t(1 - a_tB_t - 2L_1W_{t+1}A_t)

with :math:`a_t = L_1\eta_t`, :math:`A_t = (e^{a_t} - 1)/a_t`, :math:`B_t = \varphi(a_t)/a_t^2`,
:math:`V_t^2 = \beta_t^2V_{t-1}^2 + 1/t`, :math:`W_t = \beta_t(\eta_t + W_{t+1})`, :math:`W_{T+1} = 0`, and

.. math::
    Q_T = \Delta + L_0\sum(B_t\eta_t^2 + 2W_{t+1}\eta_tA_t) + 2\sigma\sum\eta_tV_t .

Early weights are negative where :math:`\eta` is large against :math:`1/L_1`. There gradients are at most
:math:`\Gamma_t = (g_1 + L_0/L_1)e^{L_1\sum_{s<t}\eta_s} - L_0/L_1`, which is where the exponential comes
from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.checks import check_count
from curvestep.theory.problems.base import Array
from curvestep.theory.problems.walls import phi
from curvestep.theory.theorems.fixed_gd import gradient_bound, wall_height
from curvestep.theory.theorems.guarantee import Assumption, check_numbers, require
from curvestep.theory.theorems.lemmas import Inequality

MOST_NEGATIVE = 1_000_000  # early steps that are summed; where there are more, e to the 20(L1 η)² overflows


@dataclass(frozen=True, kw_only=True)
class MomentumSchedule:
    """Step lengths and momentum of the first T steps."""

    lrs: Array  # step lengths
    betas: Array  # what stays of the momentum; 0 in the first step


def agnostic_schedule(lr: float, num_steps: int) -> MomentumSchedule:
    r"""Step lengths :math:`\eta t^{-3/4}` and momentum :math:`1 - t^{-1/2}` for t = 1, …, T.

    Example:
        >>> schedule = agnostic_schedule(1.0, 3)
        >>> schedule.lrs.round(3), schedule.betas.round(3)
        (array([1.   , 0.595, 0.439]), array([0.   , 0.293, 0.423]))
    """
    t = np.arange(1.0, check_count("num_steps", num_steps) + 1)
    return MomentumSchedule(lrs=lr * t**-0.75, betas=1 - t**-0.5)


@dataclass(frozen=True, kw_only=True)
class MomentumBudget:
    """What the gradient norms of T steps of normalized SGD with momentum can add up to."""

    weights: Array  # c_t of each gradient norm; negative ones come first
    budget: float  # Q_T, which the weighted sum of mean gradient norms does not exceed
    largest: Array  # Γ_t, which no gradient norm exceeds

    def sum_of(self, grad_norms: Array) -> Inequality:
        """The weighted sums of gradient norms, steps along the first axis, beside the budget.

        Without noise the left side never exceeds the right; with noise its mean over runs does not.
        """
        left = np.tensordot(self.weights, grad_norms[: len(self.weights)], axes=1)
        return Inequality(left=left, right=np.broadcast_to(self.budget, left.shape))

    def reaches(self, eps: float, *, noisy: bool) -> bool:
        """Whether a gradient norm of at most ε is sure to be met, with noise in at least half of the runs."""
        spent = self.budget - np.minimum(self.weights, 0.0) @ self.largest
        share = 0.5 if noisy else 1.0
        return bool(spent < share * eps * np.maximum(self.weights, 0.0).sum())


def momentum_budget(
    *, L0: float, L1: float, gap: float, sigma: float, lr: float, num_steps: int
) -> MomentumBudget:
    """The certificate of T steps, in O(T) numbers and without a run.

    Example:
        >>> budget = momentum_budget(L0=1.0, L1=1.0, gap=1.0, sigma=0.0, lr=0.2, num_steps=1000)
        >>> round(budget.budget, 3), bool((budget.weights > 0).all())
        (1.475, True)
    """
    check_numbers("L1", "gap", "lr", L0=L0, L1=L1, gap=gap, sigma=sigma, lr=lr)
    schedule = agnostic_schedule(lr, num_steps)
    lrs = schedule.lrs
    betas = schedule.betas
    a = L1 * lrs
    A = np.expm1(a) / a
    B = phi(a) / a**2
    noise = np.empty(num_steps)  # V_t
    last = 0.0
    for t in range(num_steps):
        last = math.sqrt((betas[t] * last) ** 2 + 1 / (t + 1))
        noise[t] = last
    later = np.empty(num_steps)  # W_{t+1}
    last = 0.0
    for t in range(num_steps - 1, -1, -1):
        later[t] = last
        last = betas[t] * (lrs[t] + last)
    drift = L0 * np.sum(B * lrs**2 + 2 * later * lrs * A)
    return MomentumBudget(
        weights=lrs * (1 - a * B - 2 * L1 * later * A),
        budget=float(gap + drift + 2 * sigma * np.sum(lrs * noise)),
        largest=_largest_norms(lrs, L0=L0, L1=L1, gap=gap),
    )


def momentum_gradient_bound(
    num_steps: int, *, L0: float, L1: float, gap: float, sigma: float, lr: float
) -> float:
    r"""A bound on the least mean gradient norm of T steps.

    .. math::
        \min_{t\le T}\mathbb E\lVert\nabla f(x_t)\rVert \le
        \frac{\Delta/\eta + L_0\eta(2.62B_1 + 2A_1(1 + \ln T)) + 2\sigma(1 + \ln T) + E}{2((T + 1)^{1/4} - 1)}

    It follows from :func:`momentum_budget` by :math:`V_t \le t^{-1/4}` and :math:`W_t \le \eta t^{-1/4}`. E
    is 0 for :math:`\eta \le 1/(5L_1)`, where the bracket is at most :math:`3.7 + 2.3\ln T`. Beyond it is
    :math:`\tfrac1\eta\sum\eta_t(\kappa_t - \tfrac12)_+\Gamma_t` with
    :math:`\kappa_t = a_tB_t + 2L_1\eta A_t(t + 1)^{-1/4}`, of the order :math:`e^{20(L_1\eta)^2}`.

    Example:
        >>> numbers = dict(L0=1.0, L1=1.0, gap=1.0, sigma=0.1)
        >>> round(momentum_gradient_bound(10**8, **numbers, lr=0.2), 3)
        0.09
        >>> f"{momentum_gradient_bound(10**8, **numbers, lr=2.0):.1e}"
        '5.9e+20'
    """
    check_count("num_steps", num_steps)
    check_numbers("L1", "gap", "lr", L0=L0, L1=L1, gap=gap, sigma=sigma, lr=lr)
    first = L1 * lr
    log = 1 + math.log(num_steps)
    curvature = 2.62 * float(phi(first)) / first**2 + 2 * math.expm1(first) / first * log
    numerator = gap / lr + L0 * lr * curvature + 2 * sigma * log
    num_negative = min(num_steps, math.ceil((5 * first) ** 4))  # no later weight is below a half
    if num_negative > MOST_NEGATIVE:
        return math.inf
    lrs = agnostic_schedule(lr, num_negative).lrs
    a = L1 * lrs
    t = np.arange(1.0, num_negative + 1)
    kappa = phi(a) / a + 2 * first * np.expm1(a) / a * (t + 1) ** -0.25
    early = lrs * np.maximum(kappa - 0.5, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = _largest_norms(lrs, L0=L0, L1=L1, gap=gap)
        numerator += float(np.sum(early[early > 0] * largest[early > 0])) / lr
    return numerator / (2 * ((num_steps + 1) ** 0.25 - 1))


def momentum_lower_bound(*, L0: float, L1: float, eps: float, lr: float) -> float:
    r"""Steps that the schedule takes on ``OvershootWell(L0=L0, L1=L1, eps=eps, jump=lr)`` at least.

    .. math::
        T \ge \Big(1 + \frac{H}{8\eta\varepsilon}\Big)^4, \qquad H = 2\psi(U) - 2\psi(2\varepsilon), \quad
        1 + \frac{L_1U}{L_0} = \frac{e^{L_1\eta/2}}{1 + 2\varepsilon L_1/L_0}

    The first step leaps onto a slope of :math:`2\varepsilon` that is H high, and all others together go
    :math:`4\eta(T^{1/4} - 1)` at most. The gap is :math:`\psi(2\varepsilon)` only: what grows is
    :math:`e^{2L_1\eta}`.

    Example:
        >>> round(momentum_lower_bound(L0=1.0, L1=1.0, eps=0.1, lr=8.0))
        35302
    """
    check_numbers("L1", "lr", L0=L0, L1=L1, eps=eps, lr=lr)
    steepest = L0 / L1 * (math.exp(L1 * lr / 2) / (1 + 2 * eps * L1 / L0) - 1)
    require(Assumption("a steepest gradient of more than 2ε: a larger lr", steepest > 2 * eps))
    hill = 2 * (wall_height(steepest, L0=L0, L1=L1) - wall_height(2 * eps, L0=L0, L1=L1))
    return (1 + hill / (8 * lr * eps)) ** 4


def _largest_norms(lrs: Array, *, L0: float, L1: float, gap: float) -> Array:
    """Γ_t, what the gradient norm can have grown to along the steps before."""
    first = gradient_bound(gap, L0=L0, L1=L1)
    before = np.cumsum(lrs) - lrs
    with np.errstate(over="ignore"):
        return (first + L0 / L1) * np.exp(L1 * before) - L0 / L1
