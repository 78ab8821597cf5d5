"""Logs of trainers with one planted setting each, and what ``advise`` names of them.

    python -m reproduction.benchmarks.advice.planted_logs [--seeds 100]

Logs hold every step, every 10 or every 50, in the form of one trainer each. Settings are planted into logged
steps. Clean logs should get no fact at all.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from curvestep.advice.advice import Advice, advise

STEPS = 1200
EVERY = (1, 10, 50)
MAX_NORM = 1.0


@dataclass(frozen=True)
class Curves:
    """What a trainer logs: one number for each logged step."""

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    lr: np.ndarray


def clean(seed: int, every: int) -> Curves:
    """A run that goes well: a falling loss with noise, norms of a heavy tail, a constant or falling lr."""
    rng = np.random.default_rng([seed, every])
    step = np.arange(every, STEPS + 1, every)
    fall = rng.uniform(0.5, 3.0) * (1 + step / rng.uniform(50, 400)) ** -rng.uniform(0.3, 1.0)
    loss = rng.uniform(0.3, 2.0) + fall + rng.uniform(0.01, 0.1) * rng.standard_normal(len(step))
    norm = rng.uniform(0.2, 0.5) * np.exp(rng.uniform(0.05, 0.25) * rng.standard_normal(len(step)))
    schedules = [np.ones(len(step)), 1 - step / STEPS, (1 + np.cos(math.pi * step / STEPS)) / 2]
    return Curves(step, loss, norm, 10 ** rng.uniform(-4, -1) * schedules[seed % 3])


def place(seed: int, curves: Curves) -> int:
    """A row in the middle half of the log."""
    num = len(curves.step)
    return int(np.random.default_rng([seed, 7]).integers(num // 4 + 2, 3 * num // 4))


def changed(values: np.ndarray, where: int | slice | np.ndarray, new: np.ndarray | float) -> np.ndarray:
    copy = values.copy()
    copy[where] = new
    return copy


def spike(seed: int, c: Curves) -> Curves:
    k = place(seed, c)
    return replace(c, loss=changed(c.loss, k, 2.5 * c.loss[k]))


def unrecovered(seed: int, c: Curves) -> Curves:
    k = place(seed, c)
    return replace(c, loss=changed(c.loss, slice(k, None), 2.5 * c.loss[k:]))


def norm_spike(seed: int, c: Curves) -> Curves:
    k = place(seed, c)
    return replace(c, grad_norm=changed(c.grad_norm, k, 12 * c.grad_norm[k]))


def warm_up(seed: int, c: Curves) -> Curves:
    length = STEPS // 6
    return replace(c, lr=c.lr * np.minimum(1.0, c.step / length))


def not_a_number(seed: int, c: Curves) -> Curves:
    return replace(c, loss=changed(c.loss, place(seed, c), math.nan))


def jump(seed: int, c: Curves) -> Curves:
    k = place(seed, c)
    return replace(c, lr=changed(c.lr, slice(k, None), (0.1 if seed % 2 else 3.0) * c.lr[k:]))


def clipped_before(seed: int, c: Curves) -> Curves:
    threshold = np.quantile(c.grad_norm, 0.4)
    return replace(c, grad_norm=np.minimum(c.grad_norm, threshold))


def clipped(seed: int, c: Curves) -> Curves:
    return replace(c, grad_norm=c.grad_norm * 3.0)


# How a setting is planted, and the kind of note that names it with what it should say.
PLANTED: dict[str, tuple[Callable[[int, Curves], Curves], str, Callable[[int, Curves], str]]] = {
    "spike of the loss": (spike, "loss-spike", lambda s, c: f"at step {c.step[place(s, c)]}"),
    "loss that stays up": (unrecovered, "loss-spike", lambda s, c: "does not come back"),
    "spike of the norm": (norm_spike, "norm-spike", lambda s, c: f"at step {c.step[place(s, c)]}"),
    "end of warm-up": (warm_up, "warm-up", lambda s, c: "lr rises until step"),
    "NaN": (not_a_number, "not-finite", lambda s, c: f"step {c.step[place(s, c)]}"),
    "jump of lr": (jump, "lr-jump", lambda s, c: f"by step {c.step[place(s, c)]}"),
    "clip before the log": (clipped_before, "piled-norms", lambda s, c: "were clipped before"),
    "share of clipped steps": (
        clipped, "clipping", lambda s, c: f"{np.mean(c.grad_norm > MAX_NORM):.0%} of the logged",
    ),
}  # fmt: skip


def as_trainer_state(c: Curves, folder: Path) -> Path:
    names = ("step", "loss", "grad_norm", "learning_rate")
    rows = [dict(zip(names, map(float, row), strict=True)) for row in zip(c.step, c.loss, c.grad_norm, c.lr)]  # noqa: B905
    for row in rows:
        row["epoch"] = row["step"] / STEPS
    rows.append({"step": float(STEPS), "eval_loss": 1.0, "epoch": 1.0})
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": STEPS, "log_history": rows}, indent=2))
    return path


def _table(c: Curves, path: Path, names: tuple[str, ...]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        for row in zip(c.step, c.loss, c.grad_norm, c.lr, strict=True):
            table.writerow(["" if math.isnan(v) and k > 1 else v for k, v in enumerate(row)])
    return path


def as_lightning(c: Curves, folder: Path) -> Path:
    return _table(c, folder / "metrics.csv", ("step", "train_loss", "grad_2.0_norm_total", "lr-AdamW"))


def as_export(c: Curves, folder: Path) -> Path:
    names = ("Step", "lively-run-7 - train/loss", "lively-run-7 - train/grad_norm", "lively-run-7 - train/lr")
    return _table(c, folder / "wandb_export.csv", names)


def as_events(c: Curves, folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step, loss, norm, lr in zip(c.step, c.loss, c.grad_norm, c.lr, strict=True):
        for tag, value in (("train/loss", loss), ("train/grad_norm", norm), ("train/learning_rate", lr)):
            writer.add_scalar(tag, value, int(step))
    writer.close()
    return folder


WRITERS = {
    "transformers": as_trainer_state,
    "lightning": as_lightning,
    "wandb": as_export,
    "tensorboard": as_events,
}


def ask(curves: Curves, form: str, *, max_norm: float | None = None) -> Advice:
    """What ``advise`` says of a log in this form."""
    with tempfile.TemporaryDirectory() as folder:
        return advise(WRITERS[form](curves, Path(folder)), max_norm=max_norm)


def is_named(name: str, seed: int, every: int, form: str) -> bool:
    """Whether a planted setting is named, at its step."""
    plant, kind, says = PLANTED[name]
    curves = plant(seed, clean(seed, every))
    advice = ask(curves, form, max_norm=MAX_NORM if kind == "clipping" else None)
    return any(note.kind == kind and says(seed, curves) in note.text for note in advice.reasons)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30)
    options = parser.parse_args()
    forms = list(WRITERS)
    print("| planted | " + " | ".join(f"every {every}" for every in EVERY) + " |")
    print("| --- " * (len(EVERY) + 1) + "|")
    for name in PLANTED:
        cells = []
        for every in EVERY:
            found = [is_named(name, seed, every, forms[seed % 3]) for seed in range(options.seeds)]
            cells.append(f"{sum(found)} of {len(found)}")
        print(f"| {name} | {' | '.join(cells)} |")
    cells = []
    for every in EVERY:
        notes = [ask(clean(seed, every), forms[seed % 3]).reasons for seed in range(options.seeds)]
        cells.append(f"{sum(map(bool, notes))} of {len(notes)}")
    print(f"| clean, with any fact | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
