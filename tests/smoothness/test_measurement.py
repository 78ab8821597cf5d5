"""Every estimate comes with κ, lr·L/2 and the losses, and for each layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep.smoothness import probed_step
from curvestep.smoothness.estimators import local_smoothness
from curvestep.smoothness.measurement import along_step, layer_groups, local_part
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.replay import Replay
from curvestep.trace.schema import FAILED
from tests.models import Quadratic
from tests.smoothness.loops import block_steps


def measured(estimators, layers=False):
    torch.manual_seed(0)
    model = Quadratic()
    z = model.z.detach()
    probe = SmoothnessProbe(model, every=1, estimators=estimators, layers=layers)
    block_steps(probe, torch.optim.SGD(model.parameters(), lr=0.1), model)
    return probe.trace[0], model, z, model.z.detach()


def test_each_layer_has_the_largest_change_of_its_part_of_the_gradient():
    row, model, z, after = measured((), layers=True)
    change, d = model.H @ (after - z), after - z
    for name, part in (("x", slice(0, 3)), ("y", slice(3, 7))):
        expected = (change[part].norm() / d[part].norm()).item()  # the same at every fraction
        assert row["layers"][name]["smoothness"] == pytest.approx(expected)
        assert row["layers"][name]["step_norm"] == pytest.approx(d[part].norm().item())
    assert row["layers"]["nothing"] == {"grad_norm": 0.0, "step_norm": 0.0}


def test_measuring_at_the_start_fails_once_the_start_was_overwritten(monkeypatch):
    def too_late(segment, replay, fractions):
        along = along_step(segment, replay, fractions)
        return along | local_part(segment, replay)

    monkeypatch.setattr(probed_step, "along_step", too_late)
    with pytest.warns(UserWarning, match="A smoothness measurement failed"):
        row, *_ = measured(())
    assert row["status"].startswith(FAILED)
    assert row["local_smoothness"] is None


class Words(nn.Module):
    """A language model with torch's default embedding, whose norm is nearly all of the model's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 64)
        self.lstm = nn.LSTM(64, 64)
        self.decoder = nn.Linear(64, 2000)

    def forward(self, x):
        return self.decoder(self.lstm(self.embedding(x))[0])


def local_row(dtype, *, lr=1.0, model=None):
    torch.manual_seed(0)
    model = (model or Words()).to(dtype)
    x = torch.randint(2000, (2, 20, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SmoothnessProbe(model, every=1, estimators=("local_smoothness",))

    def loss_fn():
        return F.cross_entropy(model(x[0]).flatten(0, 1), x[1].flatten())

    block_steps(probe, optimizer, loss_fn)
    return probe.trace[0]


def test_local_in_float32_follows_the_step_beside_a_large_embedding():
    single, double = local_row(torch.float32), local_row(torch.float64)
    assert single["local_smoothness"] == pytest.approx(double["local_smoothness"], rel=1e-3)
    assert single["local_converged"]
    assert double["local_converged"]
    # What the general step would have given: it is a hundred times the step of training.
    torch.manual_seed(0)
    model, x = Words().to(torch.float32), torch.randint(2000, (2, 20, 10))
    with Replay(model, lambda: F.cross_entropy(model(x[0]).flatten(0, 1), x[1].flatten())) as replay:
        d = [-g for g in replay.gradient().gradients]
        general = local_smoothness(replay.__call__, replay.point, d)
    assert abs(general.item() / double["local_smoothness"] - 1) > 0.03


def test_local_that_rounding_has_spoilt_is_marked():
    row = local_row(torch.float32, lr=1e-6)
    assert row["local_error"] > 0.1
    assert row["local_converged"] is False
    assert row["status"] == "ok"


def test_curvature_keeps_its_sign_and_cosine_tells_the_direction():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    probe = SmoothnessProbe(model, every=1)

    def loss_fn():  # curvature −3 along the first weight, 1 along the second
        return 0.5 * (model.weight[0, 1].square() - 3.0 * model.weight[0, 0].square())

    loss_fn().backward()
    with probe(loss_fn), torch.no_grad():
        model.weight[0, 0] += 0.5
    row = probe.trace[0]
    assert row["curvature"] == pytest.approx(-3.0)
    assert row["smoothness"] == pytest.approx(3.0)
    assert row["cosine"] == pytest.approx(3.0 / 13**0.5)  # g = (−3, 2)


def test_every_row_has_the_papers_estimate_and_others_when_they_are_due():
    model = Quadratic()
    probe = SmoothnessProbe(model, every=1, estimators={"spectral_smoothness": 2})
    block_steps(probe, torch.optim.SGD(model.parameters(), lr=0.1), model, 3)
    assert probe.trace.ok.all()
    assert (probe.trace.column("smoothness") > 0).all()
    assert (probe.trace.column("spectral_smoothness") > 0).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="Set `every`"):
        SmoothnessProbe(model, estimators={"smoothness": 2})


def test_smoothness_of_the_only_layer_is_that_of_the_model():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(8, 3)
    probe = SmoothnessProbe(model, every=1, fractions=(0.1, 0.25), layers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    block_steps(probe, optimizer, lambda: F.cross_entropy(model(x), torch.arange(8) % 2))
    row = probe.trace[0]
    assert row["layers"]["0"]["smoothness"] == pytest.approx(row["smoothness"])


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_layers_are_named_as_in_the_model_inside_a_wrapper(wrapper):
    outer = nn.Module()
    outer.add_module(wrapper, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    assert layer_groups(outer, list(outer.parameters())) == {"0": [0, 1], "1": [2, 3]}
