"""Every estimate comes with κ, lr·L/2 and the losses, and for each layer."""

import pytest
import torch
from torch import nn

from curvestep.smoothness.probe import SmoothnessProbe


class Quadratic(nn.Module):
    """Half of zᵀHz, with z in two parts and an empty third one."""

    def __init__(self):
        super().__init__()
        H = torch.randn(7, 7)
        self.H = H + H.T
        self.x, self.y = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
        self.nothing = nn.Parameter(torch.zeros(0))

    @property
    def z(self):
        return torch.cat([self.x, self.y, self.nothing])

    def forward(self):
        return 0.5 * self.z @ self.H @ self.z


def measured(estimators, layers=False):
    torch.manual_seed(0)
    model = Quadratic()
    z = model.z.detach()
    probe = SmoothnessProbe(model, every=1, estimators=estimators, layers=layers)
    model().backward()
    with probe(model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return probe.trace[0], model, z, model.z.detach()


def test_each_layer_has_the_norm_of_its_block_of_the_hessian():
    row, model, _, _ = measured(("spectral",), layers=True)
    assert row["spectral_smoothness"] == pytest.approx(torch.linalg.matrix_norm(model.H, 2).item(), rel=1e-6)
    for name, part in (("x", slice(0, 3)), ("y", slice(3, 7))):
        block = torch.linalg.matrix_norm(model.H[part, part], 2).item()
        assert row["layers"][name]["spectral_smoothness"] == pytest.approx(block, rel=1e-6)
        assert row["layers"][name]["spectral_converged"]
    assert "spectral_smoothness" not in row["layers"]["nothing"]


@pytest.mark.parametrize("kind", ["local", "spectral"])
def test_row_without_the_segment_has_kappa_edge_and_loss_too(kind):
    row, model, z, after = measured((kind,))
    H = model.H
    assert row["status"] == "ok"
    assert row["smoothness"] is None
    assert row["kappa"] == pytest.approx(((H @ (after - z)).norm() / (H @ z).norm()).item())
    assert row["edge"] == pytest.approx(0.05 * row[f"{kind}_smoothness"])
    assert row["loss_after"] == pytest.approx((0.5 * after @ H @ after).item())


def test_measurement_with_nothing_due_takes_no_gradient():
    torch.manual_seed(0)
    model, calls = Quadratic(), []
    probe = SmoothnessProbe(model, every=1, estimators={"spectral": 2})

    def loss_fn():
        calls.append(1)
        return model()

    for _ in range(2):
        model.zero_grad()
        model().backward()
        calls.clear()
        with probe(loss_fn):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not calls
    assert probe.trace[1]["kappa"] is None
