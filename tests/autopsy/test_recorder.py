"""The recorder of the last steps: it changes nothing, and refuses what it cannot explain."""

import re

import pytest
import torch
from torch import nn

import curvestep as cs
from tests.autopsy.runs import NUM_STEPS, Run, adamw, clipped_adamw, clipped_sgd, hooked_sgd, sgd


@pytest.mark.parametrize("make", [adamw, clipped_adamw, clipped_sgd, hooked_sgd])
def test_watched_and_explained_run_is_the_run_without_bit_for_bit(make):
    ends = []
    for watched in (False, True):
        run = Run(make, watched=watched)
        for k in range(24):
            run.step()
            if watched and k in (9, 20):
                run.spikes.explain()
        stats = dict(run.optimizer.clip_stats()) if hasattr(run.optimizer, "clip_stats") else {}
        ends.append((run.state(), stats))
    (plain, plain_stats), (explained, explained_stats) = ends
    assert all(torch.equal(a, b) for a, b in zip(plain, explained, strict=True))
    assert plain_stats == explained_stats


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_refusals_take_one_line():
    run = Run(sgd).steps(30)
    refused = [
        (TypeError, "holds a generator", lambda: run.record(x for x in range(3))),
        (TypeError, "must be a function", lambda: cs.Autopsy(run.model, None)),
        (ValueError, "`keep`", lambda: cs.Autopsy(run.model, run.loss, keep=2)),
        (ValueError, "`step` 3 is not kept", lambda: run.spikes.explain(3)),
        (ValueError, "`step` 30 is not kept", lambda: run.spikes.explain(30)),
        (RuntimeError, "2 steps are kept, too few", lambda: Run(sgd).steps(2).spikes.explain()),
        (RuntimeError, "Call `watch", lambda: Run(sgd, watched=False).spikes.record(run.batch())),
        (ValueError, "watches one already", lambda: run.spikes.watch(run.optimizer)),
        (ValueError, "of `model` alone", lambda: cs.Autopsy(nn.Linear(2, 2), abs).watch(run.optimizer)),
        (TypeError, "TorchScript", lambda: cs.Autopsy(torch.jit.script(nn.Linear(2, 2)), abs)),
        (TypeError, "TorchScript", lambda: cs.Autopsy(nn.Sequential(torch.jit.script(nn.Tanh())), abs)),
    ]
    for kind, words, call in refused:
        with pytest.raises(kind, match=re.escape(words)) as error:
            call()
        assert "\n" not in str(error.value)


def test_step_without_record_is_refused():
    run = Run(sgd).steps()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"without `record"):
        run.spikes.explain()


def test_closed_recorder_keeps_nothing_more_and_still_explains():
    run = Run(sgd).steps()
    run.spikes.close()
    assert run.spikes.explain().step < NUM_STEPS
    run.optimizer.step()
    assert run.spikes.step == NUM_STEPS
