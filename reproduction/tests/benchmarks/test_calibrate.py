"""The benchmark of calibrate: frozen constants, tasks that can count, rows that survive, honest tables."""

import json
import math

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from curvestep.calibration import ladder as rule
from reproduction.benchmarks.calibrate import methods, run
from reproduction.benchmarks.calibrate.judged import JUDGED
from reproduction.benchmarks.calibrate.judged_sgd import JUDGED_SGD
from reproduction.benchmarks.calibrate.report import best_of, confidence, failures, report, table
from reproduction.benchmarks.calibrate.tasks import DEVELOPMENT, RECIPES, is_alive, trivial_loss


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def test_frozen_constants_are_those_of_the_package_and_judging_refuses_others(monkeypatch, tmp_path):
    assert json.loads(run.FROZEN.read_text()) == run.constants()
    monkeypatch.setattr(rule, "SHARE", 0.9)
    monkeypatch.setattr("sys.argv", ["run", "--rows", str(tmp_path), "--part", "judge"])
    with pytest.raises(SystemExit, match="has others"):
        run.main()


def test_there_are_enough_tasks_and_none_is_in_both_halves():
    names = [recipe.task.name for recipe in (*DEVELOPMENT, *JUDGED, *JUDGED_SGD)]
    assert len(set(names)) == len(names)
    assert set(names) <= set(RECIPES)
    assert len(DEVELOPMENT) >= 25
    assert len(JUDGED) >= 12
    steps = [recipe.task.steps for recipe in JUDGED]
    assert (min(steps), max(steps)) == (300, 3000)
    assert sum("batch 8" in name or "batch 128" in name or "batch 64" in name for name in names) >= 4
    norms = [r for r in JUDGED if "momentum" in r.optimizers]
    assert len(norms) >= 3
    assert len(JUDGED_SGD) >= 4
    assert all(recipe.optimizers == ("momentum", "plain") for recipe in JUDGED_SGD)
    models = [recipe.task.start(0) for recipe in JUDGED_SGD]
    assert sum(any(isinstance(m, _BatchNorm) for m in model.modules()) for model in models) >= 2


@pytest.mark.parametrize(
    "name",
    ["recommender", "tiny diffusion", "MLP, digits", "autoencoder", "colours from grey, BatchNorm"],
)
def test_trivial_loss_is_about_that_of_an_untrained_model(name):
    recipe = RECIPES[name]
    judges = recipe.judging(6)
    first = run.judged(recipe, recipe.task.start(1), judges)
    assert 0.8 * first < trivial_loss(recipe, judges) < 1.1 * first


def test_task_is_alive_if_its_best_is_clearly_below_a_trivial_predictor():
    assert is_alive(0.9, 1.0)
    assert not is_alive(0.97, 1.0)
    assert not is_alive(6.2, 6.3)


@pytest.mark.parametrize("best", [0.02, 1.0, 12.0])
def test_grid_widens_until_its_best_has_worse_neighbours(best):
    tried = run.widen(lambda lr: math.log(lr / best) ** 2, 0.5)
    lowest = min(tried, key=lambda lr: tried[lr])
    assert 1 / 2 < lowest / best < 2
    assert {lowest / 2, lowest * 2} <= set(tried)
    assert len(run.widen(lambda lr: -lr, 1.0, most=4)) == 4


def row(method, loss, *, lr=None, seed=1, task="ViT", **found):
    said = found.get("confidence", "high")
    return {"task": task, "kind": "adamw", "method": method, "seed": seed, "lr": lr, "first": 2.0,
            "trivial": 1.9, "loss": loss, "spent": 82, "found": {"lr": 2.0, "confidence": said}}  # fmt: skip


def grid(*losses, **options):
    return [row("grid", loss, lr=2.0**k, **options) for k, loss in enumerate(losses)]


def test_regret_is_against_the_rate_with_the_lowest_mean_over_all_its_seeds():
    rows = [
        *grid(1.5, 1.0, 1.1),
        *grid(1.5, 1.4, 1.1, seed=2),
        row("grid", 0.5, lr=8.0),
        row("grid", 3, lr=16.0),
    ]
    best = best_of(rows)
    assert (best.lr, best.problem) == (4.0, "")
    assert best.loss == pytest.approx(1.1)
    rows += [row("calibrate", 1.19), row("calibrate", 1.28, seed=2), row("Prodigy", None)]
    said = "\n".join(table(rows, ["ViT"], "adamw"))
    assert "| ViT (4) | 15.0% |" in said  # 10 % and 20 % of 0.9
    assert "100.0%" in said
    assert "| **worst** | 15.0% |" in said
    assert "| **tasks** | 1 | 1 |" in said
    assert "| **calibrate on the same, worst** | 15.0% | 15.0% |" in said
    beyond = failures(rows, ["ViT"])
    assert "| ViT | adamw | 1 | 10.0% | 0.5 | high |" in beyond
    assert len(beyond) == 5
    assert failures(rows, ["another"])[2:] == [""]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (grid(1.9, 1.85, 1.88), "dead"),
        (grid(1.0, 1.2, 1.4), "at its end"),
        (grid(1.4, 1.2, 1.0), "at its end"),
    ],
)
def test_dead_tasks_and_ends_of_a_grid_do_not_count(rows, problem):
    assert problem in best_of(rows).problem
    assert table([*rows, row("calibrate", 1.1)], ["ViT"], "adamw") == []


def test_confidence_is_counted_by_what_the_answers_missed():
    rows = [*grid(1.5, 1.0, 1.5), row("calibrate", 1.01), row("calibrate", 1.2, seed=2)]
    rows.append(row("calibrate", 1.3, seed=3, confidence="cannot tell"))
    rows.append(row("calibrate", 1.0, seed=4, confidence="medium"))
    said = confidence(rows, ["ViT"])
    assert "| high | 2 | 50% | 20.0% |" in said
    assert "| cannot tell | 1 | 0% | 30.0% |" in said
    assert "| medium | 1 | 100% | 0.0% |" in said
    assert "## Development: confidence" in report(rows)


def test_rows_survive_a_torn_line_and_no_run_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train", lambda job, trace: {**job, "first": 1.0, "loss": 0.5})
    job = {"task": "ViT", "kind": "adamw", "method": "grid", "seed": 1, "lr": 0.008}
    run.Rows(tmp_path).run(**job)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"task": "Vi')  # killed while it wrote
    again = run.Rows(tmp_path)
    again.run(**{**job, "seed": 2})
    monkeypatch.setattr(run, "train", None)
    third = run.Rows(tmp_path)
    assert len(third.rows) == 2
    assert third.run(**job)["loss"] == 0.5
    fixed = third.run(**{**job, "method": "AdamW 4e-3", "lr": 0.008})  # a point of the grid: that very run
    assert (fixed["method"], fixed["loss"]) == ("AdamW 4e-3", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["calibrate", "grid", "lr_find", "NadamW, AlgoPerf", "schedule-free", "Prodigy"]
)
def test_every_method_trains_and_keeps_its_curve(method, tmp_path):
    if method in methods.PACKAGES:
        pytest.importorskip(methods.PACKAGES[method])
    job = {"task": "autoencoder", "kind": "adamw", "method": method, "seed": 3}
    if method == "grid":
        job["lr"] = 0.008
    found = run.train(job, trace=tmp_path / "trace.jsonl" if method == "grid" else None)
    assert found["loss"] < found["first"]
    assert len(found["curve"]) == 100
    assert json.loads(json.dumps(found))["steps"] == 400
    if method == "grid":
        assert len((tmp_path / "trace.jsonl").read_text().splitlines()) >= 25


def test_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(methods.PACKAGES, "MoMo", "no_such_package_here")
    recipe = RECIPES["autoencoder"]
    with pytest.raises(methods.NotInstalled, match="MoMo: no_such_package_here is not installed"):
        methods.momo(recipe, recipe.task.start(1), [1.0])
