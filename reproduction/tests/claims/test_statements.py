"""The statistics and verdicts of the paper's statements, on runs written by hand."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from curvestep.files import dump_row
from curvestep.trace.run import METRICS, read_json
from curvestep.trace.trace import Trace
from curvestep_reproduction.claims import judges
from curvestep_reproduction.claims.claims import (
    ADDITION,
    IN_PART,
    NOT_REPRODUCED,
    NOT_TESTED,
    OPEN,
    REPRODUCED,
    decide,
)
from curvestep_reproduction.claims.statements import (
    STATEMENTS,
    make_claims,
    quartic_conservative,
    quartic_faster,
)
from curvestep_reproduction.claims.statistics import (
    clipped_share,
    correlation,
    exponent,
    fisher_z,
    speed_up,
    steps_to,
)
from curvestep_reproduction.figures.fig6_data_fraction import DATA_SHARES
from curvestep_reproduction.figures.fig7_synthetic import FIG7
from curvestep_reproduction.figures.fig8_lstm_gd import SETTINGS
from curvestep_reproduction.figures.legend import (
    BY_HAND,
    CALIBRATED,
    CLIPPED_IMAGES,
    FIVE,
    FRACTIONS,
    MEASURED_IMAGES,
    MOMENTUM,
    NORMALIZED,
    THREE,
)
from curvestep_reproduction.figures.plan import KEPT_CLAIMS, Results
from curvestep_reproduction.figures.reproduction import make_plan
from curvestep_reproduction.training.run_folder import TrainedRun
from reproduction.tests.figures.test_reproduction import fake_runs


def planned(figure, *settings, seeds=THREE):
    plan = make_plan("laptop", (figure,))
    chosen = [run for run in plan.runs if run.setting in settings and run.recipe.seed in seeds]
    return replace(plan, runs=tuple(chosen))


def curves_plan(*more):
    return make_plan("laptop", ("fig4", *more), language={"steps": 100, "eval_every": 0})


def write_trace(path, alpha, *, seed, fractions=FRACTIONS, factor=1.0, rows=40, noise=0.0):
    """Rows with smoothness ``2 g**alpha`` at every fraction, times noise of this size in the logarithm."""
    rng = np.random.default_rng(seed)
    trace = Trace(path, header={"fractions": list(fractions)})
    for row, g in enumerate(rng.lognormal(sigma=0.5, size=rows)):
        fall = 0.2 + 0.05 * (row % 5)  # no two neighbours alike: the within-step test compares steps
        ends = [float(g * (1 - fall * fraction)) for fraction in fractions]
        means = [(g + end) / 2 for end in ends]
        level = 2 * factor * math.exp(noise * rng.standard_normal())
        secants = [float(level * mean**alpha) for mean in means]
        measured = {"grad_norm": float(g), "smoothness": max(secants), "secants": secants, "kappa": fall}
        step = {"step": 10 * row, "loss": 5.0, "step_norm": 0.1, "lr": 1.0, "coefficient": 1.0}
        trace.append(step | measured | {"grad_norms": ends})
    trace.close()


def results_with(tmp_path, plan, alpha_of, *, noise=0.3):
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 100))
    for run in plan.runs:
        seed = run.recipe.seed
        write_trace(
            tmp_path / "runs" / run.name / "trace.jsonl", alpha_of(run.setting, seed), seed=seed, noise=noise
        )
    return Results(plan, tmp_path)


def verdicts_of(plan, folder):
    return {claim.name: claim for claim in make_claims(Results(plan, folder))}


def at_scale(results, scale):
    """The same runs, as if they were of another scale."""
    results.plan = replace(results.plan, scale=scale)
    results.at = {scale: results}
    return results


def verdict_of(evidence):
    return evidence.verdict or decide(*evidence.margins)


def test_correlation_and_exponent_are_those_of_the_logs(tmp_path):
    plan = planned("fig2", BY_HAND)
    results = results_with(tmp_path, plan, lambda setting, seed: 0.8, noise=0.0)
    for run in results.of(BY_HAND):
        assert exponent(run) == pytest.approx(0.8, abs=0.05)
        assert correlation(run) > 0.99
    noisy = results_with(tmp_path / "noisy", plan, lambda *_: 0.0, noise=1.0).of(BY_HAND)
    assert abs(np.mean([correlation(run) for run in noisy])) < 0.3


def test_correlations_are_within_stretches_of_constant_lr(tmp_path):
    """Gradient norm and smoothness both jump where lr drops, and have nothing to do with each other else."""
    plan = planned("fig3", "cifar-momentum", seeds=MEASURED_IMAGES[:1])
    fake_runs(plan, tmp_path, loss_of=lambda *_: np.full(400, 5.0))
    rng = np.random.default_rng(0)
    path = tmp_path / "runs" / plan.runs[0].name / "trace.jsonl"
    trace = Trace(path, header={"fractions": [1.0]})
    for row in range(80):
        jump = 10.0 if row >= 40 else 1.0
        g, ell = jump * np.exp(0.1 * rng.standard_normal(2))
        trace.append({"step": 5 * row, "loss": 5.0, "grad_norm": float(g), "smoothness": float(ell)})
    trace.close()
    (run,) = Results(plan, tmp_path).of("cifar-momentum")
    assert correlation(run) > 0.9
    dropped = replace(run, recipe=replace(run.recipe, lr_drops=(0.5,)))
    assert abs(correlation(dropped)) < 0.4
    # The rows jump at step 200 of 300 planned ones, however far a run that has not ended came.
    recipe, status = replace(run.recipe, lr_drops=(2 / 3,)), run.status | {"status": "running", "step": 10}
    assert abs(correlation(replace(run, recipe=recipe, status=status))) < 0.4


@pytest.mark.parametrize(("small", "verdict"), [(0.0, REPRODUCED), (0.35, IN_PART), (1.0, NOT_REPRODUCED)])
def test_much_weaker_is_at_most_half(tmp_path, small, verdict):
    plan = planned("fig2", BY_HAND, "lm-lr2", seeds=FIVE)
    results = results_with(tmp_path, plan, lambda setting, seed: 1.0 if setting == BY_HAND else small)
    found = judges.much_weaker(results, large=BY_HAND, small="lm-lr2")
    assert verdict_of(found) == verdict
    assert found.sentence.startswith("The correlation of logs is ")


def test_correlations_by_fraction_stand_beside_that_of_the_largest(tmp_path):
    plan = planned("fig2", BY_HAND)
    results = results_with(tmp_path, plan, lambda *_: 1.0, noise=0.0)
    numbers = judges.follows(results, setting=BY_HAND).numbers
    assert (
        numbers["by single fractions"]
        == "1.00 at 0.1 of the step, 1.00 at 0.5 of the step, 1.00 at 1 of the step"
    )


def test_one_seed_is_judged_by_the_spread_of_the_nearest_scale_with_three(tmp_path):
    plan = planned("fig2", BY_HAND, seeds=THREE[:1])
    one = at_scale(results_with(tmp_path / "one", plan, lambda *_: 1.0), "epoch")
    before = {claim.name: claim for claim in make_claims(one)}["follows-gradient"]
    assert before.verdict == OPEN
    small = results_with(tmp_path / "small", planned("fig2", BY_HAND), lambda *_: 1.0)
    one.at["laptop"] = small
    after = {claim.name: claim for claim in make_claims(one)}["follows-gradient"]
    z = [fisher_z(correlation(run)) for run in (*one.of(BY_HAND), *small.of(BY_HAND))]
    assert z[0] - fisher_z(0.5) > 3 * np.std(z[1:], ddof=1)
    assert (after.verdict, after.note) == (REPRODUCED, "one seed")


def test_smoothness_follows_from_a_correlation_of_one_half(tmp_path):
    plan = planned("fig2", BY_HAND)
    cases = ((1.0, 0.1, REPRODUCED), (1.0, 2.0, IN_PART), (-1.0, 0.1, NOT_REPRODUCED))
    for alpha, noise, verdict in cases:
        results = results_with(tmp_path / verdict, plan, lambda *_, alpha=alpha: alpha, noise=noise)
        assert verdict_of(judges.follows(results, setting=BY_HAND)) == verdict


@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_no_correlation_is_told_both_ways(tmp_path, alpha):
    plan = planned("fig3", "cifar-momentum", seeds=MEASURED_IMAGES)
    results = results_with(tmp_path, plan, lambda *_: alpha)
    assert verdict_of(judges.no_correlation(results, setting="cifar-momentum")) == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("clipped", "plain", "verdict"),
    [(2.0, 0.02, REPRODUCED), (2.0, 1.0, IN_PART), (0.02, 1.0, NOT_REPRODUCED)],
)
def test_the_explanation_needs_variation_with_clipping_alone(tmp_path, clipped, plain, verdict):
    plan = planned("fig2", BY_HAND, "lm-lr2")
    alphas = {BY_HAND: clipped, "lm-lr2": plain}
    results = results_with(tmp_path, plan, lambda setting, seed: alphas[setting], noise=0.05)
    assert verdict_of(judges.explanation(results)) == verdict


@pytest.mark.parametrize(("alpha", "verdict"), [(1.0, REPRODUCED), (1.4, IN_PART), (2.0, NOT_REPRODUCED)])
def test_growth_is_at_most_linear_up_to_an_exponent_near_one(tmp_path, alpha, verdict):
    plan = planned("fig2", BY_HAND)
    results = results_with(tmp_path, plan, lambda setting, seed: alpha + 0.01 * (seed - 11), noise=0.05)
    assert verdict_of(judges.at_most_linear(results)) == verdict


def test_verdicts_on_training_follow_the_losses(tmp_path):
    plan = curves_plan()
    speeds = {"lm-lr30clip0.25": 4.0, "lm-lr10clip0.25": 2.0}

    def loss_of(setting, seed):
        return 9.0 - 0.02 * np.minimum(np.arange(1, 101) * speeds.get(setting, 1.0), 300) - 0.001 * seed

    fake_runs(plan, tmp_path, loss_of=loss_of, diverged=("lm-lr10", "lm-lr30"))
    results = Results(plan, tmp_path)
    large = judges.allows_large_lr(results)
    assert large.verdict == REPRODUCED
    assert large.numbers["lr 30"] == "3 of 3 runs diverge without clipping, 0 of 5 with"
    faster = judges.accelerates(results)
    assert verdict_of(faster) == REPRODUCED
    # Means over 5 steps lag 2 behind: 98 of 100 plain steps are 24.5 of the fast run's, seen at 27.
    assert "needs 3.7 times fewer steps" in faster.sentence
    assert verdict_of(judges.best_validation(results)) == REPRODUCED


def test_no_larger_lr_is_allowed_where_no_run_diverges_unclipped(tmp_path):
    plan = curves_plan()
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 100))
    assert judges.allows_large_lr(Results(plan, tmp_path)).verdict == NOT_REPRODUCED


@pytest.mark.parametrize(
    ("momentum", "clipped", "matches", "reaches"),
    [(95.1, 95.2, REPRODUCED, REPRODUCED), (92.0, 91.5, REPRODUCED, NOT_REPRODUCED),
     (92.0, 90.9, OPEN, NOT_REPRODUCED), (94.9, 92.0, NOT_REPRODUCED, NOT_REPRODUCED)],
)  # fmt: skip
def test_one_seed_decides_accuracies_beyond_three_tenths_of_a_point(
    tmp_path, momentum, clipped, matches, reaches
):
    plan = make_plan("paper", ("fig4",))
    chosen = tuple(run for run in plan.runs if run.setting in (MOMENTUM, CLIPPED_IMAGES))
    plan = replace(plan, runs=chosen)
    fake_runs(plan, tmp_path, loss_of=lambda *_: np.linspace(2, 0.1, 50))
    for setting, value in ((MOMENTUM, momentum), (CLIPPED_IMAGES, clipped)):
        path = tmp_path / "runs" / f"{setting}-seed0" / METRICS
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        for row in rows:
            del row["crc32"]
            row |= {"accuracy": value} if row["split"] == "test" else {}
        path.write_bytes(b"".join(dump_row(row) for row in rows))
    results = Results(plan, tmp_path)
    assert verdict_of(judges.images_accuracy(results)) == matches
    assert verdict_of(judges.reaches_95(results)) == reaches


def test_the_speed_up_of_language_is_held_against_that_on_images(tmp_path):
    plan = curves_plan()
    speeds = {"lm-lr30clip0.25": 4.0}

    def loss_of(setting, seed):
        return 9.0 - 0.02 * np.minimum(np.arange(1, 101) * speeds.get(setting, 1.0), 300) - 0.001 * seed

    fake_runs(plan, tmp_path, loss_of=loss_of)
    assert verdict_of(judges.language_more(Results(plan, tmp_path))) == REPRODUCED
    speeds = {"lm-lr30clip0.25": 1.1, "cifar-lr5clip0.25": 4.0}
    fake_runs(plan, tmp_path / "other", loss_of=loss_of)
    assert verdict_of(judges.language_more(Results(plan, tmp_path / "other"))) == NOT_REPRODUCED


def test_slower_clipping_refutes_that_it_accelerates(tmp_path):
    plan = curves_plan()

    def loss_of(setting, seed):
        return 9.0 - (0.01 if "clip" in setting else 0.02) * np.arange(1, 101) - 0.0001 * seed

    fake_runs(plan, tmp_path, loss_of=loss_of)
    results = Results(plan, tmp_path)
    assert verdict_of(judges.accelerates(results)) == NOT_REPRODUCED
    plain, clipped = results.of("lm-lr2")[0], results.of(BY_HAND)[0]
    assert speed_up(plain, clipped) == pytest.approx(0.5, abs=0.05)
    assert speed_up(clipped, plain) == pytest.approx(1 / speed_up(plain, clipped), rel=0.1)


def test_one_learning_rate_without_clipping_is_no_choice(tmp_path):
    plan = curves_plan()
    plan = replace(plan, runs=tuple(run for run in plan.runs if run.setting in (BY_HAND, "lm-lr2")))
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 100))
    claims = verdicts_of(plan, tmp_path)
    assert claims["clipping-accelerates"].verdict == NOT_TESTED
    assert "only one learning rate" in claims["clipping-accelerates"].numbers["why"]


def test_statements_without_runs_are_not_tested(tmp_path):
    for claim in make_claims(Results(make_plan(), tmp_path)):
        if claim.scale:
            assert claim.verdict == NOT_TESTED, claim
            assert claim.sentence


def test_a_claim_without_its_runs_names_them_with_hours_and_command(tmp_path):
    claims = verdicts_of(make_plan("epoch"), tmp_path)
    assert re.fullmatch(
        r"\d+(\.\d)? core-hours, `curvestep reproduce fig5 --scale epoch --only lm-long-seed0`",
        claims["correlation-lasts"].note,
    )
    assert "--only lm-lr30clip0.25-seed0 lm-lr30clip0.25-seed1 " in claims["follows-gradient"].note


def test_seeds_that_both_settings_have_are_compared(tmp_path):
    plan = planned("fig2", BY_HAND, "lm-lr2clip0.25", seeds=FIVE)
    pair = results_with(tmp_path, plan, lambda *_: 1.0).paired(BY_HAND, "lm-lr2clip0.25")
    assert [[run.recipe.seed for run in runs] for runs in pair] == [list(THREE)] * 2


@pytest.mark.slow
def test_growth_beyond_the_control_is_told_from_none(tmp_path):
    plan = planned("fig2", BY_HAND)
    grows = results_with(tmp_path / "one", plan, lambda *_: 1.0)
    assert verdict_of(judges.beyond_control(grows)) == REPRODUCED
    none = results_with(tmp_path / "none", plan, lambda *_: 0.0)
    assert verdict_of(judges.beyond_control(none)) != REPRODUCED


@pytest.mark.parametrize(
    ("scale", "every", "verdict"), [(1.0, 1, REPRODUCED), (1.5, 1, NOT_REPRODUCED), (1.2, 10, IN_PART)]
)
def test_a_tenth_of_the_data_is_accurate_where_errors_are_small(tmp_path, scale, every, verdict):
    """Smoothness from a tenth is 1.05 times that of all data, at every so many rows ``scale`` times more."""
    plan = planned("fig6", *DATA_SHARES, seeds=THREE[:1])
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 120))
    for run in plan.runs:
        with Trace(tmp_path / "runs" / run.name / "trace.jsonl") as trace:
            for row, norm in enumerate(np.linspace(1, 2, 40)):
                off = 1.05 if run.setting == "lm-share0.1" else 1.0
                if off > 1 and row % every == 0:
                    off *= scale
                trace.append({"step": row, "grad_norm": float(norm), "smoothness": float(off * norm)})
    found = judges.accurate_share(Results(plan, tmp_path), quantity=1, name="smoothness")
    assert verdict_of(found) == verdict


def test_normalized_steps_are_those_of_clipping_up_to_two(tmp_path):
    plan = curves_plan("equivalence")
    twin = plan.of(NORMALIZED)[0].recipe
    assert (twin.optimizer, twin.lr, twin.offset) == ("normalized", 7.5, 0.25)
    ends = {BY_HAND: 5.0, NORMALIZED: 5.05}
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.r_[9.0, np.full(99, ends.get(setting, 7.0))])
    found = judges.same_up_to_a_factor(Results(plan, tmp_path))
    assert found.verdict == REPRODUCED
    assert found.numbers["smallest and largest ratio"] == "0.5 and 1"
    assert found.numbers["final loss with lr 30, clip 0.25"] == "5 [5, 5]"
    assert "which corresponds" in list(found.numbers)[-1]


@pytest.mark.parametrize(("gain", "below"), [(0.1, False), (0.5, True), (math.inf, True)])
def test_a_calibrated_run_may_miss_a_twentieth_of_the_way(tmp_path, gain, below):
    plan = curves_plan()

    def loss_of(setting, seed):
        return [9.0, *np.full(49, 6.0 + (gain if setting == CALIBRATED else 0.0))]

    fake_runs(plan, tmp_path, loss_of=loss_of, diverged=(CALIBRATED,) * math.isinf(gain))
    assert (judges.calibrated_as_good(Results(plan, tmp_path)).margins[0].mean < 0) is below


def test_the_runs_that_decide_a_claim_are_planned():
    """As the review of the rows asked: each at the model of the paper, figure 8 at its learning rate."""
    decides = {one.name: one.scale for one in STATEMENTS}
    for one in STATEMENTS:
        if one.scale:
            assert make_plan(one.scale, one.figures).runs, one.name
    assert decides["images-large-lr"] == decides["language-more"] == "paper"
    assert decides["clipping-accelerates"] == decides["best-validation"] == "epoch"
    assert decides["correlation-lasts"] == decides["tenth-smoothness"] == decides["tenth-gradient"] == "epoch"
    assert {one.kind for one in STATEMENTS if one.name == "affine-law"} == {ADDITION}
    plan = make_plan("longer", ("fig8",))
    assert {(run.recipe.lr, run.recipe.max_norm) for run in plan.runs} == {(2.0, math.inf), (10.0, 0.25)}


def test_the_synthetic_rows_say_what_was_chosen_and_use_the_true_constant(tmp_path):
    plan = make_plan("laptop", ("fig7",))
    FIG7.experiment(tmp_path, False)
    results = Results(plan, tmp_path)
    assert "not stated in the paper" in quartic_faster(results).numbers
    conservative = quartic_conservative(results)
    assert conservative.verdict == REPRODUCED
    assert "2598" in conservative.sentence
    assert "3286" in conservative.numbers["predicted with the paper's L0, which x⁴ does not have"]


def test_what_a_scale_does_not_plan_is_not_tested_there(tmp_path):
    claims = verdicts_of(make_plan("longer"), tmp_path)
    assert claims["correlation-lasts"].sentence == "This scale has no such runs."


def test_the_share_of_clipped_steps_counts_training_steps(tmp_path):
    plan = planned("fig2", BY_HAND, seeds=THREE[:1])
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.full(8, 5.0), coefficients=[0.5, 1.0] * 4)
    (run,) = Results(plan, tmp_path).of(BY_HAND)
    assert clipped_share(run) == 0.5
    normalized = replace(run, recipe=replace(run.recipe, optimizer="normalized"))
    assert clipped_share(normalized) == 0.0  # only below one half is the gradient above the offset


def test_a_run_with_few_rows_decides_nothing(tmp_path):
    plan = planned("fig3", "cifar-momentum", "cifar-lr5clip0.25", seeds=MEASURED_IMAGES[:1])
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.full(8, 5.0))
    for run in plan.runs:
        write_trace(tmp_path / "runs" / run.name / "trace.jsonl", 1.0, seed=0, rows=4)
    claims = verdicts_of(plan, tmp_path)
    for name in ("momentum-none", "images-clipped"):
        assert claims[name].verdict == NOT_TESTED
        assert "has 4 usable rows, 10 are needed" in claims[name].numbers["why"]


@pytest.mark.parametrize(("every", "found"), [(1, [5, 55]), (10, [10, 110])])
def test_steps_to_a_loss_counts_to_the_first_running_mean_below_it(tmp_path, every, found):
    """The mean is over a twentieth of the steps, of which each, or every tenth, is a row."""
    plan, rows = make_plan("laptop", ("fig8",)), {1: 100, 10: 20}[every]
    losses = np.where(np.arange(rows) < rows / 2, 2.0, 1.0)
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: losses, every=every)
    run = TrainedRun.load(tmp_path / "runs" / "lm-lr2-seed10")
    assert [steps_to(run, loss) for loss in (2.0, 1.0)] == found
    assert math.isnan(steps_to(run, 0.5))


def test_statements_have_names_of_their_own_and_short_sentences():
    names = [one.name for one in STATEMENTS]
    assert len(set(names)) == len(names)
    assert all(len(one.says.split()) <= 20 for one in STATEMENTS)


def test_kept_claims_are_those_that_are_stated():
    kept = {
        scale: {claim["name"]: claim["paper"] for claim in rows}
        for scale, rows in read_json(KEPT_CLAIMS).items()
    }
    stated = {one.name: one.says for one in STATEMENTS}
    for rows in kept.values():
        assert rows.items() <= stated.items()
    decided = [one for one in STATEMENTS if one.scale in kept]
    assert [one.name for one in decided if one.name not in kept[one.scale]] == [], "run reproduction/pages.py"


def test_a_prediction_without_a_bound_is_said_in_words(tmp_path):
    plan = planned("fig8", *SETTINGS)
    # Smoothness that grows as the square of the gradient norm, so that the fitted L0 is 0.
    results = results_with(tmp_path, plan, lambda setting, seed: 2.0, noise=0.0)
    found = judges.about_three_times(results)
    assert found.numbers["predicted as printed"].startswith("no number, because the fitted L0 is 0")


def test_the_theorems_predict_the_square_root_of_what_is_printed(tmp_path):
    plan = planned("fig8", *SETTINGS, seeds=THREE[:1])
    results = results_with(tmp_path, plan, lambda setting, seed: 0.5)
    numbers = judges.about_three_times(results).numbers
    printed, corrected = (float(numbers[name].removesuffix(" (one seed)")) for name in list(numbers)[2:])
    assert corrected == pytest.approx(math.sqrt(printed), rel=0.01)
    assert printed > 1.05


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(3.0, REPRODUCED), (2.3, REPRODUCED), (1.5, NOT_REPRODUCED), (6.0, NOT_REPRODUCED)],
)
def test_about_three_times_is_within_a_factor_of_one_and_a_half(tmp_path, factor, verdict):
    plan = planned("fig8", *SETTINGS)
    fake_runs(plan, tmp_path, loss_of=lambda *_: np.linspace(9, 5, 100))
    for run in plan.runs:
        size = factor if run.setting == SETTINGS[0] else 1.0
        with Trace(tmp_path / "runs" / run.name / "trace.jsonl") as trace:
            for row in range(20):
                norm = size * (1 + 0.01 * run.recipe.seed * (row % 2))
                trace.append({"step": 10 * row, "grad_norm": norm, "smoothness": 1.0, "kappa": 0.1})
    assert verdict_of(judges.about_three_times(Results(plan, tmp_path))) == verdict
