"""The benchmark of schedules: its constants are the package's, its grid widens, its tables say the regret."""

import json
import math

import pytest
import torch
from benchmarks import schedules as bench
from benchmarks.schedules_tasks import BATCHES, DEVELOPMENT, HELD_OUT, RECIPES
from benchmarks.scripts import SCRIPTS, LowRank


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


def test_frozen_constants_are_those_of_the_package():
    assert json.loads(bench.FROZEN.read_text()) == bench.constants()


def test_held_out_part_refuses_other_constants(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.search, "ADAM_SHARE", 0.5)
    with pytest.raises(SystemExit, match=r"has .*'adam_share': 0.75"):
        bench.held_out(bench.Results(tmp_path / "none.jsonl"), [], [], (1,))


@pytest.mark.parametrize("best", [0.02, 1.0, 70.0])
def test_grid_widens_until_its_best_has_worse_neighbours(best):
    tried = bench.widen(lambda lr: math.log(lr / best) ** 2, 1.0)
    lowest = min(tried, key=lambda lr: tried[lr])
    assert 1 / 2 < lowest / best < 2
    assert {lowest / 2, lowest * 2} <= set(tried)


def test_tasks_chosen_on_and_held_out_are_apart():
    names = [recipe.task.name for recipe in (*DEVELOPMENT, *BATCHES, *HELD_OUT)]
    assert len(set(names)) == len(names) == len(RECIPES)


def row(method, loss, *, seed=1, lr=None, **found):
    return {
        "task": "ViT", "kind": "adamw", "method": method, "seed": seed, "lr": lr, "first": 2.0, "loss": loss,
        "found": {"lr": lr or 0.1, "step": 0.05, **found},
    }  # fmt: skip


def test_regret_is_against_the_peak_with_the_lowest_mean_over_all_seeds():
    rows = [row("grid", 1.0, lr=1.0), row("grid", 1.4, lr=1.0, seed=2)]
    rows += [row("grid", 1.1, lr=2.0), row("grid", 1.1, lr=2.0, seed=2), row("grid", 0.9, lr=4.0)]
    rows += [row("measured", 1.19, spent=17), row("measured", 1.28, seed=2), row("Prodigy", None)]
    table = "\n".join(bench.held_out_table(rows, "adamw"))
    assert "| measured | 15.0% (2) | 15.0% | 15.0% | 0 | 8 |" in table  # 10 % and 20 % of 0.9
    assert "| Prodigy | 100.0% (1) | 100.0% | 100.0% | 1 | 0 |" in table
    assert "| grid's peak (seeds) | 2 (2) |" in table


def test_development_table_reads_multiples_of_the_safe_step_off_the_grid():
    rows = [row("grid", loss, lr=lr, seed=100) for lr, loss in ((0.05, 1.2), (0.1, 1.0), (0.2, 1.5))]
    table = bench.development_table([*rows, row("measured", 1.1, seed=100)], "adamw")
    cells = table[4].split(" | ")
    assert cells[:5] == ["| ViT", "0.05", "2.00", "", "10.0%"]
    assert cells[6:9] == ["20.0%", "20.0%", "20.0%"]


def test_a_measured_run_trains_under_its_schedule(tmp_path):
    results = bench.Results(tmp_path / "runs.jsonl")
    job = {"task": "autoencoder", "kind": "adamw", "method": "measured", "seed": 3}
    found = results.run(**job)
    assert found["loss"] < 0.5 * found["first"]
    assert found["found"]["spent"] <= 40
    assert bench.Results(tmp_path / "runs.jsonl").rows[bench.key(job)] == json.loads(json.dumps(found))


def test_the_peak_by_size_of_batch_is_that_of_the_grid():
    rows = [row("measured", 1.5, lr=0.1), row("grid", 1.0, lr=0.2), row("grid", 1.005, lr=0.4)]
    last = bench.batches_table([*rows, row("grid", 1.6, lr=0.8)])[-2]
    assert last == "| ViT | 0.05 | 0.1 | 0.2 | 0.2 to 0.4 | 50.0% |"


@pytest.mark.parametrize(("name", "loss"), [("tiny diffusion", 1.0), ("recommender", math.log(2))])
def test_a_script_starts_at_the_loss_of_knowing_nothing(name, loss):
    recipe = next(recipe for recipe in SCRIPTS if recipe.task.name == name)
    model = recipe.task.start(1)
    for batch in recipe.judging(2):
        assert recipe.task.loss(model, batch).item() == pytest.approx(loss, rel=0.1)


def test_a_layer_of_low_rank_starts_as_the_frozen_one():
    frozen, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
    torch.testing.assert_close(LowRank(frozen)(x), frozen(x))
