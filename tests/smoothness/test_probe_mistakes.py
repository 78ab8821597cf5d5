"""Mistakes that loops make with a probe, each named in one sentence."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.trace import Trace
from tests.models import mlp
from tests.smoothness.loops import measured_sgd, recorded_steps, watched_sgd


def task():
    torch.manual_seed(0)
    return nn.Linear(6, 3), torch.randn(8, 6), torch.randint(3, (8,))


@pytest.mark.parametrize("form", ["record", "block"])
@pytest.mark.parametrize("step", [0, 1])  # also where nothing is measured
def test_a_loss_in_place_of_its_function_is_refused_with_the_way_out(form, step):
    model, x, y = task()
    probe = SmoothnessProbe(model, every=2)
    probe.step = step
    loss = F.cross_entropy(model(x), y)
    give = probe.record if form == "record" else lambda loss: probe(loss).__enter__()
    with pytest.raises(TypeError, match=r"function that computes the loss.*lambda: .*got a Tensor"):
        give(loss)


@pytest.mark.parametrize("form", ["record", "block"])
def test_a_batch_that_requires_grad_keeps_its_gradient(form):
    """As for the loss of a physics-informed network, or an adversarial input."""
    torch.manual_seed(0)
    net = mlp(1, 16, 1)
    optimizer = cs.ClippedAdamW(net.parameters(), lr=1e-3, max_norm=1.0)
    probe = SmoothnessProbe(net, every=1, on_error="raise")
    if form == "record":
        probe.watch(optimizer)
    for _ in range(2):
        x = torch.rand(32, 1).requires_grad_()

        def loss_fn(x=x):
            u = net(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (du + u).square().mean()

        optimizer.zero_grad()
        if form == "record":
            probe.record(loss_fn).backward()
            before = x.grad.clone()
            optimizer.step()
        else:
            loss_fn().backward()
            before = x.grad.clone()
            with probe(loss_fn):
                optimizer.step()
        assert torch.equal(x.grad, before)
    assert [row["status"] for row in probe.trace] == ["ok", "ok"]


def test_reentrant_checkpoints_are_measured():
    from torch.utils.checkpoint import checkpoint

    model, x, y = task()
    inner = nn.Linear(6, 6)
    both = nn.ModuleList([inner, model])
    both.forward = lambda x: model(checkpoint(inner, x, use_reentrant=True))
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    probe = SmoothnessProbe(both, every=1, on_error="raise").watch(optimizer)
    x.requires_grad_()
    probe.record(lambda: F.cross_entropy(both(x), y)).backward()
    optimizer.step()
    assert probe.trace[0]["status"] == "ok"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_input_that_the_optimizer_trains_is_refused(optimizer):
    model, x, y = task()
    x.requires_grad_()
    optimizer = optimizer([*model.parameters(), x], lr=0.1)
    probe = SmoothnessProbe(model, every=1)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(cs.UntrackedParametersError, match="outside `model`"):
        with probe(lambda: F.cross_entropy(model(x), y)):
            optimizer.step()


def test_a_second_optimizer_of_the_same_model_is_warned_of_once():
    model, x, y = task()
    one, two = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)  # of another model: no matter
    probe = SmoothnessProbe(model, every=2).watch(one)
    for step in range(4):
        probe.record(lambda: F.cross_entropy(model(x), y)).backward()
        if step == 1:
            with pytest.warns(UserWarning, match=r"watches SGD.* 1 parameters"):
                one.step()
        else:
            one.step()  # warnings are errors here
        other.step()
        two.step()
        model.zero_grad()


def test_a_probe_that_watches_hooks_no_other_optimizer():
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    model, _, _ = task()
    SmoothnessProbe(model, every=1).watch(torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(hooks) == before


def test_a_probe_that_watches_is_not_kept_alive_by_its_hooks():
    import gc
    import weakref

    model, x, y = task()
    optimizer, probe = measured_sgd(model)
    alive = weakref.ref(probe)
    del probe
    gc.collect()
    assert alive() is None
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("layer", ["BatchNorm1d", "Dropout", "LSTM"])
def test_a_model_in_eval_mode_whose_layers_differ_there_is_warned_of_once(layer):
    head, x, y = task()
    layers = {"BatchNorm1d": [6], "Dropout": [0.5], "LSTM": [6, 6, 2, True, False, 0.1]}
    name, layer = layer, getattr(nn, layer)(*layers[layer])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, head

        def forward(self, x):
            out = self.layer(x)
            return self.head(out[0] if isinstance(out, tuple) else out)

    model = Model().eval()
    optimizer, probe = watched_sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        probe.record(lambda: F.cross_entropy(model(x), y)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said = [str(w.message) for w in caught if "eval mode" in str(w.message)]
        assert len(said) == (step == 0)
        assert all(name in words and "model.train()" in words for words in said)
    assert probe.trace.header["training_mode"] is False


def test_eval_mode_of_a_model_without_such_layers_is_no_matter():
    model, x, y = task()
    optimizer = torch.optim.SGD(model.eval().parameters(), lr=0.1)
    probe = SmoothnessProbe(nn.Sequential(model, nn.Dropout(0.0)).eval(), every=1)
    F.cross_entropy(probe.model(x), y).backward()
    with probe(lambda: F.cross_entropy(probe.model(x), y)):
        optimizer.step()
    assert probe.trace[0]["status"] == "ok"


def test_a_forgotten_zero_grad_is_noticed_from_the_second_row_on():
    model, _, _ = task()
    optimizer, probe = measured_sgd(model, every=2)

    def train():
        for _ in range(8):
            x, y = torch.randn(8, 6), torch.randint(3, (8,))
            F.cross_entropy(model(x), y).backward()
            with probe(lambda x=x, y=y: F.cross_entropy(model(x), y)):
                optimizer.step()

    with pytest.warns(UserWarning, match="zero_grad"):
        train()
    first, *others = [row["status"] for row in probe.trace]
    assert first == "ok"
    assert len(others) == 3
    assert all("zero_grad" in status for status in others)


@pytest.mark.parametrize("form", ["record", "block"])
def test_a_forgotten_backward_is_said_at_the_first_row(form):
    model, x, y = task()
    optimizer, probe = measured_sgd(model)
    block = contextlib.nullcontext()
    if form == "record":
        probe.watch(optimizer).record(lambda: F.cross_entropy(model(x), y))
    else:
        block = probe(lambda: F.cross_entropy(model(x), y))
    with pytest.warns(UserWarning, match="Call `loss.backward"), block:
        optimizer.step()
    assert "loss.backward()" in probe.trace[0]["status"]


def run(path, **options):
    model, x, y = task()
    optimizer, probe = watched_sgd(model, trace=path, **options)
    recorded_steps(probe, optimizer, lambda: F.cross_entropy(model(x), y), 2)
    probe.close()
    return probe


def test_a_second_run_of_a_script_writes_beside_the_first_and_says_where(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    run(path)
    first = path.read_bytes()
    for number in (2, 3):
        probe = run(path)
        assert f"This run writes to {probe.trace.path}" in capsys.readouterr().err
        assert probe.trace.path == tmp_path / f"trace-{number}.jsonl"
        assert len(Trace.load(probe.trace.path)) == len(probe.trace) == 2
    assert path.read_bytes() == first
