"""Each way in which a replay can differ from itself or from training, with its own message."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.determinism import NonDeterministicError, UntrackedParametersError
from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import mlp
from tests.smoothness.loops import block_steps

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


def own_dropout():
    model, (x, y) = net(OwnDropout()), batch()
    return model, lambda: F.cross_entropy(model(x), y)


def loader_inside():
    model, loader = net(), iter([batch() for _ in range(20)])

    def loss_fn():
        x, y = next(loader)
        return F.cross_entropy(model(x), y)

    return model, loss_fn


def random_loss():
    model, (x, y), generator = net(), batch(), torch.Generator().manual_seed(0)
    return model, lambda: F.cross_entropy(model(x), y, weight=torch.rand(3, generator=generator))


def random_backward():
    model, (x, y) = net(), batch()
    return model, lambda: F.cross_entropy(RandomOrder.apply(model(x)), y)


def earlier_gradient():
    model, (x, y), (u, v) = net(), batch(), batch()
    F.cross_entropy(model(u), v).backward()
    return model, lambda: F.cross_entropy(model(x), y)


def noise_before_the_model():
    model, (x, y) = net(), batch()
    return model, lambda: F.cross_entropy(model(x + torch.randn(8, 6)), y)


def layers_one_by_one():  # the model as a whole is never called
    model, (x, y) = net(nn.Dropout(0.5)), batch()
    return model, lambda: F.cross_entropy(model[3](model[2](model[1](model[0](x)))), y)


SELVES = {
    own_dropout: r"module '1' \(OwnDropout\).*Draw from torch's generator",
    loader_inside: "Draw the batch before",
    random_loss: "The loss itself draws random numbers",
    random_backward: "use_deterministic_algorithms",
    earlier_gradient: r"earlier step: call `model.zero_grad\(\)`",
    noise_before_the_model: r"`probe.snapshot\(\)`",
    layers_one_by_one: "did not see the forward pass",
}


@pytest.mark.parametrize("case", SELVES, ids=lambda case: case.__name__)
def test_closure_of_training_itself_that_does_not_repeat_is_named(case):
    model, loss_fn = case()
    with pytest.raises(NonDeterministicError, match=SELVES[case]):
        one_step(model, loss_fn, loss_fn)


def micro_batches(*middle):
    """A model, a training pass over two micro-batches, and both as one batch."""
    model, parts = net(*middle), [batch(), batch()]

    def train():
        for a, b in parts:
            (F.cross_entropy(model(a), b) / 2).backward()

    x, y = map(torch.cat, zip(*parts, strict=True))
    return model, train, lambda: F.cross_entropy(model(x), y)


def test_batchnorm_over_other_micro_batches_is_named():
    with pytest.raises(NonDeterministicError, match=r"same micro-batches.*BatchNorm statistics"):
        one_step(*micro_batches(nn.BatchNorm1d(8)))


def test_whole_batch_may_stand_for_its_micro_batches_without_batchnorm():
    assert one_step(*micro_batches()).trace.ok.all()


def test_missing_micro_batch_is_named():
    model, train, _ = micro_batches()
    x, y = batch()
    with pytest.raises(NonDeterministicError, match="training called the model 2 times, the closure 1 times"):
        one_step(model, train, lambda: F.cross_entropy(model(x), y))


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


@pytest.mark.parametrize("sparse", [False, True])
def test_other_batch_in_the_closure_is_named(sparse):
    model, draw = (sparse_net(), sparse_batch) if sparse else (net(), batch)
    (x, y), (u, v) = draw(), draw()
    with pytest.raises(NonDeterministicError, match="last batch"):
        one_step(model, lambda: F.cross_entropy(model(x), y), lambda: F.cross_entropy(model(u), v))


def sparse_net():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))


def sparse_batch():
    return torch.randint(9, (5, 2)), torch.randint(3, (5,))


def test_clipping_by_value_is_named_with_sparse_and_empty_gradients_too():
    model, (tokens, y) = sparse_net(), sparse_batch()
    model.empty = nn.Parameter(torch.zeros(0, 3))

    def loss_fn():
        return F.cross_entropy(model[2](model[1](model[0](tokens))), y) + model.empty.sum()

    def clip():
        model[0].weight.grad = model[0].weight.grad.coalesce()
        for g in (model[0].weight.grad.values(), model[2].weight.grad, model[2].bias.grad):
            g.clamp_(-1e-3, 1e-3)

    with pytest.raises(NonDeterministicError, match="clipped by value"):
        one_step(model, loss_fn, loss_fn, before=clip)


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


def parts():
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3), x, y


def returned(loss):
    return loss


def run_backward(loss):
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("kind", [returned, run_backward, "oracle"])
def test_probe_on_a_part_of_what_the_loss_trains_is_refused_untouched(kind):
    encoder, head, x, y = parts()

    def loss_of(batch):
        return F.cross_entropy(head(encoder(batch[0])), batch[1])

    oracle = cs.GradientOracle(loss_of, [(x, y)]) if kind == "oracle" else None
    probe = SmoothnessProbe(encoder, every=1, oracle=oracle)
    loss_of((x, y)).backward()
    before = [p.grad.clone() for p in (*encoder.parameters(), *head.parameters())]
    finish = returned if kind == "oracle" else kind
    with (
        pytest.raises(UntrackedParametersError, match=r"2 tensors outside `model` \(18 numbers.*ModuleList"),
        probe(lambda: finish(loss_of((x, y)))),
    ):
        pass
    after = [p.grad for p in (*encoder.parameters(), *head.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_input_to_differentiate_by_inside_the_closure_is_no_stranger():
    encoder, _, x, _ = parts()
    probe = SmoothnessProbe(encoder, every=1)

    def penalty():
        inside = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(encoder(inside).sum(), inside, create_graph=True)
        return slope.square().sum() + encoder(inside).square().mean()

    block_steps(probe, torch.optim.SGD(encoder.parameters(), lr=0.1), penalty)
    assert probe.trace.ok.all()


def run_in_threads(count, act):
    """What ``act(i)`` returns in each of several threads; None where it raised."""
    results = [None] * count

    def run(i):
        results[i] = act(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def probed_run(seed, finish):
    """Weights and secants of a run that draws from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(6, 32, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = SmoothnessProbe(model, every=2).watch(optimizer)
    for _ in range(12):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = probe.record(lambda x=x: finish(model(x).square().mean()))
        if finish is returned:
            loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], [row["secants"] for row in probe.trace]


@pytest.mark.parametrize("finish", [returned, run_backward])
def test_probes_in_eight_threads_measure_as_eight_alone(finish):
    together = run_in_threads(8, lambda seed: probed_run(seed, finish))
    for seed in range(8):
        weights, secants = probed_run(seed, finish)
        assert all(map(torch.equal, together[seed][0], weights))
        assert together[seed][1] == secants


def test_another_thread_runs_backward_while_a_probe_measures():
    stop = threading.Event()

    def run(i):
        if i == 0:
            probed_run(0, returned)
            stop.set()
            return True
        model = nn.Linear(4, 1)
        while not stop.is_set():
            model(torch.ones(8, 4)).square().mean().backward()
        return True

    assert run_in_threads(2, run) == [True, True]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_closure_that_runs_backward_compiles_nothing_anew(in_place):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    class Net(nn.Module):  # torch does not compile a module of its own in place
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x)

    model, x = Net(), torch.randn(8, 6)
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=1).watch(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        probe.record(lambda: run_backward(model(x).square().mean()))
        optimizer.step()
    assert probe.trace.ok.all()
    assert len(graphs) == 1


def test_a_lambda_that_takes_the_last_batch_of_its_loop_is_named():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=1).watch(optimizer)
    with pytest.raises(NonDeterministicError, match="lambda batch=batch"):  # noqa: PT012 (a step has lines)
        for _ in range(2):
            x, y = batch()
            probe.record(lambda: F.cross_entropy(model(x), y)).backward()  # noqa: B023 (the mistake itself)
        optimizer.step()
