"""The recorder of the last steps: what it names, what it refuses, and that it changes nothing."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from curvestep.autopsy.cause import CANNOT_TELL, FEWEST_STEPS, SPIKE, cause_of, share
from curvestep.autopsy.kept_step import norms_of

NUM_STEPS = 14


class Run:
    """A small network with dropout and BatchNorm, watched or not."""

    def __init__(self, make, *, keep=8, watched=True, bfloat16=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)
        )
        groups = [{"params": list(m.parameters())} for m in self.model if list(m.parameters())]
        self.optimizer = make(groups)
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16)
        self.spikes = cs.Autopsy(self.model, self.loss, keep=keep)
        self.record = self.spikes.watch(self.optimizer).record if watched else self.loss

    def loss(self, batch):
        with self.autocast:
            return F.mse_loss(self.model(batch[0]), batch[1])

    def batch(self):
        x = torch.randn(16, 6)
        return x, x[:, :3].sin()

    def step(self, batch=None, before=lambda: None):
        self.optimizer.zero_grad()
        self.record(batch or self.batch()).backward()
        before()
        self.optimizer.step()

    def steps(self, count=NUM_STEPS, before=lambda: None):
        for _ in range(count):
            self.step(before=before)
        return self

    def explain_last(self):
        return self.spikes.explain(self.spikes.step - 1)

    def state(self):
        moments = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        gradients = [p.grad for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *moments, *gradients, torch.get_rng_state()]


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


def clipped_adamw(groups):
    return cs.ClippedAdamW(groups, lr=0.01, max_norm=0.5)


def clipped_sgd(groups):
    return cs.ClippedSGD(groups, lr=0.1, max_norm=0.2, momentum=0.9)


def hooked_sgd(groups):
    optimizer = sgd(groups)
    cs.clip(optimizer, max_norm=0.2)
    return optimizer


@pytest.mark.parametrize("make", [adamw, clipped_adamw, clipped_sgd, hooked_sgd])
def test_watched_and_explained_run_is_the_run_without_bit_for_bit(make):
    ends = []
    for watched in (False, True):
        run = Run(make, watched=watched)
        for k in range(24):
            run.step()
            if watched and k in (9, 20):
                run.spikes.explain()
        stats = dict(run.optimizer.clip_stats()) if hasattr(run.optimizer, "clip_stats") else {}
        ends.append((run.state(), stats))
    (plain, counted), (seen, counted_too) = ends
    assert all(map(torch.equal, plain, seen))
    assert counted == counted_too


def scaled_lr(run):
    for group in run.optimizer.param_groups:
        group["lr"] *= 60
    run.step()


def scaled_targets(run):
    x, y = run.batch()
    run.step((x, -200 * y))


def scaled_moment(name, factor):
    def spoil(run):
        with torch.no_grad():
            for state in run.optimizer.state.values():
                state[name].mul_(factor)
        run.step()

    return spoil


def scaled_block(run):
    def spoil():
        for p in run.model[4].parameters():
            p.grad.mul_(1000)

    run.step(before=spoil)


@pytest.mark.parametrize(
    ("make", "spoil", "cause"),
    [
        (sgd, scaled_lr, "length"),
        (adamw, scaled_lr, "length"),
        (sgd, scaled_targets, "batch"),
        (clipped_sgd, scaled_moment("momentum_buffer", 1000), "momentum"),
        (sgd, scaled_moment("momentum_buffer", 200), "momentum"),
        (clipped_adamw, scaled_moment("exp_avg", 100), "momentum"),
        (adamw, scaled_moment("exp_avg_sq", 1e-6), "second moment"),
        (sgd, scaled_block, "block 4"),
    ],
)
def test_planted_cause_is_named(make, spoil, cause):
    run = Run(make).steps()
    assert run.explain_last().cause == CANNOT_TELL
    spoil(run)
    found = run.explain_last()
    assert found.cause == cause
    assert found.is_spike
    assert run.spikes.explain().step == found.step == found.largest


class Overflowing(Run):
    """A loss times one, computed by an exponential; that of six ones overflows in bfloat16 alone."""

    def loss(self, batch):
        with self.autocast:
            grown = nn.functional.linear(batch[0][:1], torch.full((1, 6), 14.785)).exp() + 1.0
            return F.mse_loss(self.model(batch[0]), batch[1]) * (grown / grown).squeeze()


def test_overflow_of_a_lower_precision_is_named():
    torch.set_default_dtype(torch.float32)
    run = Overflowing(sgd, bfloat16=True).steps()
    assert run.explain_last().cause == CANNOT_TELL
    x, y = run.batch()
    x[0] = 1.0
    run.step((x, y))
    found = run.explain_last()
    assert found.cause == "precision"
    assert found.rise == float("inf")


def test_clipping_between_backward_and_step_is_found_again():
    run = Run(sgd)
    run.steps(before=lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
    run.spikes.explain()  # refused where the steps do not lead to the model


def test_micro_batches_and_changes_of_lr_are_taken_again():
    run = Run(adamw)
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.1, 1.0, 10)
    for _ in range(NUM_STEPS):
        run.optimizer.zero_grad()
        for _ in range(2):
            (run.record(run.batch()) / 2).backward()
        run.optimizer.step()
        schedule.step()
    run.spikes.explain()


def test_memory_is_what_the_class_says():
    run = Run(adamw, keep=5)
    model = sum(p.nbytes for p in run.model.parameters())
    batch = sum(t.nbytes for t in run.batch())
    for _ in range(40):
        run.step()
        moments = sum(v.nbytes for state in run.optimizer.state.values() for v in state.values())
        assert run.spikes.nbytes <= 2 * (model + moments) + 10 * batch
    assert run.spikes.nbytes >= model + moments + 5 * batch


def test_writes_between_steps_cost_a_bounded_number_of_copies():
    run = Run(adamw, keep=5)
    for _ in range(12):
        run.step()
        with torch.no_grad():
            run.model[0].weight.clamp_(-1.0, 1.0)
    model = sum(p.nbytes for p in run.model.parameters())
    moments = sum(v.nbytes for state in run.optimizer.state.values() for v in state.values())
    batch = sum(t.nbytes for t in run.batch())
    assert run.spikes.nbytes <= FEWEST_STEPS * (model + moments + batch)
    with pytest.raises(RuntimeError, match="too few"):
        run.spikes.explain()


def test_norm_of_a_sparse_gradient_is_that_of_its_sums():
    rows = torch.sparse_coo_tensor([[0, 0]], [3.0, 4.0], (2,), check_invariants=True)
    sparse, none, dense = norms_of([rows, None, torch.ones(4)])
    assert (sparse.item(), none, dense.item()) == (7.0, None, 2.0)


def test_batch_is_kept_as_it_was():
    run = Run(sgd)
    x, y = run.batch()
    for _ in range(NUM_STEPS):  # a loop that fills one buffer again and again
        x.copy_(torch.randn(16, 6))
        y.copy_(x[:, :3].sin())
        run.step((x, y))
    run.spikes.explain()


def test_refusals_take_one_line():
    run = Run(sgd).steps(30)
    refused = [
        (TypeError, "holds a generator", lambda: run.record(x for x in range(3))),
        (TypeError, "must be a function", lambda: cs.Autopsy(run.model, None)),
        (ValueError, "`keep`", lambda: cs.Autopsy(run.model, run.loss, keep=2)),
        (ValueError, "`step` 3 is not kept", lambda: run.spikes.explain(3)),
        (ValueError, "`step` 30 is not kept", lambda: run.spikes.explain(30)),
        (RuntimeError, "2 steps are kept, too few", lambda: Run(sgd).steps(2).spikes.explain()),
        (RuntimeError, "Call `watch", lambda: Run(sgd, watched=False).spikes.record(run.batch())),
        (ValueError, "watches one already", lambda: run.spikes.watch(run.optimizer)),
        (ValueError, "of `model` alone", lambda: cs.Autopsy(nn.Linear(2, 2), abs).watch(run.optimizer)),
    ]
    for kind, words, call in refused:
        with pytest.raises(kind, match=re.escape(words)) as error:
            call()
        assert "\n" not in str(error.value)


def test_step_without_record_is_refused():
    run = Run(sgd).steps()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"without `record"):
        run.spikes.explain()


def test_loss_that_cannot_be_replayed_is_refused():
    run = Run(sgd)
    own = torch.Generator().manual_seed(0)
    run.spikes.loss_of_batch = lambda batch: run.loss(
        (batch[0] + torch.randn(16, 6, generator=own), batch[1])
    )
    run.steps()
    with pytest.raises(RuntimeError, match="do not lead where training was"):
        run.spikes.explain()


def test_closed_recorder_keeps_nothing_more_and_still_explains():
    run = Run(sgd).steps()
    run.spikes.close()
    assert run.spikes.explain().step < NUM_STEPS
    run.optimizer.step()
    assert run.spikes.step == NUM_STEPS


@pytest.mark.parametrize("spoil", [scaled_lr, scaled_targets, scaled_block, lambda run: run.step()])
def test_words_are_few(spoil):
    run = Run(sgd).steps()
    spoil(run)
    lines = str(run.explain_last()).splitlines()
    assert len(lines) <= 8
    assert lines[0].startswith(f"Step {NUM_STEPS}: ")
    for sentence in re.split(r"[.:]\s", " ".join(line for line in lines if not line.startswith(" "))):
        assert len(sentence.split()) <= 20


def test_cause_needs_a_spike_and_a_change_that_takes_it_away():
    changed = {"half": 1.0, "clipped": 0.0, "batch": 9.0, "momentum": 8.0, "block a": 0.1}
    assert cause_of(10.0, 10.0 / SPIKE, changed, {}) == CANNOT_TELL
    assert cause_of(10.0, 1.0, changed, {"block a": 9.0, "block b": 8.0}) == "length"
    assert cause_of(10.0, 1.0, changed, {"block a": 9.0, "block b": 1.0}) == "block a"
    assert cause_of(10.0, 1.0, {**changed, "momentum": -1.0}, {"block a": 9.0}) == "momentum"
    assert cause_of(float("inf"), 1.0, {**changed, "batch": 8.0, "half": 7.0}, {"block a": 9.0}) == "length"
    assert cause_of(float("inf"), 1.0, {**changed, "batch": 6.0, "half": 7.0}, {"block a": 9.0}) == "batch"
    assert cause_of(10.0, 1.0, {**changed, "momentum": -1.0, "batch": 0.2}, {}) == "batch"
    assert cause_of(10.0, 1.0, {**changed, "batch": 0.2, "precision": 0.5}, {}) == "precision"
    assert share(float("inf"), float("inf")) == 0.0
