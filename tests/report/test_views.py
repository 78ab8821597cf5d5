"""Runs as a page shows them: their names, settings, tasks, and what is wrong with their files."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from curvestep import SmoothnessProbe
from curvestep.calibration.result import CALIBRATION
from curvestep.report.views import find_views, seeds_by_setting, tasks_of
from curvestep.trace.schema import NONFINITE
from curvestep.trace.trace import Trace
from tests.report.pages import make_run


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("trace.jsonl", '{"step": 999, "lo', "skipped line"),
        (CALIBRATION, '{"lr": 1}', "not a calibration of"),
    ],
)
def test_a_damaged_file_is_a_note_and_not_the_end(tmp_path, file, content, words):
    folder = make_run(tmp_path / "run", steps=60)
    with (folder / file).open("a") as opened:
        opened.write(content)
    (view,) = find_views([folder])
    assert [note.kind for note in view.notes if words in note.text] == ["damaged"]
    assert view.calibration is None


def test_a_trace_that_ends_in_nan_is_marked_as_diverged(tmp_path):
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.append({"step": 0, "loss": 1.0, "grad_norm": 2.0, "smoothness": 1990.0, "lr": 1.0})
        trace.append({"step": 1, "loss": math.nan, "status": NONFINITE})
    (view,) = find_views([tmp_path])
    assert (view.status, view.ending, view.step) == ("diverged", "diverged", 1)


def test_runs_are_listed_by_number_and_a_lone_trace_by_its_folder(tmp_path):
    for number in (10, 2, 1):
        make_run(tmp_path / f"run{number}", steps=20)
    assert [view.name for view in find_views([tmp_path])] == ["run1", "run2", "run10"]
    assert [view.name for view in find_views([tmp_path / "run2" / "trace.jsonl"])] == ["run2"]


def test_fit_and_advice_do_not_warn_twice_of_the_same(folder):
    (view,) = find_views([folder])
    advice = replace(view.advice, warnings=view.fit.warnings)
    assert replace(view, advice=advice).warnings == tuple(str(note) for note in view.fit.warnings)


def test_the_best_setting_is_that_with_the_lowest_mean_of_its_seeds(views):
    fields = [{**views[0].fields, "lr": lr, "seed": seed} for lr in (1.0, 2.0) for seed in (0, 1)]
    losses = (1.0, 4.0, 2.0, 2.1)
    runs = [
        replace(views[0], fields=own, setting=f"lr {own['lr']}", final_loss=loss, trace=None, task="one")
        for own, loss in zip(fields, losses, strict=True)
    ]
    assert [run.final_loss for run in tasks_of(runs)[0].runs] == [2.0, 2.1, 1.0, 4.0]
    lost = [replace(run, status="diverged") if run.final_loss == 2.1 else run for run in runs]
    assert [run.final_loss for run in tasks_of(lost)[0].runs] == [1.0, 4.0, 2.0, 2.1]


def test_traces_of_ones_own_are_named_by_lr_and_threshold(views):
    own = [replace(views[0], fields={}, setting="lr 0.3, clip 0.5", name=name) for name in "ab"]
    assert list(seeds_by_setting(own[:1])) == ["lr 0.3, clip 0.5"]
    assert list(seeds_by_setting(own)) == ["lr 0.3, clip 0.5, run a", "lr 0.3, clip 0.5, run b"]


def test_runs_of_other_lengths_are_settings_of_their_own(views):
    short = replace(views[0], fields={**views[0].fields, "steps": 7, "probe_every": 3})
    found = seeds_by_setting([*views, short])
    steps = views[0].fields["steps"]
    names = f"lr 0.3, clip 0.5, steps {steps}", "lr 0.3, clip 0.5, steps 7"
    assert {name: len(runs) for name, runs in found.items()} == {names[0]: 2, "lr 3, no clip": 1, names[1]: 1}
    dropped = [replace(views[0], fields={**views[0].fields, "lr_drops": at}) for at in ([0.5], [0.5, 0.75])]
    names = ("lr 0.3, clip 0.5, lr drops 0.5", "lr 0.3, clip 0.5, lr drops 0.5+0.75")
    assert tuple(seeds_by_setting(dropped)) == names


def test_a_run_in_its_warm_up_is_named_by_the_peak_that_is_planned(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 20))
    probe = SmoothnessProbe(model, trace=tmp_path / "trace.jsonl", every=2).watch(optimizer)
    for _ in range(6):
        x = torch.randn(8, 3)
        probe.record(lambda x=x: model(x).square().mean()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    (view,) = find_views([tmp_path / "trace.jsonl"])
    assert view.setting == "lr 0.03, no clip"
