"""The laptop's PTB run with measured numbers beside the paper's 30 and 0.25, and what measuring costs.

    python -m benchmarks.calibrate_ptb [--seeds 1 2 3] [--steps 0] [--out docs/results]

The gradients of the calibration are taken off the steps of its run. Times are CPU times of one thread, so
that a busy machine does not change them. Writes the figure of the first calibration's curve and a table, row
by row. ``--steps`` shortens the runs, but not what calibration is compared with. The way missed is
(loss - loss by hand) / (loss at the start - loss by hand), with training losses.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from curvestep.lab.recipes import get_recipe
from curvestep.lab.run.auto import calibrate_recipe
from curvestep.lab.run.loop import train
from curvestep.lab.tasks import make_task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = get_recipe("ptb-lstm")
    task = make_task(recipe)
    num_steps = options.steps or recipe.steps
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [
        f"`python -m benchmarks.calibrate_ptb`: {num_steps} steps of ptb-lstm on {task.data_source}, those "
        "of the calibrated runs less the gradients of the calibration.",
        "",
        "| seed | setting | training loss | validation loss | status | way missed | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    words = ""
    for seed in options.seeds:
        seeded = replace(recipe, seed=seed, steps=num_steps)
        start = time.process_time()
        measured, cal = calibrate_recipe(seeded, task=make_task(seeded))
        seconds = time.process_time() - start
        if not words:
            words = f"{cal.num_gradients} gradients in {seconds:.2f} CPU seconds.\n\n{cal}"
            cal.plot(title="PTB, two-layer LSTM: where the step stops being safe").savefig(
                options.out / "calibration-curve.png", dpi=110, metadata={"Software": None}
            )
        first = sum(batch.loss for batch in cal.curve) / len(cal.curve)
        by_hand = float("nan")
        for name, run in (
            ("paper's, by hand", replace(seeded, lr=30.0, max_norm=0.25)),
            ("calibrated", replace(measured, steps=num_steps - cal.num_gradients)),
        ):
            with tempfile.TemporaryDirectory() as folder:
                start = time.process_time()
                result = train(run, Path(folder) / "run", progress=False, threads=1)
                took = time.process_time() - start
            loss = result.train_loss
            by_hand = loss if name != "calibrated" else by_hand
            valid = result.metrics.get("valid", {}).get("loss", float("nan"))
            lines.append(
                f"| {seed} | {name}: {run.label} | {loss:.3f} | {valid:.3f} | {result.status} at "
                f"{result.step} | {(loss - by_hand) / (first - by_hand):.1%} | {took:.1f} |"
            )
            text = "\n".join([*lines, "", words]) + "\n"
            (options.out / "calibrate-ptb.md").write_text(text, encoding="utf-8")
            print(lines[-1], flush=True)


if __name__ == "__main__":
    main()
