"""What the runs of one scale show about each statement of the paper, as margins that it says are positive.

Statistics and margins are those of ``docs/results/rule.md``; the verdict follows from the margins alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from curvestep.steps import clipped_step, normalized_step
from curvestep.trace.run import DIVERGED
from curvestep_reproduction.claims.claims import (
    IN_PART,
    NOT_REPRODUCED,
    REPRODUCED,
    Evidence,
    MissingRuns,
    NotPlanned,
    Spread,
)
from curvestep_reproduction.claims.statistics import (
    accuracy,
    as_correlation,
    best_of,
    clipped_share,
    control_exponents,
    correlations,
    elasticity_beyond_zero,
    exponent,
    final_loss,
    fisher_z,
    late_over_early,
    log_spread,
    measured,
    missed_share,
    speed_up,
    spread,
    typical_smoothness,
    validation_loss,
    variation,
)
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.fig6_data_fraction import ACCURATE, DATA_SHARES, agreement
from curvestep_reproduction.figures.fig8_lstm_gd import compare, two_layer_settings
from curvestep_reproduction.figures.plan import Results
from curvestep_reproduction.training.run_folder import TrainedRun

FOLLOWS = 0.5  # correlation of logs from which smoothness follows the gradient norm
ABSENT = 0.2  # correlation of logs up to which there is none, either way
MUCH = 0.5  # "much weaker" is at most half
VARIES = 2.0  # factor between the 5 % and the 95 % quantile up to which smoothness hardly varies
VARIES_GREATLY = 5.0  # factor from which it varies greatly
LINEAR = 1.25  # exponent up to which growth counts as linear
STEEPER = 1.5  # exponent from which it is steeper
STAYS = 0.9  # a gradient norm of this share of the one before is not lowered
ABOUT_THREE = 3.0  # the paper's ratio of gradient norms
ABOUT = 1.5  # factor up to which a ratio is about another
SAME = 0.05  # share of the way down by which two final losses may differ and count as the same
MATCHES = 1.0  # points of accuracy by which clipping may fall behind and still match
PRINTED_ACCURACY = {legend.MOMENTUM: 95.0, legend.CLIPPED_IMAGES: 95.2}  # per cent, in appendix H
PERPLEXITY = 56.5  # on the test text, in appendix H
NEARLY = 1.02  # factor above it that counts as reaching it
REACHES = 0.5  # points below the printed accuracy that count as reaching it
# Three of these are the 0.3 points by which the margin of a single accuracy must clear zero.
ACCURACY_DEVIATION = 0.1
NUM_STEPS = 100_000  # random gradient norms, rates and thresholds at which two step rules are compared


def follows(results: Results, *, setting: str, past: float = 0.0) -> Evidence:
    """Whether smoothness follows the gradient norm along a run."""
    runs = results.all_finished(setting)
    z = correlations(runs, past=past)
    return Evidence(
        margins=(z, z.less(fisher_z(FOLLOWS))),
        sentence=f"The correlation of logs is {math.tanh(z.mean):.2f} with {runs[0].recipe.label}.",
        numbers={"correlation of logs": as_correlation(z), **_numbers_of(runs, past=past)},
    )


def much_weaker(results: Results, *, large: str, small: str) -> Evidence:
    """Whether the correlation of one setting is at most half that of another."""
    strong, weak = results.paired(large, small)
    z_strong = correlations(strong)
    z_weak = correlations(weak)
    half = Spread(values=tuple(fisher_z(MUCH * math.tanh(z)) for z in z_strong.values))
    return Evidence(
        margins=(z_strong - z_weak, half - z_weak),
        sentence=f"The correlation of logs is {math.tanh(z_weak.mean):.2f}, and "
        f"{math.tanh(z_strong.mean):.2f} at lr {strong[0].recipe.lr:g} with clipping.",
        numbers={
            "correlation of logs": as_correlation(z_weak),
            "with clipping at the large lr": as_correlation(z_strong),
            "difference of Fisher's z": str(z_strong - z_weak),
            "half the larger less the smaller, likewise": str(half - z_weak),
            **_numbers_of(weak),
        },
    )


def no_correlation(results: Results, *, setting: str) -> Evidence:
    """Whether smoothness and gradient norm have nothing to do with each other, either way."""
    runs = results.all_finished(setting)
    z = correlations(runs)
    room = Spread(values=tuple(fisher_z(ABSENT) - abs(value) for value in z.values))
    return Evidence(
        margins=(room,),
        sentence=f"The correlation of logs is {math.tanh(z.mean):.2f} with {runs[0].recipe.label}.",
        numbers={
            "correlation of logs": as_correlation(z),
            "none up to": f"{ABSENT:g}",
            "room, in Fisher's z": str(room),
            **_numbers_of(runs),
        },
    )


def varies(results: Results) -> Evidence:
    """How much smoothness varies along the run."""
    runs = results.all_finished(legend.BY_HAND)
    log_factor = log_spread(runs, variation)
    return Evidence(
        margins=(log_factor.less(math.log(VARIES)), log_factor.less(math.log(VARIES_GREATLY))),
        sentence=f"Nine tenths of the rows span a factor of {math.exp(log_factor.mean):.1f}.",
        numbers={"logarithm of the factor": str(log_factor)},
    )


def explanation(results: Results) -> Evidence:
    """Whether smoothness varies more with clipping, and hardly without."""
    clipped, plain = results.paired(legend.BY_HAND, legend.SMALL_LR)
    with_clipping = log_spread(clipped, variation)
    without = log_spread(plain, variation)
    level = log_spread(clipped, typical_smoothness) - log_spread(plain, typical_smoothness)
    return Evidence(
        margins=(with_clipping - without, without.times(-1.0).less(-math.log(VARIES))),
        sentence=f"Nine tenths of the rows span a factor of {math.exp(with_clipping.mean):.1f} with clipping "
        f"at the large lr, of {math.exp(without.mean):.1f} without at the small one.",
        numbers={
            "logarithm of the ratio of the factors": str(with_clipping - without),
            "logarithm of the factor without clipping": str(without),
            "logarithm of the ratio of medians": str(level),
        },
    )


def allows_large_lr(results: Results) -> Evidence:
    """Whether there is an lr that trains with clipping on every seed and diverges without on every seed."""
    numbers = {}
    verdicts = set()
    sentence = ""
    for lr in ("10", "30"):
        try:
            plain = results.of(f"lm-lr{lr}")
            clipped = results.of(f"lm-lr{lr}clip0.25")
        except MissingRuns as missing:
            if missing.runs:
                raise
            continue  # this scale has no such pair
        lost = sum(run.status["status"] == DIVERGED for run in plain)
        broke = sum(run.status["status"] == DIVERGED for run in clipped)
        numbers[f"lr {lr}"] = (
            f"{lost} of {len(plain)} runs diverge without clipping, {broke} of {len(clipped)} with"
        )
        sentence = (
            f"At lr {lr} {lost / len(plain):.0%} of the runs diverge without clipping, "
            f"{broke / len(clipped):.0%} with it."
        )
        verdicts.add(_of_counts(lost, len(plain), broke))
    if not verdicts:
        raise MissingRuns("no lr was run both with and without clipping")
    best = next(verdict for verdict in (REPRODUCED, IN_PART, NOT_REPRODUCED) if verdict in verdicts)
    return Evidence(verdict=best, sentence=sentence, numbers=numbers)


def _of_counts(lost: int, planned: int, broke: int) -> str:
    """The verdict from how many runs diverge without clipping and with it."""
    if lost == planned and broke == 0:
        return REPRODUCED
    return IN_PART if lost > broke else NOT_REPRODUCED


def accelerates(results: Results) -> Evidence:
    """How many times fewer steps the best clipped setting needs to the best unclipped one's final loss."""
    plain, clipped = _tuned(results, final_loss)
    factor = _log_speed_ups(results, plain, clipped)
    return Evidence(
        margins=(factor,),
        sentence=f"Tuned, clipping needs {math.exp(factor.mean):.1f} times fewer steps to the same loss.",
        numbers={
            "best without clipping": results.label(plain),
            "best with it": results.label(clipped),
            "logarithm of the factor": str(factor),
            "length": _length(results.of(clipped)),
        },
    )


def _log_speed_ups(results: Results, plain: str, clipped: str) -> Spread:
    """Logarithms of how many times fewer steps clipping needs, seed by seed."""
    pairs = zip(*results.paired(plain, clipped), strict=True)
    return Spread(values=tuple(math.log(speed_up(*pair)) for pair in pairs))


def best_validation(results: Results) -> Evidence:
    """Validation loss of the best clipped setting against that of the best unclipped one."""
    plain, clipped = _tuned(results, validation_loss)
    runs_plain, runs_clipped = results.paired(plain, clipped)
    before = spread(runs_plain, validation_loss)
    after = spread(runs_clipped, validation_loss)
    return Evidence(
        margins=(before - after,),
        sentence=f"Tuned, validation loss is {after.mean:.2f} with clipping, {before.mean:.2f} without.",
        numbers={
            "with": results.label(clipped),
            "without": results.label(plain),
            "difference": str(before - after),
            "length": _length(runs_clipped),
        },
    )


def _tuned(results: Results, score: Callable[[TrainedRun], float]) -> tuple[str, str]:
    """The best setting without clipping and the best with it; an error where there is no choice."""
    scale = results.plan.scale
    plain = [legend.trained_name(scale, name) for name in legend.UNCLIPPED]
    clipped = [legend.trained_name(scale, name) for name in legend.CLIPPED]
    if sum(bool(results.plan.of(name)) for name in plain) < 2:
        raise MissingRuns("only one learning rate was run without clipping")
    results.require(*(name for name in (*plain, *clipped) if results.plan.of(name)))
    return best_of(results, plain, score), best_of(results, clipped, score)


def perplexity(results: Results) -> Evidence:
    """Test perplexity of AWD-LSTM after the paper's 500 epochs."""
    if results.plan.scale != "paper":
        raise NotPlanned("500 epochs are planned at the scale paper alone")
    runs = results.of(legend.trained_name("paper", legend.BY_HAND))
    log_perplexity = spread(runs, lambda run: math.log(run.rows("test")[-1]["perplexity"]))
    return Evidence(
        margins=(log_perplexity.less(math.log(PERPLEXITY * NEARLY)).times(-1),),
        sentence=f"The test perplexity is {math.exp(log_perplexity.mean):.1f}.",
        numbers={"logarithm": str(log_perplexity)},
    )


def image_speed_up(results: Results) -> Spread:
    """Logarithms of how many times fewer steps clipping needs than momentum on images, seed by seed."""
    return _log_speed_ups(results, legend.MOMENTUM, legend.CLIPPED_IMAGES)


def fastest_on_images(results: Results) -> Evidence:
    """How many times fewer steps clipped descent needs than momentum to the same training loss."""
    factor = image_speed_up(results)
    momentum, clipped = results.paired(legend.MOMENTUM, legend.CLIPPED_IMAGES)
    ends = [spread(runs, final_loss).mean for runs in (clipped, momentum)]
    return Evidence(
        margins=(factor,),
        sentence=f"Training loss ends at {ends[0]:.3g} with clipping and {ends[1]:.3g} with momentum, which "
        f"needs {math.exp(factor.mean):.2g} times the steps.",
        numbers={"logarithm of the factor": str(factor), "length": _length(clipped)},
    )


def language_more(results: Results) -> Evidence:
    """Speed-up by clipping of the language model against that on images."""
    language = accelerates(results.at.get("epoch", results)).margins[0]
    images = with_deviation(image_speed_up(results), image_speed_up, results)
    low, high = language.interval
    gain = Spread(
        values=tuple(language.mean - value for value in images.values),
        doubt=(language.mean - low, high - language.mean),
        deviation=images.deviation,
    )
    return Evidence(
        margins=(gain,),
        sentence=f"Clipping speeds up the language model {math.exp(language.mean):.1f} times, images "
        f"{math.exp(images.mean):.1f} times.",
        numbers={
            "logarithm of the ratio": str(gain),
            "language model": str(language),
            "images": str(images),
        },
    )


def images_accuracy(results: Results) -> Evidence:
    """Test accuracy of clipped descent against momentum."""
    momentum, clipped = results.paired(legend.MOMENTUM, legend.CLIPPED_IMAGES)
    behind = spread(momentum, accuracy)
    ahead = spread(clipped, accuracy)
    margin = _of_accuracies((ahead - behind).less(-MATCHES))
    return Evidence(
        margins=(margin,),
        sentence=f"Test accuracy is {ahead.mean:.1f} % with clipping and {behind.mean:.1f} % with momentum.",
        numbers={"points above falling behind": str(margin), "length": _length(clipped)},
    )


def reaches_95(results: Results) -> Evidence:
    """Test accuracies of ResNet20 against those that the paper prints: the one that is further below."""
    results.require(*PRINTED_ACCURACY)
    margins = [
        spread(results.of(setting), accuracy).less(printed - REACHES)
        for setting, printed in PRINTED_ACCURACY.items()
    ]
    momentum, clipped = (spread(results.of(setting), accuracy).mean for setting in PRINTED_ACCURACY)
    lower = _of_accuracies(min(margins, key=lambda margin: margin.mean))
    return Evidence(
        margins=(lower,),
        sentence=f"ResNet20 reaches {momentum:.1f} % with momentum, {clipped:.1f} % with clipping.",
        numbers={"the lower one's points above the printed": str(lower.less(REACHES))},
    )


def _of_accuracies(margin: Spread) -> Spread:
    """A margin with the deviation that a single accuracy has."""
    return Spread(values=margin.values, doubt=margin.doubt, deviation=ACCURACY_DEVIATION)


def accurate_share(results: Results, *, quantity: int, name: str) -> Evidence:
    """Relative error of an estimate from a tenth of the data, iterate by iterate."""
    results.require(*DATA_SHARES)
    part, whole = (results.of(setting)[0] for setting in DATA_SHARES)
    agreed = agreement(part, whole)[quantity]
    errors = np.abs(agreed.part / agreed.whole - 1)
    largest = agreed.largest_error
    return Evidence(
        margins=(
            Spread(values=tuple(ACCURATE - errors)),
            Spread(values=(ACCURATE - largest,), deviation=0.0),
        ),
        sentence=f"Over {len(errors)} iterates the mean error of the {name} is "
        f"{100 * agreed.mean_error:.1f} %, the largest {100 * largest:.1f} %.",
        numbers={
            "model": whole.recipe.model_words,
            "iterates": str(len(agreed.steps)),
            "median ratio": f"{agreed.ratio:.3f}",
            "agreement: correlation of the two estimates' logs": f"{agreed.correlation:.3f}",
            "data": str(whole.status["data"]),
        },
    )


def gradients_stay(results: Results) -> Evidence:
    """Loss and gradient norm on the oracle along gradient descent: last quarter against the second."""
    runs = results.all_finished(two_layer_settings(results.plan.scale)[0])
    kept = log_spread(runs, late_over_early)
    falls = spread(runs, lambda run: float(run.column("loss")[1][0]) - final_loss(run))
    return Evidence(
        margins=(falls, kept.less(math.log(STAYS))),
        sentence=f"The loss falls by {falls.mean:.1f}; late gradients are {math.exp(kept.mean):.2f} times "
        "those of the second quarter.",
        numbers={"fall of the loss": str(falls), "logarithm of the ratio": str(kept)},
    )


def about_three_times(results: Results) -> Evidence:
    """Gradient norms of GD over those of clipped GD."""
    gd, clipped = results.paired(*two_layer_settings(results.plan.scale))
    compared = [compare(*pair) for pair in zip(gd, clipped, strict=True)]
    printed = [prediction for prediction, _ in compared]
    ratio = Spread(values=tuple(math.log(measured_ratio) for _, measured_ratio in compared))
    distance = [abs(value - math.log(ABOUT_THREE)) for value in ratio.values]
    return Evidence(
        margins=(Spread(values=tuple(math.log(ABOUT) - far for far in distance)),),
        sentence=f"GD's gradients are {math.exp(ratio.mean):.1f} times those of clipped GD with "
        f"{clipped[0].recipe.label}.",
        numbers={
            "logarithm of the ratio": str(ratio),
            "about": f"up to a factor of {ABOUT:g}",
            "predicted as printed": _predicted(printed),
            "with the theorems' square root": _predicted([math.sqrt(one) for one in printed]),
        },
    )


def _predicted(ratios: Sequence[float]) -> str:
    """Predicted ratios over the seeds; in words where a fitted L0 of zero leaves them without a bound."""
    unbounded = sum(math.isinf(ratio) for ratio in ratios)
    if unbounded:
        return f"no number, because the fitted L0 is 0 with clipping on {unbounded} of {len(ratios)} seeds"
    return str(Spread(values=tuple(ratios)))


def same_up_to_a_factor(results: Results) -> Evidence:
    """The steps of section 3 at random gradient norms; beside them two runs that correspond."""
    rng = np.random.default_rng(0)
    norm, lr, max_norm = 10.0 ** rng.uniform(-6, 6, size=(3, NUM_STEPS))
    clipped = clipped_step(norm, lr=lr, max_norm=max_norm)
    normalized = normalized_step(norm, lr=lr * max_norm, offset=max_norm)
    ratio = normalized / clipped
    within = bool((ratio >= 0.5 - 1e-12).all() and (ratio <= 1 + 1e-12).all())
    numbers = {"smallest and largest ratio": f"{ratio.min():.3g} and {ratio.max():.3g}"}
    with suppress(MissingRuns):
        pair = results.paired(legend.BY_HAND, legend.NORMALIZED)
        ends = [spread(runs, final_loss) for runs in pair]
        numbers[f"final loss with {pair[0][0].recipe.label}"] = str(ends[0])
        numbers[f"with {pair[1][0].recipe.label}, which corresponds"] = str(ends[1])
    return Evidence(
        verdict=REPRODUCED if within else NOT_REPRODUCED,
        sentence=f"Over {NUM_STEPS} random gradient norms the normalized step is {ratio.min():.2f} to "
        f"{ratio.max():.2f} times the clipped one.",
        numbers=numbers,
    )


# Our additions


def at_most_linear(results: Results) -> Evidence:
    """Whether the power of growth is at most 1, as in the affine condition."""
    runs = results.all_finished(legend.BY_HAND)
    exponents = spread(runs, exponent)
    return Evidence(
        margins=(exponents.less(STEEPER).times(-1), exponents.less(LINEAR).times(-1)),
        sentence=f"Along the run smoothness grows as the gradient norm to the power {exponents.mean:.2f}.",
        numbers={"exponent": str(exponents), "counts as linear up to": f"{LINEAR:g}"},
    )


def beyond_control(results: Results) -> Evidence:
    """Whether the exponent is above the one that a constant Hessian shows with the same steps."""
    runs = results.all_finished(legend.BY_HAND)
    own = spread(runs, exponent)
    control = control_exponents(runs)
    return Evidence(
        margins=(own - control,),
        sentence=f"The exponent is {own.mean:.2f}; a constant Hessian would show {control.mean:.2f}.",
        numbers={"exponent": str(own), "control": str(control), "difference": str(own - control)},
    )


def inside_steps(results: Results) -> Evidence:
    """The elasticity inside single steps, beyond its shuffled zero."""
    runs = results.all_finished(legend.BY_HAND)
    elasticities = spread(runs, elasticity_beyond_zero)
    return Evidence(
        margins=(elasticities,),
        sentence=f"Inside single steps the slope of logs is {elasticities.mean:.2f} above its shuffled zero.",
        numbers={"elasticity beyond its zero": str(elasticities)},
    )


def equal_steps_make_it(results: Results) -> Evidence:
    """Correlation where nearly every step is clipped against that at the paper's threshold."""
    always, by_hand = results.paired(legend.ALWAYS_CLIPPED, legend.BY_HAND)
    one = correlations(always)
    other = correlations(by_hand)
    beyond_always = spread(always, exponent) - control_exponents(always)
    beyond_by_hand = spread(by_hand, exponent) - control_exponents(by_hand)
    shares = [spread(runs, clipped_share).mean for runs in (always, by_hand)]
    return Evidence(
        margins=(beyond_by_hand - beyond_always,),
        sentence=f"With every step clipped the correlation of logs is {math.tanh(one.mean):.2f}, at 0.25 "
        f"{math.tanh(other.mean):.2f}.",
        numbers={
            "exponent beyond its control, every step clipped": str(beyond_always),
            "at threshold 0.25": str(beyond_by_hand),
            "steps clipped": f"{shares[0]:.0%} and {shares[1]:.0%}",
        },
    )


def calibrated_as_good(results: Results) -> Evidence:
    """Training with numbers measured before it against the best setting by hand, same start and batches."""
    mine = results.of(legend.CALIBRATED)
    by_hand = {run.recipe.seed: run for run in results.of(best_of(results, legend.CLIPPED))}
    best = [by_hand[run.recipe.seed] for run in mine]
    missed = [missed_share(one, other) for one, other in zip(best, mine, strict=True)]
    return Evidence(
        margins=(Spread(values=tuple(SAME - share for share in missed)),),
        sentence=f"The calibrated runs end at a loss of {spread(mine, final_loss).mean:.2f}, the best by "
        f"hand at {spread(best, final_loss).mean:.2f}.",
        numbers={
            "measured": "; ".join(run.recipe.label for run in mine),
            "best by hand": best[0].recipe.label,
            "share of the way down that is missed": str(Spread(values=tuple(missed))),
            "missed shares count as the same up to": f"{SAME:g}",
        },
    )


def with_deviation(margin: Spread, of: Callable[[Results], Spread], results: Results) -> Spread:
    """A margin of one seed with the standard deviation of the nearest scale that has three."""
    if len(margin.values) > 1 or math.isfinite(margin.deviation):
        return margin
    for other in results.nearest():
        with suppress(ValueError):  # runs are missing there, or too short
            margins_there = of(other)
            if len(margins_there.values) >= 3:
                deviation = float(np.std(margins_there.values, ddof=1))
                return Spread(values=margin.values, doubt=margin.doubt, deviation=deviation)
    return margin


def _numbers_of(runs: Sequence[TrainedRun], *, past: float = 0.0) -> dict[str, str]:
    """Facts beside a correlation: it by single fractions, seeds, rows, clipped steps, exponent."""
    rows = [len(measured(run)[0]) for run in runs]
    fractions = runs[0].recipe.fractions
    singles = [
        f"{math.tanh(correlations(runs, past=past, fraction=i).mean):.2f} at {fraction:g} of the step"
        for i, fraction in enumerate(fractions)
    ]
    return {
        "by single fractions": ", ".join(singles),
        "seeds": ", ".join(str(run.recipe.seed) for run in runs),
        "rows a run": f"{min(rows)} to {max(rows)}",
        "steps clipped": f"{spread(runs, clipped_share).mean:.0%}",
        "exponent": str(spread(runs, exponent)),
    }


def _length(runs: Sequence[TrainedRun]) -> str:
    """How long runs are, beside the paper's."""
    return ", ".join(dict.fromkeys(legend.length_words(run) for run in runs))
