"""A recipe takes the learning rate and threshold that are measured at its start."""

import math
import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("lightning_fabric")

from curvestep.calibration.result import CALIBRATION, read_calibration, write_calibration
from curvestep.notes import Note
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.auto import calibrate_recipe, calibrate_run
from curvestep_reproduction.training.loop import train


def small(**overrides):
    options = {"corpus": "topics", "embedding": 8, "hidden": 12, "batch_size": 4, "bptt": 10}
    return get_recipe("ptb-lstm", **{**options, "precision": "64-true", **overrides})


@pytest.fixture(scope="module")
def measured():
    """The small recipe with its numbers, and how they were found."""
    return calibrate_recipe(small(), offline=True)


def test_recipe_gets_what_was_measured_and_nothing_else_changes(measured):
    recipe, (found, cal) = small(), measured
    assert (found.lr, found.max_norm) == (cal.lr, cal.max_norm)
    assert get_recipe("ptb-lstm").lr == recipe.lr
    changed = {k for k in vars(recipe) if getattr(recipe, k) != getattr(found, k)}
    assert changed == {"lr", "max_norm"}
    assert cal.num_gradients <= 700


def test_lr_and_max_norm_of_the_recipe_are_not_looked_at(measured):
    assert calibrate_recipe(small(lr=50.0, max_norm=math.inf), offline=True)[0] == measured[0]


def test_normalized_recipe_gets_an_offset_and_momentum_a_smaller_lr(measured):
    clipped, _ = measured
    normal, _ = calibrate_recipe(small(optimizer="normalized"), offline=True)
    heavy, _ = calibrate_recipe(small(momentum=0.9), offline=True)
    assert 0.1 < normal.lr / normal.offset / clipped.lr < 10
    assert 0.02 < heavy.lr / clipped.lr < 0.9


def test_random_state_and_default_type_are_left_alone():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    calibrate_recipe(small(precision="32-true", dropout=0.3), offline=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CURVESTEP_DATA"), reason="needs Penn Treebank in CURVESTEP_DATA")
def test_laptop_ptb_recipe_gets_a_learning_rate_of_the_papers_order():
    recipe, cal = calibrate_recipe(get_recipe("ptb-lstm"), offline=True)
    # The paper sets 30 and 0.25 by hand.
    assert 3 < recipe.lr < 100
    assert 0.05 < recipe.max_norm < 0.5
    assert cal.num_gradients <= 700


def test_only_the_named_fields_are_measured_and_kept_in_the_folder(tmp_path):
    recipe, cal = calibrate_run(small(max_norm=0.3), tmp_path / "run", ["lr"], offline=True)
    assert (recipe.lr, recipe.max_norm) == (cal.lr, 0.3)
    assert read_calibration(tmp_path / "run") == cal


def test_broken_trials_and_warnings_survive_the_file(tmp_path, measured):
    _, cal = measured
    broken = replace(cal.trials[0], gain=-math.inf)
    odd = replace(
        cal, trials=(broken, *cal.trials[1:]), max_norm=math.inf, warnings=(Note("edge", "beyond"),)
    )
    write_calibration(tmp_path, odd)
    assert read_calibration(tmp_path) == odd


def test_resumed_run_keeps_its_numbers_without_a_gradient(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    recipe, cal = calibrate_run(small(steps=3), folder, offline=True)
    assert (recipe.lr, recipe.max_norm) == (cal.lr, cal.max_norm)
    train(recipe, folder, progress=False, offline=True)
    with pytest.raises(ValueError, match="already holds a run"):
        calibrate_run(small(steps=3), folder, offline=True)

    def fail(*args, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr("curvestep_reproduction.training.auto.calibrate", fail)
    assert calibrate_run(small(steps=3), folder, resume=True, offline=True) == (recipe, cal)


def test_a_folder_may_lack_a_calibration_and_a_foreign_one_is_refused(tmp_path):
    assert read_calibration(tmp_path) is None
    (tmp_path / CALIBRATION).write_text("{}")
    with pytest.raises(ValueError, match=r"calibration\.json is not a calibration of this version"):
        read_calibration(tmp_path)


def test_an_older_calibration_has_its_trials_under_another_name(tmp_path, measured):
    _, cal = measured
    path = write_calibration(tmp_path, cal)
    path.write_text(path.read_text().replace('"trials"', '"arms"'))
    assert read_calibration(tmp_path) == cal


@pytest.mark.parametrize(
    ("optimizer", "given", "own"), [("clipped", "offset", "max_norm"), ("normalized", "max_norm", "offset")]
)
def test_threshold_of_the_other_rule_is_refused_by_name(tmp_path, optimizer, given, own):
    with pytest.raises(ValueError, match=f"'{optimizer}' has no `{given}`: auto measures `lr` and `{own}`"):
        calibrate_run(small(optimizer=optimizer), tmp_path / "run", ["lr", given], offline=True)
    assert not (tmp_path / "run").exists()
