"""The runs, figures and table of docs/results/longer.md: python docs/longer_figures.py [FOLDER] [--draw].

Trains what has not ended in FOLDER (default: runs/longer), more than an hour of one core, with Penn Treebank
and CIFAR-10 at hand; stop it with Ctrl-C and start it again at will. With --draw it trains nothing and takes
the runs as far as they are. Figures go to docs/results/images, the table is printed.
"""

import sys
from pathlib import Path

from curvestep.cli import main
from curvestep.lab.paper import curves, scatter
from curvestep.lab.paper.scatter import clipped_share
from curvestep.lab.run.folder import TRACE, Run

LANGUAGE = "ptb-lstm --scale paper --probe-data 0.01 --probe-every 20 --eval-every 332"
IMAGES = "cifar-resnet20 --epochs 10 --probe-every 10 --eval-every 78"
RUNS = {
    "lstm-lr30-clip0.25": f"{LANGUAGE} --lr 30 --max-norm 0.25",
    "lstm-lr4": f"{LANGUAGE} --lr 4 --max-norm inf",
    "resnet20-lr5-clip0.25": f"{IMAGES} --lr 5 --momentum 0 --max-norm 0.25",
    "resnet20-momentum": f"{IMAGES} --lr 0.1 --momentum 0.9 --max-norm inf",
}
PICTURES = Path(__file__).parent / "results" / "images"


def row(run: Run) -> str:
    """What a run shows, as a row of the table."""
    clipped = clipped_share(run)
    held = [r for split in ("test", "valid") for r in run.rows(split)][-1:]
    units = [
        f"{k} {v:.4g}{' %' * (k == 'accuracy')}"
        for r in held
        for k, v in r.items()
        if k in ("perplexity", "accuracy")
    ]
    cells = [
        run.recipe.label, run.status["status"], run.status["step"],
        f"{run.status['train_loss']:.3f}", ", ".join(units), f"{100 * clipped:.0f} %",
        *measured(run), f"{run.status['seconds'] / 60:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def measured(run: Run) -> list[str]:
    """Points, rank correlation with interval and control, L0 and L1; as far as the trace is long enough."""
    try:
        fit = run.fit
    except ValueError:
        return [str(len(run.trace)), "too few", "", "", ""]
    low, high = fit.spearman_interval
    control = f"{fit.control.spearman:.2f}" if fit.control else ""
    correlation = f"{fit.spearman:.2f} [{low:.2f}, {high:.2f}]"
    return [str(fit.num_points), correlation, control, f"{fit.L0:.3g}", f"{fit.L1:.3g}"]


folder = Path(next((word for word in sys.argv[1:] if not word.startswith("-")), "runs/longer"))
if "--draw" not in sys.argv:
    for name, command in RUNS.items():
        if main(["train", *command.split(), "--threads", "1", "--resume", "--folder", str(folder / name)]):
            sys.exit(1)
head = (
    "setting, status, steps, training loss at end, held out, clipped, points, rank correlation, control, "
    "L0, L1, minutes"
)
for kind, (one, other) in {"lstm": list(RUNS)[:2], "resnet20": list(RUNS)[2:]}.items():
    if not all((folder / name / TRACE).exists() for name in (one, other)):
        continue
    runs = [Run.load(folder / name) for name in (one, other)]
    print(f"\n{kind}\n\n| {' | '.join(head.split(', '))} |\n{'| --- ' * 12}|")
    print("\n".join(map(row, runs)))
    for what, draw in {"scatter": scatter, "curves": curves}.items():
        draw(runs, title=f"Longer runs: {kind}").savefig(PICTURES / f"longer-{kind}-{what}.png", dpi=100)
