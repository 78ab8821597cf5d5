"""The laptop's PTB run with measured numbers beside the paper's 30 and 0.25, and what measuring costs.

    python -m benchmarks.calibrate_ptb [--steps 0] [--out docs/results]

Times are CPU times of one thread, so that a busy machine does not change them. Writes the figure of the
calibration's curve and a table. ``--steps`` shortens the runs, but not what calibration is compared with.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from curvestep.lab.recipes import get_recipe
from curvestep.lab.report.page import calibration_figure
from curvestep.lab.run.auto import calibrate_recipe
from curvestep.lab.run.loop import train
from curvestep.lab.tasks import make_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = get_recipe("ptb-lstm")
    task = make_task(recipe)
    recipe = replace(recipe, steps=options.steps or recipe.steps)
    calibrate_recipe(recipe, task=task)  # the first call loads libraries
    start = time.process_time()
    measured, cal = calibrate_recipe(recipe, task=task)
    seconds = time.process_time() - start
    options.out.mkdir(parents=True, exist_ok=True)
    calibration_figure(cal, title="PTB, two-layer LSTM: where the step stops being safe").savefig(
        options.out / "calibration-curve.png", dpi=110, metadata={"Software": None}
    )
    lines = [
        f"`python -m benchmarks.calibrate_ptb`: {recipe.steps} steps of ptb-lstm on {task.data_source}.",
        "",
        "| setting | training loss, last 50 steps | validation loss | status | CPU seconds |",
        "|---|---|---|---|---|",
    ]
    took = {}
    for name, run in (
        ("paper's, by hand", replace(recipe, lr=30.0, max_norm=0.25)),
        ("calibrated", measured),
        ("calibrated, no clipping", replace(measured, max_norm=float("inf"))),
    ):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            result = train(run, Path(folder) / "run", progress=False, threads=1)
            took[name] = time.process_time() - start
        valid = result.metrics.get("valid", {}).get("loss", float("nan"))
        lines.append(
            f"| {name}: {run.label} | {result.train_loss:.3f} | {valid:.3f} "
            f"| {result.status} at {result.step} | {took[name]:.1f} |"
        )
    share = seconds / took["calibrated"]
    cost = f"{cal.num_gradients} gradients in {seconds:.2f} CPU seconds: {share:.1%} of the run."
    lines += ["", cost, "", str(cal)]
    text = "\n".join(lines) + "\n"
    (options.out / "calibrate-ptb.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
