"""The compiled kernel against the formulas, and what happens where it cannot be built."""

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from curvestep.optim.sgd import SGDRule, update_loop
from curvestep.tensors import kernel as _native
from curvestep.tensors.kernel import LIBRARY, Kernel, native, parallel_for
from curvestep.tensors.vectors import cpu_norm, distance
from tests.reference import reference_norm

ROOT = Path(__file__).parents[2]
BLOCK, STRETCH = 1 << 16, 1 << 20  # as in kernel.c
DTYPES = [torch.float32, torch.float64]
PARTS = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, PARTS, ctypes.c_void_p)

for_many_lists = given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-30, 18),
    seed=st.integers(0, 100),
)
needs_kernel = pytest.mark.skipif(native() is None, reason="built without the kernel: no C compiler")


def tensors_of(sizes, dtype=torch.float64, scale=1.0):
    return [(scale * torch.randn(n)).to(dtype) for n in sizes]


def sum_of_squares(tensors):
    return native().sum_of_squares(native().view(tensors))


def squared_distance(new, old):
    return native().sum_of_squares(native().view(new, old), apart=True)


def reference_distance(new, old):
    return reference_norm([a.double() - b.double() for a, b in zip(new, old, strict=True)])


def update(*lists, scale=1.0, lr=1.0, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False):
    native().update(
        native().view(*lists), scale=scale, lr=lr, weight_decay=weight_decay, momentum=momentum,
        dampening=dampening, nesterov=nesterov,
    )  # fmt: skip


def adamw(steps, *lists, scale=1.0, lr=1.0, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0):
    native().adamw(
        native().view(*lists), native().view(steps), scale=scale, lr=lr, betas=betas, eps=eps,
        weight_decay=weight_decay,
    )  # fmt: skip


def test_kernel_is_there_wherever_a_compiler_is():
    if shutil.which("cc") and sys.platform == "linux" and os.environ.get("CURVESTEP_KERNEL") != "0":
        assert native() is not None


@needs_kernel
@for_many_lists
def test_sums_of_squares_equal_the_reference(sizes, dtype, exponent, seed):
    torch.manual_seed(seed)
    new, old = tensors_of(sizes, dtype, 10.0**exponent), tensors_of(sizes, dtype, 10.0**exponent)
    exact, apart = reference_norm(new), reference_distance(new, old)
    assert cpu_norm(new) == pytest.approx(exact, rel=1e-6, abs=0)
    assert math.hypot(*map(float, map(distance, new, old))) == pytest.approx(apart, rel=1e-6, abs=0)
    if 1e-12 < min(exact, apart) < max(exact, apart) < 1e18:  # the rest is left to torch
        assert math.sqrt(sum_of_squares(new)) == pytest.approx(exact, rel=1e-6)
        assert math.sqrt(squared_distance(new, old)) == pytest.approx(apart, rel=1e-6)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[BLOCK], [BLOCK + 1, 3], [5, 3 * BLOCK - 1, 0, 77, 2 * BLOCK + 63, 1]])
def test_squared_distance_over_several_blocks_changes_nothing(sizes, dtype, threads):
    new, old = tensors_of(sizes, dtype), tensors_of(sizes, dtype)
    kept = [t.clone() for t in (*new, *old)]
    tolerance = 1e-7 if dtype is torch.float32 else 1e-13
    assert math.sqrt(sum_of_squares(new)) == pytest.approx(reference_norm(new), rel=tolerance)
    assert math.sqrt(squared_distance(new, old)) == pytest.approx(reference_distance(new, old), rel=tolerance)
    assert all(map(torch.equal, (*new, *old), kept))


def test_kernel_is_linked_with_no_threads_of_its_own():
    if LIBRARY.exists():
        words = LIBRARY.read_bytes().lower()
        assert all(name not in words for name in (b"gomp", b"iomp", b"libomp", b"pthread"))


@needs_kernel
def test_threads_are_those_of_torch_wherever_it_has_them():
    assert (parallel_for() is not None) == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10))


@pytest.fixture
def calls():
    """Calls of a stand-in for torch's parallel for, which takes the parts one by one from the last."""
    seen = []

    def backwards(begin, end, grain_size, function, context):
        seen.append((begin, end, grain_size))
        for part in reversed(range(begin, end)):
            function(part, part + 1, context)
        return 0

    address = PARALLEL_FOR(backwards)
    native()._take_threads_from(ctypes.cast(address, ctypes.c_void_p))
    yield seen
    native()._take_threads_from(parallel_for())


def steps_and_norms(sizes, threads):
    """Parameters after two steps of each kind, and the squares that were summed."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    g, p, b, m = (tensors_of(sizes, torch.float32) for _ in range(4))
    v, steps = [t.square() for t in b], [torch.zeros(()) for _ in sizes]
    rule = {"scale": 0.5, "weight_decay": 0.1, "lr": 0.125}
    update(g, p, b, momentum=0.5, dampening=0.75, **rule)
    adamw(steps, g, p, m, v, betas=(0.9, 0.99), eps=1e-8, **rule)
    squares = (sum_of_squares(g), squared_distance(g, p))
    return squares, torch.cat([*p, *b, *m, *v, *map(torch.atleast_1d, steps)])


@needs_kernel
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("sizes", [[70_000], [5, 3 * BLOCK - 1, 0, 77, 2 * BLOCK + 63, 1]])
def test_no_bit_depends_on_the_number_of_threads(sizes, threads, calls):
    norms, alone = steps_and_norms(sizes, 1)
    assert calls == []
    again, shared = steps_and_norms(sizes, threads)
    assert calls == [(0, threads, 1)] * 4
    assert again == norms
    assert torch.equal(shared, alone)


@needs_kernel
@pytest.mark.parametrize("from_torch", [True, False])  # without, as below torch 2.10, there is one thread
def test_torchs_own_threads_change_no_bit(from_torch, calls):
    native()._take_threads_from(parallel_for() if from_torch else None)
    norms, alone = steps_and_norms([5, 3 * BLOCK - 1, 0, 77], 1)
    again, shared = steps_and_norms([5, 3 * BLOCK - 1, 0, 77], 2)
    assert again == norms
    assert torch.equal(shared, alone)


@needs_kernel
def test_one_large_entry_among_tiny_ones_and_the_other_way_round():
    t = torch.full((5000,), 1e-25, dtype=torch.float32)
    assert cpu_norm([t]) == pytest.approx(1e-25 * math.sqrt(5000), rel=1e-6)
    for large in (2e25, 2e-11):
        t[777] = large
        assert cpu_norm([t]) == pytest.approx(large, rel=1e-6)


@needs_kernel
def test_squares_that_vanish_do_not_matter_to_the_least_norm_taken():
    t = torch.full((300_000,), 3e-20, dtype=torch.float32)  # of which the squares have no full precision
    t[::1000] = 1e-13
    assert math.sqrt(sum_of_squares([t])) == pytest.approx(reference_norm([t]), rel=1e-6)


@needs_kernel
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 64, 1023, 69_999])
def test_a_value_that_is_not_finite_is_seen_wherever_it_stands(bad, where):
    t = torch.ones(70_000, dtype=torch.float32)
    t[where] = bad
    assert not math.isfinite(sum_of_squares([t]))


@needs_kernel
def test_every_number_is_updated_once_wherever_tensors_are_cut(threads):
    sizes = [5, STRETCH - 37, 0, 100, STRETCH + 77, 3]
    g, p, m, v = ([torch.full((n,), c, dtype=torch.float32) for n in sizes] for c in (1.0, 0.0, 0.0, 0.0))
    update(g, p)
    assert all((t == -1).all() for t in p)
    steps = [torch.zeros((), dtype=torch.float32) for _ in sizes]
    steps[3] += 2.0  # a correction of its own
    adamw(steps, g, p, m, v)
    assert all((t == 0.5).all() for t in m + v)
    own = -1 - 0.5 / (1 - 0.5**3) / math.sqrt(0.5 / (1 - 0.5**3))
    for i, t in enumerate(p):
        torch.testing.assert_close(t, torch.full_like(t, own if i == 3 else -2.0))
    assert [step.item() for step in steps] == [1, 1, 1, 3, 1, 1]


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov", "decay", "sign"),
    list(product([0.0, 0.9], [0.0, 0.3], [False, True], [0.0, 0.01], [1, -1])),
)
def test_update_equals_the_formula(momentum, dampening, nesterov, decay, sign, dtype, threads):
    sizes = [1, 7, 64, 65, BLOCK - 1, 2 * BLOCK + 5, 0]
    params, grads, buffers = (tensors_of(sizes, dtype) for _ in range(3))
    buffers = buffers if momentum else []
    expected = [(p.clone(), buffers[i].clone() if momentum else None) for i, p in enumerate(params)]
    options = dict(lr=0.1, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=decay)
    for (p, b), g in zip(expected, grads, strict=True):
        update_loop(p, g, SGDRule(**options, maximize=sign < 0), 0.7, b)
    kept = [g.clone() for g in grads]
    update(*filter(None, (grads, params, buffers)), scale=sign * 0.7, **options)
    for i, (p, b) in enumerate(expected):
        torch.testing.assert_close(params[i], p)
        assert torch.equal(grads[i], kept[i])
        if momentum:
            torch.testing.assert_close(buffers[i], b)


@needs_kernel
@pytest.mark.parametrize("size", [7, 8, 61, (1 << 18) + 9])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_of_numbers_that_a_quick_root_would_get_wrong(size, amsgrad, threads):
    odd = torch.tensor([0.0, 1e-45, 1e-38, 1e-31, 1.0, 1e29, 1e31, 3e38], dtype=torch.float32)
    v = odd.repeat(size // 8 + 1)[:size].clone()
    v[size // 2] = math.inf
    p, g, m = (torch.randn(size, dtype=torch.float32) for _ in range(3))
    g *= 1e-3 * v.clamp(max=1e30).sqrt() + 1e-22
    lists = [[t.clone()] for t in (g, p, m, v, *([v / 2] if amsgrad else []))]
    steps = [torch.tensor(4.0, dtype=torch.float32)]
    adamw(steps, *lists, scale=0.5, lr=0.1, betas=(0.9, 0.75), eps=1e-30, weight_decay=0.1)
    p, g, m, v = (t.double() for t in (p, 0.5 * g, m, v))
    m, v = 0.9 * m + 0.1 * g, 0.75 * v + 0.25 * g * g
    v = torch.maximum(v, lists[3][0].double() / 2) if amsgrad else v
    expected = 0.99 * p - 0.1 / (1 - 0.9**5) * m / ((v / (1 - 0.75**5)).sqrt() + 1e-30)
    close = v > 1e-36  # below, a float32 has lost digits before any root is taken
    torch.testing.assert_close(lists[1][0].double()[close], expected[close], rtol=1e-6, atol=1e-6)
    assert torch.isfinite(lists[1][0]).all()


@needs_kernel
def test_no_decay_leaves_infinite_parameters_alone():
    p, g = torch.tensor([math.inf, 1.0]), torch.tensor([0.0, 1.0])
    for nesterov, buffers in [(False, []), (False, [[torch.zeros(2)]]), (True, [[torch.zeros(2)]])]:
        update([g], [p], *buffers, momentum=0.9, lr=0.0, nesterov=nesterov)
        assert p.tolist() == [math.inf, 1.0]


def kinds_of_tensors():
    base = torch.randn(4, 3, 2)
    return {
        "contiguous": base,
        "empty": base[:0],
        "one number": torch.randn(()),
        "transposed": base.transpose(0, 2),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "with dimensions of one": base.unsqueeze(1)[:, :, None].transpose(0, 1),
        "with an offset": torch.randn(10)[3:],
        "parameter": nn.Parameter(torch.randn(3)),
        "float32": base.float(),
        "sliced": base[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "overlapping": torch.randn(5).as_strided((2, 2), (1, 1)),
        "half": base.half(),
        "brain": base.bfloat16(),
        "whole numbers": torch.arange(5),
        "complex": torch.randn(3, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "on no device": torch.empty(3, device="meta"),
        "nothing on no device": torch.empty(0, device="meta"),
        "in a layout of its own": base.float().to_mkldnn(),
        "subclass": base.as_subclass(type("Marked", (torch.Tensor,), {})),
        "wrapper": TwoTensor(base, base.clone()),
        "zeros without memory": torch._efficientzerotensor(3),
        "negated": torch.randn(1, dtype=torch.complex128).conj().imag,
    }


GOOD = list(kinds_of_tensors())[:9]


@pytest.fixture(params=["by C", "by attributes"])
def kernel(request):
    found = Kernel(LIBRARY) if native() is not None else pytest.skip("built without the kernel")
    if request.param == "by attributes":
        found._describe = None  # as with a torch that does not let C look
    return found


@pytest.mark.parametrize("name", list(kinds_of_tensors()))
def test_view_takes_exactly_what_the_kernel_can_walk(name, kernel):
    t = kinds_of_tensors()[name]
    view = kernel.view([t])
    assert (view is not None) == (name in GOOD)
    if view is not None:
        assert (view.addresses[0], view.sizes[0]) == (t.data_ptr(), t.numel())
        assert view.doubles == (t.dtype is torch.float64)
        assert list(view.starts) == list(native().view([t]).starts)


@pytest.mark.parametrize("first", GOOD)
@pytest.mark.parametrize("second", list(kinds_of_tensors()))
def test_other_lists_must_lie_like_the_first(first, second, kernel):
    t, other = kinds_of_tensors()[first], kinds_of_tensors()[second]
    alike = t.shape == other.shape and t.dtype is other.dtype and t.stride() == other.stride()
    alike = alike and other.layout is torch.strided and second in GOOD
    view = kernel.view([t], [other])
    if t.numel() > 0 and 1 not in t.shape:  # strides of dimensions of one do not matter
        assert (view is not None) == alike
    if view is not None:
        assert list(view.addresses) == [t.data_ptr(), other.data_ptr()]


def test_lists_of_two_dtypes_or_of_other_lengths_are_refused(kernel):
    a, b = torch.ones(5), torch.ones(5)
    assert kernel.view([a, b]) is not None
    assert kernel.view([a, b.float()]) is None
    assert kernel.view([a], [b.float()]) is None
    assert kernel.view([a, b], [a]) is None
    assert kernel.view([a], [b], [torch.ones(6)]) is None
    assert kernel.view([a[:1]], [kinds_of_tensors()["negated"]]) is None


def test_torch_without_the_interface_for_c_is_noticed(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    assert _native._describe() is None


def test_environment_can_leave_the_kernel_out():
    code = "from curvestep.tensors.kernel import native; print(native())"
    env = {**os.environ, "CURVESTEP_KERNEL": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_file_that_is_no_library_is_passed_over(monkeypatch, tmp_path):
    bad = tmp_path / "kernel.so"
    bad.write_bytes(b"not a library")
    monkeypatch.setattr("curvestep.tensors.kernel.LIBRARY", bad)
    assert native.__wrapped__() is None
    with pytest.raises(OSError, match=r"kernel\.so"):
        Kernel(bad)


@needs_kernel
@pytest.mark.parametrize("function", ["_sum_of_squares", "_update", "_adamw"])
def test_kernel_that_gives_wrong_numbers_is_passed_over(function, monkeypatch):
    class Wrong(Kernel):
        def __init__(self, library):
            super().__init__(library)
            setattr(self, function, lambda *given: 0.0)

    assert native.__wrapped__() is not None
    monkeypatch.setattr("curvestep.tensors.kernel.Kernel", Wrong)
    assert native.__wrapped__() is None


SOURCES = {"src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"}


def build_wheel(folder, **variables):
    """Build a wheel in ``folder`` from a copy of the sources, with these variables in the environment."""

    def only_sources(copied, names):
        return [name for name in names if Path(copied) == ROOT and name not in SOURCES]

    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=only_sources)
    (source / LIBRARY.relative_to(ROOT)).unlink(missing_ok=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), str(source)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"CC": "no-such-compiler"}, {"CURVESTEP_KERNEL": "0"}], ids=str)
def test_wheel_without_a_compiler_or_the_kernel_is_pure_python(variables, tmp_path):
    build_wheel(tmp_path, **variables).check_returncode()
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("none-any.whl")
    assert not any(name.endswith(LIBRARY.name) for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_build_stops_where_the_kernel_is_asked_for_and_does_not_compile(tmp_path):
    done = build_wheel(tmp_path, CC="no-such-compiler", CURVESTEP_KERNEL="1")
    assert done.returncode != 0
    assert "asks for the kernel, which did not compile" in done.stdout + done.stderr


def test_kernel_loads_on_every_linux_that_torch_supports():
    if LIBRARY.suffix == ".so" and LIBRARY.exists():
        needed = re.findall(rb"GLIBC_(\d+)\.(\d+)", LIBRARY.read_bytes())
        assert max((int(major), int(minor)) for major, minor in needed) <= (2, 28)
