"""Tensors that share memory, that have none, that are huge; processes forked after a step."""

import ctypes
import math
import mmap
import multiprocessing
import os
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.tensors.kernel import native
from curvestep.tensors.vectors import global_norm
from tests.optim.kinds import every_path

MAKE = {
    "plain": partial(cs.ClippedSGD, lr=0.1, max_norm=math.inf),
    "momentum": partial(cs.ClippedSGD, lr=0.1, max_norm=math.inf, momentum=0.9),
    "adamw": partial(cs.ClippedAdamW, lr=0.1, max_norm=math.inf),
}
THEIRS = {
    "plain": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=0.1, foreach=False),
}
needs_kernel = pytest.mark.skipif(native() is None, reason="built without the kernel: no C compiler")


# --- memory that is shared -------------------------------------------------------------------------


def shared(kind, size):
    """Parameters that share memory, and the memory."""
    memory = torch.linspace(-1, 1, size)
    views = {
        "two of the same": [memory, memory],
        "two that overlap": [memory[: size - size // 3], memory[size // 3 :]],
        "one with overlapping rows": [memory.as_strided((size // 4 - 1, 8), (4, 1))],
    }
    return [nn.Parameter(view) for view in views[kind]], memory


@pytest.mark.parametrize("make", list(MAKE))
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("two of the same", 60), ("two of the same", 1 << 19),  # enough for two threads
        ("two that overlap", 60), ("two that overlap", 1 << 19), ("one with overlapping rows", 60),
    ],
)  # fmt: skip
def test_parameters_that_share_memory_step_as_with_torch(make, kind, size, threads):
    results = []
    for optimizer_of in (MAKE[make], THEIRS[make]):
        torch.manual_seed(0)
        params, memory = shared(kind, size)
        optimizer = optimizer_of(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        results.append(memory)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", list(MAKE))
@every_path
def test_parameter_that_is_expanded_is_refused(make, path):
    p = nn.Parameter(torch.ones(3).expand(4, 3))
    p.grad = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        MAKE[make]([p], **path).step()


def test_parameter_given_twice_is_torchs_warning_and_two_updates():
    p = nn.Parameter(torch.zeros(70_000))
    p.grad = torch.ones(70_000)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = MAKE["plain"]([p, p])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.2))


# --- memory of the state -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["momentum", "adamw"])
def test_state_of_a_tensor_lies_as_the_tensor_does_in_memory_of_its_own(make):
    images = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
    params = [nn.Parameter(t) for t in (torch.randn(600, 600), images, torch.tensor(1.0), torch.randn(7))]
    optimizer = MAKE[make](params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in params:
        for t in (t for name, t in optimizer.state[p].items() if name != "step"):
            assert (t.shape, t.stride()) == (p.shape, p.stride())
            assert t.untyped_storage().nbytes() == t.nbytes  # given back when nobody has this tensor
            assert t.untyped_storage().resizable()


# --- memory of an odd kind -------------------------------------------------------------------------


def misaligned():
    return torch.frombuffer(bytearray(8 * 70 + 1), dtype=torch.float64, count=70, offset=1).fill_(2.0)


@pytest.mark.parametrize("make", list(MAKE))
@pytest.mark.parametrize("odd", ["misaligned", "gradient is the parameter", "copied on write", "inference"])
def test_odd_memory_steps_as_plain_memory_does(make, odd):
    start = misaligned() if odd == "misaligned" else torch.full((70,), 2.0)
    other = torch.linspace(-1, 1, 70)
    p, twin = nn.Parameter(start), nn.Parameter(torch.full((70,), 2.0))
    p.grad = {"gradient is the parameter": p.detach(), "copied on write": torch._lazy_clone(other)}.get(
        odd, other
    )
    twin.grad = p.grad.clone()
    before = twin.grad.clone()
    with torch.inference_mode(odd == "inference"):
        MAKE[make]([p]).step()
    THEIRS[make]([twin]).step()
    torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-12, atol=1e-12)
    if odd != "gradient is the parameter":
        assert torch.equal(p.grad, before)
    assert torch.equal(other, torch.linspace(-1, 1, 70))


def test_steps_of_one_optimizer_in_four_threads_end_finite_and_counted():
    p = nn.Parameter(torch.zeros(2000))
    p.grad = torch.ones(2000)
    optimizer = cs.ClippedSGD([p], lr=1e-3, max_norm=1.0, momentum=0.9)
    optimizer.step()

    def steps():
        for _ in range(100):
            optimizer.step()

    workers = [threading.Thread(target=steps) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert 101 <= optimizer.clip_stats()["steps"] <= 401  # there is no lock around a step
    assert torch.isfinite(p).all()


# --- memory that was given back --------------------------------------------------------------------


@pytest.mark.parametrize("make", list(MAKE))
@every_path
@pytest.mark.parametrize("freed", ["parameter", "gradient", "buffer"])
def test_storage_resized_to_zero_is_one_line_and_no_signal(make, path, freed):
    p = nn.Parameter(torch.ones(40_000))
    p.grad = torch.ones(40_000)
    optimizer = MAKE[make]([p], **path)
    optimizer.step()
    buffers = [t for t in optimizer.state[p].values() if t.dim()]
    victim = {"parameter": [p], "gradient": [p.grad], "buffer": buffers}[freed]
    for t in victim:
        t.untyped_storage().resize_(0)
    if victim:  # plain descent has no buffers
        with pytest.raises(RuntimeError, match=rf"^The storage of a {freed}.* was resized to 0[^\n]*$"):
            optimizer.step()


def test_norm_and_clip_of_a_gradient_whose_storage_was_resized_to_zero():
    p = nn.Parameter(torch.ones(5))
    p.grad = torch.ones(5)
    optimizer = torch.optim.SGD([p], lr=0.1)
    cs.clip(optimizer, max_norm=1.0)
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was resized to 0"):
        global_norm([p.grad])
    with pytest.raises(RuntimeError, match="was resized to 0"):
        optimizer.step()


# --- processes that are forked ---------------------------------------------------------------------


def in_a_process(act, *given, start="fork", patience=120):
    """The exit code of ``act`` in a forked or fresh process, which does not wait forever."""
    process = multiprocessing.get_context(start).Process(target=act, args=given)
    process.start()
    process.join(patience)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


@needs_kernel
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("make", list(MAKE))
def test_step_in_a_process_forked_after_a_step_does_not_wait_forever(make, threads):
    params = [nn.Parameter(torch.ones(50_000)) for _ in range(3)]
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    optimizer, other = MAKE[make](params), MAKE[make]([nn.Parameter(p.detach().clone()) for p in params])
    for p, twin in zip(params, other.param_groups[0]["params"], strict=True):
        twin.grad = p.grad
    optimizer.step()
    other.step()
    norm = float(global_norm([p.grad for p in params]))

    def step():
        torch.set_num_threads(threads)  # a fork may begin with another number
        optimizer.step()
        if float(global_norm([p.grad for p in params])) != norm:
            os._exit(2)
        torch.set_num_threads(1)
        other.step()
        same = all(map(torch.allclose, params, other.param_groups[0]["params"]))
        os._exit(0 if same else 3)

    assert in_a_process(step) == 0


def fork_while_probing(folder):
    """What the next test does; torch allows no backward pass in a fork once a device had one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, x = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0), torch.randn(4, 3)
    probe = cs.SmoothnessProbe(model, every=1, trace=folder / "trace.jsonl")

    def measured_step():
        optimizer.zero_grad()
        loss_fn().backward()
        with probe(loss_fn):
            optimizer.step()

    def loss_fn():
        return model(x).square().mean()

    def forked_step():
        torch.set_num_threads(1)  # or torch's own forward pass would wait for threads that were not forked
        with pytest.warns(UserWarning, match="give each its own file"):
            measured_step()
        assert len(probe.trace) == 2  # in memory

    measured_step()
    assert in_a_process(forked_step) == 0
    measured_step()
    assert len(probe.trace) == len(cs.Trace.load(folder / "trace.jsonl")) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_probe_in_a_fork_measures_the_same_and_one_process_writes(tmp_path):
    assert in_a_process(fork_while_probing, tmp_path, start="spawn") == 0


# --- more than 2^31 entries ------------------------------------------------------------------------

HUGE = (1 << 31) + 7
PART = 1 << 20  # entries that are mapped at a time, 4 MB of float32
LAST = HUGE // PART


def huge(count):
    """Tensors of 2^31 + 7 float32 entries in 12 MB each: all parts but two are the same memory."""
    libc, length = ctypes.CDLL(None), (LAST + 1) * PART * 4
    libc.mmap.restype, size, address = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    readable, writable = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
    there_at_once = mmap.MAP_SHARED | 0x10 | 0x8000  # MAP_FIXED and MAP_POPULATE
    for _ in range(count):
        base = libc.mmap(None, length, readable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        file = os.memfd_create("huge")
        os.ftruncate(file, 3 * PART * 4)
        for i in range(LAST + 1):
            at, part = base + 4 * i * PART, 0 if i == 0 else 2 if i == LAST else 1
            assert libc.mmap(at, 4 * PART, writable, there_at_once, file, 4 * part * PART) == at
        os.close(file)
        yield torch.frombuffer((ctypes.c_float * HUGE).from_address(base), dtype=torch.float32)


def fill(t, *values):
    """Set first, last and all other parts."""
    for part, value in zip((t[:PART], t[LAST * PART :], t[PART : 2 * PART]), values, strict=True):
        part.fill_(value)


def parts(t):
    """The value of first, last and all other parts, if they have one each."""
    found = [part.unique().tolist() for part in (t[:PART], t[LAST * PART :], t[PART : 2 * PART])]
    return [value for (value,) in found]


def step():
    torch.set_num_threads(1)
    g, data = huge(2)
    fill(g, 1, 1, 1)
    fill(data, 0, 0, 0)
    p = nn.Parameter(data)
    p.grad = g
    optimizer = cs.ClippedSGD([p], lr=1.0, max_norm=math.inf)
    optimizer.step()
    assert optimizer.clip_stats()["grad_norm"] == pytest.approx(math.sqrt(HUGE), rel=1e-9)
    assert parts(p.detach()) == [-1, -1, 1 - LAST]  # the shared memory is updated once a part


def passes_of_the_kernel():
    kernel, (g, p, m, v) = native(), huge(4)
    for t, value in zip((g, p, m, v), (1, 0, 0, 0), strict=True):
        fill(t, value, value, value)
    kernel.update(
        kernel.view([g], [p], [m]),
        scale=1.0, weight_decay=0.0, momentum=0.0, dampening=0.0, lr=1.0, nesterov=False,
    )  # fmt: skip
    assert parts(p) == [-1, -1, 1 - LAST]
    assert parts(m) == [1, 1, 1]
    fill(p, 0, 0, 0)
    count = torch.zeros(())
    kernel.adamw(  # with betas of zero a step is lr times the sign
        kernel.view([g], [p], [m], [v]), kernel.view([count]),
        scale=1.0, lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0,
    )  # fmt: skip
    assert parts(p) == pytest.approx([-1, -1, 1 - LAST], rel=1e-6)
    assert (parts(m), parts(v)) == ([1, 1, 1], [1, 1, 1])
    fill(m, 1, 0.5, 1)
    assert kernel.sum_of_squares(kernel.view([g], [m]), apart=True) == 7 / 4


@pytest.mark.slow
@needs_kernel
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
@pytest.mark.parametrize("act", [step, passes_of_the_kernel])
def test_each_of_more_than_2_31_entries_is_reached_once(act):
    # In a fork: a worker that had so much memory mapped would show it as its peak, to its children too.
    assert in_a_process(act, patience=1200) == 0
