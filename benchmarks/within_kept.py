"""The within-step test on kept runs, beside its shuffled zero: python benchmarks/within_kept.py FOLDER...

Unpack docs/results/*/*.tar.xz first and name the folders. Of every setting: the answers of the test, and
what whole steps show if the overshoot is not minded, to see what the older numbers were worth.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from curvestep.fit.samples import Samples, usable_samples
from curvestep.fit.within import LEAST_TESTED_ROWS, MOST_KAPPA, Within, within_steps
from curvestep.trace.trace import Trace


def elasticity_of(samples: Samples, most_kappa: float = MOST_KAPPA) -> Within:
    """The test on the rows of a trace."""
    return within_steps(
        secants=samples.secants,
        grad_norm=samples.grad_norm,
        grad_norms=samples.grad_norms,
        fractions=samples.fractions,
        kappa=samples.kappa,
        eps=samples.eps,
        cosine=samples.cosine,
        most_kappa=most_kappa,
    )


def settings_below(folders: list[Path]) -> dict[str, list[Samples]]:
    """Usable rows of every run with two fractions or more, by setting."""
    found = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("trace.jsonl")):
            trace = Trace.load(path)
            if trace.column("fractions").shape[1] > 1 and len(trace) >= LEAST_TESTED_ROWS:
                found[path.parent.name.split("-seed")[0] + " " + folder.name].append(usable_samples(trace))
    return found


def line(name: str, runs: list[Samples]) -> str:
    """A row of the table."""
    answers = Counter(
        f"cannot tell ({fit.missing.kind})" if fit.missing else fit.answer for fit in map(elasticity_of, runs)
    )
    whole = [
        fit for fit in (elasticity_of(samples, most_kappa=np.inf) for samples in runs) if not fit.missing
    ]
    said = ", ".join(f"{count} {answer}" for answer, count in answers.items())
    middle = " | ".join(
        f"{np.mean([getattr(fit, key) for fit in whole]) + 0.0:.2f}" for key in ("elasticity", "zero")
    )
    kappa = np.median([np.median(samples.kappa) for samples in runs])
    beyond = sum(fit.grows for fit in whole)
    return f"| {name} | {len(runs)} | {kappa:.2f} | {said} | {middle} | {beyond} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    columns = ("setting", "runs", "κ", "the test says", "whole steps", "shuffled zero", "beyond it")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, runs in settings_below(parser.parse_args().folders).items():
        print(line(name, runs), flush=True)
