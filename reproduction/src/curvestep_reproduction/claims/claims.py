"""Claims of the paper: five verdicts, the one rule that decides between them, and the table.

THE RULE was written, with every statistic and margin, before the runs that it judges were looked at: it is
``docs/results/rule.md``. A claim is put as margins that it says are positive: first its plain form
("weaker"), then what makes it strong ("much weaker"). Margins are taken seed by seed; their mean has a 90 %
interval. One scale decides a claim, the one with the paper's own model and data; the others stand beside it.

Apart from the paper's claims stand *errata*, where its arithmetic or a printed theorem is wrong, and *our
additions*. The count at the top is over the paper's claims alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from curvestep.trace.run import write_json

if TYPE_CHECKING:
    from curvestep_reproduction.figures.plan import Planned

REPRODUCED = "reproduced"
IN_PART = "in part"
NOT_REPRODUCED = "not reproduced"
OPEN = "open"
NOT_TESTED = "not tested here"
VERDICTS = (REPRODUCED, IN_PART, NOT_REPRODUCED, OPEN, NOT_TESTED)
# Of additions and errata.
HOLDS = "holds"
DOES_NOT_HOLD = "does not hold"
CORRECTED = "corrected"
PAPER = "paper"
ERRATUM = "erratum"
ADDITION = "addition"
# Heading of the table, and of its column of statements.
HEADINGS = {
    PAPER: ("The paper's claims", "the paper says"),
    ERRATUM: ("Errata", "the paper says"),
    ADDITION: ("Our additions", "asked"),
}
# The classes of verdicts in the style sheet of the page.
BADGES = {REPRODUCED: "supported", HOLDS: "supported", NOT_REPRODUCED: "not", DOES_NOT_HOLD: "not"}
PAPERS_CLAIM = (
    "The paper claims that smoothness grows with the gradient norm along training, and that clipping is "
    "faster for that reason."
)
CENTRAL = ("follows-gradient", "less-without-clipping", "clipping-accelerates")  # claims that carry the paper
# What the runs of a scale are, where they decide; the empty one is for claims without runs.
MODELS_OF = {
    "epoch": "the paper's AWD-LSTM in its first epoch",
    "paper": "ResNet20 for 200 epochs",
    "longer": "the paper's two-layer LSTM for one epoch",
    "laptop": "small models",
    "": "no training",
}
TITLE = "Why gradient clipping accelerates training: a reproduction"
_VERBS = {IN_PART: ("holds", "hold")}  # of one claim, of several; others are, or are not
CONFIDENCE = 0.9
ONE_SEED = 3.0  # standard deviations by which the margin of a single seed must clear zero
MOST_SEEDS = 1000  # beyond which no number of seeds is named that would decide
CLAIMS_JSON = "claims.json"
CLAIMS_TABLE = "claims.md"


class MissingRuns(ValueError):
    """A figure or a claim needs runs that are not there: ``runs`` are those that have not ended."""

    def __init__(self, message: str, runs: Sequence[Planned] = ()) -> None:
        super().__init__(message)
        self.runs = tuple(runs)


class NotPlanned(MissingRuns):
    """The plan has no such runs at its scale: the picture or the claim is left out."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean over seeds with its 90 % interval (Student's t), and the values."""

    values: tuple[float, ...]  # one a seed
    # How much lower, and how much higher, all of them alike may be: the limits of a control that was
    # subtracted. More seeds do not lessen it.
    doubt: tuple[float, float] = (0.0, 0.0)
    # Standard deviation over seeds, for a single value: that of the nearest scale with three seeds.
    deviation: float = math.nan

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's t interval of the mean, widened by the doubt.

        That of a single seed is three of the standard deviations; unbounded where these are not known.

        Example:
            >>> low, high = Spread(values=(1.0, 2.0, 3.0)).interval
            >>> round(low, 3), round(high, 3)
            (0.314, 3.686)
            >>> low, high = Spread(values=(1.0, 2.0, 3.0), doubt=(0.3, 0.0)).interval
            >>> round(low, 3), round(high, 3)
            (0.014, 3.686)
            >>> Spread(values=(1.0,), deviation=0.25).interval
            (0.25, 1.75)
        """
        count = len(self.values)
        if not math.isfinite(self.mean):
            return math.nan, math.nan
        if count > 1:
            half = _quantile(count) * self._deviation() / math.sqrt(count)
        elif math.isfinite(self.deviation):
            half = ONE_SEED * self.deviation
        else:
            half = math.inf
        return self.mean - half - self.doubt[0], self.mean + half + self.doubt[1]

    def seeds_to_decide(self) -> int:
        """How many seeds would put the interval on one side of zero, if mean and spread stayed; or 0.

        Example:
            >>> Spread(values=(-0.5, 1.0, 1.0)).seeds_to_decide()
            11
        """
        room = abs(self.mean) - max(self.doubt)
        for count in range(max(3, len(self.values)), MOST_SEEDS):
            if _quantile(count) * self._deviation() / math.sqrt(count) < room:
                return count
        return 0

    def _deviation(self) -> float:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else self.deviation

    def __sub__(self, other: Spread) -> Spread:
        """Differences, seed by seed."""
        doubt = self.doubt[0] + other.doubt[1], self.doubt[1] + other.doubt[0]
        pairs = zip(self.values, other.values, strict=True)
        return Spread(values=tuple(mine - theirs for mine, theirs in pairs), doubt=doubt)

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
        low, high = self.interval
        if math.isinf(high):
            return f"{self.mean:.3g} (one seed)"
        one = ", one seed" if len(self.values) == 1 else ""
        return f"{self.mean:.3g} [{low:.3g}, {high:.3g}]{one}"


def _quantile(count: int) -> float:
    """Student's t at the upper end of the interval of a mean over so many seeds."""
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the runs of one scale show about a claim."""

    sentence: str  # the answer in one sentence, with three numbers at most and no brackets
    margins: tuple[Spread, ...] = ()  # that the claim says are positive: its plain form, then the strong ones
    verdict: str = ""  # where no margin decides
    # Everything behind it by name: intervals, controls, other statistics.
    numbers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table."""

    name: str  # short name, for links
    kind: str  # ``paper``, ``erratum`` or ``addition``
    source: str  # figure, section or theorem
    paper: str  # what the paper says; of an addition, what was asked
    # One of ``VERDICTS``; of an addition or erratum ``holds``, ``does not hold`` or ``corrected``.
    verdict: str
    sentence: str  # as in ``Evidence``, with its numbers
    numbers: dict[str, str] = field(default_factory=dict)
    scale: str = ""  # scale of the runs; empty where nothing is trained
    decides: str = ""  # scale whose runs decide the claim
    note: str = ""  # that one seed decided, or what would decide
    # Sentences of other scales, by scale.
    beside: dict[str, str] = field(default_factory=dict)


def decide(plain: Spread, *strong: Spread) -> str:
    """The verdict on a claim from the margins that it says are positive: plain form first, then the strong.

    Example:
        >>> clear, none = Spread(values=(1.0, 1.1, 0.9)), Spread(values=(-0.1, 0.1, 0.0))
        >>> decide(clear), decide(clear, none), decide(none), decide(none, clear.times(-1))
        ('reproduced', 'in part', 'open', 'not reproduced')
    """
    low, high = plain.interval
    if low > 0:
        return REPRODUCED if all(margin.interval[0] > 0 for margin in strong) else IN_PART
    refuted = any(end < 0 for end in (high, *(margin.interval[1] for margin in strong)))
    return NOT_REPRODUCED if refuted else OPEN


def what_decides(margins: Sequence[Spread]) -> str:
    """How many seeds would decide margins whose intervals cross zero."""
    counts = [margin.seeds_to_decide() for margin in margins]
    if not all(counts):
        return "no affordable number of seeds would decide"
    return f"about {max(counts)} seeds would decide"


def decided(by_scale: Mapping[str, Sequence[Claim]]) -> list[Claim]:
    """One claim a statement: that of the scale that decides it, with the others' sentences beside it."""
    rows: dict[str, list[Claim]] = {}
    for claims in by_scale.values():
        for claim in claims:
            rows.setdefault(claim.name, []).append(claim)
    chosen = []
    for of_scales in rows.values():
        own = next((claim for claim in of_scales if claim.scale == claim.decides), None)
        others = {c.scale: c.sentence for c in of_scales if c.scale != c.decides and c.verdict != NOT_TESTED}
        chosen.append(replace(own or _undecided(of_scales[0]), beside=others))
    return chosen


def _undecided(claim: Claim) -> Claim:
    sentence = f"Runs of the scale {claim.decides} decide this, and there are none here."
    return replace(claim, verdict=NOT_TESTED, sentence=sentence, numbers={}, scale=claim.decides, note="")


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
    for verdict in VERDICTS:
        one, many = _VERBS.get(verdict, ("is", "are"))
        if counts[verdict]:
            parts.append(f"{counts[verdict]} {one if counts[verdict] == 1 else many} {verdict}")
    return f"Of the {total} claim{'s' * (total != 1)} of the paper {', '.join(parts)}."


def what_decided(claims: Sequence[Claim]) -> str:
    """Which models, trained for how long, decide how many of the paper's claims, in a sentence."""
    counts = Counter(claim.decides for claim in claims if claim.kind == PAPER)
    parts = [f"{MODELS_OF[scale]} ({counts[scale]})" for scale in MODELS_OF if counts[scale]]
    return f"What decides them: {', '.join(parts)}."


def central_findings(claims: Sequence[Claim]) -> list[str]:
    """Which runs decide, and what they show of the claims that carry the paper, a sentence each."""
    by_name = {claim.name: claim for claim in claims}
    central = [by_name[name] for name in CENTRAL if name in by_name]
    findings = []
    for claim in central:
        findings.append(f"{claim.source}, {claim.verdict}: {claim.sentence}")
        if claim.verdict == NOT_TESTED and claim.beside:
            scale, found = list(claim.beside.items())[-1]
            findings.append(f"At the scale {scale}: {found}")
    return [what_decided(claims), *findings]


def summary(claims: Sequence[Claim]) -> str:
    """What the paper claims, and what was found at which size: for the first screen of a page."""
    return " ".join([PAPERS_CLAIM, tally(claims), *central_findings(claims)])


def write_claims(
    claims: Sequence[Claim],
    folder: Path,
    *,
    data: Sequence[str] = (),
    notes: Sequence[str] = (),
    picture: Mapping[str, str] | None = None,
) -> None:
    """Write ``claims.json``, all that a page shows of the claims, and ``claims.md`` into ``folder``.

    ``picture`` is an entry as in ``figures.json``: the page shows it first.
    """
    rows = [asdict(claim) for claim in claims]
    about = {
        "title": TITLE,
        "found": summary(claims),
        "data": list(data),
        "notes": list(notes),
    }
    about["picture"] = picture
    looks = {"headings": HEADINGS, "badges": BADGES}
    write_json(folder / CLAIMS_JSON, {**about, **looks, "claims": rows})
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
                verdict = f"**{c.verdict}**: {c.note}" if c.note else f"**{c.verdict}**"
                numbers = f"[numbers]({link}#{c.name})"
                rows.append([c.source, c.paper, c.sentence, verdict, c.scale, numbers])
        if len(rows) > 2:
            parts += [f"### {heading}", "", table(rows), ""]
    return "\n".join(parts).rstrip()


def numbers_behind(claims: Sequence[Claim]) -> str:
    """A section for each claim: its numbers, and what the other scales found."""
    parts = ["## Numbers behind the claims", ""]
    for claim in claims:
        parts += [f'<a id="{claim.name}"></a>', f"**{claim.source}.** {claim.paper}", ""]
        parts += [f"- {name}: {value}" for name, value in claim.numbers.items()]
        parts += [f"- at the scale `{scale}`: {said}" for scale, said in claim.beside.items()]
        parts.append("")
    return "\n".join(parts).rstrip()


def table(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table."""
    rows = [" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines]
    return "\n".join(f"| {row} |" for row in rows)
