"""README's picture from docs/results/frameworks.json: python docs/readme_figures.py [folder].

The numbers are those of ``python benchmarks/frameworks.py rates --json docs/results/frameworks.json``.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
COLOURS = {"1e-3": "0.65", "lr_find": "tab:orange", "calibrate": "tab:blue"}


def losses_of(task: str, method: str) -> list[float]:
    """Held-out losses of AdamW on a task, seed by seed."""
    rows = json.loads((DOCS / "results" / "frameworks.json").read_text(encoding="utf-8"))["rates"]["rows"]
    chosen = {"task": task, "method": method, "optimizer": "AdamW"}
    return [row["loss"] for row in rows if chosen.items() <= row.items()]


def main(folder: Path) -> None:
    """Draw a panel for each task: median and range of the seeds for each way to choose lr."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    for panel, task in zip(panels, ("digits MLP", "letters transformer"), strict=True):
        for place, (method, colour) in enumerate(COLOURS.items()):
            losses = losses_of(task, method)
            middle = statistics.median(losses)
            panel.plot(losses, [place] * len(losses), "o", color=colour, alpha=0.6)
            panel.plot([middle, middle], [place - 0.25, place + 0.25], color=colour, linewidth=3)
            panel.text(middle, place - 0.42, f"{middle:.2f}", fontsize=9, ha="center", va="center")
        panel.set_yticks(range(len(COLOURS)), ["AdamW's default 1e-3", "lr_find", "calibrate"])
        panel.set_title(task)
        panel.set_ylim(len(COLOURS) - 0.4, -0.7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("held-out loss of five seeds, and their median", fontsize=10)
    figure.savefig(folder / "readme-rates.png", dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images")
