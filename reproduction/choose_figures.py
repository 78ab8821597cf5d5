"""The runs, numbers and pictures of docs/choose.md: python reproduction/choose_figures.py [FOLDER] [--keep].

Prints every command and what it says. Minutes on one core, with Penn Treebank at hand; runs that have ended
in FOLDER (default: runs/choose) are not trained again. FOLDER gets the runs, the report page,
the pictures of the documentation (choose-loss.png, choose-scatter.png and, where there is chromium,
choose-report.png) and the numbers, choose.json. With --keep pictures and numbers are copied into docs/.
"""

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

from curvestep.cli import main
from curvestep.report.charts import comparison, run_charts
from curvestep.report.drawing import figure_of, save
from curvestep.report.views import find_views, tasks_of
from curvestep_reproduction.training.run_folder import TrainedRun

SMALL = "--embedding 64 --hidden 100"
CHROMIUM = shutil.which("chromium")  # for the picture of the page
TRAIN = f"curvestep train ptb-lstm {SMALL} --steps 200 --probe-every 2 --threads 1 --quiet --resume"
DOCS = Path(__file__).parents[1] / "docs"


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


def ending(folder: Path) -> dict[str, object]:
    """The numbers that the story tells of a run."""
    found = TrainedRun.load(folder)
    rows = found.rows("train")
    clipped = sum(row["coefficient"] < 1 - 1e-6 for row in rows) / len(rows)
    status = found.status
    perplexity = status["metrics"].get("valid", {}).get("perplexity")
    numbers = {"lr": found.recipe.lr, "max_norm": str(found.recipe.max_norm), "status": status["status"]}
    numbers |= {"step": status["step"], "clipped": clipped, "message": status["message"]}
    diverged = status["status"] == "diverged"
    return {**numbers, "train_loss": None if diverged else status["train_loss"], "perplexity": perplexity}


folder = Path(next((word for word in sys.argv[1:] if not word.startswith("-")), "runs/choose"))
run(f"{TRAIN} --lr 10 --max-norm inf --folder {folder}/first")
run(f"{TRAIN} --lr 2 --max-norm inf --folder {folder}/lower")
said = {name: run(f"curvestep advise {folder}/{name}") for name in ("first", "lower")}
said["calibrate"] = run(f"curvestep calibrate ptb-lstm {SMALL}")
found = json.loads(run(f"curvestep calibrate ptb-lstm {SMALL} --json"))
lr, max_norm = f"{found['lr']:.3g}", f"{found['max_norm']:.3g}"
run(f"{TRAIN} --lr {lr} --max-norm {max_norm} --folder {folder}/calibrated")
said["calibrated"] = run(f"curvestep advise {folder}/calibrated")
run(f"{TRAIN} --lr {lr} --max-norm 0.5 --folder {folder}/raised")
run(f"{TRAIN} --lr {lr} --max-norm inf --folder {folder}/without")
said["together"] = run(f"curvestep advise {folder}/lower {folder}/calibrated {folder}/raised")
run(f"curvestep report {folder} --output {folder}/report.html")
(task,) = tasks_of(find_views([folder]))
save(figure_of(comparison(task.runs)[:1], title=task.name), folder / "choose-loss.png")
calibrated = next(view for view in task.runs if view.name == "calibrated")
scatter = [chart for chart in run_charts(calibrated) if chart.kind == "scatter"]
save(figure_of(scatter, title=f"calibrated: {calibrated.setting}"), folder / "choose-scatter.png")
names = ("first", "lower", "calibrated", "raised", "without")
kept = {"runs": {name: ending(folder / name) for name in names}, "said": said}
(folder / "choose.json").write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")

if CHROMIUM:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.goto((folder / "report.html").resolve().as_uri())
        tab.wait_for_selector("html[data-ready=yes]")
        tab.evaluate("curvestepPage.drawAll()")
        end = tab.evaluate("document.querySelector('#comparison').getBoundingClientRect().bottom + 12")
        clip = {"x": 0, "y": 0, "width": 1100, "height": end}
        tab.screenshot(path=folder / "choose-report.png", clip=clip, full_page=True)
        browser.close()

if "--keep" in sys.argv:
    for picture in folder.glob("choose-*.png"):
        shutil.copy(picture, DOCS / "images" / picture.name)
    shutil.copy(folder / "choose.json", DOCS / "results" / "choose.json")
