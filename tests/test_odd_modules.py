"""Modules with odd state: the probe, calibrate and the autopsy leave the same bits, or refuse."""

import warnings

import pytest
import torch
from benchmarks import odd_modules

TEN = [
    "momentum_encoder",
    "large_frozen_parameter_changed_by_data",
    "weights_set_up_by_the_first_batch",
    "batchnorm",
    "carried_lstm_state",
    "kinds_of_dict",
    "numpy_array",
    "object_with_slots_that_shows_late",
    "global_number_that_never_shows",
    "iterator_that_shows_late",
]


@pytest.fixture(autouse=True)
def _in_float32_without_warnings():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_measuring_a_module_with_odd_state_changes_nothing(name):
    answers = odd_modules.table([name], ["SGD"], odd_modules.MODES, show=lambda _: None)
    assert len(answers) == len(odd_modules.MODES)
    assert not {key: words for key, words in answers.items() if "DIFFERENT" in words}


def test_at_least_fifty_modules_are_tried():
    assert len(odd_modules.MODULES) >= 50


def test_a_changed_run_is_told_from_an_unchanged_one():
    sgd, adamw = odd_modules.OPTIMIZERS["SGD"], odd_modules.OPTIMIZERS["AdamW"]
    alone = odd_modules.run("batchnorm", sgd)
    assert odd_modules.same(alone.state, odd_modules.run("batchnorm", sgd).state)
    assert "parameters" in odd_modules.differences(alone.state, odd_modules.run("batchnorm", adamw).state)
