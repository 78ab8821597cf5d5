"""The regret benchmark in small: real training on the digits, resumed, counted and reported."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("dog")

import numpy as np
from benchmarks import calibrate as bench
from benchmarks.calibrate_methods import lowest_loss_rate
from benchmarks.calibrate_report import (
    BEGIN,
    END,
    adam_shares,
    batch_counts,
    choices,
    figure,
    in_short,
    median_interval,
    own_grid,
    quote,
    regrets,
    summary,
    text,
    write,
)
from benchmarks.calibrate_tasks import DEVELOPMENT, HELD_OUT, TASKS
from matplotlib.patches import Rectangle

from curvestep.calibration.search import CLIP_AT, MAX_KAPPA, SLOPE_SHARE

SMALL = ["logistic regression"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The whole way, on one task, one seed and a corner of the grid."""
    path = tmp_path_factory.mktemp("calibrate") / "results.jsonl"
    corner = [j for j in bench.grid_jobs(SMALL, 100) if j["options"]["lr"] in (0.3, 1.0, 3.0)]
    corner = [j for j in corner if j["options"]["relative"] in (math.inf, 0.7)]
    rows = bench.run_all(corner, path, processes=1)
    bench.run_all(bench.retune_jobs(rows, SMALL, "grid"), path, processes=1)
    bench.run_all(bench.evaluate_jobs(bench.read(path), SMALL, (1,)), path, processes=1)
    return path


@pytest.mark.slow
def test_calibrated_training_is_near_the_grid_and_ahead_of_the_fixed_default(results):
    found = regrets(bench.read(results))
    for task in SMALL:
        (mine,), (fixed,) = found["calibrated"][task], found["SGD 0.1, clip 1"][task]
        assert mine < 0.05
        assert mine < fixed
        assert found["best of grid"][task] == [0.0]


@pytest.mark.slow
def test_every_method_of_the_table_ran(results):
    rows = bench.read(results)
    labels = {r["label"] for r in rows if r["seed"] == 1}
    assert {"calibrated", "DoG", "Prodigy", "AutoClip, grid's lr", "ZClip, grid's lr", "AdamW 1e-3"} <= labels
    assert len(labels) >= 17
    assert all(r["problem"] == "" for r in rows)
    spent = {r["label"]: r["spent"] for r in rows if r["seed"] == 1}
    assert 0 < spent["calibrated"] <= 40
    assert spent["range test, clip 1"] > 40
    assert spent["DoG"] == 0


@pytest.mark.slow
def test_finished_runs_are_not_repeated_and_a_torn_line_is_left_out(results):
    rows = bench.read(results)
    with results.open("a") as file:
        file.write('{"task": "logis')
    assert bench.read(results) == rows
    jobs = bench.evaluate_jobs(rows, SMALL, (1,))
    assert bench.run_all(jobs, results, processes=1) == rows


def test_run_after_a_torn_line_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "train", lambda job: job)
    path, job = tmp_path / "results.jsonl", bench.job("logistic regression", 1, "fixed", "adamw", lr=1e-3)
    path.write_text('{"task": "logis')
    assert bench.run_all([job], path, processes=1) == [job]
    assert bench.run_all([job], path, processes=1) == [job]
    assert path.read_text().count("\n") == 2


@pytest.mark.slow
def test_report_holds_both_halves_the_figure_and_the_command(results, tmp_path):
    text = write(bench.read(results), tmp_path, command="python -m benchmarks.calibrate")
    assert (tmp_path / "calibrate.md").read_text() == text
    assert (tmp_path / "calibrate.png").stat().st_size > 10_000
    for words in (
        "`python -m benchmarks.calibrate`",
        "no choice was made on",
        "| calibrated |",
        *SMALL,
    ):
        assert words in text


@pytest.mark.slow
def test_budget_counts_what_was_spent_before_training(monkeypatch):
    steps = []
    plain = bench._losses
    monkeypatch.setattr(bench, "_losses", lambda *a: steps.append(a[-1]) or plain(*a))
    row = bench.train(bench.job("logistic regression", 1, "calibrated", "calibrated"), steps=60)
    assert steps == [60 - row["spent"]]
    assert json.dumps(row)  # a row is a line of the results file


def test_range_test_looks_at_neither_its_noisy_start_nor_its_diverging_end():
    rates = np.geomspace(1e-5, 100, 100)
    losses = [2.0] * 100
    losses[1], losses[60], losses[97] = 0.5, 1.0, 0.4  # two batches that happen to be easy, and the valley
    assert lowest_loss_rate(rates, losses) == rates[60]
    assert lowest_loss_rate(rates, losses[:12]) == rates[1]  # ended early: there is nothing else


def row(label, loss, *, task="CNN", seed=1, diverged=False, **more):
    return {
        "task": task,
        "seed": seed,
        "label": label,
        "loss": loss,
        "first_loss": 3.0,
        "diverged": diverged,
        **more,
    }


def test_regret_is_the_share_of_the_grids_progress_that_is_missed():
    rows = [
        row("best of grid", 1.0),
        row("mine", 1.5),
        row("other", None, diverged=True),
        row("mine", 0.5, seed=2),
    ]
    found = regrets(rows)
    assert found["mine"]["CNN"] == [0.25]  # no tuned run on seed 2
    assert found["other"]["CNN"] == [math.inf]


def test_intervals_contain_the_median_and_widen_with_the_spread():
    narrow = median_interval({"a": [0.01, 0.02, 0.03], "b": [0.01, 0.02, 0.03]})
    wide = median_interval({"a": [0.0, 0.02, 0.2], "b": [-0.1, 0.02, math.inf]})
    for middle, low, high in (narrow, wide):
        assert low <= middle <= high
    assert wide[2] - wide[1] > narrow[2] - narrow[1]


def test_summary_puts_the_best_median_first_and_counts_divergence():
    rows = [row("best of grid", 1.0), row("good", 1.02), row("bad", None, diverged=True)]
    lines = [line for _, line in summary(regrets(rows), "development")][1:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["best of grid", "good", "bad"]
    assert "1 of 1" in lines[-1]


def test_choices_are_listed_by_constant():
    rows = [row("best of grid", 1.0)]
    rows += [row("choose", 1.1, options={"max_kappa": 1.0, "clip_at": [h, 1.0]}) for h in (0.5, 1.0)]
    assert choices(rows).count("5.0 %") == 4


def test_constants_that_were_taken_run_once_a_task_and_seed():
    tried = [(j["options"]["max_kappa"], tuple(j["options"]["clip_at"])) for j in bench.choose_jobs()]
    assert (MAX_KAPPA, CLIP_AT) not in tried  # these are the runs "calibrated" of the same table


def test_shares_for_adam_are_read_off_its_grid():
    grid = [
        row("grid, AdamW", loss, seed=100, options={"lr": lr})
        for lr, loss in ((0.01, 2.0), (0.1, 1.0), (1.0, 2.0))
    ]
    mine = row("calibrated, AdamW", 1.0, chosen={"lr": 0.1 * SLOPE_SHARE}, problem="")
    said = "".join(adam_shares([*grid, mine]))
    assert "| 1 | 0.0 % | 0.0 % (CNN) | 1 |" in said  # the whole step is the best learning rate
    assert "| 0.1 | 50.0 % | 50.0 % (CNN) | 1 |" in said  # half of the way from 3 to 1 is missed
    assert adam_shares(grid) == []


def test_numbers_of_batches_are_compared_where_all_of_them_ran():
    rows = [row("best of grid", 1.0), row("calibrated", 1.2, spent=15)]
    assert batch_counts(rows) == []
    rows.append(row("choose, batches", 1.1, spent=30, options={"num_batches": 6}))
    rows.append(row("calibrated", 1.9, seed=2, spent=15))
    said = "".join(batch_counts(rows))
    assert "| 3 | 10.0 % | 10.0 % (CNN) | 15 | 1 |" in said
    assert "| 6 | 5.0 % | 5.0 % (CNN) | 30 | 1 |" in said


def test_figure_shows_only_tasks_with_a_mark_and_an_aim_without_a_left_end():
    panel = figure(regrets([row("best of grid", 1.0), row("mine", 1.5)])).axes[0]
    legend, (aim, *_) = panel.get_legend(), panel.patches
    assert legend is not None
    assert isinstance(aim, Rectangle)
    assert [text.get_text() for text in legend.get_texts()] == ["CNN"]
    assert aim.get_x() == panel.get_xlim()[0]


DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = DOCS / "results" / "calibrate.jsonl"


@pytest.mark.slow
def test_documents_say_what_the_committed_results_say():
    rows = bench.read(COMMITTED)
    command = "python -m benchmarks.calibrate --results docs/results/calibrate.jsonl"
    assert (DOCS / "results" / "calibrate.md").read_text(encoding="utf-8") == text(rows, command=command)
    page = (DOCS / "calibrate.md").read_text(encoding="utf-8")
    assert page == quote(page, in_short(rows))


def test_page_without_marks_is_not_written_to():
    with pytest.raises(ValueError, match="no place between"):
        quote("# Calibrate\n", "| table |\n")
    assert quote(f"a\n{BEGIN}\nold\n{END}\nb", "new\n") == f"a\n{BEGIN}\nnew\n{END}\nb"


def test_calibrated_optimizer_is_held_against_its_own_grid():
    rows = [row("best of grid", 1.0), row("calibrated, AdamW", 0.9, spent=9, chosen={"lr": 0.1}, problem="")]
    assert own_grid(rows, "best of grid, AdamW", "calibrated, AdamW") == []
    best = row("best of grid, AdamW", 0.5, options={"lr": 0.01})
    mine = {**rows[1], "options": {"optimizer": "AdamW"}}
    said = "".join(own_grid([*rows[:1], best, mine], "best of grid, AdamW", "calibrated, AdamW"))
    assert "| CNN | development | lr 0.01 | 0.1 (9) | 16.0 % |" in said  # 0.4 of 2.5, not -5 % of the other


def test_development_and_held_out_tasks_are_apart_and_as_many_kinds_as_promised():
    development, held_out = ({task.name for task in half} for half in (DEVELOPMENT, HELD_OUT))
    assert not development & held_out
    assert len(held_out) >= 7
    assert set(TASKS) == development | held_out


def case_row(method, loss, *, case="LoRA", seed=1, start=2.0, **more):
    return {"case": case, "seed": seed, "method": method, "start": start, "loss": loss, "lr": 0.1, **more}


def test_table_of_hard_cases_counts_regret_only_where_the_result_is_sure():
    from benchmarks.calibrate_cases import CASES, table

    assert len(CASES) >= 12
    sure: dict[str, Any] = {"limit": "curvature", "words": ""}
    unsure: dict[str, Any] = {"limit": "unknown", "words": "cannot tell: ..."}
    rows = [
        case_row("grid", 1.0),
        case_row("calibrated", 1.2, **sure),
        case_row("grid", 1.0, seed=2),
        case_row("calibrated", 2.5, seed=2, **unsure),
        case_row("calibrated", 1.1, seed=3, **sure),
    ]
    said = table(rows)
    assert "20.0% of 1 runs" in said
    assert "in 1 of 3: LoRA (2)" in said
    assert said.count("| yes |") == 1


@pytest.mark.slow
def test_hard_case_near_an_optimum_is_not_made_worse():
    from benchmarks.calibrate_cases import RAISED, run

    row = run("regression near its optimum, noise 5, batch 8", 0, "calibrated")
    assert row["loss"] < RAISED * row["start"]
    assert row["limit"] in ("noise", "unknown")
    assert row["num_gradients"] <= 40
