"""The statistics that decide figures 2, 3, 6 and the equivalence, on runs written by hand."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from curvestep.fit.within import Within
from curvestep.lab.paper.claims import (
    CANNOT_TELL,
    CONTRADICTED,
    NOT_TESTABLE,
    SUPPORTED,
    NotPlanned,
    Spread,
)
from curvestep.lab.paper.equivalence import NORMALIZED, judge_equivalence, step_ratio
from curvestep.lab.paper.fig1_scatter import (
    absent,
    beyond_control,
    clipped_share,
    contrast,
    exponent,
    grows_inside_steps,
)
from curvestep.lab.paper.fig6_data_fraction import SHARES, judge_shares
from curvestep.lab.paper.plan import ALWAYS_CLIPPED, BY_HAND, FIVE, FRACTIONS, MEASURED_IMAGES, THREE, Results
from curvestep.lab.paper.reproduction import make_claims, make_plan
from curvestep.notes import Note
from curvestep.smoothness.trace import Trace
from tests.lab.paper.test_reproduction import fake_runs


def planned(figure, *settings, seeds=THREE):
    plan = make_plan("laptop", (figure,))
    chosen = [run for run in plan.runs if run.setting in settings and run.recipe.seed in seeds]
    return replace(plan, runs=tuple(chosen))


def write_trace(path, alpha, *, seed, fractions=FRACTIONS, factor=1.0, rows=40):
    """Rows with smoothness ``2 g**alpha`` at every fraction, a little less at the later ones."""
    rng = np.random.default_rng(seed)
    trace = Trace(path, header={"fractions": list(fractions)})
    for row, g in enumerate(rng.lognormal(sigma=0.5, size=rows)):
        fall = 0.2 + 0.05 * (row % 5)  # no two neighbours alike: the within-step test compares steps
        ends = [float(g * (1 - fall * fraction)) for fraction in fractions]
        means = [(g + end) / 2 for end in ends]
        secants = [float(2 * factor * mean**alpha) for mean in means]
        trace.append(
            {
                "step": 10 * row,
                "loss": 5.0,
                "grad_norm": float(g),
                "smoothness": max(secants),
                "secants": secants,
                "grad_norms": ends,
                "step_norm": 0.1,
                "kappa": fall,
                "lr": 1.0,
                "coefficient": 1.0,
            }
        )
    trace.close()


def results_with(tmp_path, plan, alpha_of):
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 400))
    for run in plan.runs:
        seed = run.recipe.seed
        write_trace(tmp_path / "runs" / run.name / "trace.jsonl", alpha_of(run.setting, seed), seed=seed)
    return Results(plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("large", "spread", "verdict"),
    [(1.0, 0.05, SUPPORTED), (-0.5, 0.05, CONTRADICTED), (0.2, 0.8, CANNOT_TELL)],
)
def test_the_difference_of_exponents_decides(tmp_path, large, spread, verdict):
    plan = planned("fig2", BY_HAND, "lm-lr2")

    def alpha_of(setting, seed):
        return large + spread * (seed - THREE[1]) if setting == BY_HAND else 0.0

    results = results_with(tmp_path, plan, alpha_of)
    for run in results.of(BY_HAND):
        for fraction in (None, *FRACTIONS):
            expected = alpha_of(BY_HAND, run.recipe.seed)
            assert exponent(run, fraction) == pytest.approx(expected, abs=0.05)
    found = contrast(results, BY_HAND, "lm-lr2")
    assert found.verdict == verdict
    for words in (
        "at 0.1 of the step",
        "at 0.5 of the step",
        "at 1 of the step",
        "past the first 10%",
        "by ranks",
        "inside steps",
    ):
        assert words in found.measured


def test_exponents_beyond_their_controls_decide_where_all_steps_are_clipped(tmp_path, monkeypatch):
    plan = planned("fig2", ALWAYS_CLIPPED, BY_HAND)
    alphas = {ALWAYS_CLIPPED: 1.0, BY_HAND: 0.5}
    results = results_with(tmp_path, plan, lambda setting, seed: alphas[setting] + 0.01 * seed)
    assert "beyond" not in contrast(results, ALWAYS_CLIPPED, BY_HAND).measured
    assert contrast(results, ALWAYS_CLIPPED, BY_HAND).verdict == SUPPORTED

    # Constant Hessians show 0.9 where every step is clipped, and nothing elsewhere.
    def set_control(run, value, limits):
        control = run.fit.control
        assert control is not None
        changed = replace(control, exponent=value, exponent_interval=limits)
        monkeypatch.setitem(vars(run), "fit", replace(run.fit, control=changed))

    for setting, value, limits in ((ALWAYS_CLIPPED, 0.9, (0.7, 0.95)), (BY_HAND, 0.0, (0.0, 0.1))):
        for run in results.of(setting):
            set_control(run, value, limits)
    shares = {ALWAYS_CLIPPED: 1.0, BY_HAND: 0.3}
    monkeypatch.setattr(
        sys.modules["curvestep.lab.paper.fig1_scatter"],  # the package has a function of this name, too
        "clipped_share",
        lambda run: shares[run.folder.name.rpartition("-seed")[0]],
    )
    found = contrast(results, ALWAYS_CLIPPED, BY_HAND)
    one, other = ([exponent(run) for run in results.of(name)] for name in (ALWAYS_CLIPPED, BY_HAND))
    assert "exponent beyond its control" in found.measured
    assert found.verdict == CONTRADICTED
    assert "control 0.9), " in found.measured
    assert "inside steps, where no control is needed" in found.measured
    gain = Spread(values=tuple(a - 0.9 - b for a, b in zip(one, other, strict=True)), doubt=(0.05, 0.3))
    assert f": {gain} higher; at 0.1 of the step" in found.measured

    # Beyond a control with wide limits nothing can be told, however many seeds there are: there the
    # elasticity inside steps decides, which is alpha here.
    for low, high in ((0.0, 1.0), (math.nan, math.nan)):
        for run in results.of(ALWAYS_CLIPPED):
            set_control(run, 0.9 if low == 0 else math.nan, (low, high))
        found = contrast(results, ALWAYS_CLIPPED, BY_HAND)
        assert found.verdict == SUPPORTED
        assert found.measured.startswith("elasticity inside steps 1.")
        assert ": 0.5 [0.5, 0.5] higher; the exponents do not decide" in found.measured
        assert "known to no better than ±0.3: exponent beyond its control" in found.measured
        assert found.measured.endswith("(cannot tell by that)")
    for run in results.of(ALWAYS_CLIPPED):
        set_control(run, 0.9, (0.0, 1.0))
        monkeypatch.setitem(
            vars(run), "fit", replace(run.fit, within=Within(level=0.9, missing=Note("alike", "too short")))
        )
    found = contrast(results, ALWAYS_CLIPPED, BY_HAND)
    assert found.verdict == CANNOT_TELL
    assert "no number of seeds helps" in found.settle


def test_seeds_that_both_settings_have_are_compared(tmp_path):
    plan = planned("fig2", BY_HAND, "lm-lr2clip0.25", seeds=FIVE)
    results = results_with(tmp_path, plan, lambda setting, seed: 1.0 if seed in THREE else 9.0)
    one, other = results.paired(BY_HAND, "lm-lr2clip0.25")
    assert [run.recipe.seed for run in one] == [run.recipe.seed for run in other] == list(THREE)


@pytest.mark.slow
def test_growth_beyond_the_control_and_inside_steps_is_told_from_none(tmp_path):
    plan = planned("fig2", BY_HAND, "lm-lr2")
    results = results_with(tmp_path, plan, lambda setting, seed: 1.0 if setting == BY_HAND else 0.0)
    assert beyond_control(results, BY_HAND).verdict == SUPPORTED
    assert grows_inside_steps(results, BY_HAND).verdict == SUPPORTED
    assert grows_inside_steps(results, "lm-lr2").verdict == CONTRADICTED


@pytest.mark.parametrize(("alpha", "verdict"), [(1.0, CONTRADICTED), (-1.0, SUPPORTED)])
def test_no_correlation_is_one_below_a_fifth(tmp_path, alpha, verdict):
    plan = planned("fig3", "cifar-momentum", seeds=MEASURED_IMAGES[:3])
    assert absent(results_with(tmp_path, plan, lambda *_: alpha), "cifar-momentum").verdict == verdict


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.05, SUPPORTED), (1.5, CONTRADICTED), ("mixed", CANNOT_TELL)]
)
def test_a_tenth_of_the_data_is_accurate_where_nine_of_ten_errors_are_small(tmp_path, factor, verdict):
    plan = planned("fig6", *SHARES, seeds=THREE[:1])
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.linspace(9, 5, 120))
    for run in plan.runs:
        path = tmp_path / "runs" / run.name / "trace.jsonl"
        own = 1.05 if factor == "mixed" else factor
        write_trace(path, 1.0, seed=0, fractions=(0.5,), factor=own if run.setting == "lm-share0.1" else 1.0)
    if factor == "mixed":
        path = tmp_path / "runs" / f"lm-share0.1-seed{THREE[0]}" / "trace.jsonl"
        rows = list(Trace.load(path))
        path.unlink()
        trace = Trace(path, header={"fractions": [0.5]})
        for index, row in enumerate(rows):
            scale = 2.0 if index % 5 == 0 else 1.0
            kept = {key: value for key, value in row.items() if value is not None}
            trace.append(kept | {"smoothness": scale * row["smoothness"]})
        trace.close()
    found = judge_shares(Results(plan, tmp_path))
    assert found.verdict == verdict
    assert "nine of ten below" in found.measured


def test_normalized_descent_is_compared_with_its_clipped_twin_seed_by_seed(tmp_path):
    plan = planned("equivalence", BY_HAND, NORMALIZED)
    twin = plan.of(NORMALIZED)[0].recipe
    assert (twin.optimizer, twin.lr, twin.offset) == ("normalized", 7.5, 0.25)
    ends = {BY_HAND: 5.0, NORMALIZED: 5.05}
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.r_[9.0, np.full(399, ends[setting])])
    results = Results(plan, tmp_path)
    found = judge_equivalence(results)
    assert found.verdict == SUPPORTED
    assert "ends 0.0125 [0.0125, 0.0125] of the way down above" in found.measured
    # At a gradient norm of 1: 7.5/(1 + 0.25) over 30·0.25.
    _, ratio = step_ratio(results.of(BY_HAND)[0], results.of(NORMALIZED)[0])
    np.testing.assert_allclose(ratio, 0.8)
    ends[NORMALIZED] = 6.0
    fake_runs(plan, tmp_path / "other", loss_of=lambda setting, seed: np.r_[9.0, np.full(399, ends[setting])])
    assert judge_equivalence(Results(plan, tmp_path / "other")).verdict == CONTRADICTED


def test_what_a_scale_does_not_plan_is_left_out_of_its_table(tmp_path):
    plan = make_plan("longer")
    with pytest.raises(NotPlanned):
        Results(plan, tmp_path).of("lm-lr10")
    claims = [claim.paper for claim in make_claims(Results(plan, tmp_path))]
    assert not any("Large learning rates diverge" in paper or "schedule" in paper for paper in claims)
    assert any(paper.startswith("Smoothness grows with the gradient norm") for paper in claims)


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
    claims = make_claims(Results(plan, tmp_path))
    assert {claim.verdict for claim in claims} == {NOT_TESTABLE}
    assert all("has 4 usable rows, 10 are needed" in claim.measured for claim in claims)
