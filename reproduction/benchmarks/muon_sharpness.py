"""Is the directional sharpness of Muon's steps below that of AdamW's at equal loss, as arXiv 2606.04662 says?

    python -m reproduction.benchmarks.muon_sharpness --part rates   # how the rates below were chosen
    python -m reproduction.benchmarks.muon_sharpness                # runs what is missing, prints the tables
    python -m reproduction.benchmarks.muon_sharpness --part points  # both directions at the same points

The directional sharpness of a step d is dᵀ(g(x + d) − g(x))/‖d‖², a probe's `curvature`, here of the mean
loss over 8 fixed training batches. The plan, committed before the three seeds were run:

- Two tasks: a GPT of two layers on letters of the Penn Treebank, and a perceptron with two hidden layers on
  images of CIFAR-10; 400 steps, warm-up over a tenth of them, then a line to zero; no weight decay.
- AdamW moves everything, or Muon the hidden matrices and AdamW the rest, at its own best rate. Rates are the
  best of a grid on seed 100, by the mean training loss of the last 40 steps.
- A seed's ratio compares the two at equal loss. The range of losses that both pass after the warm-up is cut
  into five parts of equal ratio. In each, the median of Muon's sharpness is divided by that of AdamW's; parts
  without rows of both, or with a median that is not positive, are left out. The ratio is the geometric mean.
- The claim holds on a task if the ratio is at most 0.8 in all three seeds, fails if it is at least 1.25 in
  all three, and is open otherwise. It is reproduced here if it holds on both tasks.

The part ``points`` was added after the runs, and judges nothing. Along AdamW's runs of the same seeds, a
Muon is given the same gradients and moves nothing. Every 45 steps, the steps that both take with the hidden
matrices are tried from the same point, at the length of AdamW's.

Beside it, without a verdict: the share of the curvature within layers, and that of the penalty in the gain.
"""

import argparse
import json
import math
import statistics
from itertools import islice
from pathlib import Path

import torch
from reproduction.benchmarks.calibrate.data import (
    Task,
    characters,
    classify,
    next_token,
    samples,
    small_cifar,
    text,
)
from reproduction.benchmarks.calibrate.scheduled import GPT
from torch import nn

import curvestep as cs
from curvestep.files import write_atomically

STEPS, WARMUP, EVERY = 400, 40, 15
NUM_BATCHES = 8  # that sharpness is measured on
SEEDS = (0, 1, 2)
RATES_SEED, LAST = 100, 40
POINTS_EVERY = 45  # steps between those of the part `points`
BINS = 5
BELOW, ABOVE = 0.8, 1.25
ADAMW_GRID = (1e-3, 3e-3, 1e-2, 3e-2)
MUON_GRID = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
RATES = {  # of `--part rates`
    "GPT, letters": {"AdamW": 3e-3, "Muon": 3e-2},
    "MLP, CIFAR-10": {"AdamW": 3e-3, "Muon": 1e-1},
}
FILE = Path("docs/results/muon.jsonl")


def perceptron():
    layers = [nn.Linear(3 * 16 * 16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def gpt():
    return GPT(characters()[1], width=64, layers=2)


TASKS = {
    "GPT, letters": Task("GPT, letters", STEPS, gpt, text(lambda: characters()[0], 16), next_token),
    "MLP, CIFAR-10": Task("MLP, CIFAR-10", STEPS, perceptron, samples(small_cifar, 64), classify),
}


def hidden_matrices(model):
    """What Muon moves: matrices that are neither the first nor the last layer of a model."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2]
    if isinstance(model, GPT):
        return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    return matrices[1:-1]


def optimizers_of(model, kind, rates):
    if kind == "AdamW":
        return [torch.optim.AdamW(model.parameters(), lr=rates["AdamW"], weight_decay=0.0)]
    hidden = hidden_matrices(model)
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    return [
        torch.optim.Muon(hidden, lr=rates["Muon"], weight_decay=0.0),
        torch.optim.AdamW(rest, lr=rates["AdamW"], weight_decay=0.0),
    ]


def share_of_peak(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (STEPS - step) / (STEPS - WARMUP)


def train(name, kind, seed, rates, *, measured, steps=STEPS):
    """Training losses, and the rows of a probe if it is ``measured``."""
    task = TASKS[name]
    model = task.start(seed)
    loss_of = task.loss  # the task itself reads files, which no loss may do that is computed again
    optimizers = optimizers_of(model, kind, rates)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, share_of_peak) for one in optimizers]
    fixed = list(islice(task.stream(seed, "measuring"), NUM_BATCHES))
    oracle = cs.GradientOracle(lambda batch: loss_of(model, batch), fixed)
    estimators = {"layer_curvature": 4}
    probe = cs.SmoothnessProbe(
        model, every=EVERY if measured else steps, fractions=(1.0,), oracle=oracle, estimators=estimators
    )
    losses = []
    for batch in islice(task.stream(seed, "training"), steps):
        loss = loss_of(model, batch)
        loss.backward()
        if measured:
            with probe(lambda batch=batch: loss_of(model, batch)):
                for one in optimizers:
                    one.step()
        else:
            for one in optimizers:
                one.step()
        for one, schedule in zip(optimizers, schedules, strict=True):
            schedule.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses, probe.trace


def rows_of(name, kind, seed):
    """What a run measured, one row for each measured step."""
    _, trace = train(name, kind, seed, RATES[name], measured=True)
    gains = trace.step_gains()
    rows = []
    for i, step in enumerate(gains.step.tolist()):
        row = {"task": name, "optimizer": kind, "seed": seed, "step": int(step)}
        row |= {"loss": trace[i]["loss"], "sharpness": trace[i]["curvature"]}
        row |= {"gain": gains.gain[i], "penalty": gains.penalty[i], "within": gains.within[i]}
        rows.append({key: None if value != value else value for key, value in row.items()})
    return rows


def matched_ratio(adamw, muon):
    """Muon's directional sharpness over AdamW's at equal loss, and how many parts of the range it is from."""
    both = [[row for row in rows if row["step"] >= WARMUP] for rows in (adamw, muon)]
    low = max(min(row["loss"] for row in rows) for rows in both)
    high = min(max(row["loss"] for row in rows) for rows in both)
    if not 0 < low < high:
        return math.nan, 0
    logs = []
    for part in range(BINS):
        begin, end = (low * (high / low) ** ((part + more) / BINS) for more in (0, 1))
        medians = []
        for rows in both:
            inside = [row["sharpness"] for row in rows if begin <= row["loss"] <= end]
            medians.append(statistics.median(inside) if inside else math.nan)
        if all(median > 0 for median in medians):
            logs.append(math.log(medians[1] / medians[0]))
    return (math.exp(statistics.fmean(logs)), len(logs)) if logs else (math.nan, 0)


def verdict(ratios):
    if all(ratio <= BELOW for ratio in ratios):
        return "holds"
    if all(ratio >= ABOVE for ratio in ratios):
        return "fails"
    return "open"


def ratios_at_points(name, seed):
    """Muon's directional sharpness over AdamW's, of hidden matrices alone, at points of AdamW's run."""
    task = TASKS[name]
    model = task.start(seed)
    loss_of = task.loss
    places = [i for i, p in enumerate(model.parameters()) if any(p is one for one in hidden_matrices(model))]
    point = list(model.parameters())
    shadows = [point[i].detach().clone() for i in places]
    [adamw] = optimizers_of(model, "AdamW", RATES[name])
    muon = torch.optim.Muon(shadows, lr=RATES[name]["Muon"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, share_of_peak)
    fixed = list(islice(task.stream(seed, "measuring"), NUM_BATCHES))
    ratios = []
    for step, batch in enumerate(islice(task.stream(seed, "training"), STEPS)):
        loss_of(model, batch).backward()
        begin = [p.detach().clone() for p in point]
        for shadow, i in zip(shadows, places, strict=True):
            shadow.copy_(begin[i])
            shadow.grad = point[i].grad.clone()
        adamw.step()
        muon.step()
        adamw.zero_grad()
        schedule.step()
        if step >= WARMUP and step % POINTS_EVERY == 0:
            end = [p.detach().clone() for p in point]
            move_to(point, begin)
            by_adamw = {i: end[i] - begin[i] for i in places}
            by_muon = {i: shadow - begin[i] for shadow, i in zip(shadows, places, strict=True)}
            longer = length_of(by_adamw) / length_of(by_muon)
            by_muon = {i: longer * d for i, d in by_muon.items()}
            with cs.Replay(model, lambda: sum(loss_of(model, one) for one in fixed) / NUM_BATCHES) as replay:
                ratios.append(sharpness_along(replay, by_muon) / sharpness_along(replay, by_adamw))
            move_to(point, end)
    return ratios


def sharpness_along(replay, step):
    direction = [step.get(i) for i in range(len(replay.parameters))]
    before = replay.gradient_at(direction, 0.0).gradients
    after = replay.gradient_at(direction, 1.0).gradients
    product = sum((d * (after[i] - before[i])).double().sum().item() for i, d in step.items())
    return product / length_of(step) ** 2


def length_of(step):
    return math.sqrt(sum(d.double().square().sum().item() for d in step.values()))


@torch.no_grad()
def move_to(point, values):
    for p, value in zip(point, values, strict=True):
        p.copy_(value)


def points_table():
    """Markdown: the ratios at points of AdamW's runs, with their median and range."""
    lines = ["| task | Muon / AdamW at the same points, seeds 0, 1, 2: median (range) |", "| --- | --- |"]
    for name in TASKS:
        cells = [spread(ratios_at_points(name, seed), float) for seed in SEEDS]
        lines.append(f"| {name} | {', '.join(cells)} |")
    return "\n".join(lines)


def kept(path):
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def run_missing(path):
    """Run what the file does not have yet; it is replaced whole after every run."""
    rows = kept(path)
    done = {(row["task"], row["optimizer"], row["seed"]) for row in rows}
    for name in TASKS:
        for seed in SEEDS:
            for kind in ("AdamW", "Muon"):
                if (name, kind, seed) not in done:
                    rows += rows_of(name, kind, seed)
                    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def tables(rows):
    """Markdown: the ratios with their verdict, and what stands beside them."""
    of_run = {}
    for row in rows:
        of_run.setdefault((row["task"], row["optimizer"], row["seed"]), []).append(row)
    lines = ["| task | Muon / AdamW at equal loss, seeds 0, 1, 2 | parts of the range | the claim |"]
    lines.append("| --- | --- | --- | --- |")
    for name in TASKS:
        pairs = [matched_ratio(of_run[name, "AdamW", seed], of_run[name, "Muon", seed]) for seed in SEEDS]
        ratios = ", ".join(f"{ratio:.2f}" for ratio, _ in pairs)
        parts = ", ".join(str(count) for _, count in pairs)
        lines.append(f"| {name} | {ratios} | {parts} | {verdict([ratio for ratio, _ in pairs])} |")
    numbers = {
        "sharpness": median_sharpness,
        "length of a step": median_length,
        "last loss": last_loss,
        "penalty over gain": of_gain,
        "within layers": within,
    }
    lines += ["", f"| task | optimizer | {' | '.join(numbers)} |", "| --- " * (2 + len(numbers)) + "|"]
    for name in TASKS:
        for kind in ("AdamW", "Muon"):
            runs = [of_run[name, kind, seed] for seed in SEEDS]
            cells = [spread(runs, number) for number in numbers.values()]
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(runs, number):
    values = [number(rows) for rows in runs]
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def median_sharpness(rows):
    return statistics.median(row["sharpness"] for row in rows if row["step"] >= WARMUP)


def median_length(rows):
    lengths = (math.sqrt(2 * row["penalty"] / row["sharpness"]) for row in rows if row["step"] >= WARMUP)
    return statistics.median(lengths)


def last_loss(rows):
    return rows[-1]["loss"]


def of_gain(rows):
    return sum(row["penalty"] for row in rows) / sum(row["gain"] for row in rows)


def within(rows):
    known = [row for row in rows if row["within"] is not None]
    return sum(row["within"] for row in known) / sum(row["penalty"] for row in known)


def choose_rates(tasks):
    """Markdown: the loss at each rate of the grids, on a seed that judges nothing."""
    for name in tasks:
        best = {}
        for kind, grid in (("AdamW", ADAMW_GRID), ("Muon", MUON_GRID)):
            ends = {}
            for rate in grid:
                losses, _ = train(name, kind, RATES_SEED, best | {kind: rate}, measured=False)
                ends[rate] = statistics.fmean(losses[-LAST:])
            best[kind] = min(grid, key=ends.get)
            cells = ", ".join(f"{rate:g}: {end:.3f}" for rate, end in ends.items())
            print(f"| {name} | {kind} | {cells} | {best[kind]:g} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("rates", "judge", "points"), default="judge")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="of the rates")
    parser.add_argument("--rows", type=Path, default=FILE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "rates":
        choose_rates(options.tasks)
    elif options.part == "points":
        print(points_table())
    else:
        print(tables(run_missing(options.rows)))


if __name__ == "__main__":
    main()
