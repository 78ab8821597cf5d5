"""README's picture from docs/results/calibrate/ladder.jsonl: python docs/readme_figures.py.

The rows are those of ``python -m reproduction.benchmarks.calibrate.run --part judge-ladder``: every judged
task that counts, of every kind of optimizer, and the mean over its seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduction.benchmarks.calibrate.report import best_of
from reproduction.benchmarks.calibrate.run import read

from curvestep.report.drawing import panels, save, styled

DOCS = Path(__file__).parent
KINDS = {
    "adamw": "AdamW",
    "momentum": "SGD, momentum 0.9",
    "plain": "SGD",
    "muon": "Muon + AdamW",
}
DEFAULTS = {"adamw": "AdamW 1e-3", "momentum": "SGD 0.1", "plain": "SGD 0.1", "muon": "Muon 0.02"}
METHODS = {
    "calibrate": ("calibrate", "#0072B2", "o"),
    "random search": ("random search, as many gradients", "#D55E00", "s"),
    "default": ("usual default", "#777777", "D"),
}


def regrets() -> dict[tuple[str, str], dict[str, float]]:
    """The share of the best rate's progress that each method misses, by kind and task."""
    rows = list(read(DOCS / "results" / "calibrate").values())
    found: dict[tuple[str, str], dict[str, float]] = {}
    for kind, task in dict.fromkeys((row["kind"], row["task"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["task"]) == (kind, task)]
        best = best_of(own)
        if best is None or best.problem:
            continue
        missed = {}
        for name in METHODS:
            method = DEFAULTS[kind] if name == "default" else name
            values = [max(0.0, best.regret(row)) for row in own if row["method"] == method]
            if values:
                missed[name] = mean(values)
        if "calibrate" in missed:
            found[kind, task] = missed
    order = list(KINDS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[1]["calibrate"])))


def summary(found: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Median and worst of a method over tasks, in per cent."""
    values = [task[name] for task in found if name in task]
    return 100 * median(values), 100 * max(values)


def _both(numbers: tuple[float, float]) -> str:
    return " and ".join(f"{number:.1f} %" for number in numbers)


def caption() -> str:
    """The picture in words: a table."""
    found = regrets()
    lines = [
        "The share of the best lr's progress that each misses, on the judged tasks run so far "
        "([every task](docs/results/calibrate.md); `python docs/readme_figures.py`):",
        "",
        "| optimizer | judged tasks | calibrate: median and worst | usual default: median and worst |",
        "| --- | --- | --- | --- |",
    ]
    for kind, label in KINDS.items():
        of_kind = [missed for (own, _), missed in found.items() if own == kind]
        if not of_kind:
            continue
        default = "not run yet"
        if any("default" in task for task in of_kind):
            default = f"{DEFAULTS[kind]}: {_both(summary(of_kind, 'default'))}"
        lines.append(f"| {label} | {len(of_kind)} | {_both(summary(of_kind, 'calibrate'))} | {default} |")
    return "\n".join(lines)


def main() -> None:
    """One line a task, one mark a method."""
    found = regrets()
    with styled():
        figure, (panel,) = panels(1, 1, width=7.4, height=0.27 * len(found) + 1.6)
        for name, (label, colour, mark) in METHODS.items():
            places = [place for place, task in enumerate(found.values()) if name in task]
            missed = [100 * task[name] for task in found.values() if name in task]
            look = {"color": colour, "marker": mark, "linestyle": "none", "markersize": 6}
            panel.plot(
                missed, places, label=label, **look, zorder=4 if name == "calibrate" else 3, alpha=0.85
            )
        panel.axvline(0, color="black", linewidth=0.8)
        labels = [f"{task} ({KINDS[kind]})" for kind, task in found]
        panel.set_yticks(range(len(found)), labels, fontsize=9)
        panel.set_xlabel("% of the best lr's progress missed (lower is better)", fontsize=9)
        title = f"What calibrate misses on {len(found)} judged tasks"
        figure.suptitle(title, fontweight="bold", fontsize=11)
        figure.legend(loc="outside lower center", ncols=len(METHODS), fontsize=9)
        png, _ = save(figure, DOCS / "images" / "readme-rates")
    png.unlink()  # README shows the SVG


if __name__ == "__main__":
    main()
