"""Claims by scales as a coloured grid: what each scale shows of each claim of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from curvestep.report.drawing import panels, styled
from curvestep_reproduction.claims.claims import (
    IN_PART,
    NOT_REPRODUCED,
    NOT_TESTED,
    OPEN,
    PAPER,
    REPRODUCED,
    Claim,
    decided,
    tally,
)
from curvestep_reproduction.figures.layout import GREY, wrapped
from curvestep_reproduction.recipes import SCALES

# Colour of a cell, and of its word; the words tell them apart, too.
COLOURS = {
    REPRODUCED: ("#009E73", "white"),
    IN_PART: ("#56B4E9", "black"),
    NOT_REPRODUCED: ("#D55E00", "white"),
    OPEN: ("#F0C75E", "black"),
    NOT_TESTED: ("#ececec", GREY),
}
SHORT = {NOT_REPRODUCED: "not repr.", NOT_TESTED: "–"}  # words that need less room
UNTRAINED = "no training"  # column of the claims that no run decides
ROW = 0.31  # inches, for two lines
WIDTH = 8.6  # inches
STATEMENT = 78  # characters in a line of a claim


def claims_grid(by_scale: Mapping[str, Sequence[Claim]]) -> Figure:
    """A row for each claim of the paper, a column for each scale; a frame marks the scale that decides."""
    columns = [UNTRAINED, *(scale for scale in SCALES if scale in by_scale)]
    cells: dict[str, dict[str, Claim]] = {}
    for scale, claims in by_scale.items():
        for claim in claims:
            if claim.kind == PAPER:
                cells.setdefault(claim.name, {})[scale if claim.decides else UNTRAINED] = claim
    with styled():
        figure, (axis,) = panels(1, 1, width=WIDTH, height=ROW * (len(cells) + 4))
        axis.set_axis_off()
        axis.set_xlim(-6.2, len(columns))
        axis.set_ylim(len(cells), -1.2)
        for column, scale in enumerate(columns):
            axis.text(column + 0.5, -0.3, scale, ha="center", va="bottom", fontsize=9, fontweight="bold")
        for row, by_column in enumerate(cells.values()):
            claim = next(iter(by_column.values()))
            words = wrapped(f"{claim.source}: {claim.paper}", STATEMENT)
            axis.text(-0.1, row + 0.5, words, ha="right", va="center", fontsize=8)
            for column, scale in enumerate(columns):
                if scale in by_column:
                    colour, ink = COLOURS[by_column[scale].verdict]
                    axis.add_patch(Rectangle((column + 0.03, row + 0.06), 0.94, 0.88, color=colour))
                    word = SHORT.get(by_column[scale].verdict, by_column[scale].verdict)
                    axis.text(column + 0.5, row + 0.52, word, ha="center", va="center", fontsize=8, color=ink)
                if scale == (claim.decides or UNTRAINED):
                    frame = Rectangle((column + 0.03, row + 0.06), 0.94, 0.88, fill=False, linewidth=1.8)
                    axis.add_patch(frame)
        title = wrapped(tally(decided(by_scale)), WIDTH / 0.1)
        figure.suptitle(title, fontsize=11.5, fontweight="bold")
        note = "A frame marks the scale whose runs decide the claim; – is not tested at that scale."
        figure.supxlabel(note, fontsize=8.5, color=GREY)
    return figure
