"""The table of claims: what the paper says, what was measured here, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from curvestep.lab.paper import evidence as show
from curvestep.lab.paper.evidence import CONFIDENCE, NOT_TESTABLE, Evidence, MissingRuns, Results
from curvestep.lab.paper.plan import CALIBRATED
from curvestep.lab.run.folder import write_json

BAR = "\\|"  # a bar inside a cell


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table.

    Args:
        figure: Figure of the paper.
        paper: What the paper says.
        measured: What was measured, with intervals over the seeds.
        verdict: ``supported``, ``not supported`` or ``not testable at this scale``.
    """

    figure: str
    paper: str
    measured: str
    verdict: str


def make_claims(results: Results) -> list[Claim]:
    """Every row that the runs allow; one whose runs are missing says so."""
    rows: list[tuple[str, str, Callable[[Results], Evidence]]] = [
        ("fig4", "Large learning rates diverge without clipping; it allows them.", show.allows_large_lr),
        ("fig4", "Clipping accelerates training of the language model.", show.accelerates),
        (
            "fig4",
            "lr 30 and max_norm 0.25 are set by hand. Not in the paper: measured before training, they do as "
            "well.",
            show.calibrated,
        ),
        ("fig4", "Models trained with clipping have the best validation loss.", show.validation),
        (
            "fig2",
            "Smoothness grows with the gradient norm under clipping with a large learning rate, and much "
            "less at a small one without clipping.",
            lambda r: show.correlations(r, "lm-lr30clip0.25", "lm-lr2"),
        ),
        (
            "fig2",
            "At the small learning rate the correlation is much weaker with clipping too.",
            lambda r: show.correlations(r, "lm-lr30clip0.25", "lm-lr2clip0.25"),
        ),
        ("fig6", "A tenth of the data gives an accurate estimate of both quantities.", show.shares),
        (
            "fig3",
            "On images the correlation is absent with SGD and momentum and appears with a large learning "
            "rate and clipping.",
            lambda r: show.correlations(r, "cifar-lr5clip0.25", "cifar-momentum"),
        ),
        ("fig4", "On images clipped descent converges fastest.", show.images_loss),
        ("fig4", "On images clipped descent matches the test accuracy of momentum.", show.images_accuracy),
        ("fig7", "On x⁴ clipped descent converges much faster than gradient descent.", show.synthetic),
        ("fig7", "There theory predicts gradients 1e5 times smaller.", show.synthetic_theory),
        ("fig8", "GD lowers the loss but not the gradient norm.", show.gradients_stay),
        ("fig8", "GD's gradients are about 3 times those of clipped GD; theory says 5.", show.ratio),
    ]  # fmt: skip
    wanted = [row for row in rows if row[0] in results.plan.figures]
    if not results.plan.of(CALIBRATED):
        wanted = [row for row in wanted if row[2] is not show.calibrated]
    return [_claim(results, figure, paper, measure) for figure, paper, measure in wanted] + _beyond(results)


def _claim(results: Results, figure: str, paper: str, measure: Callable[[Results], Evidence]) -> Claim:
    try:
        measured, verdict = measure(results)
    except (MissingRuns, ValueError) as error:
        measured, verdict = f"not measured: {error}", NOT_TESTABLE
    return Claim(figure=figure, paper=paper, measured=measured, verdict=verdict)


def _beyond(results: Results) -> list[Claim]:
    """What no laptop can test."""
    rows = []
    if results.plan.scale == "laptop" and "fig4" in results.plan.figures:
        rows = [
            Claim(
                figure="fig4",
                paper="AWD-LSTM with clipped SGD reaches a test perplexity of 56.5 after 500 epochs.",
                measured="not run; the public recipe reports 58.8, and 56.5 only after fine-tuning",
                verdict=NOT_TESTABLE,
            ),
            Claim(
                figure="fig4",
                paper="ResNet20 reaches 95.0 % test accuracy with SGD + momentum, 95.2 % with clipping.",
                measured="not run; 95 % fits a ResNet18 of 11 million parameters, not ResNet20 (about 91 %)",
                verdict=NOT_TESTABLE,
            ),
        ]
    return rows


def write_claims(
    claims: Sequence[Claim], folder: Path, *, data: Sequence[str], notes: Sequence[str] = ()
) -> None:
    """Write ``claims.json`` and ``claims.md`` into ``folder``."""
    write_json(
        folder / "claims.json",
        {"data": list(data), "notes": list(notes), "claims": [asdict(claim) for claim in claims]},
    )
    (folder / "claims.md").write_text(as_markdown(claims, data=data, notes=notes), encoding="utf-8")


def as_markdown(claims: Sequence[Claim], *, data: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The table for people, in Markdown."""
    lines = ["# The paper's claims, measured", "", *(f"- Data: {source}." for source in data)]
    lines += [f"- {note}" for note in notes]
    lines += [
        f"- Numbers are means over seeds with {CONFIDENCE:.0%} intervals of the mean (Student's t).",
        "",
        "| figure | the paper says | measured here | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for claim in claims:
        cells = (claim.figure, claim.paper, claim.measured, f"**{claim.verdict}**")
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines) + "\n"
