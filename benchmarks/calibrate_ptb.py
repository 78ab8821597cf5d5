"""The laptop's PTB run with measured numbers beside the paper's 30 and 0.25, and what measuring costs.

    python -m benchmarks.calibrate_ptb [--seeds 7 8 9] [--steps 0] [--out docs/results]

Each gradient of the calibration takes the place of a step, and of that step's text: the calibrated run begins
so many batches later and ends with the same ones. Losses are those of batches that no step has seen, over the
last 40 steps of both runs. (Text differs: the batches 271 to 285 are by three per cent of the whole way
harder than the batches 286 to 300, so runs that end at different steps cannot be compared by them.) The way
missed is (loss - loss by hand) / (loss at the start - loss by hand). Times are CPU times of one thread.
Writes the figure of the first calibration's curve and a table, row by row. ``--steps`` shortens the runs, but
not the calibration.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.calibrate import WINDOW

from curvestep import ClippedSGD
from curvestep.lab.recipes import Recipe, get_recipe
from curvestep.lab.run.auto import calibrate_recipe
from curvestep.lab.tasks import make_task


def losses(recipe: Recipe, *, first: int) -> tuple[np.ndarray, float]:
    """The loss of each batch before its step, from batch ``first`` on, and the validation loss at the end."""
    torch.manual_seed(recipe.seed)  # dropout
    task, state, found = make_task(recipe), None, []
    model = task.build().train()
    optimizer = ClippedSGD(model.parameters(), lr=recipe.lr, max_norm=recipe.max_norm)
    for step in range(first, recipe.steps):
        loss, state = task.loss(model, task.batch(step), state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return np.array(found), task.evaluate(model.eval(), "valid", torch.device("cpu"))["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = get_recipe("ptb-lstm")
    num_steps = options.steps or recipe.steps
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [
        f"`python -m benchmarks.calibrate_ptb --seeds {' '.join(map(str, options.seeds))}`: {num_steps} "
        f"gradients of ptb-lstm on {make_task(recipe).data_source}, those of the calibration included.",
        "",
        f"| seed | setting | loss, last {WINDOW} | validation loss | steps | way missed | CPU seconds |",
        7 * "|---" + "|",
    ]
    words = ""
    for seed in options.seeds:
        seeded = replace(recipe, seed=seed, steps=num_steps)
        start = time.process_time()
        measured, cal = calibrate_recipe(seeded)
        seconds = time.process_time() - start
        if not words:
            words = f"{cal.num_gradients} gradients in {seconds:.2f} CPU seconds.\n\n{cal}"
            cal.plot(title="PTB, two-layer LSTM: where the step stops being safe").savefig(
                options.out / "calibration-curve.png", dpi=110, metadata={"Software": None}
            )
        by_hand, way = np.empty(0), 0.0
        for name, run, first in (
            ("paper's, by hand", replace(seeded, lr=30.0, max_norm=0.25), 0),
            ("calibrated", measured, cal.num_gradients),
        ):
            start = time.process_time()
            found, valid = losses(run, first=first)
            took = time.process_time() - start
            if not first:
                by_hand, way = found, found[0] - found[-WINDOW:].mean()
            missed = (found[-WINDOW:] - by_hand[-WINDOW:]).mean() / way
            lines.append(
                f"| {seed} | {name}: {run.label} | {found[-WINDOW:].mean():.3f} | {valid:.3f} | {len(found)} "
                f"| {missed:.1%} | {took:.1f} |"
            )
            text = "\n".join([*lines, "", words]) + "\n"
            (options.out / "calibrate-ptb.md").write_text(text, encoding="utf-8")
            print(lines[-1], flush=True)


if __name__ == "__main__":
    main()
