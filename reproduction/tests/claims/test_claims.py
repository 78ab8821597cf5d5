"""The rule of the verdicts, the choice among scales, and the tables."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from curvestep_reproduction.claims.claims import (
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
    summary,
    tally,
    write_claims,
)

ABOVE, BELOW, ACROSS = (
    Spread(values=values) for values in ((1.0, 1.1, 0.9), (-1.0, -1.1, -0.9), (1.0, -1.1, 0.9))
)


def claim(verdict, *, name="one", kind=PAPER, scale="laptop", paper="It grows.", sentence="It is 2."):
    about = {"name": name, "kind": kind, "source": "Figure 2", "paper": paper, "scale": scale}
    about["decides"] = "longer"
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
    assert decide(plain, *strong) == verdict


def test_a_spread_of_one_seed_promises_nothing():
    assert Spread(values=(1.0,)).interval == (-math.inf, math.inf)


@pytest.mark.parametrize(("value", "verdict"), [(0.7, REPRODUCED), (0.5, OPEN), (-0.7, NOT_REPRODUCED)])
def test_one_seed_decides_beyond_three_deviations_in_both_directions(value, verdict):
    assert decide(Spread(values=(value,), deviation=0.2)) == verdict


@pytest.mark.parametrize("count", [3, 10])
def test_so_many_seeds_as_are_said_to_decide_do(count):
    values = (0.3, 1.0, -0.1) * count
    needed = Spread(values=values).seeds_to_decide()
    rng = np.random.default_rng(0)
    more = rng.standard_normal(needed)
    more = (more - more.mean()) / more.std(ddof=1) * np.std(values, ddof=1) + np.mean(values)
    assert decide(Spread(values=tuple(more))) == REPRODUCED
    assert decide(Spread(values=tuple(more[: needed // 2]))) != NOT_REPRODUCED
    assert Spread(values=(0.01, -0.01, 0.0)).seeds_to_decide() == 0


def test_a_rule_without_effect_is_rarely_called_reproduced_or_not():
    rng = np.random.default_rng(1)
    verdicts = Counter(decide(Spread(values=tuple(row))) for row in rng.standard_normal((4000, 3)))
    assert verdicts[REPRODUCED] / 4000 == pytest.approx(0.05, abs=0.012)
    assert verdicts[NOT_REPRODUCED] / 4000 == pytest.approx(0.05, abs=0.012)


def test_a_spread_with_an_infinite_value_has_no_interval():
    spread = Spread(values=(1.0, math.inf, 2.0))
    assert spread.mean == math.inf
    assert all(math.isnan(end) for end in spread.interval)
    assert str(spread) == "undefined"


def test_a_negative_factor_swaps_the_doubt():
    turned = Spread(values=(1.0, 3.0), doubt=(0.1, 0.4)).times(-2.0)
    assert (turned.values, turned.doubt) == ((-2.0, -6.0), (0.8, 0.2))


def test_one_scale_decides_and_the_others_stand_beside_it():
    laptop = [claim(REPRODUCED), claim(REPRODUCED, name="two")]
    longer = [claim(OPEN, scale="longer"), claim(NOT_TESTED, name="two", scale="longer")]
    rows = decided({"laptop": laptop, "longer": longer})
    assert [(row.verdict, row.scale) for row in rows] == [(OPEN, "longer"), (NOT_TESTED, "longer")]
    assert rows[0].beside == {"laptop": "It is 2."}
    assert [row.verdict for row in decided({"laptop": laptop})] == [NOT_TESTED, NOT_TESTED]


def test_only_the_papers_claims_are_counted():
    rows = [claim(REPRODUCED), claim(REPRODUCED), claim(IN_PART), claim(OPEN), claim(HOLDS, kind=ADDITION)]
    assert tally(rows) == "Of the 4 claims of the paper 2 are reproduced, 1 holds in part, 1 is open."
    assert tally([claim(IN_PART)] * 2) == "Of the 2 claims of the paper 2 hold in part."


def test_the_table_keeps_its_columns_and_links_to_the_numbers():
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
    assert kept["found"] == summary(rows)
    assert tally(rows) in kept["found"]


def test_the_summary_counts_what_decides_and_gives_the_central_claims():
    rows = [claim(IN_PART, name="follows-gradient"), claim(OPEN, name="other"), claim(HOLDS, kind=ADDITION)]
    words = summary(rows)
    assert "What decides them: the paper's two-layer LSTM for one epoch (2)." in words
    assert "Figure 2, in part: It is 2." in words
    assert words.count("It is 2.") == 1


def test_the_summary_gives_the_nearest_scale_where_a_central_claim_is_not_tested():
    row = replace(
        claim(NOT_TESTED, name="follows-gradient"), beside={"laptop": "It is 3.", "longer": "It is 4."}
    )
    assert "At the scale longer: It is 4." in summary([row])
    assert "It is 3." not in summary([row])
