"""Does `cs.Autopsy` name the cause of a spike? Planted causes and clean steps; and what it costs.

    python reproduction/benchmarks/autopsy.py [--part develop|judge] [--seeds 100]
        [--causes batch …] [--rows PATH]
    python reproduction/benchmarks/autopsy.py --cost

A seed draws a small network, a task, an optimizer and the step at which one thing goes wrong:

- batch: its inputs (classes) or its targets (regression) are 50 times too large, and of other samples;
- length: lr is 30 times too large for one step;
- second moment: Adam's second moment is 1/100,000 of what it was;
- momentum: the momentum buffer is 50 times what it was;
- precision: under bfloat16 autocast one logit overflows the exponential, in float32 it does not;
- block: the gradient of one layer (SGD) or its lr (AdamW) is 1,000 times too large;
- cannot tell: nothing. The step that `explain()` takes by itself is asked for.

Seeds from 1,000 on judge; those below are for development. The rule was committed before these were run.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from curvestep_reproduction.models import LSTMModel, ResNet20

CAUSES = ("batch", "length", "second moment", "momentum", "precision", "block", "cannot tell")
FIRST_SEED = {"develop": 0, "judge": 1_000}
FACTOR, LR_FACTOR, BLOCK_FACTOR, STALE = 50.0, 30.0, 1e3, 1e-5
OVERFLOW = 88.7  # its exponential is finite; in bfloat16 the next numbers are 88.5 and 89, which overflows
INPUTS, CLASSES = 12, 5


class Run:
    """A training run of a small network in which one thing goes wrong."""

    def __init__(self, cause, seed):
        torch.manual_seed(seed)
        self.draw = random.Random(f"{cause}/{seed}")
        self.cause = cause
        adaptive = cause == "second moment" or self.draw.random() < 0.5
        # AdamW takes inputs that are too large as it takes others: such a batch makes no spike.
        self.is_classes = cause == "precision" or self.draw.random() < (
            0.0 if cause == "batch" and adaptive else 0.5
        )
        self.in_bfloat16 = cause == "precision" or self.draw.random() < 0.25
        self.model = self._network()
        self.teacher = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        blocks = [m for m in self.model if isinstance(m, nn.Linear)]
        groups = [{"params": list(block.parameters())} for block in blocks]
        if adaptive:
            self.optimizer = torch.optim.AdamW(groups, lr=self.draw.choice([1e-2, 3e-2]))
        else:
            self.optimizer = torch.optim.SGD(
                groups, lr=self.draw.choice([0.1, 0.2] if self.is_classes else [0.03, 0.06]), momentum=0.9
            )
        self.adaptive = adaptive
        self.place = self.draw.randrange(len(blocks))
        self.block = [name for name, m in self.model.named_modules() if isinstance(m, nn.Linear)][self.place]
        self.spikes = cs.Autopsy(self.model, self.loss, keep=8).watch(self.optimizer)

    def _network(self):
        width, activation = (
            self.draw.choice([16, 32]),
            self.draw.choice(self._activations()),
        )
        sizes = [INPUTS, *[width] * self.draw.choice([2, 3]), CLASSES]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
        return nn.Sequential(*layers[:-1])

    def _activations(self):
        """Units that saturate bear inputs that are too large, and no logit of theirs overflows."""
        if self.cause == "precision" or (self.cause == "batch" and self.is_classes):
            return [nn.ReLU, nn.GELU]
        return [nn.ReLU, nn.GELU, nn.Tanh]

    def loss(self, batch):
        """Cross-entropy as one writes it without care, or mean squared error."""
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.in_bfloat16):
            out = self.model(x)
            if not self.is_classes:
                return F.mse_loss(out, y)
            return (out.exp().sum(1).log() - out.gather(1, y[:, None])[:, 0]).mean()

    @torch.no_grad()
    def batch(self):
        """Fresh inputs with the teacher's answers."""
        x = torch.randn(32, INPUTS)
        out = 3.0 * self.teacher(x)
        return x, out.argmax(1) if self.is_classes else out + 0.1 * torch.randn_like(out)

    def step(self, batch, *, block_factor=1.0):
        """One training step."""
        self.optimizer.zero_grad()
        self.spikes.record(batch).backward()
        for p in self.optimizer.param_groups[self.place]["params"]:
            p.grad.mul_(block_factor)
        self.optimizer.step()

    def explanation(self):
        """What the recorder says after the step that went wrong."""
        for _ in range(self.draw.randrange(60, 100)):
            self.step(self.batch())
        if self.cause == "cannot tell":
            return self.spikes.explain()
        self._spoiled_step()
        return self.spikes.explain(self.spikes.step - 1)

    def _spoiled_step(self):
        batch, block_factor = self.batch(), 1.0
        groups = self.optimizer.param_groups
        if self.cause == "batch":
            x, y = batch
            batch = (FACTOR * x, y.roll(1)) if self.is_classes else (x, FACTOR * y.roll(1, 0))
        elif self.cause == "length":
            self._scale_lr(groups, LR_FACTOR)
        elif self.cause == "second moment":
            self._scale_state("exp_avg_sq", STALE)
        elif self.cause == "momentum":
            self._scale_state("exp_avg" if self.adaptive else "momentum_buffer", FACTOR)
        elif self.cause == "precision":
            batch = self._overflowing(batch)
        elif self.adaptive:
            self._scale_lr([groups[self.place]], BLOCK_FACTOR)
        else:
            block_factor = BLOCK_FACTOR
        self.step(batch, block_factor=block_factor)

    def _scale_lr(self, groups, factor):
        for group in groups:
            group["lr"] *= factor

    @torch.no_grad()
    def _scale_state(self, name, factor):
        for state in self.optimizer.state.values():
            state[name].mul_(factor)

    @torch.no_grad()
    def _overflowing(self, batch):
        """The batch with one sample of a class so sure that its exponential overflows in bfloat16 alone."""
        x, y = batch
        for _ in range(200):
            low, high = torch.zeros(256), torch.full((256,), 1e6)
            samples = torch.randn(256, INPUTS)
            for _ in range(60):
                middle = (low + high) / 2
                above = self.model(middle[:, None] * samples).amax(1) > OVERFLOW
                low, high = torch.where(above, low, middle), torch.where(above, middle, high)
            samples = low[:, None] * samples
            exact = self.model(samples)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rounded = self.model(samples)
            found = (rounded.amax(1) > OVERFLOW) & (exact.amax(1) > OVERFLOW - 1.0)
            if found.any():
                i = int(found.int().argmax())
                x, y = x.clone(), y.clone()
                x[0], y[0] = samples[i], exact[i].argmax()
                return x, y
        raise RuntimeError("no sample overflows")


def judged(cause, seed):
    """A row: what was planted and what was named."""
    run = Run(cause, seed)
    found = run.explanation()
    wanted = f"block {run.block}" if cause == "block" else cause
    return {
        "cause": cause, "seed": seed, "optimizer": type(run.optimizer).__name__, "wanted": wanted,
        "named": found.cause, "rise": found.rise, "usual": found.usual, "shares": dict(found.shares),
    }  # fmt: skip


def kept_rows(path):
    """The rows that an earlier call has written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def judge(causes, seeds, path):
    """A row for each cause and seed; those in the file are not judged again."""
    done = {(row["cause"], row["seed"]) for row in kept_rows(path)}
    for cause in causes:
        for seed in seeds:
            if (cause, seed) not in done:
                with path.open("a") as file:
                    file.write(json.dumps(judged(cause, seed)) + "\n")
    return [row for row in kept_rows(path) if row["seed"] in seeds]


def cause_table(rows):
    """Markdown: how often the planted cause was named, and what was named instead."""
    lines = ["| planted | named | of | instead |", "| --- | --- | --- | --- |"]
    for cause in CAUSES:
        own = [row for row in rows if row["cause"] == cause]
        right = sum(row["named"] == row["wanted"] for row in own)
        wrong = Counter(row["named"] for row in own if row["named"] != row["wanted"])
        instead = ", ".join(f"{name} {count}" for name, count in wrong.most_common()) or "-"
        lines.append(f"| {'nothing' if cause == CAUSES[-1] else cause} | {right} | {len(own)} | {instead} |")
    return "\n".join(lines)


class Timed(cs.Autopsy):
    """A recorder that counts the CPU time it takes itself."""

    spent = inside = 0.0

    def __init__(self, model, loss_of_batch, **options):
        def timed_loss(batch):
            begun = time.thread_time()
            loss = loss_of_batch(batch)
            self.inside += time.thread_time() - begun
            return loss

        super().__init__(model, timed_loss, **options)

    def record(self, batch):
        """Without the time of the loss."""
        begun, inside = time.thread_time(), self.inside
        loss = super().record(batch)
        self.spent += time.thread_time() - begun - (self.inside - inside)
        return loss

    def _before_step(self, *given):
        begun = time.thread_time()
        super()._before_step(*given)
        self.spent += time.thread_time() - begun

    def _after_step(self, *given):
        begun = time.thread_time()
        super()._after_step(*given)
        self.spent += time.thread_time() - begun


def lstm():
    model = LSTMModel(10_000)
    tokens = torch.randint(10_000, (36, 20))
    return model, lambda t: F.cross_entropy(model(t[:-1])[0].flatten(0, 1), t[1:].flatten()), tokens


def resnet20():
    model = ResNet20()
    batch = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return model, lambda b: F.cross_entropy(model(b[0]), b[1]), batch


def mlp():
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    batch = torch.randn(128, 64), torch.randint(10, (128,))
    return model, lambda b: F.cross_entropy(model(b[0]), b[1]), batch


def cost(make, num_periods=4):
    """CPU seconds of a step of AdamW and of the recorder in it, and its memory in copies of the parameters.

    Medians, of steps with and without a copy: on a busy machine a few steps take many times as long.
    """
    torch.manual_seed(0)
    model, loss_of_batch, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spikes = Timed(model, loss_of_batch).watch(optimizer)
    copying, others, plain = [], [], []
    for k in range(num_periods * spikes.keep):
        begun, spikes.spent = time.thread_time(), 0.0
        optimizer.zero_grad()
        spikes.record(batch).backward()
        optimizer.step()
        plain.append(time.thread_time() - begun - spikes.spent)
        (others if k % spikes.keep else copying).append(spikes.spent)
    other = statistics.median(others)
    mean = other + (statistics.median(copying[1:]) - other) / spikes.keep
    return statistics.median(plain), mean, spikes.nbytes / sum(p.nbytes for p in model.parameters())


def cost_table():
    """Markdown: time and memory of the recorder."""
    lines = ["| model | a step | recording | share | memory, in copies of the parameters |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for make in (lstm, resnet20, mlp):
        step, ours, copies = cost(make)
        cells = [f"{step * 1e3:.1f} ms", f"{ours * 1e3:.2f} ms", f"{ours / step:.1%}", f"{copies:.1f}"]
        lines.append(f"| {make.__name__} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=FIRST_SEED, default="judge")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=CAUSES)
    parser.add_argument("--rows", type=Path, default=Path("autopsy.jsonl"))
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        print(cost_table())
        return
    first = FIRST_SEED[options.part]
    print(cause_table(judge(options.causes, range(first, first + options.seeds), options.rows)))


if __name__ == "__main__":
    main()
