import math

import pytest
import torch
from hypothesis import given, strategies as st

from curvestep.tensors import kernel
from curvestep.tensors.vectors import PIECE, difference, distance, dot, dot_of_changes, global_norm
from tests.reference import reference_norm


@pytest.fixture(autouse=True, params=["native", "torch"], scope="module")
def summed_by(request):
    """All that is said here holds with our kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernel, "native", lambda: None)
        elif kernel.native() is None:
            pytest.skip("built without the kernel")
        yield


def relative_error(tensors):
    exact = reference_norm(tensors)
    return abs(float(global_norm(tensors)) / exact - 1)


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]),
    seed=st.integers(0, 100),
)
def test_norm_equals_the_reference(sizes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(n, dtype=torch.float64, generator=generator).to(dtype) for n in sizes]
    assert float(global_norm(tensors)) == pytest.approx(reference_norm(tensors), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
def test_norm_of_25_million_fp32_elements_is_right_to_1e_6(constant):
    t = torch.full((25_000_000,), 0.03, dtype=torch.float32)
    if not constant:
        t.normal_()
    assert relative_error([t]) < 1e-6
    # What it guards against: torch's own sum loses three digits at this size.
    assert abs(float(torch.linalg.vector_norm(t)) / reference_norm([t]) - 1) > 1e-5


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e19, 1e-20, 3e-22, 1e-38, 3e38])
def test_norm_neither_overflows_nor_vanishes_in_fp32(scale):
    t = torch.full((1000,), scale, dtype=torch.float32)
    norm = float(global_norm([t, torch.zeros(3, dtype=torch.float32)]))
    assert norm == pytest.approx(float(t[0]) * math.sqrt(1000), rel=1e-6)


@pytest.mark.parametrize("scale", [1e300, 3e-161, 1e-300])
def test_norm_neither_overflows_nor_vanishes_in_fp64(scale):
    assert float(global_norm([torch.full((4,), scale)])) == pytest.approx(2 * scale, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.03, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("sizes", [[999] * 100, [998_867], [65_537], [100_003]])  # no row divides the primes
def test_half_precision_is_cut_into_rows_and_added_up_in_single(sizes, dtype, value):
    assert relative_error([torch.full((size,), value, dtype=dtype) for size in sizes]) < 1e-6


@pytest.mark.parametrize(
    ("entry", "expected"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)]
)
def test_nonfinite_entries_show_in_the_norm(entry, expected):
    norm = float(global_norm([torch.tensor([1.0, entry]), torch.ones(3)]))
    assert norm == expected or (math.isnan(norm) and math.isnan(expected))


def test_nothing_and_zeros_have_norm_zero():
    assert float(global_norm([])) == 0.0
    assert float(global_norm([torch.zeros(5), torch.empty(0)])) == 0.0


def test_sparse_duplicates_are_added_before_squaring():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,))
    assert float(global_norm([sparse])) == pytest.approx(5.0)


def test_complex_counts_real_and_imaginary_part():
    assert float(global_norm([torch.tensor([3 + 4j]), torch.tensor([12j])])) == pytest.approx(13.0)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1:],
        lambda t: t[:1].expand(50, -1),
        lambda t: t.reshape(10, 10, 30, 30).contiguous(memory_format=torch.channels_last),
        lambda t: t.reshape(-1)[7],
    ],
    ids=["transposed", "sliced", "expanded", "channels last", "scalar"],
)
def test_strides_do_not_matter(view):
    t = view(torch.randn(300, 300))
    assert relative_error([t, torch.randn(3)]) < 1e-12


def test_mixed_dtypes_and_tensors_that_require_grad():
    single = torch.randn(7, dtype=torch.float32)
    assert relative_error([torch.randn(10, requires_grad=True), single, torch.randn(3).bfloat16()]) < 1e-6


def test_difference_of_sparse_gradients_equals_that_of_dense_ones():
    indices = torch.tensor([[0, 2, 2]])
    a = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (4, 2), check_invariants=True)
    b = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.randn(2, 2), (4, 2), check_invariants=True)
    dense = torch.randn(4, 2)
    for one in (a, b, dense, None):
        for two in (a, b, dense, None):
            if one is None and two is None:
                continue
            zero = torch.zeros(4, 2)
            expected = (zero if one is None else one.to_dense()) - (zero if two is None else two.to_dense())
            torch.testing.assert_close(difference([one], [two])[0].to_dense(), expected)
            torch.testing.assert_close(global_norm(difference([one], [two])), expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_distance_in_pieces_is_the_norm_of_the_difference(size, dtype):
    a, b = torch.randn(2, size).to(dtype)
    exact = torch.linalg.vector_norm((a - b).double())
    torch.testing.assert_close(distance(a, b), exact, rtol=1e-5, atol=0)
    assert torch.equal(distance(a, a), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize(
    "pair",
    [
        lambda a, b: (a.t(), b.t()),
        lambda a, b: (a.t().contiguous(), b.t()),
        lambda a, b: (a.to_sparse(), b),
        lambda a, b: (a.to_sparse(), b.to_sparse()),
        lambda a, b: (a.requires_grad_(), b),
        lambda a, b: (torch.complex(a, b), torch.complex(b, a)),
    ],
)
def test_distance_of_tensors_that_cannot_be_cut_alike(pair):
    one, other = pair(*torch.randn(2, 300, 400))
    exact = torch.linalg.vector_norm(one.to_dense() - other.to_dense()).detach()
    torch.testing.assert_close(distance(one, other), exact, rtol=1e-12, atol=0)


def test_distance_neither_overflows_nor_hides_what_is_not_finite():
    huge = torch.full((2 * PIECE,), 1e30, dtype=torch.float32)
    assert distance(huge, -huge).item() == pytest.approx(2e30 * math.sqrt(2 * PIECE), rel=1e-6)
    for bad in (math.nan, math.inf):
        huge[-1000] = bad
        assert not math.isfinite(distance(torch.zeros_like(huge), huge).item())


@given(
    sizes=st.sampled_from([(0,), (7,), (40_000,), (130, 170), ()]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex64]),
    given_=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    kind=st.sampled_from(["plain", "transposed", "sparse"]),
    seed=st.integers(0, 100),
)
def test_dot_of_changes_is_the_inner_product_of_both_differences(sizes, dtype, given_, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(sizes, dtype=torch.float64, generator=generator).to(dtype) for _ in range(4)]
    a, b, c, d = (t.t() if kind == "transposed" and t.dim() == 2 else t for t in drawn)
    if kind == "sparse" and sizes and not dtype.is_complex:
        c, d = c.to_sparse(), d.to_sparse()
    found = dot_of_changes(a, b, c if given_[0] else None, d if given_[1] else None)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x, y, z, w = (t.to_dense().to(wide) for t in (a, b, c, d))
    other = given_[0] * z - given_[1] * w
    exact = ((x - y).conj() * other).sum().real.item()
    scale = (x - y).norm().item() * other.norm().item()
    tolerance = {torch.float64: 1e-13, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    assert found.item() == pytest.approx(exact, abs=tolerance * scale)


def test_dot_takes_a_missing_piece_of_either_for_zero():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert dot([a, a, None], [b, None, b]) == 11.0
    assert dot([None], [None]) == 0.0
