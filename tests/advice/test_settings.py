"""Several runs: seeds merged, ties as ties, and a next learning rate that was not tried."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import SmoothnessProbe
from curvestep.advice.advice import advise
from curvestep.advice.decision import decide
from curvestep.advice.settings import JudgedRun, Setting, compare, next_lr
from tests.advice.runs import falling, outcome, trace_of


def run(lr, last, *, seed=0, noise=0.01, num=40, header=None, path=None, **row):
    rng = np.random.default_rng([seed, round(1e6 * lr)])
    losses = np.array(falling(num, last=last)) + noise * rng.standard_normal(num)
    return trace_of(list(losses), lr=lr, header=header, path=path, **row)


def lost(lr):
    return trace_of([2.0, 40.0, *[None] * 4], lr=lr, kappa=9.0)


def tried(lr, loss):
    """A setting of one run."""
    facts = outcome(lr=lr)
    return Setting(runs=(JudgedRun(name="run", outcome=facts, condition=decide(facts), loss=loss),))


def settings_of(*traces):
    return compare(traces).settings


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


def trained(optimizer, *, seed=0, steps=150, scheduler=None, norm=nn.Identity, **options):
    """The probe of a small network on five classes."""
    torch.manual_seed(9)
    x = torch.randn(3200, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 32), norm(32), nn.ReLU(), nn.Linear(32, 5))
    opt = optimizer(model.parameters())
    schedule = scheduler(opt, steps) if scheduler else None
    probe = SmoothnessProbe(model, **options).watch(opt)
    for _ in range(steps):
        rows = torch.randint(3200, (32,))
        opt.zero_grad()
        probe.record(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows])).backward()
        opt.step()
        if schedule:
            schedule.step()
    return probe


def sgd(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def one_cycle(opt, steps):
    return torch.optim.lr_scheduler.OneCycleLR(opt, opt.param_groups[0]["lr"], total_steps=steps)


def test_two_seeds_of_a_dead_network_say_what_each_says_alone():
    torch.set_default_dtype(torch.float32)
    options = {"scheduler": one_cycle, "norm": nn.BatchNorm1d}
    seeds = [trained(lambda p: torch.optim.AdamW(p, lr=5.0), seed=seed, **options) for seed in (0, 1)]
    alone = [advise(probe) for probe in seeds]
    together = advise(*seeds)
    assert together.action in {advice.action for advice in alone} <= {"stuck", "lower", "diverged"}
    assert min(advice.lr for advice in alone) <= together.lr <= max(advice.lr for advice in alone)
    assert together.next_lr is None
    assert kinds(together)[0] == "seeds"


def test_a_run_that_ended_early_does_not_turn_the_direction_round():
    torch.set_default_dtype(torch.float32)
    whole, short = trained(sgd(0.003), steps=300), trained(sgd(0.03), steps=40)
    alone, together = advise(whole), advise(whole, short)
    assert (together.action, together.lr) == (alone.action, alone.lr)
    assert alone.action == "raise"
    assert [note.kind for note in together.warnings] == ["ended-early"]


@pytest.mark.parametrize("seeds", [2, 3])
def test_seeds_of_one_setting_are_not_ranked(seeds):
    advice = advise(*(run(0.3, 0.5, seed=seed) for seed in range(seeds)))
    assert (advice.action, advice.lr, advice.next_lr) == ("no sign", 0.3, None)
    assert kinds(advice)[:2] == ["seeds", "setting"]


short_steps, inefficient = (
    {"kappa": 0.002, "smoothness": 0.02, "loss_after": None},
    {"kappa": 9.0, "loss_after": 3.0},
)


@pytest.mark.parametrize(("rows", "action"), [
    ([short_steps, short_steps, {}], "raise"),
    ([short_steps, {}, {}], "no sign"),
    ([short_steps, {}], "no sign"),  # half keep
    ([short_steps, inefficient], "cannot tell"),
    ([{}, None], "diverged"),  # half diverged
    ([{}, {}, None], "no sign"),
])  # fmt: skip
def test_the_majority_of_the_seeds_decides(rows, action):
    traces = [lost(0.3) if row is None else run(0.3, 1.6, seed=k, **row) for k, row in enumerate(rows)]
    advice = advise(*traces)
    assert advice.action == action
    assert advice.lr is None or min(t.lr or 1e9 for t in map(advise, traces)) <= advice.lr


def test_seeds_that_disagree_about_the_size_meet_in_the_middle():
    seeds = [
        run(0.3, 0.5, seed=k, kappa=kappa, smoothness=0.1, loss_after=None)
        for k, kappa in enumerate((0.2, 0.25))
    ]
    rates = [advise(trace).lr for trace in seeds]
    assert rates[0] != rates[1]
    assert advise(*seeds).lr == pytest.approx(math.sqrt(rates[0] * rates[1]))


def test_settings_that_all_got_nowhere_are_not_taken():
    advice = advise(*(run(lr, 2.5, kappa=3.0, loss_after=3.0, seed=k) for lr in (1.0, 3.0) for k in (1, 2)))
    assert advice.action == "stuck"
    assert advice.lr < 1.0


def test_a_run_that_goes_on_decides_nothing(tmp_path):
    going_on = run(0.03, 0.9, num=12, path=tmp_path / "six" / "trace.jsonl", header={"peak_lr": 0.1})
    (tmp_path / "six" / "status.json").write_text('{"status": "running", "step": 60}')
    advice = advise(run(0.1, 0.9), run(0.3, 0.5), going_on)
    assert kinds(advice) == ["setting"] * 2
    assert [note.kind for note in advice.warnings] == ["running"]
    assert advice.warnings[0].text.startswith("six (")
    assert advise(run(0.3, 0.5), going_on).action == "no sign"


def test_under_a_schedule_a_run_that_was_not_finished_decides_nothing():
    cut = run(0.9, 0.3, num=32)
    whole = [run(lr, last) for lr, last in ((0.1, 0.9), (0.3, 0.5))]
    assert advise(*whole, cut).lr == 0.9
    scheduled = [halved(trace) for trace in (*whole, cut)]
    assert advise(*scheduled).lr == 0.3
    assert [note.kind for note in advise(*scheduled).warnings] == ["ended-early"]
    planned = [halved(run(lr, 0.5, header={"num_steps": 400})) for lr in (0.1, 0.3)]
    assert [note.kind for note in advise(*planned).warnings][-2:] == ["ended-early"] * 2


def halved(trace):
    """The same rows, lr halved from the middle on."""
    changed = trace_of([], header={"optimizer": "SGD", **trace.header})
    for k, row in enumerate(trace):
        changed.append({**row, "lr": row["lr"] * (1.0 if k < len(trace) / 2 else 0.5)})
    return changed


def test_of_three_runs_the_one_that_differs_is_named_and_left_out():
    others = [run(lr, 0.5, header={"model": "LSTM"}) for lr in (0.1, 0.3)]
    advice = advise(*others, run(0.9, 0.1, header={"model": "GRU"}))
    assert (advice.action, [note.kind for note in advice.warnings]) == ("take", ["differs"])
    assert advice.lr == 0.3


def test_runs_within_noise_are_ties():
    advice = advise(run(0.1, 0.502, noise=0.1), run(0.3, 0.5, noise=0.1), run(0.9, 0.7, noise=0.01))
    assert kinds(advice)[0] == "tie"
    advice = advise(run(0.1, 0.6, noise=1e-4), run(0.3, 0.5, noise=1e-4))
    assert "tie" not in kinds(advice)


@pytest.mark.parametrize(("losses", "following"), [((1.5, 1.0, 0.5), 2.7), ((0.5, 1.0, 1.5), 0.1 / 3)])
def test_at_the_edge_the_next_one_lies_beyond(losses, following):
    advice = advise(
        *(run(lr, last, kappa=0.3, smoothness=0.1) for lr, last in zip((0.1, 0.3, 0.9), losses, strict=True))
    )
    assert advice.next_lr == pytest.approx(following)
    assert f"{following:.3g}" in advice.verdict


@pytest.mark.parametrize(("losses", "lr"), [((0.5, 0.9), 0.01), ((0.9, 0.5), 4.0)])
def test_in_a_wide_gap_the_next_one_lies_in_its_middle(losses, lr):
    advice = advise(*(run(lr, last) for lr, last in zip((0.01, 4.0), losses, strict=True)))
    assert (advice.lr, advice.next_lr) == (lr, pytest.approx(0.2))


def test_of_a_run_without_steps_nothing_follows():
    assert next_lr(tried(0.0, 1.0), [tried(0.1, 2.0)]) is None


@pytest.mark.parametrize("seed", range(5))
def test_what_to_try_next_was_never_tried(seed):
    rng = np.random.default_rng(seed)
    rates = sorted({float(f"{rate:.2g}") for rate in 10 ** rng.uniform(-3, 1, 6)})
    settings = [tried(lr, float(rng.uniform())) for lr in rates]
    for best in settings:
        following = next_lr(best, settings)
        assert following is None or not any(math.isclose(following, rate, rel_tol=0.01) for rate in rates)


def test_a_lost_run_is_listed_and_cannot_win():
    advice = advise(run(0.1, 0.9), run(0.3, 0.5), lost(3.0))
    assert (advice.lr, advice.next_lr) == (0.3, None)
    assert advice.reasons[-1].text.endswith("diverged")


def test_runs_that_were_all_lost_are_judged_by_the_smallest_lr():
    advice = advise(lost(3.0), lost(9.0))
    assert (advice.action, advice.lr) == ("diverged", advise(lost(3.0)).lr)


def test_runs_are_compared_where_most_of_them_ended():
    long, short = run(0.3, 0.45, num=60), run(0.1, 0.5, num=40)
    assert advise(long, short).lr == 0.1  # at step 195 the longer one was higher
    assert [note.kind for note in advise(run(0.1, 0.5), run(0.3, 0.5, num=15)).warnings] == ["ended-early"]


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


def test_sparse_rows_are_ranked_by_their_mean_loss_not_by_one_batch():
    means, lucky = {"recent_loss": 0.5, "recent_steps": 80}, [*falling(13, last=0.6), 0.3]
    steady = trace_of([*falling(13, last=0.5), 0.5], lr=0.1, every=80, **means)
    noisy = trace_of(lucky, lr=0.3, every=80, **{**means, "recent_loss": 0.6})
    assert advise(steady, noisy).lr == 0.1
    (one,) = settings_of(noisy)
    (alone,) = settings_of(trace_of(lucky, lr=0.3, every=80))
    assert (one.loss, alone.loss) == (0.6, 0.3)
    assert math.isclose(one.error, alone.error / math.sqrt(80))


def test_thresholds_make_settings_and_settings_ascend_in_lr():
    clipped = [run(0.3, 0.5, clipped=True, coefficient=share) for share in (0.5, 0.25)]
    runs = [run(0.9, 0.7), *clipped, run(0.1, 0.6)]
    found = settings_of(*runs)
    assert [(setting.outcome.lr, setting.outcome.max_norm) for setting in found][1:3] == [
        (0.3, 0.25),
        (0.3, 0.5),
    ]
    assert [setting.outcome.lr for setting in found] == [0.1, 0.3, 0.3, 0.9]
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


def test_thresholds_that_were_measured_for_each_seed_are_one_setting():
    def clipped(seed, norm):
        header = {"clipping": "norm", "max_norm": norm}
        return run(0.3, 0.5, seed=seed, header=header, clipped=True, coefficient=0.5)

    assert kinds(advise(clipped(1, 0.758), clipped(2, 0.644)))[0] == "seeds"
    assert advise(clipped(1, 0.25), clipped(2, 0.5)).action == "take"
    assert len(settings_of(clipped(1, 0.25), run(0.3, 0.5, clipped=False))) == 2
    assert len(settings_of(clipped(1, math.inf), clipped(2, math.inf))) == 1


def test_a_threshold_is_read_from_the_header_and_not_from_rows_of_an_oracle():
    rows = {"clipped": True, "coefficient": 0.9, "grad_norm": 0.24}
    header = {"clipping": "norm", "max_norm": 0.25, "measured_on": "4 fixed batches"}
    (known,) = settings_of(run(0.3, 0.5, header=header, **rows))
    assert known.outcome.max_norm == 0.25
    del header["max_norm"], header["clipping"]
    advice = advise(run(0.3, 0.5, header=header, **rows))
    assert advice.max_norm is None
    assert "max_norm" not in advice.verdict


def test_a_run_in_its_warm_up_is_named_by_the_peak_that_it_goes_to():
    early = trace_of([], header={"peak_lr": 0.03, "num_steps": 400})
    for k, row in enumerate(trace_of([2.0, 1.9, 1.8])):
        early.append({**row, "lr": 0.004 * (k + 1)})
    advice = advise(run(0.1, 0.9), run(0.3, 0.5), early)
    assert advice.lr == 0.3
    assert "peak lr 0.03" in advice.warnings[0].text
