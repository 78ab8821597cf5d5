"""What is measured beside the probe, on a small AWD-LSTM with dropout."""

from dataclasses import replace

import pytest
import torch

from curvestep.tensors.vectors import global_norm
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.tasks import PIECE_WORDS, make_task
from curvestep_reproduction.training.controls import AUTHORS, WITHOUT_DROPOUT
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import TrainedRun
from reproduction.tests.small import assert_same_rows, interrupt_at, write_text


@pytest.fixture
def recipe(tmp_path):
    small = {
        "corpus": write_text(tmp_path / "text.txt"), "embedding": 8, "hidden": 10, "batch_size": 4, "bptt": 6,
        "steps": 12, "probe_pieces": 3, "precision": "64-true", "lr": 1.0,
    }  # fmt: skip
    return get_recipe("ptb-awd-lstm", "epoch", **small)


def test_stacked_pieces_have_the_mean_gradient_of_the_pieces_one_by_one(recipe):
    task = make_task(recipe)
    model = task.build().double().eval()  # without dropout the masks cannot differ
    pieces = task.stacked_pieces(3)
    assert {part.shape for part in pieces} == {(PIECE_WORDS, 3 * recipe.batch_size)}
    task.loss_of_pieces(model, pieces).backward()
    stacked = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for columns in torch.arange(3 * recipe.batch_size).chunk(3):
        (task.loss_of_pieces(model, tuple(part[:, columns] for part in pieces)) / 3).backward()
    for p, expected in zip(model.parameters(), stacked, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_stacked_pieces_stand_in_the_text_after_the_words_before_them(recipe):
    task = make_task(recipe)
    before, words, following = task.stacked_pieces(3)
    torch.testing.assert_close(words[1:], following[:-1])
    for column in range(words.shape[1]):
        stream = task.streams[:, column % recipe.batch_size]
        window = torch.cat([before[:, column], words[:, column], following[-1:, column]])
        assert any(torch.equal(part, window) for part in stream.unfold(0, len(window), 1))


@pytest.mark.slow
def test_the_run_is_the_run_without_what_is_measured_beside_it(recipe, tmp_path):
    fields = {"spectral_every": 2, "authors_at": (0.0, 0.5)}
    for name, one in {"plain": replace(recipe, probe_every=0), "all": replace(recipe, **fields)}.items():
        train(one, tmp_path / name, progress=False)
    plain, everything = TrainedRun.load(tmp_path / "plain"), TrainedRun.load(tmp_path / "all")
    for split in ("train", "valid", "test"):
        assert plain.rows(split) == everything.rows(split)
    assert [row["step"] for row in everything.rows(WITHOUT_DROPOUT)] == [0, 5, 10]
    assert [row["step"] for row in everything.rows(AUTHORS)] == [0, 5]
    trace = everything.trace
    assert len(trace.column("secants")[0]) == 4
    assert [value > 0 for value in trace.column("spectral_smoothness")[[0, 2]]] == [True, True]


@pytest.mark.slow
def test_gradient_norm_without_dropout_is_of_the_evaluation_mode(recipe, tmp_path):
    train(recipe, tmp_path / "run", progress=False)
    row = TrainedRun.load(tmp_path / "run").rows(WITHOUT_DROPOUT)[0]
    task = make_task(recipe)
    torch.set_default_dtype(torch.float64)
    model = task.build().eval()
    loss = task.loss_of_pieces(model, task.stacked_pieces(3))
    loss.backward()
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["grad_norm"] == pytest.approx(float(global_norm(p.grad for p in model.parameters())), rel=1e-6)


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_rows(recipe, tmp_path):
    train(recipe, tmp_path / "whole", progress=False)
    interrupt_at(6, recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert_same_rows(tmp_path / "cut", tmp_path / "whole")
