"""Gain and penalty of a step: exact on quadratics, shares add up, the rest is of third order."""

import numpy as np
import pytest
import torch
from torch import nn

import curvestep as cs
from tests.models import classifier
from tests.smoothness.loops import recorded_steps, watched_sgd


class Blocks(nn.Module):
    """Half of zᵀHz, with z in two layers and one that never moves."""

    def __init__(self):
        super().__init__()
        H = torch.randn(5, 5)
        self.H = H @ H.T / 5
        self.first = nn.Linear(1, 2, bias=False)
        self.second = nn.Linear(1, 3, bias=False)
        self.unused = nn.Linear(1, 1, bias=False)

    def forward(self):
        z = torch.cat([self.first.weight, self.second.weight]).flatten()
        return 0.5 * z @ self.H @ z


def test_gains_of_a_quadratic_are_exact_and_those_of_its_blocks_too():
    model = Blocks()
    optimizer, probe = watched_sgd(model, layers=True)
    z = torch.cat([model.first.weight, model.second.weight]).detach().flatten()
    recorded_steps(probe, optimizer, model, 3)
    gains = probe.trace.step_gains()
    assert gains.step.tolist() == [0, 1, 2]
    np.testing.assert_allclose(gains.rest, 0.0, atol=1e-12)
    d = -0.1 * model.H @ z
    first_order = -(model.H @ z) * d
    second_order = 0.5 * d * (model.H @ d)
    for name, part in (("first", slice(0, 2)), ("second", slice(2, 5))):
        assert gains.layers[name].gain[0] == pytest.approx(first_order[part].sum().item())
        assert gains.layers[name].penalty[0] == pytest.approx(second_order[part].sum().item())
    assert not gains.layers["unused"].gain.any()
    assert not gains.layers["unused"].penalty.any()


def test_shares_of_layers_add_up_on_a_network():
    model, loss_fn = classifier()
    optimizer, probe = watched_sgd(model, lr=0.5, layers=True)
    recorded_steps(probe, optimizer, loss_fn, 4)
    gains = probe.trace.step_gains()
    assert set(gains.layers) == {"0", "2"}
    for name in ("gain", "penalty"):
        total = sum(getattr(layer, name) for layer in gains.layers.values())
        np.testing.assert_allclose(total, getattr(gains, name), rtol=1e-9)
    assert gains.penalty_share == pytest.approx(gains.penalty.sum() / gains.gain.sum())


def test_the_rest_falls_with_the_third_power_of_the_step():
    rests = []
    for lr in (0.1, 0.05, 0.025):
        torch.manual_seed(0)
        model, loss_fn = classifier()
        optimizer, probe = watched_sgd(model, lr=lr)
        recorded_steps(probe, optimizer, loss_fn)
        gains = probe.trace.step_gains()
        assert gains.layers == {}
        rests.append(abs(gains.rest[0]))
    assert rests[0] / rests[1] == pytest.approx(8.0, rel=0.1)
    assert rests[1] / rests[2] == pytest.approx(8.0, rel=0.05)


def test_gains_name_the_layers_of_the_largest_penalty_first():
    trace = cs.Trace()
    layers = {
        f"layer{i}": {"grad_norm": 1.0, "step_norm": 0.1, "cosine": 1.0, "curvature": i} for i in range(7)
    }
    row = {
        "step": 0,
        "grad_norm": 7**0.5,
        "step_norm": 0.07**0.5,
        "cosine": 1.0,
        "curvature": 3.0,
        "layers": layers,
    }
    trace.append(row)
    lines = str(trace.step_gains()).splitlines()
    assert lines[0].endswith("(15%).")
    assert [line.split()[1] for line in lines[1:6]] == ["layer6", "layer5", "layer4", "layer3", "layer2"]
    assert "14% of the gain" in lines[1]
    assert "29% of the penalty" in lines[1]
    assert len(lines) == 7  # the last counts the others


def test_rows_without_the_end_of_the_step_or_the_loss_at_its_start_are_told_apart():
    trace = cs.Trace()
    trace.append({"step": 0, "grad_norm": 1.0, "step_norm": 0.5, "cosine": 1.0})
    with pytest.raises(ValueError, match=r"1\.0 among the `fractions`"):
        trace.step_gains()
    whole = {"grad_norm": 1.0, "step_norm": 0.5, "cosine": 1.0, "curvature": 2.0}
    trace.append({"step": 1, "loss": 3.0, "loss_after": 3.0, **whole})  # the loss after the step, twice
    trace.append({"step": 2, "loss": 3.0, "loss_after": 2.75, **whole})
    gains = trace.step_gains()
    assert gains.step.tolist() == [1, 2]
    np.testing.assert_array_equal(gains.fall, [np.nan, 0.25])
    assert gains.rest[1] == 0.0


def test_gains_are_drawn_with_and_without_layers():
    plt = pytest.importorskip("matplotlib.pyplot", reason="needs the extra `report`")
    for layers in (False, True):
        model, loss_fn = classifier()
        optimizer, probe = watched_sgd(model, layers=layers)
        recorded_steps(probe, optimizer, loss_fn, 3)
        figure = probe.trace.step_gains().plot()
        assert len(figure.axes) == 1 + layers
        plt.close(figure)
