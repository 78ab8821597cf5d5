"""How often the right law is named: python benchmarks/laws.py [--help].

Synthetic traces of 100 rows: gradient norm and loss wander over a given range, smoothness follows one law
with a scatter. Seeds below 10,000 were for choosing; the printed table is of others. With folders, it
prints the laws of the traces in there.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np

from curvestep.fit.laws import LawComparison, compare_laws
from curvestep.fit.samples import usable_samples
from curvestep.smoothness.trace import Trace

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


def kept(folders: list[Path]) -> None:
    """The table of kept traces."""
    print("| run | rows | best | exponent | error: affine | power | loss |\n|---|---|---|---|---|---|---|")
    for path in sorted(path for folder in folders for path in folder.rglob("trace.jsonl")):
        trace = Trace.load(path)
        found = compared(trace)
        low, high = found.exponent_interval
        errors = " | ".join(
            f"{found.laws[name].error:.2f}" if name in found.laws else ""
            for name in ("affine", "power", "loss")
        )
        exponent = f"{found.laws['power'].exponent:.2f} [{low:.2f}, {high:.2f}]"
        print(
            f"| {path.parent.name} | {len(trace)} | {found.best or 'cannot tell'} | {exponent} | {errors} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("--traces", type=int, default=300, help="of each cell")
    asked = parser.parse_args()
    if asked.folders:
        kept(asked.folders)
    else:
        synthetic(asked.seed, asked.traces)
