"""The words of an advice: each sentence names the numbers that it rests on."""

from __future__ import annotations

import math

import numpy as np

from curvestep.advice.settings import Setting
from curvestep.fit.diagnostics import at_edge_of_stability, kappa_saturated
from curvestep.fit.evidence import Evidence
from curvestep.fit.samples import Points

LITTLE_GAIN = 1.5  # below it clipping is not worth its threshold


def loss_rose(evidence: Evidence) -> str | None:
    """What to make of a trace along which the loss rose."""
    if evidence.rise is None:
        return None
    return (
        "The loss rose along this trace, from {:.3g} to {:.3g}: its steps were too long, so lr is not raised."
    ).format(*evidence.rise)


def does_clipping_pay(
    points: Points, L0: float, L1: float, gain: float, noise: float | None, evidence: Evidence
) -> str:
    """Whether clipping helps, and why, in one sentence."""
    largest = float(points.grad_norm.max())
    if kappa_saturated(points) and points.clipped.mean() > 0.5:
        return (
            "Whether clipping pays cannot be told from this trace: its steps all have the same length and "
            "change the gradient by the same share of its norm (κ is saturated), and that alone makes "
            "smoothness grow with the gradient norm."
        )
    if at_edge_of_stability(points):
        return (
            "Whether clipping pays cannot be told from this trace: without clipping, smoothness has settled "
            "at 2/lr whatever the gradient norm (the edge of stability), and says nothing about other steps."
        )
    if gain < LITTLE_GAIN:
        return (
            f"Clipping gains little here: at the largest gradient seen the smoothness is {gain:.2f} times "
            "what it is at none, so a plain learning rate does nearly as well."
        )
    if noise is not None and L1 > 0 and largest < 2 * (noise + L0 / L1):
        return (
            f"The large gradients are mostly noise ({noise:.3g}, with the largest norm {largest:.3g}): a "
            "lower lr or a larger batch helps more than clipping."
        )
    if not evidence.varies:
        return (
            "Whether clipping pays cannot be told from this trace: its gradient norm hardly varies, so "
            "nothing shows how smoothness goes with it."
        )
    if evidence.explained:
        return (
            "Whether clipping pays cannot be told from this trace: smoothness grows with the gradient norm, "
            "but a constant Hessian, where clipping gains nothing, would show as much with the same steps."
        )
    times = "many" if math.isinf(gain) else f"{gain:.3g}"
    return (
        f"Clipping pays here: smoothness grows with the gradient norm, to {times} times its value at small "
        "gradients, so one learning rate for all steps would have to be that much smaller."
    )


def tolerated(
    points: Points, L0: float, L1: float, constant: float, *, most_lr: float, evidence: Evidence
) -> str:
    """The step that the region tolerates, and what that does not say."""
    middle = float(np.median(points.grad_norm))
    size = min(constant / (L0 + L1 * middle), most_lr)
    today = float(np.nanmedian(points.step_size))
    region = (
        f"This region tolerates a step of {size * middle:.3g} at the median gradient norm {middle:.3g} (step "
        f"size {size:.3g}; today's is {today:.3g}). That is a local statement: curvature adapts to the step, "
    )
    if evidence.rise is None:
        return (
            region + "so raise lr with the longest step kept, measure again, and judge by the loss as well."
        )
    return region + "so measure again where the loss falls."


def reasons(
    points: Points,
    L0: float,
    L1: float,
    gain: float,
    noise: float | None,
    inert: bool,
    constant: float,
    *,
    held: bool,
    evidence: Evidence,
) -> tuple[str, ...]:
    """The numbers behind an advice from one trace."""
    found = [
        f"smoothness here is about {L0:.3g} + {L1:.3g} ‖g‖; step sizes stay below {constant:g} over that",
        f"gain of clipping, 1 + L1·M/L0, is {gain:.3g} with M = {points.grad_norm.max():.3g}",
    ]
    if L1 > 0 and evidence.explained:
        found.append(
            f"a constant Hessian would show a rank correlation up to {evidence.control:.2f} with these "
            f"steps, and this run's may be as low as {evidence.rank:.2f}: L1 may be no more than a trend"
        )
    if held:
        today, largest = np.nanmedian(points.step_size), points.smoothness.max()
        found.append(
            f"lr is held there: today's step size is {today:.3g}, and one over the largest smoothness "
            f"measured is {1 / largest:.3g}"
        )
    if inert:
        size, length = np.nanmedian(points.step_size), np.median(points.step_norm)
        found.append(
            f"{points.clipped.mean():.0%} of today's steps are clipped, so lr is inert: only lr·max_norm = "
            f"{length:.3g} acts (effective step size {size:.3g}); a larger lr with max_norm smaller by "
            "the same factor changes nothing"
        )
    if noise is not None:
        corner = L0 / L1 if L1 > 0 else math.inf
        found.append(
            f"gradient noise is {noise:.3g}, L0/L1 is {corner:.3g}: clipping pays if the largest gradients "
            "are well above their sum; a max_norm of five times the noise keeps clipping off the noise"
        )
    if kappa_saturated(points):
        found.append(
            "κ is saturated, so the step advised is close to the step taken: it repeats today's setting"
        )
    return tuple(found)


def went(setting: Setting, *, staged: bool) -> str:
    """How a run or a stage went."""
    if setting.diverged:
        return "diverged"
    if setting.ended_early:
        return "ended too early to be compared"
    if not math.isfinite(setting.score):
        return "no loss recorded"
    return (
        f"loss falls by {-setting.score:.3g} a step"
        if staged
        else f"loss {setting.score:.4g} ± {setting.error:.2g}"
    )
