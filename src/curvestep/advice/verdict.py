"""The words of an advice: one sentence to act on, then what it rests on, each with its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from curvestep.advice.decision import FAR, INERT, KEEP, LOWER, RAISE, RESCUE, TRY, Decision
from curvestep.advice.outcome import Outcome
from curvestep.advice.rule import LITTLE_GAIN, Rule
from curvestep.advice.settings import Setting, rate_name
from curvestep.fit.diagnostics import at_edge_of_stability, hardly_varies, kappa_saturated
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.within import LEAST_ELASTICITY

_OPENINGS = {RAISE: "Raise", LOWER: "Lower", TRY: "Cannot tell yet; next run"}


def first_line(decision: Decision, outcome: Outcome) -> str:
    """What to do, in one sentence."""
    if decision.action == KEEP:
        return "Good as it is. That is by this run alone: calibrate may find better."
    lr, rate = decision.lr, rate_name(outcome.scheduled)
    name = "offset" if outcome.method.normalized else "max_norm"
    norm = f"{name} {decision.max_norm:.3g}" if math.isfinite(decision.max_norm) else ""
    if decision.action == RESCUE:
        setting = ", ".join(part for part in (f"{rate} {lr:.3g}", norm) if part)
        return f"Diverged at step {outcome.diverged_at}: try {setting}."
    if decision.action != TRY and lr < outcome.lr and decision.max_norm > outcome.max_norm * (1 + 1e-9):
        parts = [f"lower {rate} to {lr:.3g}", f"raise {name} to {decision.max_norm:.3g}"]
        return ", ".join(parts if decision.action == LOWER else parts[::-1]).capitalize() + "."
    opening = _OPENINGS[decision.action]
    to = "" if decision.action == TRY else "to "
    if decision.action != TRY and math.isclose(lr, outcome.lr):
        return f"{opening} max_norm to {decision.max_norm:.3g}."
    changed = decision.action == TRY or not math.isclose(decision.max_norm, outcome.max_norm)
    return f"{opening} {rate} {to}{lr:.3g}{f', {norm}' if norm and changed else ''}."


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
            unknown
            + "in its unclipped steps smoothness has settled near 2/lr whatever the gradient norm (the "
            "edge of stability), and says nothing about other steps."
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


def why_stable(fit: SmoothnessFit, decision: Decision, limit: str, *, as_long: bool) -> str:
    """Why lr is lower than the threshold asks for, in one sentence; whether the longest step is the run's."""
    samples, lr, max_norm = fit.samples, decision.lr, decision.max_norm
    share = float(samples.clipped.mean())
    if share == 0:
        return f"No step was clipped, and {limit}"
    clipped = "Every step was clipped" if share == 1 else f"{share:.0%} of the steps were clipped"
    only = ", so only lr·max_norm counted" if is_inert(fit) else ""
    steps = f"steps up to {lr * max_norm:.3g} long"
    if as_long:
        steps = "the same steps" if max_norm <= samples.grad_norm.min() else "the longest step the same"
    return (
        f"{clipped}{only}: lr {lr:.3g} with max_norm {max_norm:.3g} makes {steps}, and stays stable where "
        f"clipping ends ({limit})"
    )


def is_inert(fit: SmoothnessFit) -> bool:
    """Whether nearly every step was clipped, so that only the product lr·max_norm acts."""
    return bool(fit.samples.clipped.mean() >= INERT)


def reasons(fit: SmoothnessFit, rule: Rule, outcome: Outcome, decision: Decision) -> tuple[str, ...]:
    """The numbers behind an advice from one trace."""
    samples, L0, L1 = fit.samples, rule.L0, rule.L1
    found = [decision.why, *reasons_of_start(outcome), *_by_this_run(decision, outcome)]
    if decision.action == RAISE and rule.limit and rule.most_lr < 3.01 * rule.today:
        found.append(f"no further: {rule.limit}")
    found.append(
        f"smoothness here is about {L0:.3g} + {L1:.3g} ‖g‖; step sizes below {rule.constant:g} over that are "
        f"those of lr {rule.lr:.3g}, max_norm {rule.max_norm:.3g}. Curvature adapts to the step: this holds "
        "for the region that was visited"
    )
    if L1 > 0 and fit.within.missing and fit.explained and fit.control is not None:
        low, high = fit.spearman_interval[0], fit.control.spearman_interval[1]
        found.append(
            f"a constant Hessian would show a rank correlation up to {high:.2f} with these steps, and this "
            f"run's may be as low as {low:.2f}: L1 may be no more than a trend"
        )
    if not fit.within.missing:
        found.append(str(fit.within).removesuffix("."))
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
    return tuple(found)


def reasons_of_method(fit: SmoothnessFit, outcome: Outcome, decision: Decision) -> tuple[str, ...]:
    """The numbers behind an advice on momentum, Adam and the like, and what they cannot say."""
    method = outcome.method
    name = method.name or "an optimizer that is not named in the rows"
    found = [decision.why, *reasons_of_start(outcome), *_by_this_run(decision, outcome)]
    if math.isfinite(method.product) and math.isfinite(method.limit):
        far = (
            f"; over all directions it reached {method.spectral:.3g}"
            if math.isfinite(method.spectral)
            else ""
        )
        near = " of the steps at half the peak lr or more" if outcome.scheduled else ""
        found.append(
            f"lr times smoothness in the metric of {name} is {method.product:.3g} in the median of the later "
            f"half{near}{far}; the edge of stability is {method.limit:.3g}"
        )
    if fit.noise_scale is not None:
        found.append(
            f"the gradient noise scale is {fit.noise_scale:.3g} samples: batches far below it are mostly "
            "noise, and gain from a lower lr"
        )
    if method.uneven:
        found.append(
            "lr is the largest of the groups', and steps are not that times the gradient: groups have other "
            "learning rates, parts are frozen, or weights decay. Change all groups by the same factor"
        )
    found.append(
        f"steps of {name} are not lr times the gradient, so L0 and L1 give no lr for them; which lr is best "
        "under a schedule, and how much weight decay, no trace can say"
    )
    return tuple(found)


def reasons_of_normalized(
    outcome: Outcome, decision: Decision, L0: float, L1: float, *, constant: float
) -> tuple[str, ...]:
    r"""The numbers behind an advice on normalized descent, whose step is that of the bound itself.

    .. math::
        \frac{c}{L_0 + L_1 g} = \frac{\eta}{g + \beta} \quad\text{for}\quad \eta = c/L_1, \; \beta = L_0/L_1
    """
    offset = outcome.method.offset
    own = "plain SGD, for smoothness does not grow with the gradient norm"
    if L1 > 0:
        own = f"NormalizedSGD with lr {constant / L1:.3g}, offset {L0 / L1:.3g}"
    return (
        decision.why,
        *reasons_of_start(outcome),
        *_by_this_run(decision, outcome),
        f"lr is the length of a step where the gradient is far above the offset, {offset:.3g} (max_norm "
        f"stands for it here); far below it steps are those of plain SGD with lr {outcome.lr / offset:.3g}",
        f"smoothness here is about {L0:.3g} + {L1:.3g} ‖g‖; steps of {constant:g} over that are those of "
        f"{own}. Curvature adapts to the step: this holds for the region that was visited",
    )


def what_the_threshold_does(outcome: Outcome) -> str:
    """Whether a threshold is a safety net, a limit, or without effect; for momentum, Adam and the like."""
    share, adaptive = outcome.clipped, outcome.method.adaptive
    if math.isnan(share):
        return "Whether steps were clipped was not recorded."
    if share == 0:
        return "No measured step was clipped: a threshold, if there is one, is a safety net."
    told = f"{share:.0%} of the measured steps were clipped, at {outcome.max_norm:.3g}: "
    if share < 0.5:
        return told + "the threshold is a safety net."
    if adaptive:
        return (
            told + "Adam divides by the gradient's own size, so a factor that all gradients share has no "
            "effect; the threshold only evens out their norms. Above the usual norm it is a safety net."
        )
    if share < INERT:
        return told + "the threshold limits most steps, so lr and max_norm act together."
    return told + "lr is inert: only lr·max_norm acts."


def reasons_of_start(outcome: Outcome) -> tuple[str, ...]:
    """What the first rows say, before curvature has adapted to the step."""
    start = outcome.start
    if start is None:
        return ()
    measured = "changes the gradient by its own norm"
    if start.searched:
        measured = "is the longest that is safe, by what calibrate calls safe"
    if outcome.method.share < 1:
        measured = "is what calibrate would take by that batch alone, at a constant learning rate"
    long = f", lr·L/2 = {start.edge:.3g}" if start.edge > 1 else ""
    step = "the step of its peak lr" if outcome.scheduled else "its step"
    return (
        f"where the run started, {start.factor:.2g} times {step} {measured}{long}; the gradient norm there "
        f"is {start.grad_norm:.3g}",
    )


def _by_this_run(decision: Decision, outcome: Outcome) -> tuple[str, ...]:
    """Where a setting is kept: what one run cannot know, and what can."""
    if decision.action != KEEP:
        return ()
    if outcome.start is not None and outcome.start.factor > FAR:
        shown = "longer steps would gain little where the run is now"
    else:
        shown = "nothing in this run speaks for another setting"
    return (
        f"{shown}; a run with other steps from the beginning may go elsewhere. cs.calibrate measures the "
        "step to begin with, in seconds (curvestep calibrate)",
    )


def doubts(outcome: Outcome) -> tuple[str, ...]:
    """What to doubt besides the fit."""
    if outcome.rise is None:
        return ()
    return (
        "If another network is trained against this one, as in a GAN, a rising loss is no sign of long "
        "steps: go by what a step does to the loss of its own batch.",
    )


def reasons_of_lost(outcome: Outcome) -> tuple[str, ...]:
    """What is known of a run whose loss was lost, and what measures the rest."""
    first, last = outcome.losses
    went = (
        "the loss is not finite from there on"
        if math.isnan(last)
        else f"the loss went from {first:.3g} to {last:.3g}"
    )
    name = "offset" if outcome.method.normalized else "max_norm"
    clip = "without clipping" if math.isinf(outcome.max_norm) else f"with {name} {outcome.max_norm:.3g}"
    rate = f"{rate_name(outcome.scheduled)} {outcome.lr:.3g}"
    found = [f"{went}, at {rate} {clip}", *reasons_of_start(outcome)]
    if outcome.start is None:
        found.append("the first step was not measured, so a third of the lr is a guess")
    elif outcome.start.factor < 0.1 and not outcome.start.searched:  # up to 7 times calibrate's lr was seen
        found.append("a step more than ten times too long says little of shorter ones: lr may be far off")
    return (
        *found,
        "cs.calibrate measures both numbers before training, in seconds: it is the surer next step",
    )


def verdict_on_settings(best: Setting, max_norm: float, following: dict[str, float] | None) -> str:
    """Which of several settings to take, and what to try before settling."""
    rate = rate_name(best.scheduled)
    verdict = f"Take {rate} {best.lr:.3g}, max_norm {max_norm:.3g}"
    if following is None:
        return f"{verdict}."
    return f"{verdict}; next run {rate} {following['lr']:.3g}, max_norm {following['max_norm']:.3g}."


def reasons_of_settings(
    best: Setting, settings: Sequence[Setting], following: dict[str, float] | None
) -> tuple[str, ...]:
    """How each setting went, and what that leaves open."""
    assert best.samples is not None
    kappa = float(np.nanmedian(best.samples.kappa))
    how = "its loss fell fastest" if best.staged else "its loss ended lowest"
    found = [f"of the {len(settings)} settings measured {how}, or as low with a larger step"]
    if following is None:
        found.append("settings on both sides of it did worse")
    else:
        found.append("it lies at the edge of what was tried, so try the next one before settling")
    found += [f"{s.label}: {s.outcome}" for s in sorted(settings, key=lambda s: s.lr)]
    found.append(f"in the region of the best run one step changes the gradient by {kappa:.2f} times its norm")
    if math.isinf(best.max_norm):
        found.append("the best run did not clip; the max_norm given only guards against a stray long step")
    if best.staged:
        found.append("stages follow each other, so a later one starts from a lower loss: a hint, not a race")
    return tuple(found)
