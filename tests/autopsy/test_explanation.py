"""The sentences of an explanation: few, short, and the answer first."""

import re

import pytest

from tests.autopsy.runs import NUM_STEPS, Run, scaled_block, scaled_lr, scaled_targets, sgd


@pytest.mark.parametrize("spoil", [scaled_lr, scaled_targets, scaled_block, Run.step])
def test_words_are_few(spoil):
    run = Run(sgd).steps()
    spoil(run)
    lines = str(run.explain_last()).splitlines()
    assert len(lines) <= 8
    assert lines[0].startswith(f"Step {NUM_STEPS}: ")
    for sentence in re.split(r"[.:]\s", " ".join(line for line in lines if not line.startswith(" "))):
        assert len(sentence.split()) <= 20


def test_step_that_is_no_spike_names_the_one_to_ask_for():
    run = Run(sgd).steps()
    scaled_block(run)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.steps(2)
    last = run.explain_last()
    assert (last.is_spike, last.largest) == (False, NUM_STEPS)
    assert f"Step {NUM_STEPS} " in str(last)
