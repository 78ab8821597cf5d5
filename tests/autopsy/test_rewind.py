"""A run that goes back behind a batch is, bit for bit, the run that never saw it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from tests.autopsy.runs import adamw, clipped_adamw, clipped_sgd, hooked_sgd, sgd
from tests.models import mlp
from tests.processes import run_on_processes

BAD = 11  # the number of the poisoned batch


class Follower(nn.Module):
    """A network and a frozen one that each forward pass moves after it; BatchNorm, dropout and a counter."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 3)
        self.target = copy.deepcopy(self.head).requires_grad_(False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.head.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        hidden = self.online(x)
        return self.head(hidden) - 0.1 * self.target(hidden)


class Loop:
    """A loop with what real ones have; ``poisoned`` puts one batch more into it, which is then rewound."""

    def __init__(self, make, *, parts=1, max_norm=None, precision=None, scaled=False, scheduled=True, keep=8):
        torch.manual_seed(0)
        self.model = Follower().float()
        self.optimizer = make(list(self.model.parameters()))
        self.parts = parts
        self.max_norm = max_norm
        self.autocast = torch.autocast(
            "cpu", dtype=precision or torch.bfloat16, enabled=precision is not None
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=60)
        self.scheduled = scheduled
        self.losses = []
        self.spikes = cs.Autopsy(self.model, self.loss, keep=keep)
        self.spikes.watch(self.optimizer, self.scheduler, self.scaler)

    def loss(self, batch):
        x, y = batch
        with self.autocast:
            return F.mse_loss(self.model(x), y)

    def step(self, batch):
        for part in zip(*(t.chunk(self.parts) for t in batch), strict=True):
            loss = self.spikes.record(part)
            self.scaler.scale(loss / self.parts).backward()
            self.losses.append(loss.item())
        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scheduled:
            self.scheduler.step()

    def state(self):
        moments = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        tensors = [*self.model.state_dict().values(), *moments, torch.get_rng_state()]
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        stats = self.optimizer.clip_stats() if hasattr(self.optimizer, "clip_stats") else {}
        return tensors, (lrs, self.scaler.get_scale(), self.model.calls, dict(stats))


def clipped_before(params):
    optimizer = hooked_sgd(params)
    optimizer.stop_double_clip_check()
    return optimizer


def batch(seed, scale=1.0):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed)).float()
    return x, scale * x[:, :3].sin()


def went_back(setting, *, bad=BAD, steps_after=0, num_steps=22):
    """A run that takes a poisoned step, and more, and goes back; and the run that never saw them."""
    make, options = setting
    loop = Loop(make, **options)
    for k in range(bad):
        loop.step(batch(k))
    loop.step(batch(99, scale=100.0))
    for k in range(steps_after):
        loop.step(batch(1000 + k))
    loop.spikes.rewind(bad)
    for k in range(bad, num_steps):
        loop.step(batch(k))
    without = Loop(make, **options)
    for k in range(num_steps):
        without.step(batch(k))
    return loop, without


def assert_same(loop, without):
    (tensors, numbers), (expected, expected_numbers) = loop.state(), without.state()
    for one, two in zip(tensors, expected, strict=True):
        assert torch.equal(one, two)
    assert numbers == expected_numbers
    assert loop.spikes.step == without.spikes.step


def ruled_sgd(params):
    optimizer = sgd(params)
    cs.clip(optimizer, cs.clip_rules.zscore(2.0, warmup=3))
    return optimizer


SETTINGS = {
    "sgd": (sgd, {}),
    "adamw": (adamw, {}),
    "clipped sgd": (clipped_sgd, {}),
    "clipped adamw": (clipped_adamw, {}),
    "clip": (hooked_sgd, {}),
    "clip by a rule": (ruled_sgd, {}),
    "accumulation": (adamw, {"parts": 4}),
    "torch's clipping": (adamw, {"max_norm": 0.05}),
    "torch's clipping and clip": (clipped_before, {"max_norm": 0.3, "parts": 2}),
    "bfloat16": (adamw, {"precision": torch.bfloat16}),
    "float16": (adamw, {"precision": torch.float16, "scaled": True}),
    "float16, clipped": (sgd, {"precision": torch.float16, "scaled": True, "max_norm": 0.05, "parts": 2}),
    "float16, clips itself": (clipped_adamw, {"precision": torch.float16, "scaled": True}),
}


@pytest.mark.parametrize("steps_after", [0, 4])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_run_that_went_back_is_the_run_that_never_saw_the_batch(setting, steps_after):
    assert_same(*went_back(setting, steps_after=steps_after))


@pytest.mark.parametrize("bad", [1, 8, 15, 16, 17])
def test_every_kept_step_can_be_gone_back_to(bad):
    assert_same(*went_back((adamw, {"max_norm": 0.05}), bad=bad))


def test_a_run_can_go_back_twice_and_past_a_nan():
    loop = Loop(adamw)
    for k in range(BAD):
        loop.step(batch(k))
    for _ in range(2):
        loop.step(batch(99, scale=torch.nan))
        loop.step(batch(98))
        loop.spikes.rewind(BAD)
    for k in range(BAD, 22):
        loop.step(batch(k))
    without = Loop(adamw)
    for k in range(22):
        without.step(batch(k))
    assert_same(loop, without)


def test_a_step_that_was_not_taken_yet_is_gone_back_behind():
    loop, without = Loop(sgd), Loop(sgd)
    for k in range(20):
        if k == BAD:
            loop.spikes.record(batch(99, scale=100.0)).backward()
            loop.spikes.rewind(BAD)
        torch.manual_seed(k)
        loop.step(batch(k))
        torch.manual_seed(k)
        without.step(batch(k))
    assert_same(loop, without)


def test_a_run_that_went_back_explains_its_next_spike():
    loop, _ = went_back((adamw, {"scheduled": False}))
    loop.step(batch(98, scale=100.0))
    assert loop.spikes.explain(loop.spikes.step - 1).step == loop.spikes.step - 1


def unchanged(loop, refused):
    before = copy.deepcopy(loop.state())
    gradients = [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()]
    refused()
    (tensors, numbers), (expected, expected_numbers) = loop.state(), before
    same = all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    pairs = zip(loop.model.parameters(), gradients, strict=True)
    same_gradients = all(p.grad is g or torch.equal(p.grad, g) for p, g in pairs)
    return same and same_gradients and numbers == expected_numbers


def test_a_step_that_is_not_kept_is_refused_and_nothing_changes():
    loop = Loop(adamw, keep=8)
    for k in range(30):
        loop.step(batch(k))

    def refused():
        for unknown in (-1, 3, 30, 400):
            with pytest.raises(ValueError, match="not kept"):
                loop.spikes.rewind(unknown)

    assert unchanged(loop, refused)
    with pytest.raises(ValueError, match="not kept"):
        Loop(adamw).spikes.rewind(0)


def test_steps_that_do_not_lead_to_the_same_bits_are_refused():
    loop = Loop(adamw)
    noise = torch.Generator().manual_seed(1)

    def disturb(*_):
        for p in loop.model.parameters():
            if p.grad is not None:
                p.grad.add_(0.01 * torch.randn(p.shape, generator=noise, dtype=p.dtype))

    hook = loop.optimizer.register_step_pre_hook(disturb)
    for k in range(14):
        loop.step(batch(k))
    hook.remove()

    def refused():
        with pytest.raises(RuntimeError, match="same bits"):
            loop.spikes.rewind(12)

    assert unchanged(loop, refused)
    loop.spikes.rewind(8)  # where a copy was kept


def test_a_model_moved_to_another_kind_of_number_is_refused():
    loop = Loop(sgd)
    for k in range(14):
        loop.step(batch(k))
    loop.model.double()

    def refused():
        with pytest.raises(RuntimeError, match="was moved"):
            loop.spikes.rewind(12)

    assert unchanged(loop, refused)


def test_a_model_moved_to_another_device_is_refused():
    loop = Loop(sgd)
    for k in range(14):
        loop.step(batch(k))
    loop.model.to("meta")
    with pytest.raises(RuntimeError, match="to meta"):
        loop.spikes.rewind(12)
    assert loop.spikes.step == 14


def refusals(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    words = []
    for wrap in (fully_shard, DistributedDataParallel):
        try:
            cs.Autopsy(wrap(mlp()), lambda batch: batch.sum())
        except NotImplementedError as error:
            words.append(str(error))
    return words


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_a_model_on_several_processes_is_refused_in_one_line():
    for words in run_on_processes(refusals, world_size=2):
        assert len(words) == 2
        assert all("several processes" in line and "\n" not in line for line in words)


def test_what_has_no_state_cannot_be_watched():
    loop = Loop(sgd)
    recorder = cs.Autopsy(loop.model, loop.loss)
    with pytest.raises(TypeError, match="state_dict"):
        recorder.watch(loop.optimizer, lambda: None)
