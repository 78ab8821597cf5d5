"""Long runs that look for wrong numbers, for lost rows and for growth.

    python benchmarks/soak.py [--sets 2000] [--kills 10] [--steps 20000] [--page benchmarks/results/soak.md]

Random parameter sets are stepped by every path and compared with the formula in float64; a run of the command
line is killed and resumed until it ends, and compared with one that was left alone; a loop with the probe
reports memory, descriptors and time in tenths, beside the same loop without.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import nn

import curvestep as cs

PATHS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def random_tensor(draw, dtype):
    shape = [draw.choice([0, 1, 2, 3, 17, 64]) for _ in range(draw.randrange(4))]
    t = torch.randn(shape, dtype=dtype)
    kind = draw.randrange(4)
    if kind == 1 and t.dim() > 1:
        return t.transpose(0, 1)
    if kind == 2 and t.dim():
        return torch.randn([2 * n for n in shape], dtype=dtype)[tuple(slice(None, None, 2) for _ in shape)]
    return t


def one_set(seed):
    """The largest relative error of a random set of parameters after a few steps."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice(list(TOLERANCE))
    tensors = [random_tensor(draw, dtype) for _ in range(draw.randrange(1, 8))]
    adamw, options = draw.random() < 0.4, dict(draw.choice(PATHS))
    options |= {"norm_scope": draw.choice(["global", "tensor"]), "weight_decay": draw.choice([0.0, 0.1])}
    if not adamw:
        options |= {"momentum": draw.choice([0.0, 0.9])}
    make = cs.ClippedAdamW if adamw else draw.choice([cs.ClippedSGD, cs.NormalizedSGD])
    ours = [nn.Parameter(t) for t in tensors]
    exact = [nn.Parameter(t.detach().double().contiguous()) for t in tensors]
    plain = options | {"foreach": False, "fused": None}
    optimizers = make(ours, 0.1, 1.0, **options), make(exact, 0.1, 1.0, **plain)
    for _ in range(draw.randrange(1, 5)):
        for p, q in zip(ours, exact, strict=True):
            g = torch.randn(p.shape, dtype=torch.float64) * 10 ** draw.uniform(-3, 3)
            p.grad = g.to(dtype)
            q.grad = p.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    pairs = [(p.detach().double(), q.detach()) for p, q in zip(ours, exact, strict=True) if q.numel()]
    size = max((float(q.abs().max()) for _, q in pairs), default=1.0)
    apart = max((float((p - q).abs().max()) for p, q in pairs), default=0.0)
    return apart / max(size, 1.0) / TOLERANCE[dtype]


def fuzz(sets):
    errors = [one_set(seed) for seed in range(sets)]
    wrong = [seed for seed, error in enumerate(errors) if not error < 1]
    return {"sets": sets, "wrong": wrong, "largest_error_over_tolerance": max(errors)}


TRAIN = (
    "ptb-lstm --corpus topics --num-words 4000 --vocabulary 200 --embedding 16 --hidden 16 --layers 1 "
    "--dropout 0.2 --batch-size 4 --bptt 10 --momentum 0.9 --lr 1 --eval-every 50 --eval-size 500 "
    "--threads 1 --offline --quiet"
)


def last_step(folder):
    """The step of the last whole row that is on disk, 0 before the first."""
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return json.loads(rows[-1])["step"] if rows else 0


def train(folder, steps):
    command = [sys.executable, "-m", "curvestep", "train", *TRAIN.split(), f"--steps={steps}", "--resume"]
    # A checkpoint after every row, so that some kills fall into the writing of one.
    return subprocess.Popen(
        [*command, "--checkpoint-seconds=0", f"--folder={folder}"], stdout=subprocess.DEVNULL
    )


def killed(kills):
    """What differs between a run that was killed at several steps and resumed, and one that was not."""
    steps = 40 * (kills + 2)
    with tempfile.TemporaryDirectory() as folder:
        alone, struck = Path(folder, "alone"), Path(folder, "struck")
        if train(alone, steps).wait():
            raise RuntimeError("the run that was left alone did not end well")
        struck_at = [0]
        while len(struck_at) <= kills:
            process = train(struck, steps)
            while last_step(struck) < struck_at[-1] + 20 and process.poll() is None:
                time.sleep(0.01)
            if process.poll() is not None:
                break
            process.kill()
            process.wait()
            struck_at.append(last_step(struck))
        train(struck, steps).wait()
        different = [
            name
            for name in ("metrics.jsonl", "trace.jsonl")
            if (alone / name).read_bytes() != (struck / name).read_bytes()
        ]
        weights = [torch.load(run / "checkpoint.pt", weights_only=True)["model"] for run in (alone, struck)]
        if not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]):
            different.append("checkpoint.pt")
    return {"steps": steps, "killed_after_steps": struck_at[1:], "different": different}


class Loop:
    """A small model in training, with a probe or without."""

    def __init__(self, trace=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.x = torch.randn(64, 16)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.optimizer = cs.ClippedSGD(self.model.parameters(), lr=0.05, max_norm=1.0)
        self.probe = cs.SmoothnessProbe(self.model, every=10, trace=trace) if trace else None

    def loss(self):
        """Of the one batch."""
        return (self.model(self.x) - self.y).square().mean()

    def microseconds(self, steps):
        """Processor time of a step."""
        begun = time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            if self.probe is None:
                self.optimizer.step()
            else:
                with self.probe(self.loss):
                    self.optimizer.step()
        return 1e6 * (time.process_time() - begun) / steps


def probed(steps, block=100):
    """Memory, descriptors and processor time of each tenth of a loop with the probe.

    Blocks of it alternate with blocks of the same loop without: what else the machine does slows both.
    """
    process, tenths = psutil.Process(), []
    with tempfile.TemporaryDirectory() as folder:
        watched, plain = Loop(Path(folder) / "trace.jsonl"), Loop()
        for _ in range(10):
            pairs = [
                (watched.microseconds(block), plain.microseconds(block)) for _ in range(steps // 10 // block)
            ]
            tenths.append(
                {
                    "us_a_step": round(median(ours for ours, _ in pairs)),
                    "without_probe": round(median(theirs for _, theirs in pairs)),
                    "ratio": round(median(ours / theirs for ours, theirs in pairs), 3),
                    "megabytes": round(process.memory_info().rss / 2**20, 1),
                    "handles": process.num_fds(),
                }
            )
    return tenths


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=2000, help="random parameter sets (default 2000)")
    parser.add_argument("--kills", type=int, default=10, help="kills of one training run (default 10)")
    parser.add_argument("--steps", type=int, default=20_000, help="steps with the probe (default 20000)")
    parser.add_argument("--page", type=Path, help="also write the results as a page to this file")
    options = parser.parse_args()
    results = {
        "fuzz": fuzz(options.sets),
        "kills": killed(options.kills),
        "probe": probed(options.steps),
    }
    text = json.dumps(results, indent=1)
    print(text)
    if options.page:
        options.page.write_text(
            f"# Soak\n\n`python benchmarks/soak.py --sets {options.sets} --kills {options.kills} "
            f"--steps {options.steps}`, torch {torch.__version__}.\n\n"
            "- Random sets: errors are relative to the largest parameter, over 2e-5 in float32 and 1e-12 in "
            "float64.\n"
            "- Kills: `curvestep train` struck by SIGKILL after these steps and resumed each time; metrics, "
            "trace and weights are compared bit for bit with those of a run that was left alone.\n"
            "- Probe: each tenth of the loop; processor time, medians over blocks of 100 steps, which "
            "alternate with blocks of the same loop without the probe.\n\n"
            f"Sets that were wrong: {len(results['fuzz']['wrong'])}; resumed runs that differed: "
            f"{len(results['kills']['different'])}; megabytes at the end and after the first tenth: "
            f"{results['probe'][-1]['megabytes']} and {results['probe'][0]['megabytes']}. Numbers: "
            f"`{options.page.with_suffix('.json').name}`.\n"
        )
        options.page.with_suffix(".json").write_text(text + "\n")
    kills = results["kills"]
    if results["fuzz"]["wrong"] or kills["different"] or len(kills["killed_after_steps"]) < options.kills:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
