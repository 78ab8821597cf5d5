"""Thirteen faults that were reported, each by public names alone.

On the code of that time (6ef220b) each test fails with the symptom that its docstring names. A copy of this
file in the tests of that commit runs there.
"""

import copy
import errno
import gc
import math
import threading
import tracemalloc
import weakref

import pytest
import torch
from torch import nn

import curvestep as cs
from tests.processes import run_on_processes


class Following(nn.Module):
    """A momentum encoder that its forward pass moves."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                k.lerp_(q, 0.1)
        return (self.query(x) - self.key(x + 1)).square().mean()


def trained(model, loss, *, measure=False, steps=12):
    """The model after some steps on drawn batches, of which a probe measures every second one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe = cs.SmoothnessProbe(model, every=2).watch(optimizer) if measure else None
    for _ in range(steps):
        x = torch.randn(8, 6)
        optimizer.zero_grad()
        (loss(x) if probe is None else probe.record(lambda x=x: loss(x))).backward()
        optimizer.step()
    return model


def recorded(model, loss, batches, optimizer):
    """A recorder that has seen the batches."""
    spikes = cs.Autopsy(model, loss, keep=6).watch(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        spikes.record(batch).backward()
        optimizer.step()
    return spikes


def weight(size=3, grad=None):
    p = nn.Parameter(torch.ones(size))
    p.grad = torch.ones(size) if grad is None else torch.full((size,), grad)
    return p


@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
def test_1_frozen_parameters_that_a_pass_moves_are_put_back():
    """The weights of the measured run differ; nobody says so."""
    weights = []
    for measure in (False, True):
        torch.manual_seed(0)
        model = Following()
        weights.append([*trained(model, model, measure=measure).parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    batches = [torch.randn(8, 6) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cs.calibrate(model, model, batches, optimizer=optimizer, schedule="warmup-decay", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights[0], strict=True))


def test_2_another_thread_trains_while_a_probe_measures():
    """UntrackedParametersError in a thread that does not use this package."""
    done = threading.Event()
    errors = []

    def train_elsewhere():
        model = nn.Linear(4, 1)
        while not done.is_set() and not errors:
            try:
                model(torch.randn(8, 4)).square().mean().backward()
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=train_elsewhere)
    thread.start()
    model = nn.Sequential(nn.Linear(6, 2048), nn.Tanh(), nn.Linear(2048, 1))
    trained(model, lambda x: model(x).square().mean(), measure=True, steps=40)
    done.set()
    thread.join()
    assert errors == []


def test_3_rows_of_two_writers_of_one_file_are_in_it_or_refused(tmp_path):
    """The second writer's rows are in no file, without an error."""
    one = cs.Trace(tmp_path / "race.jsonl")
    two = cs.Trace(tmp_path / "race.jsonl")
    one.describe({"model": "A"})
    written = 0
    codes: set[int | None] = set()
    for k in range(10):
        try:
            (one, two)[k % 2].append({"step": k, "loss": 1.0})
            written += 1
        except OSError as error:
            codes.add(error.errno)
    assert codes <= {errno.EBUSY}
    assert written >= 5
    assert len(cs.Trace.load(tmp_path / "race.jsonl")) == written


@pytest.mark.slow
def test_4_a_fit_of_many_rows_takes_little_memory():
    """Some 25 kB more for each row."""
    peaks = []
    for num in (2_000, 6_000):
        trace = cs.Trace()
        for k, (a, b) in enumerate(torch.randn(num, 2).tolist()):
            g = math.exp(0.5 * a)
            bend = 0.1 * b
            secants = [(1 + 2 * g) * (1 - bend * f) for f in (0.2, 0.5, 1.0)]
            norms = [g - 0.1 * (0.2 + bend) * f for f in (0.2, 0.5, 1.0)]
            row = {
                "step": k,
                "loss": 3.0,
                "lr": 0.1,
                "grad_norm": g,
                "step_norm": 0.1,
                "smoothness": secants[2],
            }
            along = {"fractions": [0.2, 0.5, 1.0], "secants": secants, "grad_norms": norms}
            trace.append({**row, **along, "kappa": secants[2] * 0.1 / g, "eps": 1e-7, "status": "ok"})
        tracemalloc.start()
        assert cs.fit_smoothness(trace).within is not None
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 4_000 * 8_000


def test_5_an_autopsy_refuses_before_it_has_moved_anything():
    """The iterator is elsewhere after the refusal."""
    model = nn.Linear(6, 1)
    numbers = iter(range(10**6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.randn(10, 8, 6)
    spikes = recorded(model, lambda x: (model(x) + 0.1 * next(numbers)).square().mean(), batches, optimizer)
    with pytest.raises(RuntimeError):
        spikes.explain()
    assert next(numbers) == 10


def test_6_sparse_gradients_with_momentum_are_recorded():
    """NotImplementedError of torch, out of optimizer.step()."""
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    batches = torch.randint(5, (8, 6))
    spikes = recorded(table, lambda words: table(words).square().mean(), batches, optimizer)
    assert spikes.step == 8


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_7_a_torchscript_module_is_refused_in_one_line():
    """AttributeError: 'OrderedDictWrapper' object has no attribute 'clear'."""
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 1)))
    batches = [torch.randn(8, 6) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"^[^\n]*TorchScript[^\n]*$"):
        cs.calibrate(model, lambda x: model(x).square().mean(), batches, optimizer=optimizer)


def test_8_zscore_takes_norms_whose_square_overflows():
    """OverflowError out of step()."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    rule = cs.clip_rules.zscore(warmup=3)
    optimizer = cs.ClippedSGD([p], lr=1e-200, max_norm=rule, nonfinite="skip")
    for norm in (1.0, 1e160, 2.0, 1e160, 1e300):
        p.grad = torch.full_like(p, norm)
        optimizer.step()
    assert optimizer.clip_stats()["steps"] == 5


def test_10_a_gradient_computed_after_a_step_that_raised_is_kept():
    """``.grad`` is None after the step; the next one is left out for the old NaN."""

    def stop(*_):
        raise KeyboardInterrupt

    p = weight(2, math.nan)
    optimizer = torch.optim.SGD([p], lr=0.1)
    cs.clip(optimizer, 1.0, nonfinite="skip")
    handle = optimizer.register_step_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    p.grad = torch.full((2,), 0.5)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((2,), 0.95))


def test_11_state_of_deleted_parameters_is_freed():
    """The optimizer keeps views of it: nothing is freed."""
    kept = weight()
    gone = weight()
    optimizer = cs.ClippedSGD([kept, gone], lr=0.1, max_norm=1.0, momentum=0.9)
    optimizer.step()
    references = [weakref.ref(gone), *[weakref.ref(t) for t in optimizer.state.pop(gone).values()]]
    optimizer.param_groups[0]["params"] = [kept]
    del gone
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def clip_inside_of_zero(_):
    """What `clip` says of the optimizer that steps this rank's shard."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer([weight()], optimizer_class=torch.optim.SGD, lr=0.1)
    try:
        cs.clip(zero.optim, 0.01)
    except RuntimeError as error:
        return str(error)
    return "taken"


@pytest.mark.distributed
def test_12_the_optimizer_inside_of_zero_is_refused():
    """It is taken, and each rank clips by the norm of its shard."""
    for words in run_on_processes(clip_inside_of_zero):
        assert "ZeroRedundancyOptimizer" in words


@pytest.mark.parametrize(("entry", "value"), [("clip_stats", {"steps": "seven"}), ("clip_rules", [1, 2])])
def test_13_a_damaged_checkpoint_is_refused_in_one_line(entry, value):
    """TypeError or AttributeError of Python, or no word at all."""
    p = weight()
    optimizer = cs.ClippedSGD([p], lr=0.1, max_norm=cs.clip_rules.zscore())
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0][entry] = value
    with pytest.raises(ValueError, match=r"^[^\n]*checkpoint[^\n]*$"):
        optimizer.load_state_dict(saved)


def test_14_clipped_fraction_is_the_same_on_every_path():
    """0.67 in bfloat16, by torch's functions, and 0.80 in float32, by the kernel."""
    fractions: set[float] = set()
    for dtype in (torch.float32, torch.bfloat16):
        params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 3), (2, 0))]
        optimizer = cs.ClippedSGD(params, lr=0.1, max_norm=cs.clip_rules.weight_ratio(0.05))
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        fractions.add(optimizer.clip_stats()["clipped_fraction"])
    assert fractions == {0.8}
