"""The judged tasks of advise's bounds, their grid, and the rule of six decisions beside them."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from curvestep.trace.trace import Trace
from reproduction.benchmarks.advice import run
from reproduction.benchmarks.advice.held_out import HELD_OUT
from reproduction.benchmarks.advice.judged_bounds import BOUNDS, BOUNDS_KIND
from reproduction.benchmarks.advice.noisy import NOISY
from reproduction.benchmarks.advice.score import ADVISERS, cases, grids
from reproduction.benchmarks.advice.six_lines import Facts, decide, six_lines
from reproduction.benchmarks.advice.spent import SPENT
from reproduction.benchmarks.calibrate.tasks import RECIPES

NAMES = list(BOUNDS_KIND)


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def test_names_are_new_and_each_way_of_training_has_two_tasks():
    assert not set(NAMES) & {recipe.task.name for recipe in (*NOISY, *SPENT, *HELD_OUT)}
    assert not set(NAMES) & RECIPES.keys()
    kinds = list(BOUNDS_KIND.values())
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "adamw, schedule": 2,
        "adamw": 2,
        "momentum": 2,
        "clipped": 2,
    }
    for recipe in BOUNDS:
        if BOUNDS_KIND[recipe.task.name] == "momentum":
            assert any(isinstance(m, nn.BatchNorm2d) for m in recipe.task.start(0).modules())


@pytest.mark.parametrize("name", NAMES)
def test_task_of_bounds_starts_and_takes_two_steps(name, monkeypatch):
    monkeypatch.setattr(run, "STEPS", 2)
    row = run.train({"task": name, "kind": BOUNDS_KIND[name], "seed": 0, "lr": 1e-4}, None)
    assert math.isfinite(row["loss"])
    assert 0 < row["trivial"] < 1.1 * row["first"]


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_bounds_repeat_by_seed(name):
    task = run.recipe_of(name).task
    one, same, other = (next(task.stream(seed, "training")) for seed in (4, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("best", [0, 3, 6])
def test_grid_goes_from_a_hundredth_to_thirty_times_the_best(best):
    center = run.rate("momentum", best)
    rates = run.grid_about_best(lambda lr: abs(math.log(lr / center)), "momentum")
    assert len(rates) == 8
    assert rates[0] / center == pytest.approx(0.01, rel=0.01)
    assert rates[-1] / center == pytest.approx(10**1.5, rel=0.01)


def test_grid_of_bounds_is_read_with_every_adviser_but_the_judged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "STEPS", 40)
    rows = run.Rows(tmp_path)
    for index in range(3, 10):
        rows.run(task="tumours in noise", kind="adamw, schedule", seed=1, lr=run.rate("adamw", index))
    (grid,) = grids(rows, ("tumours in noise",), train=False)
    for name in ("keep", "lr / 3", "lr x 3", "six lines"):
        found = list(cases(grid, ADVISERS[name], far=False, default=False))
        assert len(found) == 7
        assert all(0 <= case.after <= 1 for case in found)
    kept = list(cases(grid, ADVISERS["keep"], far=False, default=False))
    assert all(case.before == case.after for case in kept)


@pytest.mark.parametrize(("lr", "answers"), [(1e-5, {"raise"}), (30.0, {"diverged", "stuck", "lower"})])
def test_six_lines_raise_tiny_rates_and_lower_huge_ones(lr, answers, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "STEPS", 60)
    trace = tmp_path / "trace.jsonl"
    run.train({"task": "outlines, BatchNorm", "kind": "momentum", "seed": 0, "lr": lr}, trace)
    word, factor = six_lines(Trace.load(trace))
    assert word in answers
    assert (factor > 1) == (word == "raise")


def test_six_lines_decide_in_their_order():
    falling = np.linspace(2.0, 0.5, 30)
    calm = {"kappa": 0.5, "efficiency": 0.9, "start": 1.0}
    assert decide(Facts(falling, **calm)) == ("keep", 1.0)
    assert decide(Facts(falling, **{**calm, "kappa": 0.02})) == ("raise", 10.0)
    assert decide(Facts(falling, **{**calm, "efficiency": 0.1})) == ("lower", pytest.approx(1 / 3))
    assert decide(Facts(np.full(30, 2.0), **calm)) == ("stuck", 0.1)
    peak = np.r_[2.0, 20.0, falling]
    assert decide(Facts(peak, **{**calm, "start": 0.01})) == ("diverged", 0.05)
    assert decide(Facts(np.r_[falling, math.nan], **calm)) == ("diverged", 0.1)
