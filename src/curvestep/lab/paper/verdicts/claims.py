"""Claims of the paper: five verdicts, the one rule that decides between them, and the table.

THE PROTOCOL, fixed before a run at the scale ``epoch`` was looked at. One statistic a claim, in the paper's
own word, the same at every scale; its claim stands in ``statements.py``, the statistic in ``judges.py``. The
numbers of ``laptop`` and ``longer`` were known when its limits were chosen: there they are no blind test.

1. Take the statistic seed by seed, two settings with the same start and batches, and form the mean over the
   seeds with its 90 % interval (Student's t).
2. A claim is put as margins that it says are positive: first its plain form ("weaker"), then what makes it
   strong ("much weaker"). *Reproduced*: every interval lies above zero. *In part*: the first one does.
   *Not reproduced*: the first lies below zero, or reaches across it while a strong one lies below. *Open*:
   anything else; one seed decides nothing.
3. *Not reproduced* needs the paper's model, data and length, or a claim about any network: at a smaller scale
   it is *open*, not seen there. Where nothing was run it is *not tested here*.
4. The largest scale whose runs decide, decides; the others stand beside it. A scale decides once all of its
   planned seeds have ended, not before.

Apart from the paper's claims stand *errata*, where its arithmetic or a printed theorem is wrong, and *our
additions*. The count at the top is over the paper's claims alone.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from scipy import stats

from curvestep.lab.run.folder import write_json

REPRODUCED, IN_PART, NOT_REPRODUCED = "reproduced", "in part", "not reproduced"
OPEN, NOT_TESTED = "open", "not tested here"
VERDICTS = (REPRODUCED, IN_PART, NOT_REPRODUCED, OPEN, NOT_TESTED)
HOLDS, DOES_NOT_HOLD, CORRECTED = "holds", "does not hold", "corrected"  # of additions and errata
PAPER, ERRATUM, ADDITION = "paper", "erratum", "addition"
# Heading of the table, and of its column of statements.
HEADINGS = {
    PAPER: ("The paper's claims", "the paper says"),
    ERRATUM: ("Errata", "the paper says"),
    ADDITION: ("Our additions", "asked"),
}
_VERBS = {IN_PART: ("holds", "hold")}  # of one claim, of several; others are, or are not
CONFIDENCE = 0.9
CLAIMS_JSON, CLAIMS_TABLE = "claims.json", "claims.md"


class MissingRuns(ValueError):
    """A figure or a claim needs runs that are not there."""


class NotPlanned(MissingRuns):
    """The plan has no such runs at its scale: the picture or the claim is left out."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding for a claim at one scale."""

    # One of ``VERDICTS``; of an addition or erratum ``holds``, ``does not hold`` or ``corrected``.
    verdict: str
    sentence: str  # the answer in one sentence, with three numbers at most and no brackets
    # Everything behind it by name: intervals, controls, other statistics.
    numbers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim(Finding):
    """One row of the table."""

    name: str  # short name, for links
    kind: str  # ``paper``, ``erratum`` or ``addition``
    source: str  # figure, section or theorem
    paper: str  # what the paper says; of an addition, what was asked
    scale: str = ""  # scale of the runs that decide; empty where nothing is trained
    so_far: str = ""  # what the seeds that have ended show, where not all of them have: it decides nothing
    # Findings at other scales: verdict and sentence by scale.
    beside: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean over seeds with its 90 % interval (Student's t), and the values."""

    values: tuple[float, ...]  # one a seed
    # How much lower, and how much higher, all of them alike may be: the limits of a control that was
    # subtracted. More seeds do not lessen it.
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
        if not math.isfinite(self.mean):
            return math.nan, math.nan
        quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
        half = quantile * float(np.std(self.values, ddof=1)) / math.sqrt(count)
        return self.mean - half - self.doubt[0], self.mean + half + self.doubt[1]

    def __sub__(self, other: Spread) -> Spread:
        """Differences, seed by seed."""
        doubt = self.doubt[0] + other.doubt[1], self.doubt[1] + other.doubt[0]
        return Spread(values=tuple(map(operator.sub, self.values, other.values)), doubt=doubt)

    def less(self, number: float) -> Spread:
        """This less a number."""
        return replace(self, values=tuple(value - number for value in self.values))

    def times(self, factor: float) -> Spread:
        """This times a number; a negative one swaps the limits of the doubt."""
        low, high = sorted((-factor * self.doubt[0], factor * self.doubt[1]))
        return Spread(values=tuple(factor * value for value in self.values), doubt=(-low, high))

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "undefined"
        if len(self.values) == 1:
            return f"{self.mean:.3g} (one seed)"
        low, high = self.interval
        return f"{self.mean:.3g} [{low:.3g}, {high:.3g}]"


def decide(plain: Spread, *strong: Spread, at_size: bool) -> str:
    """The verdict on a claim from the margins that it says are positive: plain form first, then the strong.

    Example:
        >>> clear, none = Spread(values=(1.0, 1.1, 0.9)), Spread(values=(-0.1, 0.1, 0.0))
        >>> decide(clear, at_size=True), decide(clear, none, at_size=True)
        ('reproduced', 'in part')
        >>> decide(none, clear.times(-1), at_size=True), decide(none, clear.times(-1), at_size=False)
        ('not reproduced', 'open')
    """
    low, high = plain.interval
    if low > 0:
        return REPRODUCED if all(margin.interval[0] > 0 for margin in strong) else IN_PART
    refuted = any(end < 0 for end in (high, *(margin.interval[1] for margin in strong)))
    return NOT_REPRODUCED if refuted and at_size else OPEN


def decided(by_scale: Mapping[str, Sequence[Claim]]) -> list[Claim]:
    """One claim a statement: that of the last scale whose runs tested it, with the others beside it."""
    rows: dict[str, list[Claim]] = {}
    for claims in by_scale.values():
        for claim in claims:
            rows.setdefault(claim.name, []).append(claim)
    chosen = []
    for found in rows.values():
        tested = [claim for claim in found if claim.verdict != NOT_TESTED] or found[:1]
        others = {c.scale: f"{c.verdict}: {c.sentence}" for c in tested[:-1] if c.scale}
        others |= {c.scale: f"with part of its seeds, no verdict: {c.so_far}" for c in found if c.so_far}
        chosen.append(replace(tested[-1], beside=others))
    return chosen


def tally(claims: Sequence[Claim]) -> str:
    """How many of the paper's claims have which verdict, in words.

    Example:
        >>> row = {"name": "", "kind": PAPER, "source": "", "paper": "", "sentence": ""}
        >>> tally([Claim(verdict=OPEN, **row), Claim(verdict=REPRODUCED, **row)])
        'Of the 2 claims of the paper 1 is reproduced, 1 is open.'
    """
    counts = Counter(claim.verdict for claim in claims if claim.kind == PAPER)
    total = counts.total()
    parts = []
    for verdict in filter(counts.__getitem__, VERDICTS):
        one, many = _VERBS.get(verdict, ("is", "are"))
        parts.append(f"{counts[verdict]} {one if counts[verdict] == 1 else many} {verdict}")
    return f"Of the {total} claim{'s' * (total != 1)} of the paper {', '.join(parts)}."


def write_claims(
    claims: Sequence[Claim], folder: Path, *, data: Sequence[str] = (), notes: Sequence[str] = ()
) -> None:
    """Write ``claims.json`` and ``claims.md`` into ``folder``."""
    rows = list(map(asdict, claims))
    about = {"found": tally(claims), "data": list(data), "notes": list(notes)}
    write_json(folder / CLAIMS_JSON, {**about, "claims": rows})
    text = as_markdown(claims, data=data, notes=notes)
    (folder / CLAIMS_TABLE).write_text(text, encoding="utf-8")


def as_markdown(claims: Sequence[Claim], *, data: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Count, tables and a section of numbers for each claim, in Markdown."""
    lines = ["# The paper's claims, measured", "", tally(claims), ""]
    lines += [f"- Data: {source}." for source in data]
    lines += [f"- {note}" for note in notes]
    return "\n".join([*lines, "", claims_tables(claims), "", numbers_behind(claims)]) + "\n"


def claims_tables(claims: Sequence[Claim], *, link: str = "") -> str:
    """Tables for the paper's claims, errata and additions; each row links to its numbers in page ``link``."""
    parts = []
    for kind, (heading, asked) in HEADINGS.items():
        rows = [["where", asked, "what we found", "verdict", "scale", ""], ["---"] * 6]
        for c in claims:
            if c.kind == kind:
                found = [c.sentence, f"**{c.verdict}**", c.scale, f"[numbers]({link}#{c.name})"]
                rows.append([c.source, c.paper, *found])
        if len(rows) > 2:
            parts += [f"### {heading}", "", table(rows), ""]
    return "\n".join(parts).rstrip()


def numbers_behind(claims: Sequence[Claim]) -> str:
    """A section for each claim: its numbers, and what the other scales found."""
    parts = ["## Numbers behind the claims", ""]
    for claim in claims:
        parts += [f'<a id="{claim.name}"></a>', f"**{claim.source}.** {claim.paper}", ""]
        parts += [f"- {name}: {value}" for name, value in claim.numbers.items()]
        parts += [f"- at the scale `{scale}`, {said}" for scale, said in claim.beside.items()]
        parts.append("")
    return "\n".join(parts).rstrip()


def table(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table."""
    rows = [" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines]
    return "\n".join(f"| {row} |" for row in rows)
