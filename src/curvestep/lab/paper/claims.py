"""Claims of the paper: four verdicts, the rule that decides between them, and the table.

The rule, for a claim that says that something is positive, such as a difference of two settings:

1. Take it seed by seed, both settings with the same start and the same batches, and form the mean over the
   seeds with its 90 % interval (Student's t).
2. Where a control was subtracted that is itself known only within limits, widen the interval by those.
3. Supported if the interval lies above zero, contradicted if below, cannot tell if across. Not testable at
   this scale if the runs are missing.

What is compared in figures 2 and 3 is said in :mod:`curvestep.lab.paper.fig1_scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from curvestep.lab.run.folder import write_json

SUPPORTED, CONTRADICTED, CANNOT_TELL = "supported", "contradicted", "cannot tell"
NOT_TESTABLE = "not testable at this scale"
VERDICTS = (SUPPORTED, CONTRADICTED, CANNOT_TELL, NOT_TESTABLE)
CONFIDENCE = 0.9
MANY = 50  # more seeds than this are needed only where the mean lies next to what decides
CLAIMS_JSON, CLAIMS_TABLE = "claims.json", "claims.md"


class MissingRuns(ValueError):
    """A figure or a claim needs runs that are not there."""


class NotPlanned(MissingRuns):
    """The plan has no such runs at its scale: the picture or the claim is left out."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured for a claim, and what follows.

    Args:
        measured: The numbers, with intervals over the seeds: up to the first semicolon those that decide.
        verdict: One of ``VERDICTS``.
        settle: What would settle it, where it is not settled.
    """

    measured: str
    verdict: str
    settle: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim(Evidence):
    """One row of the table: what the paper says, and the evidence.

    Args:
        figure: Figure of the paper.
        paper: What the paper says.
        longer: The verdict of the longer runs on the same claim, where they have one.
    """

    figure: str
    paper: str
    longer: str = ""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean over seeds with its 90 % interval (Student's t), and the values.

    Args:
        values: One a seed.
        doubt: How much lower, and how much higher, all of them alike may be: the limits of a control that
            was subtracted. More seeds do not lessen it.
    """

    values: tuple[float, ...]
    doubt: tuple[float, float] = (0.0, 0.0)

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's t interval of the mean, widened by the doubt; unbounded for a single seed.

        Example:
            >>> low, high = Spread(values=(1.0, 2.0, 3.0)).interval
            >>> round(low, 3), round(high, 3)
            (0.314, 3.686)
            >>> low, high = Spread(values=(1.0, 2.0, 3.0), doubt=(0.3, 0.0)).interval
            >>> round(low, 3), round(high, 3)
            (0.014, 3.686)
        """
        count = len(self.values)
        if count < 2:
            return -math.inf, math.inf
        if not all(map(math.isfinite, self.values)):
            return math.nan, math.nan
        half = float(_half_width(float(np.std(self.values, ddof=1)), np.array(count)))
        return self.mean - half - self.doubt[0], self.mean + half + self.doubt[1]

    def __sub__(self, other: Spread) -> Spread:
        """Differences, seed by seed."""
        return Spread(
            values=tuple(a - b for a, b in zip(self.values, other.values, strict=True)),
            doubt=(self.doubt[0] + other.doubt[1], self.doubt[1] + other.doubt[0]),
        )

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "undefined"
        if len(self.values) == 1:
            return f"{self.mean:.3g} (one seed)"
        low, high = self.interval
        return f"{self.mean:.3g} [{low:.3g}, {high:.3g}]"


def decide(measured: str, *margins: Spread) -> Evidence:
    """The verdict on a claim that holds if every margin is positive.

    Supported if the interval of every margin lies above zero, contradicted if that of one lies below;
    between the two it cannot be told, and the evidence says how many seeds would tell, or that none would.

    Args:
        measured: The numbers in words.
        margins: Quantities that the claim says are positive, seed by seed.

    Example:
        >>> decide("", Spread(values=(1.0, 1.1, 0.9))).verdict
        'supported'
        >>> print(decide("", Spread(values=(1.0, 2.0, -0.5))).settle)
        about 9 seeds, if mean and spread stay
    """
    intervals = [margin.interval for margin in margins]
    if all(low > 0 for low, _ in intervals):
        return Evidence(measured=measured, verdict=SUPPORTED)
    if any(high < 0 for _, high in intervals):
        return Evidence(measured=measured, verdict=CONTRADICTED)
    unsure = [margin for margin, (low, _) in zip(margins, intervals, strict=True) if not low > 0]
    count = max(map(seeds_to_tell, unsure))
    settle = "more seeds, longer runs"
    if any(math.isnan(margin.mean) and len(margin.values) > 1 for margin in unsure):
        settle = "a control that does not diverge with the steps of the run"
    elif count < math.inf:
        settle = f"about {count} seeds, if mean and spread stay"
        settle += ": the mean lies on the line between the verdicts" * (count > MANY)
    elif any(any(margin.doubt) and _distance(margin) <= 0 for margin in unsure):
        settle = "a closer control: the spectrum of the run is not known, and no number of seeds helps"
    return Evidence(measured=measured, verdict=CANNOT_TELL, settle=settle)


def seeds_to_tell(margin: Spread) -> float:
    """Seeds after which the interval would leave out zero, if mean and deviation stay; inf beyond 10,000.

    Example:
        >>> seeds_to_tell(Spread(values=(1.0, 2.0, -0.5))), seeds_to_tell(Spread(values=(1.0, 1.2, -2.0)))
        (9, 1958)
    """
    if len(margin.values) < 2 or not all(map(math.isfinite, margin.values)) or margin.mean == 0:
        return math.inf
    deviation, distance = float(np.std(margin.values, ddof=1)), _distance(margin)
    counts = np.arange(2, 10_001)
    enough = counts[_half_width(deviation, counts) < distance]
    return int(enough[0]) if len(enough) else math.inf


def _distance(margin: Spread) -> float:
    """How far the mean lies from zero beyond its doubt."""
    return abs(margin.mean) - margin.doubt[0 if margin.mean > 0 else 1]


def _half_width(deviation: float, count: np.ndarray) -> np.ndarray:
    return stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1) * deviation / np.sqrt(count)


def write_claims(
    claims: Sequence[Claim], folder: Path, *, data: Sequence[str], notes: Sequence[str] = ()
) -> None:
    """Write ``claims.json`` and ``claims.md`` into ``folder``."""
    write_json(
        folder / CLAIMS_JSON,
        {"data": list(data), "notes": list(notes), "claims": [asdict(claim) for claim in claims]},
    )
    (folder / CLAIMS_TABLE).write_text(as_markdown(claims, data=data, notes=notes), encoding="utf-8")


def as_markdown(claims: Sequence[Claim], *, data: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The table for people, in Markdown."""
    lines = ["# The paper's claims, measured", "", *(f"- Data: {source}." for source in data)]
    lines += [f"- {note}" for note in notes]
    lines += [
        f"- Numbers are means over seeds with {CONFIDENCE:.0%} intervals of the mean (Student's t). "
        "Supported: the interval lies on the claim's side; contradicted: on the other; cannot tell: across. "
        "Intervals of exponents beyond a control include how far the control itself is known.",
        "",
    ]
    return "\n".join([*lines, claims_table(claims)]) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """The rows, with the longer runs' verdicts beside where there are any."""
    head = ["figure", "the paper says", "measured here", "verdict", "what would settle it"]
    rows = [[c.figure, c.paper, c.measured, f"**{c.verdict}**", c.settle] for c in claims]
    if any(claim.longer for claim in claims):
        head.insert(4, "longer runs")
        for row, claim in zip(rows, claims, strict=True):
            row.insert(4, claim.longer)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
