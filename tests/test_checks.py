"""Argument checks: what each accepts comes back, the rest is one line with the name and the value."""

import math

import numpy as np
import pytest
import torch

from curvestep.checks import check_choice, check_count, check_finite, check_nonnegative, check_positive

POSITIVE = (1e-300, 3, np.float32(0.5), torch.tensor(2.0), 10**400)
NO_NUMBERS = ("1", b"1", None, True, 1j, [1.0])


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_positive, POSITIVE, (0, 0.0, -1.0, math.inf, math.nan, torch.tensor(0.0))),
        (check_nonnegative, (*POSITIVE, 0, 0.0), (-1e-9, math.inf, math.nan)),
        (check_finite, (-1, 0.0, 2.5), (math.inf, -math.inf, math.nan)),
        (check_count, (1, np.int64(7), torch.tensor(3), 10**400), (0, -1, 2.0, 2.5, math.nan)),
    ],
)
def test_numbers_are_accepted_or_named(check, good, bad):
    for value in good:
        assert check("lr", value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"`lr` must be .*, got"):
            check("lr", value)
    for value in NO_NUMBERS:
        with pytest.raises(TypeError, match=r"`lr` must be .*, got"):
            check("lr", value)


def test_a_count_is_an_int_of_at_least_so_many():
    assert type(check_count("steps", np.int64(7))) is int
    assert check_count("steps", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"`steps`.* 3, got 2"):
        check_count("steps", 2, least=3)


def test_a_choice_lists_the_others():
    assert check_choice("law", "ball", ("ball", "sphere")) == "ball"
    with pytest.raises(ValueError, match="`law` must be one of 'ball', 'sphere', got 'cube'"):
        check_choice("law", "cube", ("ball", "sphere"))
