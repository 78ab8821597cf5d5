import itertools
import json
import math
import os
import re
from dataclasses import replace

import pytest

from curvestep.calibration.result import CALIBRATION, read_calibration
from curvestep.files import dump_row
from curvestep.fit.fit import fit_smoothness
from curvestep.report import views
from curvestep.trace.history import final_loss
from curvestep.trace.run import METRICS, STATUS, read_json, write_json
from curvestep.trace.trace import Trace
from curvestep_reproduction import progress as displays
from curvestep_reproduction.claims.claims import PAPER, VERDICTS
from curvestep_reproduction.figures.fig8_lstm_gd import two_layer_settings
from curvestep_reproduction.figures.legend import BY_HAND, CALIBRATED
from curvestep_reproduction.figures.reproduction import (
    FIGURES,
    cost_table,
    make_plan,
    named_runs,
    reproduce,
    watch_runs,
)
from curvestep_reproduction.progress import print_notice_once
from curvestep_reproduction.recipes import LanguageRecipe, with_fields
from curvestep_reproduction.tasks import make_task
from curvestep_reproduction.training import run_folder
from curvestep_reproduction.training.run_folder import TrainedRun, open_run
from reproduction.tests.small import write_text


def tiny_plan(folder, figures=None):
    folder.mkdir(parents=True, exist_ok=True)
    language = {
        "corpus": write_text(folder / "text.txt"), "embedding": 6, "hidden": 6, "batch_size": 4, "bptt": 5,
        "steps": 30, "num_words": 400, "eval_size": 200, "eval_every": 15, "probe_every": 1,
    }  # fmt: skip
    images = {
        "images": "digits", "num_images": 80, "batch_size": 8, "steps": 4, "eval_size": 40, "eval_every": 2,
        "probe_every": 1, "probe_from": 0,
    }  # fmt: skip
    return make_plan("laptop", figures, language=language, images=images)


def test_fields_are_changed_task_by_task_and_unmeasured_runs_stay_so():
    plain = {run.name: run.recipe for run in make_plan("laptop", ("fig4",)).runs}
    for run in make_plan("laptop", ("fig4",), language={"steps": 7, "probe_every": 3}).runs:
        before = plain[run.name]
        if run.recipe.task == "language":
            before = replace(before, steps=7, probe_every=3 if before.probe_every else 0)
        assert run.recipe == before


def test_the_plan_serves_every_figure_within_its_time():
    plan = make_plan()
    assert list(FIGURES) == [*(f"fig{number}" for number in range(1, 9)), "equivalence"]
    assert [figure.name for figure in plan.figures] == list(FIGURES)
    names = {run.name for run in plan.runs}
    for figure in plan.figures:
        assert {run.name for run in figure.runs("laptop")} <= names
        assert list(figure.runs("laptop")) or figure.name == "fig7"
    costs = [run.cost for run in plan.runs]
    assert costs == sorted(costs, reverse=True)
    assert sum(costs) < 0.9 * 2 * 15 * 60  # seconds on two cores, the rest for fits and drawings


def test_the_central_pictures_have_the_protocol_that_was_fixed():
    plan = make_plan("laptop", ("fig2", "fig3"))
    for setting, first in {BY_HAND: 10, "lm-lr2": 10, "cifar-momentum": 15, "cifar-lr5clip0.25": 15}.items():
        assert [run.recipe.seed for run in plan.of(setting)] == list(range(first, first + 5))
    assert all(run.recipe.fractions == (0.1, 0.5, 1.0) for run in plan.runs)
    language = plan.of(BY_HAND)[0].recipe
    assert isinstance(language, LanguageRecipe)
    assert (language.sizes, language.vocabulary) == ("64/100/2", 2000)
    assert (language.steps, language.probe_every) == (400, 5)
    task = make_task(language, offline=True)
    if task.data_name == "ptb":
        assert [batch[0].shape for batch in task.oracle_batches(language.probe_data)] == [(35, 20)] * 4
    images = plan.of("cifar-momentum")[0].recipe
    assert (images.probe_from, images.probe_every) == (60, 2)
    ((pictures, classes),) = make_task(images, offline=True).oracle_batches(images.probe_data)
    assert len(pictures) <= images.batch_size
    assert len(set(classes.bincount().tolist())) == 1  # as many images of every class


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_figure_8_compares_two_runs_of_the_same_model_at_either_scale(scale):
    plan = make_plan(scale, ("fig8",))
    assert {run.setting for run in plan.runs} == set(two_layer_settings(scale))
    gd, clipped = (plan.of(setting)[0].recipe for setting in two_layer_settings(scale))
    assert (gd.name, gd.lr, gd.max_norm) == ("ptb-lstm", 2.0, math.inf)
    assert replace(gd, lr=10.0, max_norm=0.25, probe_every=clipped.probe_every) == clipped


def test_a_dry_run_names_every_setting_with_its_core_hours():
    table = cost_table(make_plan("epoch", ("fig2",)))
    assert re.match(r"9 runs, about \d+(\.\d)? core-hours in all\n", table)
    assert re.search(r"lm-lr2: lr 2, no clip, seeds 0 to 2: \d\.\d core-hours", table)


def test_only_the_runs_that_are_named_are_made():
    plan = make_plan("paper", ("fig3",))
    names = ("cifar-momentum-seed0", "cifar-lr5clip0.25-seed0")
    assert {run.name for run in named_runs(plan, names)} == set(names)
    assert named_runs(plan, ()) == plan.runs
    with pytest.raises(ValueError, match="Did you mean cifar-momentum-seed0"):
        named_runs(plan, ("cifar-momentun-seed0",))
    assert cost_table(plan, names[:1]).startswith("1 run, about 12 core-hours")


def test_the_plan_has_three_calibrated_runs_beside_those_by_hand():
    plan = make_plan()
    runs = [run for run in plan.runs if run.calibrated]
    assert {run.setting for run in runs} == {CALIBRATED}
    seeds = {run.recipe.seed for run in runs}
    assert len(seeds) == 3
    assert seeds <= {other.recipe.seed for other in plan.of(BY_HAND)}
    assert sum(run.cost for run in runs) <= 80  # two cores: forty seconds of the quarter of an hour


@pytest.mark.slow
def test_a_calibrated_run_is_trained_with_what_was_measured(tmp_path):
    plan = tiny_plan(tmp_path / "data", ("fig4",))
    first = plan.of(CALIBRATED)[0].recipe.seed
    runs = [run for run in plan.runs if run.setting in (BY_HAND, CALIBRATED) and run.recipe.seed == first]
    plan = replace(plan, runs=tuple(runs))
    result = reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    (folder,) = [path.parent for path in (tmp_path / "out" / "runs").rglob(CALIBRATION)]
    cal, run = read_calibration(folder), TrainedRun.load(folder)
    assert (run.recipe.lr, run.recipe.max_norm) == (cal.lr, cal.max_norm)
    (claim,) = [claim for claim in result.claims if claim.name == "calibrated"]
    assert claim.numbers["measured"] == run.recipe.label
    assert math.isfinite(run.status["train_loss"])


@pytest.mark.slow
def test_runs_of_another_recipe_or_scale_are_not_taken_for_these(tmp_path):
    plan = tiny_plan(tmp_path / "data", ("fig8",))
    reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    run = plan.runs[0]
    other = replace(plan, runs=(replace(run, recipe=with_fields(run.recipe, hidden=7)),))
    with pytest.raises(ValueError, match=r"run of another recipe .hidden 6 → 7"):
        reproduce(tmp_path / "out", plan=other, workers=1, offline=True, progress=False)
    at_paper_scale = replace(plan, scale="paper", runs=(replace(run, setting="lstm-lr2"),))
    reproduce(tmp_path / "out", plan=at_paper_scale, workers=1, offline=True, progress=False)
    assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == ["text", "text-paper"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("huge",), "`scale` must be one of"), (("laptop", ("fig9",)), "`figures` must be one of 'fig1'")],
)
def test_unknown_scales_and_figures_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_plan(*arguments)


@pytest.mark.slow
def test_a_reproduction_leaves_figures_claims_and_runs_and_is_resumed(tmp_path, capsys):
    plan = tiny_plan(tmp_path / "data", ("fig6", "fig8"))
    result = reproduce(tmp_path / "out", plan=plan, offline=True)
    assert set(result.figures) == {"fig6", "fig8"}
    assert not result.failures
    saved = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert [row["verdict"] for row in saved["claims"]] == [claim.verdict for claim in result.claims]
    assert {claim.verdict for claim in result.claims if claim.kind == PAPER} <= set(VERDICTS)
    assert saved["picture"]["png"] == "figures/claims.png"
    assert "| where | the paper says |" in (tmp_path / "out" / "claims.md").read_text()
    printed = capsys.readouterr().out
    ended = re.findall(r"^\[\d+/\d+\] \S+: .* left\)$", printed, flags=re.MULTILINE)
    assert len(ended) == len(plan.runs)  # a line a run, with the time left
    assert result.page.read_text().startswith("<!doctype html>")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*")}
    again = reproduce(tmp_path / "out", plan=plan, offline=True, progress=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*")} == before
    assert again.claims == result.claims


def test_a_line_tells_how_far_it_is_when_nothing_has_ended_for_long(tmp_path, monkeypatch, capsys):
    (run,) = [run for run in make_plan("laptop", ("fig2",)).runs if run.name == "lm-lr2-seed10"]
    run = replace(run, recipe=replace(run.recipe, steps=200))
    now = [0.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: now[0])
    with displays.Progress("training", run.cost, unit="share", interval=30.0) as progress:
        watch = watch_runs([run], tmp_path, 0.0, progress)
        watch()
        assert capsys.readouterr().out == ""
        now[0] = 31.0
        watch()
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "metrics.jsonl").write_text('{"split": "train", "step": 50}\n')
        now[0] = 62.0
        watch()
    assert re.fullmatch(
        r"training: 0 % starting, .* left\ntraining: 25 % lm-lr2-seed10 50/200, .* left\n",
        capsys.readouterr().out,
    )


@pytest.mark.slow
def test_every_trace_is_fitted_once_for_figures_claims_and_page(tmp_path, monkeypatch):
    plan = tiny_plan(tmp_path / "data", ("fig2", "fig8"))
    reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    fitted = []

    def counted(trace, **options):
        fitted.append(tuple(trace.column("grad_norm")))
        return fit_smoothness(trace, **options)

    for module in (run_folder, views):
        monkeypatch.setattr(module, "fit_smoothness", counted)
    reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    own = list((tmp_path / "out" / "runs").rglob("trace.jsonl"))
    assert len(own) == len(plan.runs)
    assert len(fitted) == len(set(fitted))  # those of the kept runs that are drawn, too
    assert {tuple(Trace.load(path).column("grad_norm")) for path in own} <= set(fitted)


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_rest_is_done(tmp_path):
    plan = tiny_plan(tmp_path / "data", ("fig6", "fig8"))
    (tmp_path / "out" / "runs" / "text" / "lm-lr2-seed10").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "text" / "lm-lr2-seed10" / "checkpoint.pt").write_bytes(b"precious")
    result = reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    assert [failure.split(":")[0] for failure in result.failures] == ["lm-lr2-seed10"]
    assert set(result.figures) == {"fig6", "fig8"}  # the seeds that are there
    there = tmp_path / "out" / "runs" / "text" / "lm-lr2-seed10"
    assert {path.name for path in there.iterdir()} <= {"checkpoint.pt", ".lock"}
    assert (there / "checkpoint.pt").read_bytes() == b"precious"
    trained = read_json(tmp_path / "out" / "claims.json")["notes"]
    assert trained[0] == "Trained here: scale laptop."


@pytest.mark.slow
def test_without_any_network_the_stand_ins_are_used_and_named(tmp_path, monkeypatch, capsys):
    """Nothing answers: no host, no registry, no cache, no folder of data."""
    print_notice_once.cache_clear()
    nowhere = "http://127.0.0.1:9"
    for name in ("CURVESTEP_DATA", "NO_PROXY", "no_proxy", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "npm_config_registry"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("PIP_INDEX_URL", f"{nowhere}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "cache"))
    sizes = {"embedding": 6, "hidden": 6, "batch_size": 4, "bptt": 5, "num_words": 400, "eval_size": 200}
    every_step = {"probe_every": 1, "probe_from": 0}
    plan = make_plan(
        "laptop",
        ("fig3", "fig6"),
        language=sizes | {"steps": 12, "eval_every": 0, "probe_every": 1},
        images={"num_images": 80, "batch_size": 8, "steps": 3, "eval_size": 20, **every_step},
    )
    result = reproduce(tmp_path / "out", plan=plan, workers=1)
    assert not result.failures
    assert set(result.figures) == {"fig3", "fig6"}
    assert result.data == (
        "stand-in for PTB: pydoc_data.topics of the standard library",
        "stand-in for CIFAR-10: the digits of scikit-learn, magnified to 3 x 32 x 32",
    )
    assert {path.name for path in (tmp_path / "out" / "runs").iterdir()} == {"topics", "digits"}
    assert (tmp_path / "out" / "claims.md").read_text().count("- Data: stand-in for") == 2
    shown = capsys.readouterr().err
    assert "these are not PTB results" in shown
    assert "these are not CIFAR-10 results" in shown


# Claims, on runs written by hand: the verdict must follow the numbers. -------------------------------------


def fake_runs(plan, folder, *, loss_of, diverged=(), every=1, coefficients=()):
    """Run folders with made-up losses: ``loss_of(setting, seed)`` gives one a step."""
    for planned in plan.runs:
        run = open_run(folder / "runs" / planned.name, planned.recipe, resume=False)
        lost = planned.setting in diverged
        values = [math.nan] * 3 if lost else loss_of(planned.setting, planned.recipe.seed)
        rows = [
            {"step": every * i, "split": "train", "loss": "NaN" if lost else float(v), "grad_norm": 1.0}
            for i, v in enumerate(values, 1)
        ]
        for row, value in zip(rows, itertools.chain(coefficients, itertools.repeat(1.0)), strict=False):
            row["coefficient"] = value
        if not lost:
            end = {"step": every * len(values), "loss": float(values[-1])}
            rows += [end | {"split": "valid"}, end | {"split": "test", "accuracy": 50.0}]
        (run.folder / METRICS).write_bytes(b"".join(map(dump_row, rows)))
        status = {
            "status": "diverged" if lost else "finished",
            "step": every * len(values),
            "data": "made up",
        }
        loss = final_loss(range(len(values)), values)
        rest = {"train_loss": loss, "message": "", "metrics": {}, "num_parameters": 1, "seconds": 1.0}
        write_json(run.folder / STATUS, status | rest)
