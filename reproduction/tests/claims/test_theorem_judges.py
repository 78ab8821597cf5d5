"""The theorems as printed, on random functions: which hold on each, and what is found of a false one."""

from dataclasses import replace
from functools import partial

import pytest

from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep_reproduction.claims import theorem_judges
from curvestep_reproduction.claims.claims import NOT_REPRODUCED, REPRODUCED


@pytest.mark.parametrize(
    ("theorem", "verdict"),
    [
        (theorem_judges.LEMMA_2, REPRODUCED),
        (theorem_judges.THEOREM_3, REPRODUCED),
        (theorem_judges.THEOREM_4, NOT_REPRODUCED),
        (theorem_judges.THEOREM_6, REPRODUCED),
        (theorem_judges.THEOREM_7, NOT_REPRODUCED),
        (theorem_judges.THEOREM_8, REPRODUCED),
    ],
)
def test_theorems_hold_as_printed_or_corrected(theorem, verdict):
    found = theorem_judges.evidence(theorem)
    assert found.verdict == verdict
    everywhere = f"{theorem_judges.NUM_FUNCTIONS} of {theorem_judges.NUM_FUNCTIONS}"
    assert found.numbers.get("corrected", everywhere) == everywhere


def test_a_false_theorem_is_not_reproduced():
    def hasty(**numbers):
        true = theorem3(**numbers)
        return replace(true, bound=true.bound / 1000)

    draw = partial(theorem_judges.without_noise, theorem=hasty)
    found = theorem_judges.evidence(theorem_judges.Theorem(draw, "random walls"))
    assert found.verdict == NOT_REPRODUCED
    assert found.numbers["where it first fails"]
