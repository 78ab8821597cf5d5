"""What once broke an optimizer: each is taken, or refused in one line that says why."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import curvestep as cs
from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD
from curvestep.tensors.kernel import native
from curvestep.tensors.vectors import global_norm
from tests.optim.kinds import every_path


def parameter(*shape, grad=None, dtype=torch.float32):
    p = nn.Parameter(torch.randn(shape, dtype=dtype))
    p.grad = torch.randn(shape, dtype=dtype) if grad is None else grad.to(dtype)
    return p


# --- CPU tensors that are not plain memory ---------------------------------------------------------


def test_fake_tensors_raise_and_do_not_end_the_process():
    with FakeTensorMode():
        p = parameter(5)
        with pytest.raises(RuntimeError):
            ClippedSGD([p], lr=0.1, max_norm=1.0).step()
        with pytest.raises(RuntimeError):
            global_norm([torch.ones(70_000)])


def test_a_kernel_first_tried_among_fake_tensors_is_found_all_the_same():
    found = native()
    for context in (FakeTensorMode(), torch.device("meta")):
        native.cache_clear()
        with context:
            assert type(native()) is type(found)


@pytest.mark.parametrize("size", [3, 70_000])
def test_wrapper_tensors_have_the_norm_that_torch_gives_them(size):
    t = torch.randn(size)
    assert float(global_norm([TwoTensor(t, t.clone())])) == pytest.approx(t.norm().item())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_wrapper_tensors_step_like_plain_ones(momentum):
    start, grad = torch.randn(6), torch.randn(6)
    wrapped = nn.Parameter(TwoTensor(start.clone(), start.clone()))
    plain = nn.Parameter(start.clone())
    wrapped.grad, plain.grad = TwoTensor(grad.clone(), grad.clone()), grad.clone()
    for p in (wrapped, plain):
        optimizer = ClippedSGD([p], lr=0.1, max_norm=0.5, momentum=momentum)
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(wrapped.detach().a, plain.detach())
    torch.testing.assert_close(wrapped.detach().b, plain.detach())


@pytest.mark.parametrize("path", [{}, {"fused": True}, {"foreach": False}])
def test_gradient_of_zeros_without_memory_moves_nothing(path):
    p = nn.Parameter(torch.ones(5))
    p.grad = torch._efficientzerotensor(5)
    optimizer = ClippedSGD([p], lr=0.1, max_norm=1.0, **path)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(5))
    assert optimizer.clip_stats()["grad_norm"] == 0.0


@every_path
@pytest.mark.parametrize(
    "make", [partial(ClippedSGD, momentum=0.9), ClippedSGD, ClippedAdamW], ids=["momentum", "plain", "adamw"]
)
def test_a_gradient_that_is_marked_as_negated_has_its_sign(make, path):
    one, other = (nn.Parameter(torch.linspace(-1, 1, 70)) for _ in range(2))
    one.grad = torch._neg_view(torch.randn(70))
    other.grad = one.grad.resolve_neg().clone()
    ours, theirs = make([one], 0.1, 1.0, **path), make([other], 0.1, 1.0, foreach=False)
    for _ in range(3):
        ours.step()
        theirs.step()
    torch.testing.assert_close(one.detach(), other.detach())


def test_a_parameter_that_is_marked_as_negated_is_refused_and_not_added():
    optimizer = ClippedSGD([parameter(3)], lr=0.1, max_norm=1.0)
    with pytest.raises(ValueError, match="negated view of another tensor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch._neg_view(torch.ones(3)))]})
    assert len(optimizer.param_groups) == 1


@every_path
@pytest.mark.parametrize("make", [partial(ClippedSGD, momentum=0.9), ClippedAdamW], ids=["sgd", "adamw"])
def test_gradient_that_is_a_conjugate_still_to_be_computed(make, path):
    start, g = torch.randn(5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)
    lazy, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    lazy.grad, plain.grad = g.conj(), g.conj().resolve_conj()
    assert lazy.grad.is_conj()
    optimizers = make([lazy], 0.1, 1.0, **path), make([plain], 0.1, 1.0, foreach=False)
    for optimizer in optimizers * 3:
        optimizer.step()
    torch.testing.assert_close(lazy.detach(), plain.detach())
    assert optimizers[0].clip_stats()["grad_norm"] == pytest.approx(float(g.norm()), rel=1e-6)


def test_parameter_that_is_a_conjugate_still_to_be_computed_is_refused():
    p = nn.Parameter(torch.randn(5, dtype=torch.complex64).conj())
    p.grad = torch.randn(5, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="unresolved conjugated tensors"):
        ClippedSGD([p], lr=0.1, max_norm=1.0).step()


# --- layouts and dtypes that differ ----------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_empty_gradient_with_strides_of_its_own_is_a_step(momentum):
    empty = nn.Parameter(torch.empty(0, 4))
    empty.grad = torch.empty(4, 0).t()
    assert empty.grad.stride() != empty.stride()
    p = parameter(3)
    expected = p.detach() - 0.1 * p.grad
    ClippedSGD([empty, p], lr=0.1, max_norm=math.inf, momentum=momentum).step()
    torch.testing.assert_close(p.detach(), expected)


@every_path
def test_model_turned_to_another_dtype_after_a_step_goes_on_as_with_torch(path):
    models = [nn.Linear(3, 2, dtype=torch.float32) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        ClippedSGD(models[0].parameters(), lr=0.1, max_norm=math.inf, momentum=0.9, **path),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9, foreach=False),
    ]
    x = torch.randn(4, 3, dtype=torch.float32)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            model.double()
        x = x.double()
    torch.testing.assert_close([*models[0].parameters()], [*models[1].parameters()], rtol=1e-6, atol=1e-6)


# --- parameters elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [({"fused": True}, "`fused=True` requires all the params"), ({}, 'nonfinite="raise"`, requires')],
)
def test_parameters_without_values_are_refused_in_words(options, words):
    p = nn.Parameter(torch.empty(3, device="meta"))
    p.grad = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match=f"{words}.*`meta` device.*to_empty"):
        ClippedSGD([p], lr=0.1, max_norm=1.0, **options).step()


# --- what is counted, what is blamed ---------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        partial(ClippedSGD, lr=0.1, max_norm=0.5),
        partial(ClippedSGD, lr=torch.tensor(0.1), max_norm=0.5, momentum=0.9),
        lambda params: cs.clip(torch.optim.AdamW(params, lr=0.1), max_norm=0.5).optimizer,
    ],
    ids=["plain", "momentum", "clip"],
)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("world", ["without_native", "on_device"])
def test_step_that_a_checkpoint_pretends_does_not_count(make, steps, world, request):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    request.getfixturevalue(world)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.clip_stats()
    for _ in range(2):
        get_optimizer_state_dict(model, optimizer)
    assert optimizer.clip_stats() == before
    assert before["steps"] == steps


def test_a_step_with_zero_gradient_or_zero_lr_counts_with_both_later():
    p = parameter(3, grad=torch.zeros(3))
    optimizer = ClippedSGD([p], lr=0.1, max_norm=0.5, momentum=0.9)
    optimizer.step()
    p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.clip_stats()["steps"] == 3


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_norm_that_overflows_though_every_gradient_is_finite_is_said_to(scope):
    params = [parameter(2, grad=torch.full((2,), 1.7e308), dtype=torch.float64) for _ in range(2)]
    before = [p.detach().clone() for p in params]
    optimizer = ClippedSGD(params, lr=0.1, max_norm=1.0, norm_scope=scope)
    with pytest.raises(FloatingPointError, match="their norm overflows"):
        optimizer.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(params, before, strict=True))


# --- states and settings that torch takes ------------------------------------------------------------


@every_path
@pytest.mark.parametrize(
    "step", [torch.empty(0), torch.zeros(0, 3), torch.ones(2)], ids=["none", "no row", "two"]
)
def test_step_that_is_not_one_number_is_one_line_and_no_signal(step, path):
    params = [parameter(50), parameter(3)]
    optimizer = ClippedAdamW(params, lr=0.1, max_norm=1.0, **path)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][1]["step"] = step
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^`step` must be one number, got shape [^\n]*$"):
        optimizer.step()


EVERYWHERE = {
    "ClippedSGD": partial(ClippedSGD, momentum=0.9),
    "by tensor": partial(ClippedSGD, norm_scope="tensor", skip_above="10x"),
    "NormalizedSGD": NormalizedSGD,
    "ClippedAdamW": ClippedAdamW,
    "ClippedAdamW loop": partial(ClippedAdamW, foreach=False),
    "clip": lambda params, lr, bound: cs.clip(torch.optim.SGD(params, lr), bound).optimizer,
}


@pytest.mark.parametrize("make", EVERYWHERE.values(), ids=EVERYWHERE)
def test_steps_do_not_depend_on_the_default_device(make):
    one, other = torch.ones(3), torch.ones(3)
    for p, place in ((one, "cpu"), (other, "meta")):
        optimizer = make([p], 0.1, 1.0)
        for _ in range(2):
            p.grad = torch.full((3,), 2.0)
            with torch.device(place):
                optimizer.step()
                stats = optimizer.clip_stats()
    assert torch.equal(one, other)
    assert (stats["steps"], stats["clipped_fraction"]) == (2, 1.0)


@pytest.mark.parametrize("size", [0, 3, 70_000])
def test_norm_does_not_depend_on_the_default_device(size):
    with torch.device("meta"):
        norm = global_norm([torch.ones(size, device="cpu")])
    assert norm.item() == pytest.approx(math.sqrt(size))
