"""Several runs: seeds merged, ties as ties, and a next learning rate that was not tried."""

import math

import numpy as np
import pytest

from curvestep.advice.advice import advise
from curvestep.advice.settings import TriedSetting, next_lr, settings_of
from curvestep.trace.history import History
from tests.advice.runs import falling, outcome, trace_of


def run(lr, last, *, seed=0, noise=0.01, num=40, header=None, **row):
    rng = np.random.default_rng([seed, round(1e6 * lr)])
    losses = np.array(falling(num, last=last)) + noise * rng.standard_normal(num)
    return trace_of(list(losses), lr=lr, header=header, **row)


def lost(lr):
    return trace_of([2.0, 40.0, *[None] * 4], lr=lr, kappa=9.0)


def kinds(advice):
    return [note.kind for note in advice.reasons]


def test_the_best_is_taken_and_settings_are_listed_by_their_loss():
    advice = advise(run(0.1, 0.9), run(0.3, 0.5), run(0.9, 0.7))
    assert (advice.action, advice.lr, advice.next_lr) == ("take", 0.3, None)
    assert kinds(advice) == ["setting"] * 3
    assert [float(note.text.split()[1].strip(",:")) for note in advice.reasons] == [0.3, 0.9, 0.1]


def test_seeds_of_a_setting_are_one_line():
    runs = [run(lr, last, seed=seed) for lr, last in ((0.1, 0.9), (0.3, 0.5)) for seed in (1, 2, 3)]
    advice = advise(*runs)
    assert kinds(advice) == ["setting"] * 2
    assert "3 runs" in advice.reasons[0].text


def test_seeds_of_one_setting_are_not_ranked():
    advice = advise(run(0.3, 0.5, seed=1), run(0.3, 0.5, seed=2))
    assert (advice.action, advice.lr) == ("take", 0.3)
    assert "the only setting of 2 runs" in advice.verdict


def test_runs_within_noise_are_ties():
    advice = advise(run(0.1, 0.502, noise=0.1), run(0.3, 0.5, noise=0.1), run(0.9, 0.7, noise=0.01))
    assert kinds(advice)[0] == "tie"
    advice = advise(run(0.1, 0.6, noise=1e-4), run(0.3, 0.5, noise=1e-4))
    assert "tie" not in kinds(advice)


@pytest.mark.parametrize(("losses", "following"), [((0.9, 0.7, 0.5), 2.7), ((0.5, 0.7, 0.9), 0.1 / 3)])
def test_at_the_edge_the_next_one_lies_beyond(losses, following):
    advice = advise(*(run(lr, last) for lr, last in zip((0.1, 0.3, 0.9), losses, strict=True)))
    assert advice.next_lr == pytest.approx(following)
    assert f"{following:.3g}" in advice.verdict


@pytest.mark.parametrize(("losses", "lr"), [((0.5, 0.9), 0.01), ((0.9, 0.5), 4.0)])
def test_in_a_wide_gap_the_next_one_lies_in_its_middle(losses, lr):
    advice = advise(*(run(lr, last) for lr, last in zip((0.01, 4.0), losses, strict=True)))
    assert (advice.lr, advice.next_lr) == (lr, pytest.approx(0.2))


def test_of_a_run_without_steps_nothing_follows():
    assert next_lr(TriedSetting(outcome(lr=0.0), (1.0,)), [TriedSetting(outcome(lr=0.1), (2.0,))]) is None


@pytest.mark.parametrize("seed", range(5))
def test_what_to_try_next_was_never_tried(seed):
    rng = np.random.default_rng(seed)
    rates = sorted({float(f"{rate:.2g}") for rate in 10 ** rng.uniform(-3, 1, 6)})
    settings = [TriedSetting(outcome(lr=lr), (float(rng.uniform()),)) for lr in rates]
    for best in settings:
        following = next_lr(best, settings)
        assert following is None or not any(math.isclose(following, rate, rel_tol=0.01) for rate in rates)


def test_a_lost_run_is_listed_and_cannot_win():
    advice = advise(run(0.1, 0.9), run(0.3, 0.5), lost(3.0))
    assert (advice.lr, advice.next_lr) == (0.3, None)
    assert advice.reasons[-1].text.endswith("diverged")


def test_runs_that_were_all_lost_are_judged_by_the_smallest_lr():
    advice = advise(lost(3.0), lost(9.0))
    assert advice == advise(lost(3.0))
    assert advice.action == "diverged"


def test_runs_are_compared_where_most_of_them_ended():
    long, short = run(0.3, 0.45, num=60), run(0.1, 0.5, num=40)
    assert advise(long, short).lr == 0.1  # at step 195 the longer one was higher
    assert "cannot be compared" in advise(run(0.1, 0.5), run(0.3, 0.5, num=15)).reasons[-1].text


def test_twenty_settings_are_ten_lines():
    advice = advise(*(run(0.01 * 1.3**k, 0.5 + 0.02 * k, noise=1e-4) for k in range(20)))
    assert kinds(advice).count("setting") == 11
    assert advice.reasons[-1].text.startswith("10 other")
    assert len(str(advice).splitlines()) == 8


@pytest.mark.parametrize(("name", "one", "other"), [
    ("model", "LSTM", "GRU"), ("optimizer", "SGD", "AdamW"), ("num_parameters", 11, 21),
    ("momentum", 0.5, 0.9),
])  # fmt: skip
def test_runs_of_different_tasks_are_refused_in_one_line(name, one, other):
    advice = advise(run(0.1, 0.5, header={name: one}), run(0.3, 0.5, header={name: other}))
    assert (advice.action, advice.kind) == ("cannot tell", "not-comparable")
    assert str(advice).count("\n") == 0
    assert f"({one} against {other})" in advice.verdict


def test_the_clip_inside_makes_no_other_optimizer():
    advice = advise(
        run(0.1, 0.5, header={"optimizer": "AdamW"}), run(0.3, 0.4, header={"optimizer": "ClippedAdamW"})
    )
    assert advice.action == "take"


def test_runs_without_a_loss_cannot_be_compared():
    silent = [trace_of([None] * 20, lr=lr) for lr in (0.1, 0.3)]
    assert advise(*silent).kind == "no-loss"


def test_a_schedule_is_another_setting_than_its_peak_held():
    scheduled = trace_of([])
    for k, row in enumerate(run(0.3, 0.5)):
        scheduled.append({**row, "lr": 0.3 if k < 20 else 0.1})
    assert kinds(advise(run(0.3, 0.6), scheduled)).count("setting") == 2


def test_an_empty_trace_among_runs_is_left_out():
    advice = advise(trace_of([]), run(0.3, 0.5))
    assert advice == advise(run(0.3, 0.5))
    assert advise(trace_of([]), run(0.1, 0.9), run(0.3, 0.5)).action == "take"


def test_of_one_run_the_noise_of_its_losses_makes_ties():
    quiet = advise(run(0.1, 0.55, noise=0.02), run(0.3, 0.5, noise=0.02, seed=2))
    assert "± 0.0" in quiet.reasons[-1].text
    many = [run(lr, last, seed=seed, noise=0.0) for lr, last in ((0.1, 0.5), (0.3, 0.501)) for seed in (1, 2)]
    assert "tie" not in kinds(advise(*many))


def test_sparse_rows_are_ranked_by_the_mean_loss_since_the_row_before_and_not_by_one_batch():
    means, lucky = {"recent_loss": 0.5, "recent_steps": 80}, [*falling(13, last=0.6), 0.3]
    steady = trace_of([*falling(13, last=0.5), 0.5], lr=0.1, every=80, **means)
    noisy = trace_of(lucky, lr=0.3, every=80, **{**means, "recent_loss": 0.6})
    assert advise(steady, noisy).lr == 0.1
    (one,) = settings_of([History.of(noisy)])
    (alone,) = settings_of([History.of(trace_of(lucky, lr=0.3, every=80))])
    assert (one.loss, alone.loss) == (0.6, 0.3)
    assert math.isclose(one.error, alone.error / math.sqrt(80))


def test_thresholds_make_settings_and_settings_ascend_in_lr():
    clipped = [run(0.3, 0.5, clipped=True, coefficient=share) for share in (0.5, 0.25)]
    runs = [run(0.9, 0.7), *clipped, run(0.1, 0.6)]
    found = settings_of([History.of(trace) for trace in runs])
    assert [(setting.run.lr, setting.run.max_norm) for setting in found][1:3] == [(0.3, 0.25), (0.3, 0.5)]
    assert [setting.run.lr for setting in found] == [0.1, 0.3, 0.3, 0.9]
    assert "max_norm 0.25" in advise(*runs[2:]).reasons[0].text


def test_runs_of_one_row_are_not_ranked():
    assert advise(trace_of([1.0]), trace_of([2.0], lr=0.3)).kind == "few-rows"
    assert advise(trace_of([]), trace_of([])).kind == "no-rows"


def test_a_line_counts_runs_where_there_are_several_and_names_three_ties():
    losses = [loss + 0.05 * (-1) ** k for k, loss in enumerate(falling(40))]
    tie, *settings = advise(*(trace_of(losses, lr=lr) for lr in (0.1, 0.2, 0.3, 0.4, 0.5))).reasons
    assert tie.text.count("lr") == 3
    assert not any("run" in note.text for note in settings)


def test_batches_of_text_may_differ_a_little():
    alike = advise(run(0.1, 0.5, batch_size=100), run(0.3, 0.4, batch_size=104))
    other = advise(run(0.1, 0.5, batch_size=100), run(0.3, 0.4, batch_size=200))
    assert (alike.action, other.kind) == ("take", "not-comparable")
