"""A probe on a part of what the loss trains would change the other part's gradients: it says so instead."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvestep as cs
from curvestep.smoothness.determinism import UntrackedParametersError
from curvestep.smoothness.probe import SmoothnessProbe
from tests.smoothness.loops import block_steps

BACKWARD = Tensor.backward


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
    assert Tensor.backward is BACKWARD


def test_input_to_differentiate_by_inside_the_closure_is_no_stranger():
    encoder, _, x, _ = parts()
    probe = SmoothnessProbe(encoder, every=1)

    def penalty():
        inside = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(encoder(inside).sum(), inside, create_graph=True)
        return slope.square().sum() + encoder(inside).square().mean()

    block_steps(probe, torch.optim.SGD(encoder.parameters(), lr=0.1), penalty)
    assert probe.trace.ok.all()
