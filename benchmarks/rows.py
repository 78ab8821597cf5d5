"""What rows cost to read: python benchmarks/rows.py [--rows 100000 1000000] [--commands fit advise report].

For each number of rows it writes a trace as a probe writes it with ``every=1``, some 850 bytes a row, and
reads it in a process of its own: CPU seconds and the most memory that this process held, its imports
included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from curvestep.files import dump_row

COMMANDS = ("fit", "advise", "report")
FRACTIONS = np.array([1 / 6, 0.5, 1.0])


def write_trace(path: Path, num_rows: int) -> None:
    """A clipped run whose sharpness grows with the gradient norm, between rows and inside steps."""
    rng = np.random.default_rng(0)
    norms = np.exp(0.5 * rng.standard_normal(num_rows))
    scatter = np.exp(0.3 * rng.standard_normal(num_rows))
    bends = 0.1 * rng.standard_normal(num_rows)
    with path.open("wb") as file:
        file.write(dump_row({"format": "curvestep-trace", "schema": 1, "optimizer": "ClippedSGD"}))
        for step in range(num_rows):
            loss = 1.0 + 1 / (1 + 10 * step / num_rows)
            file.write(dump_row(_row(step, loss, norms[step], scatter[step], bends[step])))


def _row(step: int, loss: float, g: float, scatter: float, bend: float) -> dict[str, object]:
    length = 0.1 * min(g, 1.0)
    inside = 1 - (0.2 + bend) * FRACTIONS * length / g
    secants = (1 + 2 * g) * scatter * (1 - bend * FRACTIONS)
    coefficient = min(1.0, 1 / g)
    return {
        "step": step,
        "loss": loss,
        "loss_after": loss - 0.01 * g,
        "recent_loss": loss,
        "recent_steps": 1,
        "grad_norm": float(g),
        "step_norm": float(length),
        "smoothness": float(secants.max()),
        "fractions": FRACTIONS.tolist(),
        "secants": secants.tolist(),
        "grad_norms": (g * inside).tolist(),
        "kappa": float(secants[-1] * length / g),
        "stability_margin": float(0.05 * secants.max()),
        "curvature": float(0.8 * secants[-1]),
        "cosine": float(1 - bend**2),
        "lr": 0.1,
        "coefficient": float(coefficient),
        "clipped": bool(coefficient < 1),
        "spikes": [],
        "optimizer": "ClippedSGD",
        "momentum": 0.0,
        "optimizer_smoothness": float(secants[-1]),
        "optimizer_limit": 2.0,
        "batch_size": 16,
        "num_gradients": 4,
        "eps": 2.0**-23,
        "self_test": 0.0,
        "status": "ok",
    }


def read_trace(command: str, path: Path) -> None:
    """Read a trace by a command, and print CPU seconds and megabytes."""
    import curvestep as cs

    started = time.process_time()
    if command == "fit":
        str(cs.fit_smoothness(path))
    elif command == "advise":
        str(cs.advise(path))
    else:
        cs.report(path, output=path.with_suffix(".html"))
    seconds = time.process_time() - started
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux
    print(f"{seconds:.2f} {most / 1000:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument(
        "--read", nargs=2, metavar=("COMMAND", "TRACE"), help="read one trace in this process"
    )
    arguments = parser.parse_args()
    if arguments.read:
        read_trace(arguments.read[0], Path(arguments.read[1]))
        return
    print("| command | rows | CPU seconds | peak MB |\n| --- | --- | --- | --- |")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in arguments.rows:
            path = Path(folder) / f"{num_rows}.jsonl"
            write_trace(path, num_rows)
            for command in arguments.commands:
                call = [sys.executable, __file__, "--read", command, str(path)]
                done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
                cells = done.stdout.split() or [f"failed ({done.returncode})", ""]
                print(f"| {command} | {num_rows:,} | {cells[0]} | {cells[1]} |", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
