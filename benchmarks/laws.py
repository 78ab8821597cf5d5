"""How often the right law is named: python benchmarks/laws.py [--help].

Synthetic traces of 100 rows: gradient norm and loss wander over a given range, smoothness follows one law
with a scatter. Seeds below 10,000 were for choosing; the printed table is of others. With folders or files
of kept runs, it prints their laws, and draws their exponents.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from curvestep.fit.laws import LawComparison, compare_laws
from curvestep.fit.samples import usable_samples
from curvestep.trace.trace import Trace

KINDS = {"affine": 1.0, "power ½": 0.5, "power 2": 2.0, "loss": 1.0}
ROWS, NEIGHBOURS, TOGETHER = 100, 0.7, 0.5  # correlation of neighbours, and of log norm with log loss


def wandering(rng: np.random.Generator) -> np.ndarray:
    """A Gaussian series of unit variance."""
    values = rng.standard_normal(ROWS)
    for t in range(1, ROWS):
        values[t] = NEIGHBOURS * values[t - 1] + math.sqrt(1 - NEIGHBOURS**2) * values[t]
    return values


def trace_of(rng: np.random.Generator, *, kind: str, span: float, scatter: float) -> Trace:
    """A trace whose smoothness follows a law; its two terms are equal at the lower end of the range."""
    one, other = wandering(rng), wandering(rng)
    width = math.log(span) / (2 * 1.645)  # nine norms in ten lie within the span
    g = np.exp(width * one)
    loss = np.exp(width * (TOGETHER * one + math.sqrt(1 - TOGETHER**2) * other))
    x = (loss if kind == "loss" else g) ** KINDS[kind]
    ell = (span ** (-KINDS[kind] / 2) + x) * np.exp(scatter * rng.standard_normal(ROWS))
    trace = Trace()
    for step, (a, b, c) in enumerate(zip(g, ell, loss, strict=True)):
        trace.append({"step": step, "grad_norm": float(a), "smoothness": float(b), "loss": float(c)})
    return trace


def compared(trace: Trace) -> LawComparison:
    """The comparison on the rows of a trace."""
    return compare_laws(usable_samples(trace))


def line(found: list[LawComparison], *names: object) -> str:
    """A row of the table."""
    counts = Counter(fit.best for fit in found)
    shares = " | ".join(f"{counts[name] / len(found):.0%}" for name in ("affine", "power", "loss", ""))
    return f"| {' | '.join(map(str, names))} | {shares} |"


def synthetic(seed: int, traces: int) -> None:
    """The table of synthetic traces."""
    print("| truth | norms over a factor of | scatter | affine | power | loss | cannot tell |")
    print("|---|---|---|---|---|---|---|")
    for i, kind in enumerate(KINDS):
        for span in (3, 30):
            for j, scatter in enumerate((0.1, 0.3)):
                rng = np.random.default_rng([seed, i, span, j])
                found = [
                    compared(trace_of(rng, kind=kind, span=span, scatter=scatter)) for _ in range(traces)
                ]
                print(line(found, kind, span, scatter), flush=True)


def kept(places: list[Path]) -> dict[str, list[LawComparison]]:
    """The laws of kept runs by setting: of folders of runs, or of files that within_real.py wrote."""
    found = defaultdict(list)
    for place in places:
        if place.is_dir():
            for path in sorted(place.rglob("trace.jsonl")):
                name = f"{path.parent.name.split('-seed')[0]}, {place.name}"
                found[name].append(compared(Trace.load(path)))
            continue
        for run in map(json.loads, place.read_text().splitlines()):
            threshold = run["max_norm"].replace("inf", "none")
            name = f"{run['model']}, lr {run['lr']:g}, max_norm {threshold}"
            trace = Trace()
            for row in run["rows"]:
                columns = {key: row[key] for key in ("step", "grad_norm", "loss", "kappa")}
                trace.append({**columns, "smoothness": max(row["secants"])})
            found[name].append(compared(trace))
    return found


def table(found: dict[str, list[LawComparison]]) -> None:
    """One line a setting; errors are means over its runs."""
    print(
        "| setting | runs | named | exponents | error: affine | power | loss |\n|---|---|---|---|---|---|---|"
    )
    for name, fits in found.items():
        counts = Counter(fit.best or "cannot tell" for fit in fits)
        named = ", ".join(f"{num} {law}" for law, num in counts.items())
        exponents = sorted(fit.laws["power"].exponent for fit in fits)
        errors = " | ".join(
            f"{np.mean([fit.laws[law].error for fit in fits if law in fit.laws]):.2f}"
            for law in ("affine", "power", "loss")
        )
        print(f"| {name} | {len(fits)} | {named} | {exponents[0]:.2f} to {exponents[-1]:.2f} | {errors} |")


AFFINE = (0.71, 1.41)  # exponents that count as affine


def picture(found: dict[str, list[LawComparison]], path: Path) -> None:
    """A row for each setting, a mark for each run: its exponent with interval, beside the affine band."""
    from curvestep.report.drawing import COLOURS, panels, save, styled

    named = {name: fits for name, fits in found.items() if any(fit.best for fit in fits)}
    others = {name: fits for name, fits in found.items() if name not in named}
    with styled():
        figure, (axes,) = panels(1, 1, width=7.2, height=1.3 + 0.2 * len(found))
        axes.axvspan(*AFFINE, color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.text(1, 0.6, "affine, as in the paper", ha="center", fontsize=9, color=COLOURS[0])
        for place, fits in enumerate([*named.values(), *others.values()]):
            for number, fit in enumerate(fits):
                y = -place + 0.5 * (0.5 - (number + 1) / (len(fits) + 1))
                colour = COLOURS[1] if fit.best == "power" else "0.6"
                axes.plot(fit.exponent_interval, (y, y), color=colour, linewidth=1.2)
                axes.plot(fit.laws["power"].exponent, y, "o", color=colour, markersize=4)
        axes.set_yticks([-place for place in range(len(found))], [*named, *others], fontsize=8)
        axes.set(xscale="log", xlim=(0.09, 7), ylim=(0.4 - len(found), 1.1))
        axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
        axes.set_xlabel("exponent of the gradient norm in sharpness (95 % interval; tried from 0.1 to 6)")
        num = sum(bool(fit.best) for fits in named.values() for fit in fits)
        total = sum(map(len, found.values()))
        axes.set_title(f"{num} of {total} runs name a law (orange): a power above 1", fontweight="bold")
        png, _ = save(figure, path)
    png.unlink()  # the page shows the SVG


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", type=Path, nargs="*", help="folders of runs, or files of within_real.py")
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("--traces", type=int, default=300, help="of each cell")
    parser.add_argument("--picture", type=Path, help="where to draw the exponents of kept runs")
    asked = parser.parse_args()
    if asked.places:
        laws = kept(asked.places)
        table(laws)
        if asked.picture:
            picture(laws, asked.picture)
    else:
        synthetic(asked.seed, asked.traces)
