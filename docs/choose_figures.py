"""The runs, numbers and pictures of docs/choose.md: python docs/choose_figures.py [folder].

Prints every command and what it says. About two minutes on one core, with Penn Treebank at hand. The
folder gets the runs, the report page and the figures; the two pictures of the page are choose-loss.png and
choose-scatter.png.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

from clipwise.cli import main

SMALL = "--embedding 64 --hidden 100"
TRAIN = f"clipwise train ptb-lstm {SMALL} --steps 200 --probe-every 2 --threads 1 --quiet"


def run(line: str) -> str:
    """One command line: shown, run, and what it printed."""
    print(f"\n$ {line}", flush=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(line.split()[1:])
    print(printed.getvalue(), end="", flush=True)
    if code:
        sys.exit(code)
    return printed.getvalue()


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/choose")
run(f"{TRAIN} --lr 10 --max-norm inf --folder {folder}/first")
run(f"{TRAIN} --lr 2 --max-norm inf --folder {folder}/lower")
run(f"clipwise advise {folder}/lower")
run(f"clipwise calibrate ptb-lstm {SMALL}")
found = json.loads(run(f"clipwise calibrate ptb-lstm {SMALL} --json"))
lr, max_norm = f"{found['lr']:.3g}", f"{found['max_norm']:.3g}"
run(f"{TRAIN} --lr {lr} --max-norm {max_norm} --folder {folder}/calibrated")
run(f"clipwise advise {folder}/calibrated")
run(f"clipwise advise {folder}/first {folder}/lower {folder}/calibrated")
run(f"clipwise report {folder} --output {folder}/report.html --figures {folder}/figures")
shutil.copy(folder / "figures" / "comparison.png", folder / "choose-loss.png")
shutil.copy(folder / "figures" / "calibrated-scatter.png", folder / "choose-scatter.png")
