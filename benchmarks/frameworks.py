"""Inside Lightning: what the callback costs, and `calibrate` side by side with Lightning's own `lr_find`.

python benchmarks/frameworks.py rates [--seeds 5] [--steps 300] [--json docs/results/frameworks.json]
python benchmarks/frameworks.py overhead [--measurements 30] [--repeats 9] [--json FILE, as above]
python docs/tables.py    puts the file into docs/lightning.md

Both learning rates are used as they come: as the peak of a warm-up over a tenth of the steps and a cosine
decay. What the file has already is not run again. Seconds are processor time of one thread, which other
programs hardly change.
"""
# ruff: noqa: D101, D102

import argparse
import itertools
import json
import logging
import math
import pydoc_data.topics
import statistics
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.tuner import Tuner
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from curvestep.files import write_atomically
from curvestep.integrations.lightning import Calibrate, SmoothnessCallback

LENGTH, WIDTH = 32, 64
EVERY = 20  # between measurements that are timed: a cost in steps does not depend on it


class Transformer(nn.Module):
    """Two layers over letters."""

    def __init__(self, num_letters):
        super().__init__()
        self.letters = nn.Embedding(num_letters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, num_letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x):
        h = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.out(self.body(h, mask=self.mask, is_causal=True)).transpose(1, 2)


def digits():
    """1,797 images of digits: training and held-out data, and the model."""
    x, y = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    parts = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    return *parts, lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), 32


def letters():
    """Python's own manual, letter by letter."""
    text = "".join(pydoc_data.topics.topics.values())[:300_000]
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    data = torch.utils.data.TensorDataset(rows[:, :-1], rows[:, 1:])
    cut = len(data) - 512
    train, held_out = (torch.utils.data.Subset(data, part) for part in (range(cut), range(cut, len(data))))
    return train, held_out, lambda: Transformer(len(alphabet)), 16


METHODS = (
    ("AdamW", "1e-3"), ("AdamW", "lr_find"), ("AdamW", "calibrate"), ("ClippedSGD", "lr_find"),
    ("ClippedSGD", "calibrate"),
)  # fmt: skip
TASKS = {"digits MLP": digits, "letters transformer": letters}


class Module(L.LightningModule):
    def __init__(self, make, steps, optimizer="AdamW", lr=1e-3, max_norm=math.inf):
        super().__init__()
        self.net, self.steps, self.kind, self.lr, self.max_norm = make(), steps, optimizer, lr, max_norm

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        if self.kind == "AdamW":
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        else:
            optimizer = cs.ClippedSGD(self.parameters(), lr=self.lr, max_norm=self.max_norm)
        warm = max(1, self.steps // 10)

        def share(k):
            return (
                (k + 1) / warm
                if k < warm
                else 0.5 + 0.5 * math.cos(math.pi * (k - warm) / (self.steps - warm))
            )

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer_of(steps, *callbacks):
    return L.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def final_loss(module, held_out):
    module.eval()
    with torch.no_grad():
        batches = list(torch.utils.data.DataLoader(held_out, batch_size=256))
        losses = [F.cross_entropy(module.net(x), y).item() * len(x) for x, y in batches]
    mean = sum(losses) / len(held_out)
    return mean if math.isfinite(mean) else math.inf


def find(method, module, loader, steps):
    """The learning rate, the threshold and the gradients that a method needs."""
    if method == "1e-3":
        return 1e-3, math.inf, 0
    if method == "lr_find":
        finder = Tuner(trainer_of(steps)).lr_find(module, loader, update_attr=False)
        lr = finder.suggestion() or module.lr  # None where its curve is too short or nowhere falls
        return lr, math.inf, len(finder.results["lr"])
    callback = Calibrate()
    trainer_of(steps, callback).fit(module, loader)  # only for the calibration before its first step
    calibration = callback.calibration
    return calibration.lr, calibration.max_norm, calibration.num_gradients


def kept(path, part, settings):
    """What the file has of a part that was run with the same settings; else a new part."""
    found = json.loads(Path(path).read_text()).get(part, {}) if path and Path(path).exists() else {}
    return found if all(found.get(name) == value for name, value in settings.items()) else dict(settings)


def keep(path, part, values):
    """Write a part to the file, beside the others."""
    if path:
        found = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        write_atomically(Path(path), json.dumps({**found, part: values}, indent=1) + "\n")


def rates(seeds, steps, path):
    """A row for each task, optimizer, method and seed: the rate found, and the loss that it leads to."""
    part = kept(path, "rates", {"steps": steps})
    rows = part.setdefault("rows", [])
    done = {(row["task"], row["optimizer"], row["method"], row["seed"]) for row in rows}
    cases = itertools.product(TASKS, METHODS, range(seeds))
    for task, (optimizer, method), seed in cases:
        if (task, optimizer, method, seed) in done:
            continue
        train, held_out, make, batch_size = TASKS[task]()
        L.seed_everything(seed, verbose=False)
        loader = torch.utils.data.DataLoader(train, batch_size=batch_size, shuffle=True)
        module = Module(make, steps, optimizer, lr=1e-3, max_norm=1.0)
        lr, max_norm, gradients = find(method, module, loader, steps)
        L.seed_everything(seed, verbose=False)
        clipped = optimizer == "ClippedSGD"
        module = Module(make, steps, optimizer, lr=lr, max_norm=max_norm if clipped else math.inf)
        trainer_of(steps).fit(module, loader)
        rows.append(
            {"task": task, "optimizer": optimizer, "method": method, "seed": seed, "lr": lr,
             "max_norm": max_norm if math.isfinite(max_norm) else None, "gradients": gradients,
             "loss": final_loss(module, held_out)}
        )  # fmt: skip
        print(rows[-1], flush=True)
        keep(path, "rates", part)


class Clock(L.Callback):
    """Processor time of each step after the first.

    Args:
        taken_away: A callback that every second step is taken without.
    """

    def __init__(self, taken_away=None):
        self.taken_away, self.seconds, self.ended = taken_away, [], None

    def on_train_batch_end(self, trainer, *_, **__):
        now = time.process_time()
        if self.ended is not None:
            self.seconds.append(now - self.ended)
        if self.taken_away in trainer.callbacks:
            trainer.callbacks = [self]
            self.recorded = vars(trainer.strategy).pop("training_step")
        elif self.taken_away is not None:
            trainer.callbacks = [self.taken_away, self]
            trainer.strategy.training_step = self.recorded
        self.ended = time.process_time()


def step_seconds(steps, task, batch_size, callback, **options):
    """Seconds of the steps of a run, from its second on."""
    train, _, make, _ = task
    L.seed_everything(0, verbose=False)
    loader = torch.utils.data.DataLoader(train, batch_size=batch_size, shuffle=True)
    clock = Clock(**options)  # the last callback: it sees the ends of the others
    trainer_of(steps, callback, clock).fit(Module(make, steps), loader)
    return clock.seconds


def cost_in_steps(seconds, every):
    """What each measurement but the first takes: the measured step and the next against those just before.

    The step after a measurement is slower, because the caches hold the replay's data.
    """
    costs = []
    for k in range(every, len(seconds), every):  # seconds[k - 1] is step k
        usual = statistics.median(seconds[k - every + 1 : k - 1])
        costs.append((seconds[k - 1] + seconds[k]) / usual - 2)
    return costs


def fastest_tenth(seconds):
    """The first decile: other programs only ever add to a time."""
    return statistics.quantiles(seconds, n=10)[0]


def overhead(measurements, repeats, path):
    """What a measurement costs in steps of training, and what a waiting callback costs in microseconds.

    The time of one step against its neighbours', and of steps in turn with and without a waiting callback,
    on a model that does next to nothing: a difference of whole runs drowns in their noise.
    """
    settings = {"every": EVERY, "batch_size": 32, "measurements": measurements, "repeats": repeats}
    part = kept(path, "overhead", settings)
    task = letters()
    for name, fractions in {"0.5 and 1": (0.5, 1.0), "1 alone": (1.0,)}.items():
        if name in part.setdefault("costs", {}):
            continue
        callback = SmoothnessCallback(every=EVERY, fractions=fractions, log=False, on_error="raise")
        seconds = step_seconds(EVERY * measurements + 2, task, 32, callback)
        part["step_ms"] = 1e3 * statistics.median(seconds)
        part["costs"][name] = cost_in_steps(seconds, EVERY)
        keep(path, "overhead", part)
    if "waiting_us" not in part:
        waiting = SmoothnessCallback(every=10**6, log=False)
        seconds = step_seconds(400 * repeats, digits(), 8, waiting, taken_away=waiting)[9:]
        part["waiting_us"] = [  # the first of a block is with the callback
            1e6 * (fastest_tenth(block[::2]) - fastest_tenth(block[1::2]))
            for block in (seconds[k : k + 400] for k in range(0, len(seconds) - 200, 400))
        ]
        keep(path, "overhead", part)
    waits = part["waiting_us"]
    for name, costs in part["costs"].items():
        low, middle, high = statistics.quantiles(costs, n=4)
        print(f"fractions {name}: {middle:.2f} steps a measurement ({low:.2f} to {high:.2f})")
    print(f"waiting: {statistics.median(waits):+.1f} us a step ({min(waits):+.1f} to {max(waits):+.1f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    options = commands.add_parser("rates")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--steps", type=int, default=300)
    options = commands.add_parser("overhead")
    options.add_argument("--measurements", type=int, default=30)
    options.add_argument("--repeats", type=int, default=9)
    for options in commands.choices.values():
        options.add_argument("--json", default="", help="file for the numbers, which also resumes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if chosen.command == "rates":
        rates(chosen.seeds, chosen.steps, chosen.json)
    else:
        overhead(chosen.measurements, chosen.repeats, chosen.json)
