"""The rule of the verdicts, the choice among scales, and the tables."""

import json
import math

import pytest

from curvestep.lab.paper.verdicts.claims import (
    ADDITION,
    HOLDS,
    IN_PART,
    NOT_REPRODUCED,
    NOT_TESTED,
    OPEN,
    PAPER,
    REPRODUCED,
    Claim,
    Spread,
    as_markdown,
    decide,
    decided,
    tally,
    write_claims,
)

ABOVE, BELOW, ACROSS = (
    Spread(values=values) for values in ((1.0, 1.1, 0.9), (-1.0, -1.1, -0.9), (1.0, -1.1, 0.9))
)


def claim(verdict, *, name="one", kind=PAPER, scale="laptop", paper="It grows.", sentence="It is 2."):
    about = {"name": name, "kind": kind, "source": "Figure 2", "paper": paper, "scale": scale}
    return Claim(verdict=verdict, sentence=sentence, numbers={"exponent": "2 [1, 3]"}, **about)


@pytest.mark.parametrize(
    ("plain", "strong", "verdict"),
    [
        (ABOVE, (), REPRODUCED),
        (ABOVE, (ABOVE,), REPRODUCED),
        (ABOVE, (ACROSS,), IN_PART),
        (ABOVE, (BELOW,), IN_PART),
        (ACROSS, (), OPEN),
        (ACROSS, (ABOVE,), OPEN),
        (ACROSS, (BELOW,), NOT_REPRODUCED),
        (BELOW, (), NOT_REPRODUCED),
        (Spread(values=(5.0,)), (), OPEN),
        (Spread(values=(5.0, math.inf)), (), OPEN),
    ],
)
def test_a_verdict_is_where_the_intervals_lie(plain, strong, verdict):
    assert decide(plain, *strong, at_size=True) == verdict
    small = OPEN if verdict == NOT_REPRODUCED else verdict
    assert decide(plain, *strong, at_size=False) == small


def test_a_spread_of_one_seed_promises_nothing():
    assert Spread(values=(1.0,)).interval == (-math.inf, math.inf)


def test_a_spread_with_an_infinite_value_has_no_interval():
    spread = Spread(values=(1.0, math.inf, 2.0))
    assert spread.mean == math.inf
    assert all(math.isnan(end) for end in spread.interval)
    assert str(spread) == "undefined"


def test_a_negative_factor_swaps_the_doubt():
    turned = Spread(values=(1.0, 3.0), doubt=(0.1, 0.4)).times(-2.0)
    assert (turned.values, turned.doubt) == ((-2.0, -6.0), (0.8, 0.2))


def test_the_largest_scale_that_tested_a_claim_decides_it():
    laptop = [claim(OPEN), claim(REPRODUCED, name="two")]
    longer = [claim(REPRODUCED, scale="longer"), claim(NOT_TESTED, name="two", scale="longer")]
    rows = decided({"laptop": laptop, "longer": longer})
    assert [(row.verdict, row.scale) for row in rows] == [(REPRODUCED, "longer"), (REPRODUCED, "laptop")]
    assert rows[0].beside == {"laptop": "open: It is 2."}


def test_only_the_papers_claims_are_counted():
    rows = [claim(REPRODUCED), claim(REPRODUCED), claim(IN_PART), claim(OPEN), claim(HOLDS, kind=ADDITION)]
    assert tally(rows) == "Of the 4 claims of the paper 2 are reproduced, 1 holds in part, 1 is open."
    assert tally([claim(IN_PART)] * 2) == "Of the 2 claims of the paper 2 hold in part."


def test_the_table_keeps_its_columns_whatever_the_words_and_links_to_the_numbers():
    text = as_markdown([claim(REPRODUCED, paper="a | b", sentence="|f'| is 2.")], data=["made up"])
    (line,) = (line for line in text.splitlines() if line.startswith("| Figure 2"))
    assert line.replace("\\|", "").count("|") == 7
    assert "a \\| b" in line
    assert "[numbers](#one)" in line
    assert '<a id="one"></a>' in text
    assert "- exponent: 2 [1, 3]" in text


def test_what_is_written_can_be_read_back(tmp_path):
    rows = [claim(REPRODUCED), claim(HOLDS, name="b", kind=ADDITION)]
    write_claims(rows, tmp_path, data=["made up"])
    kept = json.loads((tmp_path / "claims.json").read_text())
    assert [Claim(**row) for row in kept["claims"]] == rows
    assert kept["found"] == tally(rows)
