"""Long runs that look for wrong numbers and for growth.

    python benchmarks/soak.py [--sets 2000] [--steps 20000] [--page docs/results/soak.md]

Random parameter sets are stepped by every path and compared with the formula in float64; a loop with the
probe reports memory, descriptors and time in tenths.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

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


def probed(steps):
    """Memory, descriptors and CPU time of each tenth of a loop with the probe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 16)
    y = x.sum(1, keepdim=True).sin()
    optimizer, process = cs.ClippedSGD(model.parameters(), lr=0.05, max_norm=1.0), psutil.Process()
    tenths = []
    with tempfile.TemporaryDirectory() as folder:
        probe = cs.SmoothnessProbe(model, every=10, trace=Path(folder) / "trace.jsonl")
        for _ in range(10):
            begun = time.process_time()
            for _ in range(steps // 10):

                def loss_fn():
                    return (model(x) - y).square().mean()

                optimizer.zero_grad()
                loss_fn().backward()
                with probe(loss_fn):
                    optimizer.step()
            spent = 1e6 * (time.process_time() - begun) / (steps // 10)
            megabytes = process.memory_info().rss / 2**20
            tenths.append({"us_a_step": spent, "megabytes": megabytes, "handles": process.num_fds()})
    return tenths


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=2000, help="random parameter sets (default 2000)")
    parser.add_argument("--steps", type=int, default=20_000, help="steps with the probe (default 20000)")
    parser.add_argument("--page", type=Path, help="also write the results as a page to this file")
    options = parser.parse_args()
    results = {"fuzz": fuzz(options.sets), "probe": probed(options.steps)}
    text = json.dumps(results, indent=1)
    print(text)
    if options.page:
        options.page.write_text(
            f"# Soak\n\n`python benchmarks/soak.py --sets {options.sets} --steps {options.steps}`, "
            f"torch {torch.__version__}. Errors are relative to the largest parameter, over 2e-5 in "
            f"float32 and 1e-12 in float64.\n\n```json\n{text}\n```\n"
        )
    if results["fuzz"]["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
