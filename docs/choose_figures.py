"""The runs, numbers and pictures of docs/choose.md: python docs/choose_figures.py [folder].

Prints every command and what it says. About three minutes on one core, with Penn Treebank at hand. The
folder gets the runs, the report page, the figures, and the pictures of the page: choose-loss.png,
choose-scatter.png and, where there is chromium, choose-report.png.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

from clipwise.cli import main

SMALL = "--embedding 64 --hidden 100"
CHROMIUM = shutil.which("chromium")  # for the picture of the page
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
run(f"{TRAIN} --lr {lr} --max-norm 0.25 --folder {folder}/raised")
run(f"{TRAIN} --lr {lr} --max-norm 0.5 --folder {folder}/further")
run(f"clipwise advise {folder}/lower {folder}/calibrated {folder}/raised {folder}/further")
run(f"clipwise report {folder} --output {folder}/report.html --figures {folder}/figures")
shutil.copy(folder / "figures" / "comparison.png", folder / "choose-loss.png")
shutil.copy(folder / "figures" / "calibrated-scatter.png", folder / "choose-scatter.png")

if CHROMIUM:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.goto((folder / "report.html").resolve().as_uri())
        tab.wait_for_selector("html[data-ready=yes]")
        tab.evaluate("clipwisePage.drawAll()")
        end = tab.evaluate("document.querySelector('#comparison').getBoundingClientRect().bottom + 12")
        clip = {"x": 0, "y": 0, "width": 1100, "height": end}
        tab.screenshot(path=folder / "choose-report.png", clip=clip, full_page=True)
        browser.close()
