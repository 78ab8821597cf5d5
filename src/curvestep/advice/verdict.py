"""The words of an advice: each sentence names the numbers that it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from curvestep.advice.rule import LITTLE_GAIN, Rule
from curvestep.advice.settings import Setting
from curvestep.fit.diagnostics import at_edge_of_stability, hardly_varies, kappa_saturated
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.within import LEAST_ELASTICITY

INERT = 0.9  # share of clipped steps from which lr no longer matters by itself


def verdict_on(fit: SmoothnessFit, rule: Rule) -> str:
    """Whether the loss rose, whether clipping pays, and the step that the region tolerates."""
    parts = [does_clipping_pay(fit, rule), tolerated(fit, rule)]
    if rule.rise is not None:
        first, last = rule.rise
        parts.insert(
            0,
            f"The loss rose along this trace, from {first:.3g} to {last:.3g}: its steps were too long, or "
            "its batches too noisy for them, so lr is lowered.",
        )
    return " ".join(parts)


def does_clipping_pay(fit: SmoothnessFit, rule: Rule) -> str:
    """Whether clipping helps, and why, in one sentence."""
    samples, within, gain, noise = fit.samples, fit.within, rule.gain, rule.noise
    largest = float(samples.grad_norm.max())
    saturated = kappa_saturated(samples) and samples.clipped.mean() > 0.5
    at_edge = at_edge_of_stability(samples)
    low, high = within.elasticity_interval
    inside = f"elasticity {within.elasticity:.2f} [{low:.2f}, {high:.2f}], p {within.p_value:.1g}"
    unknown = "Whether clipping pays cannot be told from this trace: "
    if (
        gain >= LITTLE_GAIN
        and noise is not None
        and rule.L1 > 0
        and largest < 2 * (noise + rule.L0 / rule.L1)
    ):
        return (
            f"The large gradients are mostly noise ({noise:.3g}, with the largest norm {largest:.3g}): a "
            "lower lr or a larger batch helps more than clipping."
        )
    if within.grows and (gain >= LITTLE_GAIN or saturated or at_edge):
        return (
            f"Clipping pays here: inside single steps smoothness grows with the gradient norm ({inside}), "
            "which a constant Hessian never shows, so one learning rate for all steps has to be as small as "
            "the largest gradients need."
        )
    if saturated:
        return (
            unknown + "its steps all have the same length and change the gradient by the same share of its "
            "norm (κ is saturated), and that alone makes smoothness grow with the gradient norm."
        )
    if at_edge:
        return (
            unknown + "without clipping, smoothness has settled at 2/lr whatever the gradient norm (the edge "
            "of stability), and says nothing about other steps."
        )
    if gain < LITTLE_GAIN:
        return (
            f"Clipping gains little here: at the largest gradient seen the smoothness is {gain:.2f} times "
            "what it is at none, so a plain learning rate does nearly as well."
        )
    if not within.missing and high <= LEAST_ELASTICITY:
        return (
            "Clipping gains little here: smoothness and gradient norm fall together along the run, but "
            f"inside single steps one does not follow the other ({inside})."
        )
    if not within.missing:
        return (
            unknown + "smoothness and gradient norm go together along the run, but inside single steps no "
            f"growth is shown ({inside})."
        )
    if hardly_varies(samples):
        return unknown + "its gradient norm hardly varies, so nothing shows how smoothness goes with it."
    if fit.explained:
        return (
            unknown + "smoothness grows with the gradient norm, but a constant Hessian, where clipping gains "
            "nothing, would show as much with the same steps."
        )
    times = "many" if math.isinf(gain) else f"{gain:.3g}"
    return (
        f"Clipping pays here: smoothness grows with the gradient norm, to {times} times its value at small "
        "gradients, so one learning rate for all steps would have to be that much smaller."
    )


def tolerated(fit: SmoothnessFit, rule: Rule) -> str:
    """The step that the region tolerates, and what that does not say."""
    middle = float(np.median(fit.samples.grad_norm))
    size = min(rule.constant / (rule.L0 + rule.L1 * middle), rule.most_lr)
    today = float(np.nanmedian(fit.samples.step_size))
    region = (
        f"This region tolerates a step of {size * middle:.3g} at the median gradient norm {middle:.3g} (step "
        f"size {size:.3g}; today's is {today:.3g}). That is a local statement: curvature adapts to the step, "
    )
    if rule.rise is None:
        return (
            region + "so raise lr with the longest step kept, measure again, and judge by the loss as well."
        )
    return region + "so measure again where the loss falls."


def is_inert(fit: SmoothnessFit) -> bool:
    """Whether nearly every step was clipped, so that only the product lr·max_norm acts."""
    return bool(fit.samples.clipped.mean() >= INERT)


def reasons(fit: SmoothnessFit, rule: Rule) -> tuple[str, ...]:
    """The numbers behind an advice from one trace."""
    samples, L0, L1 = fit.samples, rule.L0, rule.L1
    found = [
        f"smoothness here is about {L0:.3g} + {L1:.3g} ‖g‖; step sizes stay below {rule.constant:g} over "
        "that",
        f"gain of clipping, 1 + L1·M/L0, is {rule.gain:.3g} with M = {samples.grad_norm.max():.3g}",
    ]
    if L1 > 0 and fit.within.missing and fit.explained and fit.control is not None:
        low, high = fit.spearman_interval[0], fit.control.spearman_interval[1]
        found.append(
            f"a constant Hessian would show a rank correlation up to {high:.2f} with these steps, and this "
            f"run's may be as low as {low:.2f}: L1 may be no more than a trend"
        )
    if not fit.within.missing:
        found.append(str(fit.within).removesuffix("."))
    if rule.held:
        found.append(f"lr is held there: {rule.limit}")
    if is_inert(fit):
        size, length = np.nanmedian(samples.step_size), np.median(samples.step_norm)
        found.append(
            f"{samples.clipped.mean():.0%} of today's steps are clipped, so lr is inert: only lr·max_norm = "
            f"{length:.3g} acts (effective step size {size:.3g}); a larger lr with max_norm smaller by "
            "the same factor changes nothing"
        )
    if rule.noise is not None:
        corner = L0 / L1 if L1 > 0 else math.inf
        found.append(
            f"gradient noise is {rule.noise:.3g}, L0/L1 is {corner:.3g}: clipping pays if the largest "
            "gradients are well above their sum; a max_norm of five times the noise keeps clipping off it"
        )
    if kappa_saturated(samples):
        found.append(
            "κ is saturated, so the step advised is close to the step taken: it repeats today's setting"
        )
    return tuple(found)


def verdict_on_settings(best: Setting, settings: Sequence[Setting], *, at_edge: bool) -> str:
    """Which of several settings to take, and whether to look further."""
    how = "its loss fell fastest" if best.staged else "its loss ended lowest"
    verdict = (
        f"Take {best.label}: of the {len(settings)} settings measured {how}, or as low with a larger step."
    )
    if at_edge:
        return verdict + " It lies at the edge of what was tried, so try the next one before settling."
    return verdict + " Settings on both sides of it did worse."


def reasons_of_settings(best: Setting, settings: Sequence[Setting]) -> tuple[str, ...]:
    """How each setting went, and what that leaves open."""
    assert best.samples is not None
    kappa = float(np.nanmedian(best.samples.kappa))
    found = [f"{s.label}: {s.outcome}" for s in sorted(settings, key=lambda s: s.lr)]
    found.append(f"in the region of the best run one step changes the gradient by {kappa:.2f} times its norm")
    if math.isinf(best.max_norm):
        found.append("the best run did not clip; the max_norm given only guards against a stray long step")
    if lost := [s.label for s in settings if s.diverged]:
        found.append(f"diverged: {'; '.join(lost)}")
    if best.staged:
        found.append("stages follow each other, so a later one starts from a lower loss: a hint, not a race")
    return tuple(found)
