"""The ladder's judged tasks: they are new and start, streams repeat, rivals train, numbers are honest."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from reproduction.benchmarks.calibrate import methods, run
from reproduction.benchmarks.calibrate.judged import JUDGED
from reproduction.benchmarks.calibrate.judged_ladder import JUDGED_LADDER, LONG, LONG_STEPS
from reproduction.benchmarks.calibrate.judged_sgd import JUDGED_SGD
from reproduction.benchmarks.calibrate.ladder import GRIDS, Grid, falling, scan, steps_needed
from reproduction.benchmarks.calibrate.report import best_of, report
from reproduction.benchmarks.calibrate.tasks import DEVELOPMENT, RECIPES, trivial_loss

ALL = {recipe.task.name: recipe for recipe in (*JUDGED_LADDER, *LONG)}
SHORT = "one picture, grids of features"


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def test_names_of_judged_tasks_are_new():
    before = {recipe.task.name for recipe in (*DEVELOPMENT, *JUDGED, *JUDGED_SGD)}
    assert not before & ALL.keys()
    assert len(ALL) == len(JUDGED_LADDER) + len(LONG) == 27
    assert ALL.keys() <= RECIPES.keys()


def test_kinds_are_as_many_as_asked_for():
    counts = {kind: sum(kind in recipe.optimizers for recipe in JUDGED_LADDER) for kind in GRIDS}
    assert counts == {"adamw": 10, "momentum": 10, "plain": 4, "muon": 5}
    assert all(400 <= recipe.task.steps <= 2000 for recipe in JUDGED_LADDER)
    assert all(recipe.task.steps >= LONG_STEPS for recipe in LONG)
    models = [recipe.task.start(0) for recipe in JUDGED_LADDER if "momentum" in recipe.optimizers]
    normed = [any(isinstance(m, _BatchNorm | nn.GroupNorm) for m in model.modules()) for model in models]
    assert sum(normed[:6]) == 6


@pytest.mark.parametrize("name", ALL)
def test_task_starts_and_takes_two_steps(name):
    recipe = ALL[name]
    for kind in recipe.optimizers:
        row = run.train({"task": name, "kind": kind, "method": "grid", "seed": 0, "lr": 1e-4}, steps=2)
        assert math.isfinite(row["loss"])
        assert 0 < row["trivial"] < 2 * row["first"]
        assert len(row["curve"]) == 2


@pytest.mark.parametrize("name", ALL)
def test_streams_and_starts_repeat_by_seed(name):
    task = ALL[name].task
    one, same, other = (next(task.stream(seed, "training")) for seed in (4, 4, 5))
    for a, b in zip(one, same, strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    parameters = [list(task.start(4).parameters()) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_held_out_batches_are_the_same_for_every_run():
    recipe = ALL["surfaces of point clouds"]
    judges = [recipe.judging(2) for _ in range(2)]
    assert torch.equal(judges[0][1][0], judges[1][1][0])
    assert trivial_loss(recipe, judges[0]) == pytest.approx(math.log(6), abs=0.1)


# The grid and the practitioner's number


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("factor", [1 / 9, 1.2, 11.0])
def test_scan_finds_the_best_rate_and_its_neighbours_on_every_seed(kind, factor):
    grid, trained = GRIDS[kind], set()

    def run_of(lr, seed):
        trained.add((lr, seed))
        return math.log(lr / (grid.start * factor)) ** 2 + 0.01 * seed

    best = scan(run_of, grid, (1, 2, 3))
    assert 2**-0.51 < best / (grid.start * factor) < 2**0.51
    assert {(best * f, seed) for f in (0.5, 1, 2) for seed in (1, 2, 3)} <= trained
    assert {(best / 4, 1), (best * 4, 1)} <= trained


def test_scan_passes_one_lucky_rate_and_stops_at_the_ends():
    losses = {1.0: 5.0, 2.0: 6.0, 0.5: 6.0, 4.0: 4.0, 8.0: 3.0, 16.0: 3.5, 0.25: 7.0, 32.0: 9.0}
    assert scan(lambda lr, seed: losses.get(lr, 9.0), Grid(1.0, 5, 5), (1,)) == 8.0
    assert scan(lambda lr, seed: -lr, Grid(1.0, 2, 3), (1, 2)) == 8.0


def test_falling_curve_keeps_sums_and_never_rises():
    generator = random.Random(3)
    curve = [1 / (i + 1) + 0.1 * generator.random() for i in range(40)]
    found = falling(curve)
    assert all(a >= b for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(curve))
    assert falling([3.0, 2.0, 1.0]) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_steps_needed_is_how_much_slower_the_answer_is(slower, noise):
    generator = random.Random(11)
    points = [(i + 1) / 40 for i in range(40)]
    best = [2 * math.exp(-2 * t) + noise * generator.gauss(0, 1) for t in points]
    answer = [2 * math.exp(-2 * t / slower) + noise * generator.gauss(0, 1) for t in points]
    assert steps_needed(answer, best) == pytest.approx(slower, rel=0.01 if noise == 0 else 0.05)


def test_steps_needed_of_better_lost_and_useless_answers():
    best = [3.0, 2.0, 1.0]
    assert steps_needed([3.0, 2.0, 0.9], best) == 1.0
    assert steps_needed([3.0, math.inf, math.inf], best) == math.inf
    assert steps_needed([3.0], best) == math.inf
    assert steps_needed([9.0, 8.0, 7.0], best) == math.inf


# Rivals


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest():
    recipe = ALL["digits in clutter"]
    model = recipe.task.start(1)
    muon, adamw = methods.make(recipe, "muon", model, 0.02, math.inf)
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    of_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert of_muon == {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    assert of_adamw == {id(p) for p in model.parameters()} - of_muon
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.02, pytest.approx(0.003))


@pytest.mark.parametrize(
    ("budget", "count", "length"), [(80, 8, 10), (640, 8, 80), (0.1, 8, 25), (20, 2, 10)]
)
def test_random_search_keeps_its_budget_and_the_range_of_the_grid(budget, count, length):
    recipe = ALL[SHORT]
    job = {"task": SHORT, "kind": "adamw", "method": "random search", "seed": 2}
    state = torch.get_rng_state()
    prepared = methods.random_search(recipe, job, recipe.task.start(2), budget)
    assert prepared.spent == count * length
    rates = [lr for lr, _ in prepared.found["trials"]]
    assert len(set(rates)) == count
    assert all(0.99 * GRIDS["adamw"].lowest <= lr <= 1.01 * GRIDS["adamw"].highest for lr in rates)
    losses = dict(prepared.found["trials"])
    assert losses[prepared.found["lr"]] == min(losses.values())
    torch.set_rng_state(state)
    again = methods.random_search(recipe, job, recipe.task.start(2), budget)
    assert again.found == prepared.found


def test_random_search_leaves_the_random_numbers_of_the_run_as_they_were():
    recipe = ALL["surfaces of point clouds"]
    job = {"kind": "adamw", "method": "random search", "seed": 2}
    model = recipe.task.start(2)
    before = torch.get_rng_state()
    methods.random_search(recipe, job, model, 40)
    assert torch.equal(torch.get_rng_state(), before)


def test_curve_of_held_out_loss_does_not_change_the_run(monkeypatch):
    name = "surfaces of point clouds"  # it has dropout
    job = {"task": name, "kind": "adamw", "method": "grid", "seed": 0, "lr": 0.004}
    with_curve = run.train(job, steps=40)
    monkeypatch.setattr(run, "HELD_OUT_CURVES", set())
    without = run.train(job, steps=40)
    assert with_curve["loss"] == without["loss"]
    assert len(with_curve["held_out"]) == 40
    assert "held_out" not in without


# Runs and tables


@pytest.mark.parametrize("part", ["judge-ladder", "judge-long"])
def test_ladder_is_not_judged_before_its_rule_is_frozen(part, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "constants", lambda: {"STEPS": 16})
    monkeypatch.setattr(run, "FROZEN", tmp_path / "ladder.json")
    monkeypatch.setattr("sys.argv", ["run", "--rows", str(tmp_path), "--part", part])
    with pytest.raises(SystemExit, match="does not exist"):
        run.main()
    (tmp_path / "ladder.json").write_text('{"STEPS": 48}')
    with pytest.raises(SystemExit, match="has others"):
        run.main()


def made_up(job, trace=None):
    """A row as training would give it: the loss is a parabola of log lr about the grid's start."""
    rate = job.get("lr") or 2 * GRIDS[job["kind"]].start
    loss = 1 + 0.09 * math.log2(rate / GRIDS[job["kind"]].start) ** 2 + 0.001 * job["seed"]
    curve = [3 - (3 - loss) * (i + 1) / 40 for i in range(40)]
    found = {"lr": rate, "max_norm": None, "confidence": "high"}
    return {**job, "first": 3.0, "trivial": 2.5, "loss": loss, "held_out": curve, "spent": 82, "found": found}


def test_runs_of_the_ladder_make_its_tables_and_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", made_up)
    recipe = ALL["squeeze and excitation, GroupNorm"]
    rows = run.Rows(tmp_path)
    run.run_ladder(rows, recipe, (1, 2, 3), None)
    run.run_long(rows, LONG[1], (1,))
    lines = report(list(rows.rows.values())).splitlines()
    assert any(line.startswith("| squeeze and excitation, GroupNorm (0.1) | 4.5%, x 1.05") for line in lines)
    assert "## Judged, the ladder: momentum" in lines
    assert "## Judged, the ladder: plain" in lines
    assert any(line.startswith("| half a run | 4.5%") for line in lines)
    assert "| high | 6 | 0% | 100% | 4.6% |" in lines
    assert any(line.startswith("| CNN, BatchNorm, 5,000 steps | 1 | 0.2 | 1.091, x 1.05 |") for line in lines)
    found = best_of([row for row in rows.rows.values() if row["kind"] == "plain"])
    assert (found.lr, found.problem) == (1.0, "")
    monkeypatch.setattr(run, "train", None)
    run.run_ladder(run.Rows(tmp_path), recipe, (1, 2, 3), None)


def test_default_random_search_has_what_calibrate_spent(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", made_up)
    rows = run.Rows(tmp_path)
    run.run_ladder(rows, ALL["clusters of a set"], (1,), ["random search"])
    random_rows = [row for row in rows.rows.values() if row["method"] == "random search"]
    assert [row["budget"] for row in random_rows] == [82]
