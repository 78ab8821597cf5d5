"""The text of the page: verdict, code to copy, words that are explained, how a run ended."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.advice.advice import Advice
from curvestep.advice.decision import CANNOT_TELL
from curvestep.report import page_words
from curvestep.report.page_words import code_for, verdict
from curvestep.report.views import RunView, find_views, tasks_of
from tests.report.pages import make_run


def test_words_are_explained_once_a_text():
    assert page_words.with_glossary("sharpness and sharpness").count("<abbr") == 1
    assert page_words.with_glossary("unsharpness <i>") == "unsharpness &lt;i&gt;"


@pytest.mark.parametrize(
    ("optimizer", "max_norm", "code"),
    [
        ({"optimizer": "AdamW"}, 0.5,
         "opt = torch.optim.AdamW(model.parameters(), lr=0.01)\ncs.clip(opt, 0.5)"),
        ({"optimizer": "SGD", "momentum": 0.9}, math.inf,
         "opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"),
        ({"optimizer": "ClippedSGD"}, 0.5, "opt = cs.ClippedSGD(model.parameters(), lr=0.01, max_norm=0.5)"),
        ({"optimizer": "NormalizedSGD"}, 2.0,
         "opt = cs.NormalizedSGD(model.parameters(), lr=0.01, offset=2)"),
        ({"optimizer": "ClippedSGD"}, math.inf,
         "opt = cs.ClippedSGD(model.parameters(), lr=0.01, max_norm=float('inf'))"),
        ({}, 0.5, ""),
    ],
)  # fmt: skip
def test_the_code_to_copy_makes_the_optimizer_that_is_advised(optimizer, max_norm, code):
    advice = Advice(action="no sign", kind="no-sign", verdict="", lr=0.01, max_norm=max_norm)
    assert code_for(advice, RunView(name="", setting="", header=optimizer)) == code
    if code:
        made = {"model": nn.Linear(2, 2), "cs": cs, "torch": torch}
        exec(code, made)
        assert made["opt"].param_groups[0]["lr"] == 0.01
    without_lr = dataclasses.replace(advice, lr=None)
    assert code_for(without_lr, RunView(name="", setting="", header=optimizer)) == ""


def test_a_run_whose_trace_has_no_row_gets_no_advice(tmp_path):
    folder = make_run(tmp_path / "run", steps=60, every=1)
    header, *_ = (folder / "trace.jsonl").read_text().splitlines(keepends=True)
    (folder / "trace.jsonl").write_text(header)
    (task,) = tasks_of(find_views([folder]))
    assert task.advice.action == CANNOT_TELL
    assert verdict(task)["verdict"] == task.advice.verdict
    assert "action" not in verdict(task)


def test_a_tie_stands_where_the_page_says_how_sure_it_is(tmp_path):
    for lr in (0.3, 0.31):
        make_run(tmp_path / str(lr), lr=lr)
    (task,) = tasks_of(find_views([tmp_path]))
    (tie,) = [note.text for note in task.advice.reasons if note.kind == "tie"]
    assert verdict(task)["sure"].endswith(tie)
    assert tie not in verdict(task)["reasons"]


def test_a_run_is_counted_as_diverged_by_its_trace_too():
    advice = Advice(action="diverged", kind="rose-far", verdict="")
    assert page_words.subtitle([RunView(name="", setting="", advice=advice)] * 2) == "2 diverged"


def test_the_caption_of_the_edge_counts_the_steps_above_it():
    measured = dict.fromkeys(("lr", "grad_norm", "step_norm"), np.ones(4))
    measured |= {"smoothness": np.array([1.0, 3.0, 4.0, 6.0]), "step": np.arange(4.0)}
    view = RunView(name="run", setting="lr 1", measured=measured)
    numbers = re.findall(r"\d+(?:\.\d+)?", page_words.stability_margin(view))
    assert numbers == ["1.75", "0.5", "3", "75", "1", "2"]  # median, ends, share in per cent, above 1, of 2
