"""The tables of faults again: modules with odd state, two writers, ranks, kills, and the tests of each fault.

    python benchmarks/faults.py [--quick]

Runs `odd_modules.py`, `two_writers.py`, `ranks.py` and `signals.py`, and the tests that the page on faults
names. With ``--quick`` odd modules run with SGD alone, and ranks are two. What cannot run here is named. The
last line counts runs that differ, rows that are lost and processes that a signal killed.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "FAULTS.md"
NEEDS = {
    "tests of torch, Lightning and transformers": "their sources: see `benchmarks/peer_suites.py`",
    "pytorch_optimizer's tests of wrappers": "its sdist, 4.1.0",
    "fit and report of a million rows": "about 2 GB of memory: see `benchmarks/rows.py`",
}


def call(*words):
    """The code and the output of a command of this Python, printed as it comes."""
    print("$ python", *words, flush=True)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    print("\n".join(done.stdout.splitlines()[-6:]), flush=True)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-6:]), flush=True)
    return done.returncode, done.stdout


def total(pattern, text):
    """The sum of the numbers before some words."""
    return sum(int(number) for number in re.findall(rf"(\d+) {pattern}", text))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    modules = ["benchmarks/odd_modules.py", *(["--optimizers", "SGD"] if args.quick else [])]
    ranks = ["benchmarks/ranks.py", *(["--ranks", "2"] if args.quick else [])]
    tests = sorted(set(re.findall(r"[a-z_/]*tests/[a-z_/]+\.py::\w+", PAGE.read_text(encoding="utf-8"))))
    commands = {
        "modules": modules,
        "writers": ["benchmarks/two_writers.py"],
        "ranks": ranks,
        "signals": ["benchmarks/signals.py"],
        "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
    }
    found = {name: call(*words) for name, words in commands.items()}
    different = sum(total("different", found[name][1]) for name in ("modules", "ranks"))
    lost = total("rows lost", found["writers"][1])
    killed = sum(code < 0 for code, _ in found.values())
    for what, needed in NEEDS.items():
        print(f"not run: {what}. It needs {needed}.")
    failed = [name for name, (code, _) in found.items() if code]
    print(f"{different} different, {lost} lost, {killed} killed")
    if failed:
        print("failed:", *failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
