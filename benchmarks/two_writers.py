"""Processes that open one trace at the same moment: every row is in a file, and every loser gets an error.

    python benchmarks/two_writers.py [--rounds 200] [--processes 2]

For each way to open a file that exists, processes meet at a barrier, open the same new path and write five
rows each. With "resume" and "overwrite" one of them writes, and the others get EBUSY. With "new" each has
its own file.
The exit code is the number of lost rows, plus that of losers without an error, at most 100.
"""

import argparse
import errno
import multiprocessing
import sys
import tempfile
from pathlib import Path

from curvestep import Trace

ROWS = 5
WAYS = ("resume", "new", "overwrite")


def write(folder, name, way, rounds, barrier, results):
    """In each round open the trace that the others open, and write rows as one that nobody disturbs would."""
    for number in range(rounds):
        written = []
        code = None
        barrier.wait(120)
        try:
            trace = Trace(folder / f"{number}.jsonl", if_exists=way)
            trace.describe({"model": name})
            for step in range(ROWS):
                trace.append({"step": step, "writer": name})
                written.append((trace.path.name, name, step))
        except OSError as error:
            code = error.errno
        results.put((written, code))
        barrier.wait(120)  # files stay open until all have tried


def play(way, rounds, processes):
    """Rows that are in no file, losers without an error, and how many wrote, over all rounds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["curvestep.trace.trace"])
    barrier = context.Barrier(processes)
    results = context.Queue()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [(folder, f"writer {k}", way, rounds, barrier, results) for k in range(processes)]
        started = [context.Process(target=write, args=one) for one in given]
        for process in started:
            process.start()
        found = [results.get(timeout=300) for _ in range(rounds * processes)]
        for process in started:
            process.join()
        in_files = {
            (file.name, row["writer"], row["step"]) for file in folder.iterdir() for row in Trace.load(file)
        }
    lost = sum(row not in in_files for written, _ in found for row in written)
    quiet = sum(len(written) < ROWS and code != errno.EBUSY for written, code in found)
    winners = sum(len(written) == ROWS for written, _ in found)
    return lost, quiet, winners


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    faults = 0
    for way in WAYS:
        lost, quiet, winners = play(way, args.rounds, args.processes)
        most = args.rounds * (args.processes if way == "new" else 1)
        faults += lost + quiet + abs(winners - most)
        print(
            f"{way:9} {args.rounds} rounds of {args.processes} processes: {winners} wrote ({most} should), "
            f"{lost} rows lost, {quiet} losers without an error"
        )
    return min(faults, 100)


if __name__ == "__main__":
    sys.exit(main())
