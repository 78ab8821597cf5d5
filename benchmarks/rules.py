"""Which clipping? Every rule on planted spikes and on clean training, side by side.

    python benchmarks/rules.py [--rows PATH] [--seeds 5] [--tasks MLP] [--rules none …]
        [--minutes 10]

Two tasks: an MLP on labels of a random teacher, and a recurrent network on the characters of Python's help
texts. 240 steps each, by SGD with momentum and by AdamW, at one lr for all rules: the best of four without
clipping on clean training, on seed 100. Rules have the defaults of their papers. The measured threshold is
`cs.calibrate`'s for SGD, with its gradients drawn before the run; AdamW has 1.0.

Spikes come at steps 120, 160 and 200, after every rule's warm-up:

- poisoned: one batch has shuffled targets, and its loss counts 30 times;
- lr jump: for three steps lr is 20 times as large;
- bad layer: for three steps the gradient of the last layer is 100 times as large.

A spike is survived if 25 steps after it the held-out loss is at most 5 % above the one before it. Runs are
kept in the file of rows; a call goes on where the last one ended, for so many minutes.
"""

import argparse
import itertools
import json
import math
import pydoc_data.topics
import statistics
import time
import zlib
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

NUM_STEPS, SPIKES, WAIT = 240, (120, 160, 200), 25
POISON, LR_JUMP, BAD_LAYER, JUMP_STEPS = 30.0, 20.0, 100.0, 3
SURVIVED = 1.05
LENGTH = 17  # characters of a piece, and the one after
TUNING_SEED = 100
LRS = {"SGD": (0.02, 0.06, 0.2, 0.6), "AdamW": (1e-3, 3e-3, 1e-2, 3e-2)}
PLANTS = ("clean", "poisoned", "lr jump", "bad layer")

RULES = {
    "none": lambda measured: {"max_norm": math.inf},
    "threshold": lambda measured: {"max_norm": measured},
    "percentile": lambda measured: {"max_norm": cs.clip_rules.percentile()},
    "zscore": lambda measured: {"max_norm": cs.clip_rules.zscore()},
    "ema": lambda measured: {"max_norm": cs.clip_rules.ema()},
    "weight_ratio": lambda measured: {"max_norm": cs.clip_rules.weight_ratio()},
    "update_rms": lambda measured: {"max_norm": math.inf, "update_rms": 1.0},  # AdamW only
}


class Mlp:
    """Labels of a random teacher."""

    def __init__(self):
        self.model = nn.Sequential(
            nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8)
        )
        self.teacher = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 8))
        self.last = self.model[-1]

    def batch(self, size=32):
        """One batch."""
        x = torch.randn(size, 20)
        with torch.no_grad():
            return x, (3.0 * self.teacher(x)).argmax(1)

    def held_out(self):
        """A larger batch to judge by."""
        return self.batch(1024)

    def loss(self, batch):
        """Cross-entropy."""
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Characters(nn.Module):
    """A recurrent network with tanh units."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 16)
        self.rnn = nn.RNN(16, 32)
        self.decoder = nn.Linear(32, size)

    def forward(self, tokens):
        """Logits."""
        return self.decoder(self.rnn(self.embedding(tokens))[0])


class Rnn:
    """The next character of Python's help texts."""

    def __init__(self):
        text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:200_000]
        characters = sorted(set(text))
        place = {character: i for i, character in enumerate(characters)}
        self.tokens = torch.tensor([place[character] for character in text])
        self.model = Characters(len(characters))
        self.last = self.model.decoder

    def batch(self, size=8, first=0, last=180_000):
        """One batch."""
        starts = torch.randint(first, last - LENGTH, (size,))
        pieces = torch.stack([self.tokens[s : s + LENGTH] for s in starts.tolist()], dim=1)
        return pieces[:-1], pieces[1:]

    def held_out(self):
        """A larger batch to judge by."""
        return self.batch(64, 180_000, 200_000)

    def loss(self, batch):
        """Cross-entropy."""
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())


TASKS = {"MLP": Mlp, "RNN": Rnn}


def make_optimizer(name, model, lr, options):
    if name == "SGD":
        return cs.ClippedSGD(model.parameters(), lr=lr, momentum=0.9, nonfinite="skip", **options)
    return cs.ClippedAdamW(model.parameters(), lr=lr, nonfinite="skip", **options)


def measured_threshold(task, optimizer, lr):
    """The threshold of `cs.calibrate`; of AdamW 1.0."""
    if optimizer == "AdamW":
        return 1.0
    batches = [task.batch() for _ in range(40)]
    made = torch.optim.SGD(task.model.parameters(), lr=lr, momentum=0.9)
    return cs.calibrate(task.model, task.loss, batches, optimizer=made).max_norm


def poisoned(batch):
    x, y = batch
    return x, y[torch.randperm(len(y))]


def run(task_name, optimizer_name, plant, rule, seed, lr):
    """One run, as a row."""
    torch.manual_seed(zlib.crc32(f"{task_name}/{seed}".encode()))  # the same start and batches for all
    task = TASKS[task_name]()
    held_out = task.held_out()
    measured = measured_threshold(task, optimizer_name, lr) if rule == "threshold" else math.inf
    torch.manual_seed(seed)
    optimizer = make_optimizer(optimizer_name, task.model, lr, RULES[rule](measured))
    seconds, losses = 0.0, {}
    for step in range(NUM_STEPS):
        if any(step in (spike, spike + WAIT) for spike in SPIKES):
            losses[step] = evaluated(task, held_out)
        spiked = any(spike <= step < spike + JUMP_STEPS for spike in SPIKES)
        batch = task.batch()
        optimizer.zero_grad()
        if plant == "poisoned" and step in SPIKES:
            (POISON * task.loss(poisoned(batch))).backward()
        else:
            task.loss(batch).backward()
        if plant == "bad layer" and spiked:
            for p in task.last.parameters():
                p.grad.mul_(BAD_LAYER)
        for group in optimizer.param_groups:
            group["lr"] = lr * (LR_JUMP if plant == "lr jump" and spiked else 1.0)
        begun = time.thread_time()
        optimizer.step()
        seconds += time.thread_time() - begun
    survived = sum(losses[spike + WAIT] <= SURVIVED * losses[spike] for spike in SPIKES)
    return {
        "task": task_name, "optimizer": optimizer_name, "plant": plant, "rule": rule, "seed": seed,
        "lr": lr, "max_norm": measured, "final": evaluated(task, held_out), "survived": survived,
        "touched": optimizer.clip_stats()["clipped_fraction"], "microseconds": 1e6 * seconds / NUM_STEPS,
    }  # fmt: skip


def evaluated(task, held_out):
    with torch.no_grad():
        loss = task.loss(held_out).item()
    return loss if math.isfinite(loss) else math.inf


def kept_rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(row[name] for name in KEYS): row for row in map(json.loads, lines)}


KEYS = ("task", "optimizer", "plant", "rule", "seed", "lr")


def kept(path, rows, *key):
    """The row of a run, which is run if it is not there yet."""
    if key not in rows:
        rows[key] = run(*key)
        with path.open("a") as file:
            file.write(json.dumps(rows[key]) + "\n")
    return rows[key]


def planned(seeds, tasks, rules):
    for seed, task, optimizer, plant, rule in itertools.product(range(seeds), tasks, LRS, PLANTS, rules):
        if rule != "update_rms" or optimizer == "AdamW":
            yield task, optimizer, plant, rule, seed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("rules.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.perf_counter() + 60 * options.minutes
    rows, judged = kept_rows(options.rows), []
    lrs = {}
    for task, optimizer in itertools.product(options.tasks, LRS):
        tried = [
            kept(options.rows, rows, task, optimizer, "clean", "none", TUNING_SEED, lr)
            for lr in LRS[optimizer]
        ]
        lrs[task, optimizer] = min(tried, key=lambda row: row["final"])["lr"]
    for task, optimizer, *rest in planned(options.seeds, options.tasks, options.rules):
        if time.perf_counter() > end:
            print("Not all runs are there yet: call again.")
            return
        judged.append(kept(options.rows, rows, task, optimizer, *rest, lrs[task, optimizer]))
    print(table(judged))


def table(rows):
    """Markdown: a line for each optimizer and rule."""
    head = ["", "rule", *(f"{plant}: loss" for plant in PLANTS), "survived", "touched, clean", "step"]
    lines = [head, ["---"] * len(head)]
    clean = {tuple(row[n] for n in ("task", "optimizer", "seed")): row["final"]
             for row in rows if (row["plant"], row["rule"]) == ("clean", "none")}  # fmt: skip
    groups = defaultdict(list)
    for row in rows:
        groups[row["optimizer"], row["rule"]].append(row)
    for (optimizer, rule), own in groups.items():
        cells = []
        for plant in PLANTS:
            ratios = [
                row["final"] / clean[row["task"], row["optimizer"], row["seed"]]
                for row in own
                if row["plant"] == plant
            ]
            cells.append(f"{statistics.geometric_mean(ratios):.2f}")
        spiked = [row["survived"] for row in own if row["plant"] != "clean"]
        touched = statistics.mean(row["touched"] for row in own if row["plant"] == "clean")
        time_ratio = statistics.median(r["microseconds"] for r in own) / statistics.median(
            r["microseconds"] for r in groups[optimizer, "threshold"]
        )
        share = sum(spiked) / (len(SPIKES) * len(spiked))
        lines.append([optimizer, rule, *cells, f"{share:.0%}", f"{touched:.0%}", f"{time_ratio:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
