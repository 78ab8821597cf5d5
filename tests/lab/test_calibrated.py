"""A recipe takes the learning rate and threshold that are measured at its start."""

import math
import os

import pytest
import torch

pytest.importorskip("lightning_fabric")

from clipwise.lab.calibrated import calibrate_recipe
from clipwise.lab.recipes import get_recipe


def small(**overrides):
    options = {
        "corpus": "topics",
        "embedding": 8,
        "hidden": 12,
        "batch_size": 4,
        "bptt": 10,
        "precision": "64-true",
    }
    return get_recipe("ptb-lstm", **{**options, **overrides})


def test_recipe_gets_what_was_measured_and_nothing_else_changes():
    recipe = small()
    found, cal = calibrate_recipe(recipe, offline=True)
    assert (found.lr, found.max_norm) == (cal.lr, cal.max_norm)
    assert get_recipe("ptb-lstm").lr == recipe.lr
    changed = {k for k in vars(recipe) if getattr(recipe, k) != getattr(found, k)}
    assert changed == {"lr", "max_norm"}
    assert cal.num_gradients <= 40


def test_lr_and_max_norm_of_the_recipe_are_not_looked_at():
    one, _ = calibrate_recipe(small(lr=1e-3, max_norm=7.0), offline=True)
    two, _ = calibrate_recipe(small(lr=50.0, max_norm=math.inf), offline=True)
    assert one == two


def test_normalized_recipe_gets_an_offset_and_momentum_a_smaller_lr():
    clipped, _ = calibrate_recipe(small(), offline=True)
    normal, _ = calibrate_recipe(small(optimizer="normalized"), offline=True)
    heavy, _ = calibrate_recipe(small(momentum=0.9), offline=True)
    assert math.isclose(normal.offset, clipped.max_norm)
    assert math.isclose(normal.lr / normal.offset, clipped.lr)
    assert math.isclose(heavy.lr, 0.1 * clipped.lr)


def test_random_state_and_default_type_are_left_alone():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    calibrate_recipe(small(precision="32-true", dropout=0.3), offline=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CLIPWISE_DATA"), reason="needs Penn Treebank in CLIPWISE_DATA")
def test_laptop_ptb_recipe_gets_a_learning_rate_of_the_papers_order():
    recipe, cal = calibrate_recipe(get_recipe("ptb-lstm"), offline=True)
    # The paper sets 30 and 0.25 by hand.
    assert 8 < recipe.lr < 30
    assert 0.05 < recipe.max_norm < 0.5
    assert cal.num_gradients <= 40
