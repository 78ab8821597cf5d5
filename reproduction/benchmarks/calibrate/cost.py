"""What calibrate costs beside training: gradients, CPU time, memory; each measured in a process of its own.

    python -m reproduction.benchmarks.calibrate.cost

A perceptron of 17 million parameters. Memory is the peak of the process above the moment when only the model
was there, in copies of its parameters.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, calibrate

WIDTH, BATCH, NUM_STEPS = 2048, 64, 80


def measured(what: str, kind: str) -> dict[str, float]:
    """CPU seconds, gradients and copies of the parameters that ``what`` took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    batches = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(24)]
    make = {"AdamW": ClippedAdamW, "SGD with momentum": ClippedSGD}[kind]
    options = {} if kind == "AdamW" else {"momentum": 0.9}
    optimizer = make(model.parameters(), lr=1e-3, max_norm=1.0, **options)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    with torch.no_grad():
        loss(batches[0])
    before, began, spent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), NUM_STEPS
    if what == "train":
        for k in range(NUM_STEPS):
            optimizer.zero_grad()
            loss(batches[k % len(batches)]).backward()
            optimizer.step()
    else:
        spent = calibrate(
            model, loss, batches, optimizer=optimizer, schedule="warmup-decay", progress=False
        ).num_gradients
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"gradients": spent, "seconds": time.process_time() - began, "copies": 1024 * peak / size}


def main() -> None:
    print("| optimizer | gradients | CPU time, in training steps | memory, in copies: training | calibrate |")
    print("| --- " * 5 + "|")
    for kind in ("AdamW", "SGD with momentum"):
        rows = []
        for what in ("train", "calibrate"):
            command = [sys.executable, "-m", "reproduction.benchmarks.calibrate.cost", what, kind]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        train, own = rows
        steps = own["seconds"] / (train["seconds"] / NUM_STEPS)
        copies = f"{train['copies']:.1f} | {own['copies']:.1f}"
        print(f"| {kind} | {own['gradients']} | {steps:.0f} | {copies} |")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measured(*sys.argv[1:])))
    else:
        main()
