"""Signals at random moments of a measurement and of calibrate: does anything differ afterwards?

    python benchmarks/signals.py [--count 500] [--seed 0] [--work measure calibrate]

A thread sends SIGINT, as Ctrl-C does, to the main thread after a random share of the usual time. Then
parameters, buffers, gradients, the optimizer's state, the random states of torch, Python and numpy, the
loader's generator, gradient mode, training modes and the signal's handler are compared bit for bit with
those from before, or, for a measured step, from after the step. A signal that falls into
``optimizer.step()`` itself is not one of the measurement: it is counted apart. So are exceptions that
Python drops, in the callback of a weak reference, say.
"""

import argparse
import collections
import json
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvestep as cs
from curvestep.smoothness.replay import Replay


class Subject:
    """A model with buffers and dropout, a loader with a generator, an optimizer that has stepped."""

    def __init__(self):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        layers = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 3)
        self.model = nn.Sequential(*layers)
        self.model.draws = random.Random(3)
        self.optimizer = cs.ClippedAdamW(self.model.parameters(), lr=0.01, max_norm=1.0)
        x = torch.randn(240, 6)
        data = TensorDataset(x, x[:, :3].argmax(1))
        self.loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(3))
        batch = x[:8], x[:8, :3].argmax(1)
        self.loss_fn = lambda: self.loss(batch)
        self.loss_fn().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.probe = cs.SmoothnessProbe(self.model, every=1, fractions=(0.25, 0.5, 1.0), on_error="raise")
        self.loss_fn().backward()

    def loss(self, batch):
        """Of one batch, with randomness of all kinds."""
        output = self.model(batch[0])
        noise = 0.01 * (random.random() + np.random.rand() + self.model.draws.random())
        return F.cross_entropy(output * (1 + noise), batch[1])

    def measure(self):
        """One measured step."""
        with self.probe(self.loss_fn):
            self.optimizer.step()

    def calibrate(self):
        """A calibration."""
        cs.calibrate(self.model, self.loss, self.loader, optimizer=self.optimizer, budget=48, progress=False)

    def held(self):
        """Everything that must not differ, as bytes by name."""
        parts = {
            "parameters": [p.detach().numpy().tobytes() for p in self.model.parameters()],
            "buffers": [b.numpy().tobytes() for b in self.model.buffers()],
            "gradients": [p.grad.numpy().tobytes() for p in self.model.parameters()],
            "optimizer": str(self.optimizer.state_dict()),
            "torch": torch.get_rng_state().numpy().tobytes(),
            "python": random.getstate(),
            "numpy": pickle.dumps(np.random.get_state()),
            "the module's generator": self.model.draws.getstate(),
            "the loader's generator": self.loader.generator.get_state().numpy().tobytes(),
            "gradient mode": torch.is_grad_enabled(),
            "training modes": [module.training for module in self.model.modules()],
            "handler": signal.getsignal(signal.SIGINT),
            "function modes": len(torch.overrides._get_current_function_mode_stack()),
            "replays": len(Replay.running.replays),
        }
        return parts


def send(delay, over):
    """Send Ctrl-C to the main thread after ``delay`` seconds, unless it is over by then."""
    time.sleep(delay)
    if not over.is_set():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def struck(name, delay):
    """Act and be interrupted: what was held before, what is held now, and the exception."""
    subject = Subject()
    before, over = subject.held(), threading.Event()
    sender = threading.Thread(target=send, args=(delay, over))
    stopped = None
    try:
        sender.start()
        getattr(subject, name)()
        over.set()
        sender.join()
    except (KeyboardInterrupt, Exception) as error:
        stopped = error
        over.set()
        sender.join()
    return before, subject.held(), stopped


def undisturbed(name):
    """What is held after it, and the seconds that it takes."""
    seconds = []
    for _ in range(8):
        subject = Subject()
        begun = time.perf_counter()
        getattr(subject, name)()
        seconds.append(time.perf_counter() - begun)
    return subject.held(), median(seconds)


def differences(name, count, seed):
    """How many of ``count`` signals left something else behind, and what."""
    after, seconds = undisturbed(name)
    draw, found = random.Random(seed), collections.Counter()
    signals = 0
    places, dropped = set(), []
    sys.unraisablehook = dropped.append
    while signals < count:
        before, now, stopped = struck(name, draw.uniform(0, 1.1 * seconds))
        where = traceback.extract_tb(stopped and stopped.__traceback__)
        if name == "measure" and now != before:  # then the step was taken
            before = after
        if name == "measure" and any("/optim/" in frame.filename for frame in where):
            found["in optimizer.step()"] += 1
            continue
        found.update(f"{part} differ" for part in now if now[part] != before[part])
        if not isinstance(stopped, (KeyboardInterrupt, type(None))):
            found[f"the exception differs: {stopped}"] += 1
        if any("curvestep" in frame.filename for frame in where):  # else it came before or after
            signals += 1
            places.add((where[-1].filename, where[-1].lineno))
    return {"signals": signals, "places": len(places), "dropped": len(dropped), "found": dict(found)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="signals of each kind of work (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs="+", default=["measure", "calibrate"], help="which of the two")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sys.setswitchinterval(1e-5)  # the sender shares the interpreter
    torch.set_num_threads(1)
    results = {}
    for name in options.work:
        results[name] = differences(name, options.count, options.seed)
        print(name, json.dumps(results[name]), flush=True)
    if any("differ" in part for result in results.values() for part in result["found"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
