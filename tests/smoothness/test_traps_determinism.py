"""Each way in which a replayed gradient can differ from itself or from training's, with its own message."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.determinism import NonDeterministicError, check_determinism
from curvestep.smoothness.probe import SmoothnessProbe

MASKS = torch.Generator().manual_seed(0)  # of no module, so that nobody puts it back


class OwnDropout(nn.Module):
    """Dropout from a generator of its own."""

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=MASKS) > 0.5) * 2


class RandomOrder(torch.autograd.Function):
    """Stands for a kernel whose backward pass adds up in random order, in half precision."""

    generator = torch.Generator().manual_seed(0)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + 1e-3 * torch.randn(g.shape, generator=RandomOrder.generator))


def net(*middle):
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def batch(size=8):
    return torch.randn(size, 6), torch.randint(3, (size,))


def one_step(model, train, closure, *, before=lambda: None, probe_model=None, **kwargs):
    """A step whose training pass is ``train`` and whose closure is ``closure``."""
    probe = SmoothnessProbe(probe_model or model, every=1, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = train()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    before()
    start = [p.detach().clone() for p in model.parameters()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    rng = torch.get_rng_state()
    try:
        with probe(closure):
            optimizer.step()
    except NonDeterministicError:
        assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
        for p, g in zip(model.parameters(), gradients, strict=True):
            assert (p.grad is None) == (g is None)
            assert g is None or torch.equal(p.grad.to_dense(), g.to_dense())
        assert torch.equal(rng, torch.get_rng_state())
        raise
    return probe


def test_dropout_outside_torchs_generators_is_named_with_its_module():
    model, (x, y) = net(OwnDropout()), batch()

    def loss_fn():
        return F.cross_entropy(model(x), y)

    with pytest.raises(
        NonDeterministicError, match=r"module '1' \(OwnDropout\).*Draw from torch's generator"
    ):
        one_step(model, loss_fn, loss_fn)


class MaskedInput(nn.Module):
    """Draws a mask from a generator of its own, and hands the masked input to a layer."""

    def __init__(self):
        super().__init__()
        self.layer = net()

    def forward(self, x):
        return self.layer(x * (torch.rand(x.shape, generator=MASKS) > 0.5))


class HiddenInAnObject(nn.Module):
    """A recurrent state where nobody looks: in an object that is no module."""

    def __init__(self):
        super().__init__()
        self.cell, self.memory = nn.RNNCell(6, 3), SimpleNamespace(state=torch.zeros(1, 3))

    def forward(self, x):
        out = self.cell(x, self.memory.state.expand(len(x), 3))
        self.memory.state = out[:1].detach()
        return out


@pytest.mark.parametrize("kind", [MaskedInput, HiddenInAnObject])
@pytest.mark.parametrize("outer", [False, True])
def test_module_that_changes_the_input_of_its_children_is_named(kind, outer):
    model, (x, y) = kind(), batch()
    whole = nn.Sequential(nn.Identity(), model, nn.Identity()) if outer else model

    def loss_fn():
        return F.cross_entropy(whole(x), y)

    name = "1" if outer else "model"
    with pytest.raises(NonDeterministicError, match=rf"module '{name}' \({kind.__name__}\)"):
        one_step(whole, loss_fn, loss_fn)


def test_loader_drawn_inside_the_closure_is_named():
    model = net()
    loader = iter([batch() for _ in range(20)])

    def loss_fn():
        x, y = next(loader)
        return F.cross_entropy(model(x), y)

    with pytest.raises(NonDeterministicError, match="Draw the batch before the closure"):
        one_step(model, loss_fn, loss_fn)


def test_random_loss_outside_the_model_is_named():
    model, (x, y) = net(), batch()
    generator = torch.Generator().manual_seed(0)

    def loss_fn():
        weights = torch.rand(3, generator=generator)
        return F.cross_entropy(model(x), y, weight=weights)

    with pytest.raises(NonDeterministicError, match="The loss itself draws random numbers"):
        one_step(model, loss_fn, loss_fn)


def test_kernel_with_a_random_backward_pass_is_named():
    model, (x, y) = net(), batch()

    def loss_fn():
        return F.cross_entropy(RandomOrder.apply(model(x)), y)

    with pytest.raises(NonDeterministicError, match="use_deterministic_algorithms"):
        one_step(model, loss_fn, loss_fn)


def test_batchnorm_over_other_micro_batches_is_named():
    model = net(nn.BatchNorm1d(8))
    parts = [batch(), batch()]
    x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def train():
        for a, b in parts:
            (F.cross_entropy(model(a), b) / 2).backward()

    with pytest.raises(NonDeterministicError, match=r"same micro-batches.*BatchNorm statistics"):
        one_step(model, train, lambda: F.cross_entropy(model(x), y))


def test_whole_batch_may_stand_for_its_micro_batches_without_batchnorm():
    model = net()
    parts = [batch(), batch()]
    x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def train():
        for a, b in parts:
            (F.cross_entropy(model(a), b) / 2).backward()

    assert one_step(model, train, lambda: F.cross_entropy(model(x), y)).trace.ok.all()


def test_missing_micro_batch_is_named():
    model, parts = net(), [batch(), batch()]

    def train():
        for a, b in parts:
            (F.cross_entropy(model(a), b) / 2).backward()

    with pytest.raises(NonDeterministicError, match="training called the model 2 times, the closure 1 times"):
        one_step(model, train, lambda: F.cross_entropy(model(parts[0][0]), parts[0][1]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
            "times the closure's.*Clip inside",
        ),
        (lambda model: [p.grad.mul_(65536.0) for p in model.parameters()], "6.554e[+]04 times.*unscale_"),
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01), "clipped by value"),
        (lambda model: [p.grad.add_(p, alpha=0.1) for p in model.parameters()], "penalty added by hand"),
    ],
    ids=["clipped", "scaled", "clipped by value", "weight decay"],
)
def test_gradient_changed_before_the_block_is_named(spoil, words):
    model, (x, y) = net(), batch()

    def loss_fn():
        return F.cross_entropy(model(x), y)

    with pytest.raises(NonDeterministicError, match=words):
        one_step(model, loss_fn, loss_fn, before=lambda: spoil(model))


def test_gradient_left_from_an_earlier_step_is_named():
    model, (x, y), (u, v) = net(), batch(), batch()
    F.cross_entropy(model(u), v).backward()

    def loss_fn():
        return F.cross_entropy(model(x), y)

    with pytest.raises(NonDeterministicError, match=r"earlier step: call `model.zero_grad\(\)`"):
        one_step(model, loss_fn, loss_fn)


def test_other_batch_in_the_closure_is_named():
    model, (x, y), (u, v) = net(), batch(), batch()
    with pytest.raises(NonDeterministicError, match="another batch"):
        one_step(
            model,
            lambda: F.cross_entropy(model(x), y),
            lambda: F.cross_entropy(model(u), v),
        )


def sparse_net():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))


def test_other_batch_is_named_with_sparse_gradients_too():
    model, y = sparse_net(), torch.randint(3, (5,))
    tokens, others = torch.randint(9, (5, 2)), torch.randint(9, (5, 2))
    with pytest.raises(NonDeterministicError, match="another batch"):
        one_step(
            model,
            lambda: F.cross_entropy(model(tokens), y),
            lambda: F.cross_entropy(model(others), y),
        )


def test_clipping_by_value_is_named_with_sparse_and_empty_gradients_too():
    model, y = sparse_net(), torch.randint(3, (5,))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    tokens = torch.randint(9, (5, 2))

    def loss_fn():
        return F.cross_entropy(model[2](model[1](model[0](tokens))), y) + model.empty.sum()

    def clip():
        model[0].weight.grad = model[0].weight.grad.coalesce()
        for g in (model[0].weight.grad.values(), model[2].weight.grad, model[2].bias.grad):
            g.clamp_(-1e-3, 1e-3)

    with pytest.raises(NonDeterministicError, match="clipped by value"):
        one_step(model, loss_fn, loss_fn, before=clip)


def test_noise_drawn_before_the_model_is_named_with_the_way_out():
    model, (x, y) = net(), batch()

    def loss_fn():
        return F.cross_entropy(model(x + torch.randn(8, 6)), y)

    with pytest.raises(NonDeterministicError, match=r"call `probe.snapshot\(\)`"):
        one_step(model, loss_fn, loss_fn)


def test_forward_pass_that_the_probe_did_not_see_is_named():
    model, (x, y) = net(nn.Dropout(0.5)), batch()

    def loss_fn():  # the layers one by one: the model as a whole is never called
        out = x
        for layer in model:
            out = layer(out)
        return F.cross_entropy(out, y)

    with pytest.raises(NonDeterministicError, match="did not see the forward pass"):
        one_step(model, loss_fn, loss_fn)


def test_oracle_that_shuffles_is_refused():
    model, (x, y) = net(), batch()
    generator = torch.Generator().manual_seed(0)

    def loss_of_batch(part):
        chosen = torch.randperm(8, generator=generator)[:4]
        return F.cross_entropy(model(part[0][chosen]), part[1][chosen])

    def loss_fn():
        return F.cross_entropy(model(x), y)

    with pytest.raises(NonDeterministicError, match="input changes from call to call"):
        one_step(model, loss_fn, loss_fn, oracle=cs.GradientOracle(loss_of_batch, [(x, y)]))


def test_rounding_noise_passes_and_is_reported():
    model, (x, y) = net().float(), batch()
    x = x.float()
    generator = torch.Generator().manual_seed(0)

    def loss_fn():
        order = torch.randperm(8, generator=generator)  # the same sum in another order
        return F.cross_entropy(model(x[order]), y[order])

    with cs.Replay(model, loss_fn) as replay:
        noise = check_determinism(replay).error
    assert 0 < noise < 1e-5
