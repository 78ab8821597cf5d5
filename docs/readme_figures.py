"""README's picture from docs/results/calibrate/rows.jsonl: python docs/readme_figures.py.

The rows are those of ``python -m reproduction.benchmarks.calibrate``: every judged task of AdamW under a
schedule that counts, and the median over its seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction.benchmarks.calibrate.report import best_of
from reproduction.benchmarks.calibrate.run import Job, read

from curvestep.report.drawing import panels, save, styled

DOCS = Path(__file__).parent
LADDER = DOCS / "results" / "calibrate" / "ladder.jsonl"
METHODS = {
    "calibrate": ("calibrate", "#0072B2", "o"),
    "lr_find": ("lr_find", "#D55E00", "s"),
    "prodigy-plus-schedule-free": ("Prodigy+", "#009E73", "^"),
    "AdamW 4e-3": ("always 0.004", "#777777", "D"),
}


def judged_rows() -> list[Job]:
    """The runs that judge the rule of today; until they have ended, those that judged the rule before."""
    if LADDER.exists():
        return [json.loads(line) for line in LADDER.read_text(encoding="utf-8").splitlines()]
    return list(read(LADDER.parent).values())


def regrets() -> dict[str, dict[str, float]]:
    """The share of the best rate's progress that each method misses, by task."""
    rows = [row for row in judged_rows() if row["kind"] == "adamw"]
    found: dict[str, dict[str, float]] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        best = best_of(of_task)
        if best is None or best.problem or not any(row["method"] == "calibrate" for row in of_task):
            continue
        missed = {name: [best.regret(row) for row in of_task if row["method"] == name] for name in METHODS}
        found[task] = {name: mean(values) for name, values in missed.items() if values}
    return dict(sorted(found.items(), key=lambda item: item[1]["calibrate"]))


def summary(found: dict[str, dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Median and worst of each method over the tasks."""
    values = {name: [task[name] for task in found.values() if name in task] for name in METHODS}
    return {name: (median(missed), max(missed)) for name, missed in values.items()}


def caption() -> str:
    """The picture in words."""
    found = regrets()
    numbers = {name: (100 * middle, 100 * worst) for name, (middle, worst) in summary(found).items()}
    rivals = {METHODS[name][0]: worst for name, (_, worst) in numbers.items() if name != "calibrate"}
    safest, worst_of_it = min(rivals.items(), key=lambda item: item[1])
    ours, ours_worst = numbers["calibrate"]
    median_of_ramp, worst_of_ramp = numbers["lr_find"]
    old = (
        ""
        if LADDER.exists()
        else " These runs judged the rule before the present one, which is being judged."
    )
    return (
        f"AdamW with warm-up and decay on {len(found)} tasks that the rule was not tuned on. "
        f"`calibrate` misses {ours:.1f} % of the best lr's progress in the median, "
        f"and {ours_worst:.1f} % at worst. "
        f"The safest other way in the picture, {safest}, misses {worst_of_it:.1f} % at worst. "
        f"`lr_find` misses {median_of_ramp:.1f} % in the median, but {worst_of_ramp:.1f} % at worst. "
        "[Every task](docs/results/calibrate.md); `python docs/readme_figures.py` draws it."
        f"{old}"
    )


def main() -> None:
    """One line a task, one mark a method."""
    found = regrets()
    with styled():
        figure, (panel,) = panels(1, 1, width=7.4, height=0.27 * len(found) + 1.35)
        for name, (label, colour, mark) in METHODS.items():
            middle, worst = summary(found)[name]
            places = [place for place, task in enumerate(found.values()) if name in task]
            missed = [100 * task[name] for task in found.values() if name in task]
            look = {"color": colour, "marker": mark, "linestyle": "none", "markersize": 6}
            panel.plot(
                missed,
                places,
                label=f"{label}: median {100 * middle:.1f}, worst {100 * worst:.1f} %",
                **look,
                zorder=4 if name == "calibrate" else 3,
                alpha=0.85,
            )
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_yticks(range(len(found)), list(found), fontsize=9)
        panel.set_xlabel("progress missed, % of the grid's best lr (lower is better)", fontsize=9.5)
        worst = summary(found)["calibrate"][1]
        panel.set_title(
            f"calibrate misses at most {100 * worst:.1f} % on {len(found)} unseen tasks",
            fontweight="bold",
            fontsize=11,
        )
        panel.legend(loc="lower right", fontsize=9)
        png, _ = save(figure, DOCS / "images" / "readme-rates")
    png.unlink()  # README shows the SVG


if __name__ == "__main__":
    main()
