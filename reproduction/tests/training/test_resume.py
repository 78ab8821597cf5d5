"""A run that is killed again and again ends as if nothing had happened."""

import random
import signal
from dataclasses import replace
from unittest import mock

import pytest
import torch
from tests.processes import CONTEXT

from curvestep_reproduction.data.corpus import load_corpus
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.session import load_checkpoint
from reproduction.tests.small import assert_same_rows, interrupt_at, small_language


def _train(recipe, folder, kill_after=None, delay=0.0):
    """Train; after the row of one step and so many seconds of work, wherever it then is, the process dies."""
    torch.set_num_threads(1)

    def update(progress, step, **numbers):
        if kill_after is not None and step >= kill_after and signal.getitimer(signal.ITIMER_PROF)[0] == 0:
            signal.setitimer(signal.ITIMER_PROF, delay)

    with mock.patch("curvestep_reproduction.progress.Progress.update", update):
        train(recipe, folder, resume=True, progress=False, checkpoint_seconds=0.02)


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_bit_for_bit_like_one_never_killed(tmp_path):
    recipe = small_language(tmp_path, steps=400, dropout=0.3, momentum=0.5, eval_every=50, probe_every=5)
    train(recipe, tmp_path / "whole", progress=False)
    killed, moments = tmp_path / "killed", random.Random(7)
    for kill in range(10):
        after, delay = kill * 35 + moments.randrange(35), 1e-6 + moments.random() * 0.02
        child = CONTEXT.Process(target=_train, args=(recipe, killed, after, delay))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGPROF  # at once: nothing is tidied up
    child = CONTEXT.Process(target=_train, args=(recipe, killed))
    child.start()
    child.join()
    assert child.exitcode == 0

    assert_same_rows(killed, tmp_path / "whole")
    one, other = (load_checkpoint(folder / "checkpoint.pt") for folder in (killed, tmp_path / "whole"))
    _assert_identical(one, other)


def _assert_identical(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_identical(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_identical(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_run_is_not_resumed_on_other_data(tmp_path, monkeypatch):
    recipe = small_language(tmp_path, probe_every=0)
    interrupt_at(6, recipe, tmp_path / "run")
    stand_in = replace(load_corpus(recipe.corpus), name="topics")
    monkeypatch.setattr("curvestep_reproduction.tasks.load_corpus", lambda *_, **__: stand_in)
    with pytest.raises(ValueError, match=r"text\.txt.*topics"):
        train(recipe, tmp_path / "run", resume=True, progress=False)
