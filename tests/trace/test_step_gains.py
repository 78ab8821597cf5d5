"""Gain and penalty of a step: exact on quadratics, shares add up, the rest is of third order."""

import numpy as np
import pytest
import torch
from torch import nn

import curvestep as cs
from tests.models import classifier
from tests.smoothness.loops import recorded_steps, watched_sgd


class Blocks(nn.Module):
    """Half of zᵀHz, with z in two layers and one that never moves; between them H may be zero."""

    def __init__(self, *, between=1.0):
        super().__init__()
        H = torch.randn(5, 5)
        self.H = H @ H.T / 5
        self.H[:2, 2:] *= between
        self.H[2:, :2] *= between
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
    for name, part in BLOCKS.items():
        assert np.isnan(gains.layers[name].within).all()
        assert gains.layers[name].gain[0] == pytest.approx(first_order[part].sum().item())
        assert gains.layers[name].penalty[0] == pytest.approx(second_order[part].sum().item())
    assert not gains.layers["unused"].gain.any()
    assert not gains.layers["unused"].penalty.any()


BLOCKS = {"first": slice(0, 2), "second": slice(2, 5)}


def test_the_penalty_within_layers_of_a_quadratic_is_that_of_its_blocks():
    model = Blocks()
    optimizer, probe = watched_sgd(model, estimators=["layer_curvature"])
    z = torch.cat([model.first.weight, model.second.weight]).detach().flatten()
    recorded_steps(probe, optimizer, model, 3)
    gains = probe.trace.step_gains()
    d = -0.1 * model.H @ z
    for name, part in BLOCKS.items():
        own = 0.5 * d[part] @ model.H[part, part] @ d[part]
        assert gains.layers[name].within[0] == pytest.approx(own.item())
    between = d[:2] @ model.H[:2, 2:] @ d[2:]
    assert gains.penalty[0] - gains.within[0] == pytest.approx(between.item())
    total = sum(layer.within for layer in gains.layers.values())
    np.testing.assert_allclose(total, gains.within, rtol=1e-12)
    assert gains.within_share == pytest.approx(gains.within.sum() / gains.penalty.sum())
    assert probe.trace[0]["num_gradients"] == 6  # two layers moved, three fractions, one before the step


def test_without_interactions_all_of_the_penalty_is_within_layers():
    model = Blocks(between=0.0)
    optimizer, probe = watched_sgd(model, estimators={"layer_curvature": 2})
    recorded_steps(probe, optimizer, model, 4)
    gains = probe.trace.step_gains()
    assert gains.within_share == pytest.approx(1.0)
    np.testing.assert_array_equal(np.isfinite(gains.within), [True, False, True, False])
    np.testing.assert_allclose(gains.within[::2], gains.penalty[::2])
    assert "100% of the penalty lies within layers" in str(gains)


def test_measuring_within_layers_leaves_the_run_and_other_columns():
    rows = []
    for estimators in ((), ("layer_curvature",)):
        torch.manual_seed(0)
        model, loss_fn = classifier()
        optimizer, probe = watched_sgd(model, lr=0.5, layers=True, estimators=estimators)
        recorded_steps(probe, optimizer, loss_fn, 4)
        rows.append([{**row, "num_gradients": 0, "layers": 0, "layer_curvature": 0} for row in probe.trace])
    assert rows[0] == rows[1]


def test_the_order_of_the_layers_does_not_matter():
    shares = []
    for swapped in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        if swapped:
            model._modules["first"] = model._modules.pop("first")
        optimizer, probe = watched_sgd(model, estimators=["layer_curvature"])
        recorded_steps(probe, optimizer, model, 2)
        gains = probe.trace.step_gains()
        shares.append({name: (gains.layers[name].penalty, gains.layers[name].within) for name in BLOCKS})
    for name in BLOCKS:
        np.testing.assert_allclose(shares[0][name], shares[1][name], rtol=1e-12)


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


def test_rows_without_an_end_or_a_loss_at_the_start_are_told_apart():
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
