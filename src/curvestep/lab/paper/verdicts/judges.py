"""The statistic that tests each statement of the paper, and what the runs of one scale show by it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial

from curvestep.lab.paper import legend
from curvestep.lab.paper.fig6_data_fraction import DATA_SHARES, agreement
from curvestep.lab.paper.fig8_lstm_gd import compare, two_layer_settings
from curvestep.lab.paper.plan import Results
from curvestep.lab.paper.verdicts.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    IN_PART,
    NOT_REPRODUCED,
    NOT_TESTED,
    OPEN,
    REPRODUCED,
    Finding,
    MissingRuns,
    Spread,
    decide,
)
from curvestep.lab.paper.verdicts.statistics import (
    accuracy,
    best_of,
    clipped_share,
    control_exponents,
    correlation,
    elasticity_beyond_zero,
    exponent,
    final_loss,
    late_over_early,
    log_spread,
    measured,
    missed_share,
    speed_up,
    spread,
    spreads,
    typical_smoothness,
    validation_loss,
    variation,
)
from curvestep.lab.run.folder import DIVERGED, Run

FOLLOWS = 0.5  # correlation of logs from which smoothness follows the gradient norm
ABSENT = 0.2  # correlation of logs up to which there is none, either way
MUCH = 0.5  # "much weaker" is at most half
VARIES, VARIES_GREATLY = 2.0, 5.0  # factors between the 5 % and the 95 % quantile
LINEAR, STEEPER = 1.25, 1.5  # exponents: at most linear up to the first, steeper from the second
ACCURATE = 0.1  # relative error of an accurate estimate
STAYS = 0.9  # a gradient norm of this share of the one before is not lowered
ABOUT_THREE = 3.0  # the paper's ratio of gradient norms
SAME = 0.05  # share of the way down by which two final losses may differ and count as the same
MATCHES = 2.0  # points of accuracy that count as the same
OTHER_MODEL = Finding(verdict=NOT_TESTED, sentence="The laptop's LSTM is not the paper's two-layer model.")
# Scales whose runs have the model, data and length of the paper.
AWD_LSTM, PAPER_ONLY, TWO_LAYER = ("epoch", "paper"), ("paper",), ("longer", "paper")


def follows(results: Results, *, setting: str, scales: Sequence[str], past: float = 0.0) -> Finding:
    """Whether smoothness follows the gradient norm along a run."""
    runs = results.all_finished(setting)
    found = spread(runs, partial(correlation, past=past))
    return Finding(
        verdict=decide(found, found.less(FOLLOWS), at_size=results.plan.scale in scales),
        sentence=f"The correlation of logs is {found.mean:.2f} with {runs[0].recipe.label}.",
        numbers=_numbers_of(runs) | {"correlation of logs": str(found), "follows from": f"{FOLLOWS:g}"},
    )


def much_weaker(results: Results, *, large: str, small: str, scales: Sequence[str]) -> Finding:
    """Whether the correlation of one setting is at most half that of another."""
    strong, weak = results.paired(large, small)
    one, other = spreads((strong, weak), correlation)
    gain = one - other
    return Finding(
        verdict=decide(gain, one.times(MUCH) - other, at_size=results.plan.scale in scales),
        sentence=f"The correlation of logs is {other.mean:.2f}, and {one.mean:.2f} at lr "
        f"{strong[0].recipe.lr:g} with clipping.",
        numbers=_numbers_of(weak) | {"correlation of logs": str(other), "difference": str(gain)},
    )


def no_correlation(results: Results, *, setting: str, scales: Sequence[str]) -> Finding:
    """Whether smoothness and gradient norm have nothing to do with each other, either way."""
    runs = results.all_finished(setting)
    found = spread(runs, correlation)
    room = spread(runs, lambda run: ABSENT - abs(correlation(run)))
    return Finding(
        verdict=decide(room, at_size=results.plan.scale in scales),
        sentence=f"The correlation of logs is {found.mean:.2f} with {runs[0].recipe.label}.",
        numbers=_numbers_of(runs) | {"correlation of logs": str(found), "none up to": f"{ABSENT:g}"},
    )


def varies(results: Results) -> Finding:
    """How much smoothness varies along the run."""
    runs = results.all_finished(legend.BY_HAND)
    found = log_spread(runs, variation)
    margins = [found.less(math.log(factor)) for factor in (VARIES, VARIES_GREATLY)]
    return Finding(
        verdict=decide(*margins, at_size=results.plan.scale in AWD_LSTM),
        sentence=f"Nine tenths of the rows span a factor of {math.exp(found.mean):.1f}.",
        numbers={"logarithm of the factor": str(found)},
    )


def explanation(results: Results) -> Finding:
    """Whether clipping goes through less smooth regions, and meets more of a range of them."""
    pair = results.paired(legend.BY_HAND, legend.SMALL_LR)
    clipped, plain = spreads(pair, typical_smoothness, log_spread)
    widths = spreads(pair, variation, log_spread)
    level, width = clipped - plain, widths[0] - widths[1]
    return Finding(
        verdict=decide(level, width, at_size=results.plan.scale in AWD_LSTM),
        sentence=f"Median smoothness is {math.exp(clipped.mean):.2g} with clipping at the large lr, "
        f"{math.exp(plain.mean):.2g} without at the small one.",
        numbers={"logarithm of the ratio of medians": str(level), "of the ratio of variations": str(width)},
    )


def at_most_linear(results: Results) -> Finding:
    """Whether the power of growth is at most 1, as the affine condition wants."""
    runs = results.all_finished(legend.BY_HAND)
    found = spread(runs, exponent)
    margins = [found.less(limit).times(-1) for limit in (STEEPER, LINEAR)]
    return Finding(
        verdict=decide(*margins, at_size=results.plan.scale in AWD_LSTM),
        sentence=f"Along the run smoothness grows as the gradient norm to the power {found.mean:.2f}.",
        numbers={"exponent": str(found), "counts as linear up to": f"{LINEAR:g}"},
    )


def allows_large_lr(results: Results) -> Finding:
    """Whether there is an lr that trains with clipping on every seed and diverges without on every seed."""
    words, verdict, sentence = {}, OPEN, ""
    for lr in ("10", "30"):
        plain, clipped = results.of(f"lm-lr{lr}"), results.of(f"lm-lr{lr}clip0.25")
        lost, broke = (sum(run.status["status"] == DIVERGED for run in runs) for runs in (plain, clipped))
        counts = f"{lost} of {len(plain)} runs diverge without clipping, {broke} of {len(clipped)} with"
        words[f"lr {lr}"] = counts
        shares = f"{lost / len(plain):.0%} of the runs diverge without clipping, {broke / len(clipped):.0%}"
        sentence = f"At lr {lr} {shares} with it."
        if lost == len(plain) and broke == 0:
            verdict = REPRODUCED
        elif lost and verdict == OPEN:
            verdict = IN_PART
    return Finding(verdict=verdict, sentence=sentence, numbers=words)


def accelerates(results: Results) -> Finding:
    """How many times fewer steps the best clipped setting needs to the best unclipped one's final loss."""
    plain, clipped = _tuned(results, final_loss)
    factor = Spread(values=_log_speed_ups(results, plain, clipped))
    return Finding(
        verdict=decide(factor, at_size=results.plan.scale in PAPER_ONLY),
        sentence=f"Tuned, clipping needs {math.exp(factor.mean):.1f} times fewer steps to the same loss.",
        numbers={
            "best without clipping": results.label(plain),
            "best with it": results.label(clipped),
            "logarithm of the factor": str(factor),
        },
    )


def _log_speed_ups(results: Results, plain: str, clipped: str) -> tuple[float, ...]:
    """Logarithms of how many times fewer steps clipping needs, seed by seed."""
    return tuple(map(math.log, map(speed_up, *results.paired(plain, clipped))))


def best_validation(results: Results) -> Finding:
    """Validation loss of the best clipped setting against that of the best unclipped one."""
    plain, clipped = _tuned(results, validation_loss)
    before, after = spreads(results.paired(plain, clipped), validation_loss)
    gain = before - after
    return Finding(
        verdict=decide(gain, at_size=results.plan.scale in PAPER_ONLY),
        sentence=f"Tuned, validation loss is {after.mean:.2f} with clipping, {before.mean:.2f} without.",
        numbers={"with": results.label(clipped), "without": results.label(plain), "difference": str(gain)},
    )


def _tuned(results: Results, score: Callable[[Run], float]) -> tuple[str, str]:
    """The best setting without clipping and the best with it; an error where there is no choice."""
    scale = results.plan.scale
    plain, clipped = (
        [legend.trained_name(scale, name) for name in names] for names in (legend.UNCLIPPED, legend.CLIPPED)
    )
    if sum(bool(results.plan.of(name)) for name in plain) < 2:
        raise MissingRuns("only one learning rate was run without clipping")
    return best_of(results, plain, score), best_of(results, clipped, score)


def language_more(results: Results) -> Finding:
    """Speed-up by clipping of the language model against that on images."""
    language = _log_speed_ups(results, *_tuned(results, final_loss))
    images = _log_speed_ups(results, legend.MOMENTUM, legend.CLIPPED_IMAGES)
    gain = Spread(values=tuple(map(operator.sub, language, images)))  # as many seeds as both have
    means = [math.exp(Spread(values=logs).mean) for logs in (language, images)]
    return Finding(
        verdict=decide(gain, at_size=results.plan.scale in PAPER_ONLY),
        sentence=f"Clipping speeds up the language model {means[0]:.1f} times, images {means[1]:.1f} times.",
        numbers={"logarithm of the ratio": str(gain)},
    )


def fastest_on_images(results: Results) -> Finding:
    """Final training loss of clipped descent against momentum, after all of the paper's epochs."""
    momentum, clipped = spreads(results.paired(legend.MOMENTUM, legend.CLIPPED_IMAGES), final_loss)
    ends = f"{clipped.mean:.3g} with clipping and {momentum.mean:.3g} with momentum"
    return _only_at_size(results, momentum - clipped, f"Training loss ends at {ends}.")


def images_accuracy(results: Results) -> Finding:
    """Test accuracy of clipped descent against momentum, after all of the paper's epochs."""
    momentum, clipped = spreads(results.paired(legend.MOMENTUM, legend.CLIPPED_IMAGES), accuracy)
    sentence = f"Test accuracy is {clipped.mean:.1f} % with clipping and {momentum.mean:.1f} % with momentum."
    return _only_at_size(results, (clipped - momentum).less(-MATCHES), sentence)


def reaches_95(results: Results) -> Finding:
    """Test accuracy of ResNet20 after the paper's epochs against the 95 % that the paper prints."""
    runs = results.of(legend.MOMENTUM)
    found = spread(runs, accuracy)
    sentence = f"ResNet20 with momentum reaches {found.mean:.1f} % here."
    return _only_at_size(results, found.less(95.0 - MATCHES), sentence)


def _only_at_size(results: Results, margin: Spread, sentence: str) -> Finding:
    """A finding about whole runs: at a smaller scale it is not tested."""
    if results.plan.scale not in PAPER_ONLY:
        steps = results.of(legend.MOMENTUM)[0].status["step"]
        return Finding(verdict=NOT_TESTED, sentence=f"Not run for 200 epochs; these runs have {steps} steps.")
    return Finding(verdict=decide(margin, at_size=True), sentence=sentence, numbers={"margin": str(margin)})


def accurate_share(results: Results, *, quantity: int, name: str) -> Finding:
    """Relative error of an estimate from a tenth of the data, iterate by iterate."""
    part, whole = (results.of(setting)[0] for setting in DATA_SHARES)
    found = agreement(part, whole)[quantity]
    middle, most = found.errors
    margins = [Spread(values=(ACCURATE - error,) * 2) for error in (middle, most)]  # one run: no interval
    return Finding(
        verdict=decide(*margins, at_size=results.plan.scale in AWD_LSTM),
        sentence=f"The median error of the {name} is {100 * middle:.1f} %; nine of ten are below "
        f"{100 * most:.1f} %.",
        numbers={
            "model": whole.recipe.model_words,
            "iterates": str(len(found.steps)),
            "median ratio": f"{found.ratio:.3f}",
            "correlation of logs": f"{found.correlation:.3f}",
            "data": str(whole.status["data"]),
        },
    )


def gradients_stay(results: Results) -> Finding:
    """Loss and gradient norm on the oracle along gradient descent: last quarter against the second."""
    runs = results.all_finished(two_layer_settings(results.plan.scale)[0])
    kept = log_spread(runs, late_over_early)
    falls = spread(runs, lambda run: float(run.column("loss")[1][0]) - final_loss(run))
    if results.plan.scale not in TWO_LAYER:
        return OTHER_MODEL
    return Finding(
        verdict=decide(falls, kept.less(math.log(STAYS)), at_size=True),
        sentence=f"The loss falls by {falls.mean:.1f}; late gradients are {math.exp(kept.mean):.2f} times "
        "those of the second quarter.",
        numbers={"fall of the loss": str(falls), "logarithm of the ratio": str(kept)},
    )


def about_three_times(results: Results) -> Finding:
    """Gradient norms of GD over those of clipped GD."""
    if results.plan.scale not in TWO_LAYER:
        return OTHER_MODEL
    pair = results.paired(*two_layer_settings(results.plan.scale))
    printed, ratios = zip(*map(compare, *pair), strict=True)
    factor = Spread(values=ratios)
    low, high = factor.interval
    verdict = decide(factor.less(1.0), at_size=True)
    if verdict == REPRODUCED and not low <= ABOUT_THREE <= high:
        verdict = IN_PART
    return Finding(
        verdict=verdict,
        sentence=f"GD's gradients are {factor.mean:.1f} times those of clipped GD.",
        numbers={
            "ratio": str(factor),
            "predicted as printed": _predicted(printed),
            "with the theorems' square root": _predicted(list(map(math.sqrt, printed))),
        },
    )


def _predicted(ratios: Sequence[float]) -> str:
    """Predicted ratios over the seeds; in words where a fitted L0 of zero leaves them without a bound."""
    unbounded = sum(map(math.isinf, ratios))
    if unbounded:
        return f"no number, because the fitted L0 is 0 with clipping on {unbounded} of {len(ratios)} seeds"
    return str(Spread(values=tuple(ratios)))


def same_up_to_a_factor(results: Results) -> Finding:
    """Final loss of normalized descent against the best clipped setting, as shares of the way down."""
    clipped = best_of(results, legend.CLIPPED)
    missed = tuple(map(missed_share, *results.paired(clipped, legend.NORMALIZED)))
    ends = [spread(results.of(name), final_loss).mean for name in (clipped, legend.NORMALIZED)]
    room = Spread(values=tuple(SAME - abs(value) for value in missed))
    return Finding(
        verdict=decide(room, at_size=True),
        sentence=f"Tuned, clipped descent ends at a loss of {ends[0]:.2f} and normalized at {ends[1]:.2f}.",
        numbers={
            "best clipped setting": results.label(clipped),
            "share of the way down that is missed": str(Spread(values=missed)),
            "steps": "the two step sizes agree within a factor of two at every gradient norm (section 3)",
        },
    )


# Our additions


def beyond_control(results: Results) -> Finding:
    """Whether the exponent is above the one that a constant Hessian shows with the same steps."""
    runs = results.all_finished(legend.BY_HAND)
    own, control = spread(runs, exponent), control_exponents(runs)
    return Finding(
        verdict=_of_addition(own - control),
        sentence=f"The exponent is {own.mean:.2f}; a constant Hessian would show {control.mean:.2f}.",
        numbers={"exponent": str(own), "control": str(control), "difference": str(own - control)},
    )


def inside_steps(results: Results) -> Finding:
    """The elasticity inside single steps, beyond its shuffled zero."""
    runs = results.all_finished(legend.BY_HAND)
    found = spread(runs, elasticity_beyond_zero)
    return Finding(
        verdict=_of_addition(found),
        sentence=f"Inside single steps the slope of logs is {found.mean:.2f} above its shuffled zero.",
        numbers={"elasticity beyond its zero": str(found)},
    )


def equal_steps_make_it(results: Results) -> Finding:
    """Correlation where nearly every step is clipped against that at the paper's threshold."""
    pair = results.paired(legend.ALWAYS_CLIPPED, legend.BY_HAND)
    one, other = spreads(pair, correlation)
    beyond = [spread(runs, exponent) - control_exponents(runs) for runs in pair]
    return Finding(
        verdict=_of_addition(beyond[1] - beyond[0]),
        sentence=f"With every step clipped the correlation is {one.mean:.2f}, at 0.25 {other.mean:.2f}.",
        numbers={
            "exponent beyond its control, every step clipped": str(beyond[0]),
            "at threshold 0.25": str(beyond[1]),
            "steps clipped": " and ".join(f"{spread(runs, clipped_share).mean:.0%}" for runs in pair),
        },
    )


def calibrated_as_good(results: Results) -> Finding:
    """Training with numbers measured before it against the best setting by hand, same start and batches."""
    (mine,) = results.of(legend.CALIBRATED)
    by_hand = best_of(results, legend.CLIPPED)
    best = next(run for run in results.of(by_hand) if run.recipe.seed == mine.recipe.seed)
    return Finding(
        verdict=HOLDS if missed_share(best, mine) <= SAME else DOES_NOT_HOLD,
        sentence=f"The calibrated run ends at a loss of {final_loss(mine):.2f}, the best by hand at "
        f"{final_loss(best):.2f}.",
        numbers={"measured": mine.recipe.label, "best by hand": best.recipe.label, "seeds": "1"},
    )


def _of_addition(margin: Spread) -> str:
    return {REPRODUCED: HOLDS, NOT_REPRODUCED: DOES_NOT_HOLD}.get(decide(margin, at_size=True), OPEN)


def _numbers_of(runs: Sequence[Run]) -> dict[str, str]:
    """Facts beside a correlation: seeds, rows, clipped steps, exponent."""
    rows = [len(measured(run)[0]) for run in runs]
    return {
        "seeds": ", ".join(str(run.recipe.seed) for run in runs),
        "rows a run": f"{min(rows)} to {max(rows)}",
        "steps clipped": f"{spread(runs, clipped_share).mean:.0%}",
        "exponent": str(spread(runs, exponent)),
    }
