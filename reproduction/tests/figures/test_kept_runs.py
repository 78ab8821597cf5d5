"""Runs of the larger scales that come with the package: packed, unpacked, drawn, and named where lost."""

import json
import math
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from curvestep.trace.run import METRICS, STATUS, TRACE, read_json, write_json
from curvestep_reproduction.archives import KEPT, UNFINISHED, pack_runs, runs_below
from curvestep_reproduction.claims.claims import NOT_TESTED
from curvestep_reproduction.claims.statements import make_claims
from curvestep_reproduction.figures import reproduction
from curvestep_reproduction.figures.legend import BY_HAND, CLIPPED_IMAGES, MOMENTUM, length_words
from curvestep_reproduction.figures.plan import PAPER_SIZE, load_kept
from curvestep_reproduction.figures.reproduction import draw_kept, make_plan, reproduce
from curvestep_reproduction.recipes import SCALES
from curvestep_reproduction.training.run_folder import CHECKPOINT
from reproduction.tests.claims.test_statements import write_trace
from reproduction.tests.figures.test_reproduction import fake_runs

COMMIT = "0123456"


def leave_runs(folder, *names, steps=684, rows=60):
    """What some runs of the scale ``epoch`` might leave, each with its checkpoint."""
    plan = make_plan("epoch", ("fig1", "fig2", "fig5"))
    chosen = tuple(run for run in plan.runs if run.name in names)
    fake_runs(replace(plan, runs=chosen), folder, loss_of=lambda setting, seed: np.linspace(9, 6, steps))
    for run in chosen:
        there = folder / "runs" / run.name
        fractions = run.recipe.fractions
        write_trace(there / "trace.jsonl", 1.0, seed=run.recipe.seed, rows=rows, fractions=fractions)
        (there / CHECKPOINT).write_bytes(b"heavy")
    return folder / "runs"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A package that has two of the nine runs, on one seed."""
    runs = leave_runs(tmp_path / "out", f"{BY_HAND}-seed1", "lm-lr2-seed1")
    monkeypatch.setattr(reproduction, "KEPT", tmp_path / "kept")
    assert pack_runs(runs_below(runs), tmp_path / "kept" / "epoch", commit=COMMIT) == [
        "lm-lr2-seed1",
        f"{BY_HAND}-seed1",
    ]
    return tmp_path / "kept"


def load(kept, tmp_path):
    return load_kept(make_plan("epoch", ("fig1", "fig2", "fig5")), kept / "epoch", tmp_path / "there")


def test_a_run_is_kept_without_its_checkpoint_in_the_same_bytes_each_time(kept, tmp_path):
    archive = kept / "epoch" / "lm-lr2-seed1.tar.xz"
    with tarfile.open(archive) as packed:
        assert {name.split("/")[1] for name in packed.getnames()} == {
            "config.json", "status.json", "metrics.jsonl", "trace.jsonl", "origin.json",
        }  # fmt: skip
    before = archive.read_bytes()
    pack_runs(runs_below(tmp_path / "out"), kept / "epoch", commit=COMMIT)
    assert archive.read_bytes() == before


def cut_short(run, *, rows):
    """Leave a run as one that is still training: some rows, half a line more, an older status."""
    metrics = run / METRICS
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:rows]) + lines[rows][:20])
    write_json(
        run / STATUS, read_json(run / STATUS) | {"status": "running", "step": 10, "train_loss": math.nan}
    )


def test_a_run_that_has_not_ended_is_kept_on_request_only(tmp_path):
    runs = leave_runs(tmp_path / "out", f"{BY_HAND}-seed1")
    cut_short(runs / f"{BY_HAND}-seed1", rows=342)
    assert pack_runs(runs_below(runs), tmp_path / "kept" / "epoch", commit=COMMIT) == []
    packed = pack_runs(runs_below(runs), tmp_path / "kept" / "epoch", commit=COMMIT, unended=True)
    assert packed == [f"{BY_HAND}-seed1"]
    found = load(tmp_path / "kept", tmp_path)
    (run,) = found.results.runs
    assert (found.damaged, len(run.metrics), length_words(run)) == ((), 342, "342 of about 686 steps")
    claims = {claim.name: claim for claim in make_claims(found.results)}
    assert claims["follows-gradient"].verdict == NOT_TESTED


def test_resnet20_is_drawn_as_far_as_it_came_and_says_so(tmp_path, monkeypatch):
    plan = make_plan("paper", ("fig3", "fig4"))
    chosen = tuple(run for run in plan.runs if run.setting in (MOMENTUM, CLIPPED_IMAGES))
    losses = lambda setting, seed: np.linspace(2.3, 0.5, 790)  # noqa: E731
    fake_runs(replace(plan, runs=chosen), tmp_path, loss_of=losses, every=10)
    for run, rows in zip(chosen, (780, 390), strict=True):
        there = tmp_path / "runs" / run.name
        write_trace(there / TRACE, 1.0, seed=0, rows=40)
        cut_short(there, rows=rows)
    monkeypatch.setattr(reproduction, "KEPT", tmp_path / "kept")
    pack_runs(runs_below(tmp_path / "runs"), tmp_path / "kept" / "paper", commit=COMMIT, unended=True)
    drawn = draw_kept({"fig3", "fig4"}, tmp_path / "page", progress=False)
    assert [entry["name"] for entry in drawn.entries] == ["fig3_paper", "fig4_paper"]
    assert drawn.failures == ["no run of the scale epoch is kept for fig4"]
    words = "ResNet20, 20 of 200 epochs and 10 of 200 epochs, seed 0. Not run yet: "
    assert f"{words}lr 1, no clip, lr drops." in drawn.entries[0]["caption"]
    assert words in drawn.entries[1]["caption"]
    assert "AWD-LSTM 400/1150" in drawn.entries[1]["caption"]
    scatter, curves = ((tmp_path / "page" / entry["svg"]).read_text() for entry in drawn.entries)
    assert "(b)" not in scatter
    assert "of 200 epochs)" in scatter
    assert "(c) training loss" in curves
    assert "(d)" not in curves  # two accuracies
    assert "test accuracy (%)" in curves
    assert "mean of 390 steps" in curves


def test_figures_show_the_settings_that_are_there_with_the_papers_letters(kept, tmp_path):
    drawn = draw_kept({"fig1", "fig2", "fig5", "fig6"}, tmp_path / "page", progress=False)
    assert [(entry["figure"], entry["name"]) for entry in drawn.entries] == [
        (name, f"{name}_epoch") for name in ("fig1", "fig2", "fig5")
    ]
    assert drawn.failures == ["no run of the scale epoch is kept for fig6"]
    by_name = {entry["name"]: entry for entry in drawn.entries}
    for entry in drawn.entries:
        assert entry["title"].endswith("(paper's size, kept runs)")
        assert "AWD-LSTM 400/1150, 684 steps, seed 1." in entry["caption"]
        assert f"2 of 12 runs, made by {COMMIT}" in entry["caption"]
        assert "`curvestep reproduce --scale epoch` trains it anew" in entry["caption"]
        assert (tmp_path / "page" / entry["png"]).read_bytes().startswith(b"\x89PNG")
    assert "seed 1. Not run yet: lr 2, clip 0.25. 2 of 12 runs" in by_name["fig2_epoch"]["caption"]
    assert "Not run yet" not in by_name["fig1_epoch"]["caption"]
    text = (tmp_path / "page" / by_name["fig2_epoch"]["svg"]).read_text()
    assert "(a) lr 30, clip 0.25" in text
    assert "(b) lr 2, no clip" in text
    assert "(c)" not in text


@pytest.mark.parametrize("harm", ["cut", "emptied", "missing", "rows lost"])
def test_a_missing_or_damaged_kept_run_is_named_and_the_rest_drawn(kept, tmp_path, harm):
    archive = kept / "epoch" / "lm-lr2-seed1.tar.xz"
    if harm == "cut":
        archive.write_bytes(archive.read_bytes()[:-200])
    elif harm == "emptied":
        archive.write_bytes(b"")
    elif harm == "missing":
        archive.unlink()
    else:
        metrics = tmp_path / "out" / "runs" / "lm-lr2-seed1" / "metrics.jsonl"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:100]))
        pack_runs(runs_below(tmp_path / "out"), kept / "epoch", commit=COMMIT)
    drawn = draw_kept({"fig2"}, tmp_path / "page", progress=False)
    assert [entry["name"] for entry in drawn.entries] == ["fig2_epoch"]
    assert "Not run yet: lr 2, no clip; lr 2, clip 0.25." in drawn.entries[0]["caption"]
    if harm == "missing":
        assert drawn.failures == []
    else:
        assert [line.partition(" is damaged: ")[0] for line in drawn.failures] in (
            ["lm-lr2-seed1.tar.xz"],
            ["lm-lr2-seed1"],
        )


def test_without_any_kept_run_one_line_names_the_figures(kept, tmp_path):
    shutil.rmtree(kept)
    drawn = draw_kept({"fig1", "fig2"}, tmp_path / "page", progress=False)
    assert (drawn.entries, drawn.failures) == ([], ["no run of the scale epoch is kept for fig1, fig2"])


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_damaged_claims_of_the_package_are_one_line_and_the_rest_is_done(tmp_path, monkeypatch, harm):
    path = tmp_path / "claims.json"
    if harm == "cut":
        path.write_text('{"longer": [')
    monkeypatch.setattr(reproduction, "KEPT_CLAIMS", path)
    plan = replace(make_plan("laptop", ("fig1",)), runs=(), figures=())
    result = reproduce(tmp_path / "out", plan=plan, offline=True, progress=False)
    (line,) = result.failures
    assert line.startswith("claims of the larger scales: ")
    assert "\n" not in line
    assert next(claim.name for claim in result.claims) == "normalizing-is-clipping"
    assert result.page.exists()


def test_a_part_of_the_seeds_decides_nothing_and_names_the_rest(kept, tmp_path):
    claims = {claim.name: claim for claim in make_claims(load(kept, tmp_path).results)}
    mine = claims["follows-gradient"]
    assert mine.verdict == NOT_TESTED
    assert mine.note.endswith(f"--only {BY_HAND}-seed0 {BY_HAND}-seed2`")


def test_the_kept_runs_of_the_package_can_be_read_and_stay_small(tmp_path):
    scales = {path.name for path in KEPT.iterdir() if path.is_dir() and path != UNFINISHED}
    assert scales <= set(PAPER_SIZE)
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 11e6
    for scale in scales:
        found = load_kept(make_plan(scale), KEPT / scale, tmp_path / scale)
        assert found.damaged == ()
        assert found.results.runs
    assert scales <= set(json.loads((KEPT / "claims.json").read_text())) <= set(SCALES)
