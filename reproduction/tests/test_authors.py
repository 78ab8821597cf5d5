"""The authors' estimate as benchmarks/authors.py writes it, beside ours, on a case solved by hand."""

import math
from pathlib import Path

from reproduction.benchmarks.authors import (
    AUTHORS,
    DIVIDED,
    SEEDS,
    STEPS,
    Estimate,
    cheapest,
    lstm_words,
    points_in_words,
    points_of,
    quadratic_points,
    read_rows,
    rows_of,
)

OURS = "curvestep, one row of the data"
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_ours_is_exact_on_the_quadratic_where_random_cuts_are_not():
    rows = rows_of((point, 1.0) for point in quadratic_points(quick=True, lr=0.1, max_norm=0.25))
    assert rows[OURS].errors[1] < 1e-4
    assert rows[DIVIDED].errors[0] > 1
    assert rows[AUTHORS].factor > 2 * rows[DIVIDED].factor
    assert rows[OURS].passes < rows[AUTHORS].passes / 100


def point(*values):
    names = (AUTHORS, DIVIDED, "curvestep, oracle of 1 piece", "curvestep, oracle of 2 pieces")
    found = zip(names, values, (100, 100, 2, 4), strict=True)
    return {name: Estimate(value=value, passes=n, seconds=float(n)) for name, value, n in found}, 1.0


def test_the_cheapest_of_ours_that_is_as_good_is_named():
    rows = rows_of(
        [point(5.0, 1.01, 1.005, 1.001), point(5.0, 1.01, 1.04, 1.002), point(5.0, 1.03, 1.0, 1.0)]
    )
    named = [cheapest(rows, n) for n in (0, 1)]
    assert named == ["curvestep, oracle of 1 piece", "curvestep, oracle of 2 pieces"]
    assert math.isclose(rows[DIVIDED].errors[0], 0.01, rel_tol=1e-9)
    unlucky = rows_of([point(5.0, 1.01, 1.0, 1.02)])  # the larger oracle is worse: the smaller one was lucky
    assert cheapest(unlucky, 1) is None


def test_the_page_is_made_of_the_kept_points():
    rows = read_rows(RESULTS / "authors.jsonl")
    page = (RESULTS / "authors.md").read_text(encoding="utf-8")
    assert f"{len(rows)} points of {len(SEEDS) * len(STEPS)} planned: {points_in_words(rows)}." in page
    assert lstm_words(rows_of(points_of(rows))) in page
    assert {(row["seed"], row["step"]) for row in rows} <= {(s, k) for s in SEEDS for k in STEPS}
