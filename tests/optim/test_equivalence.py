"""The optimizers against torch's own, and against the formula, step by step."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from curvestep import ClippedSGD, NormalizedSGD
from tests.models import mlp
from tests.optim.kinds import PATHS, every_path
from tests.reference import ReferenceSGD, exact_clip_

OPTIONS = [
    {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in itertools.product([0.0, 0.9], [0.0, 0.3], [False, True], [0.0, 0.1], [False, True])
    if not n or (m and not d)
]


def names(options):
    return ",".join(f"{k}={v}" for k, v in options.items() if v) or "plain"


def problem():
    """A small net, its twin and sixteen batches; gradient norms vary by a factor of about ten."""
    torch.manual_seed(1)
    net = mlp(5, 9, 1)
    batches = [(torch.randn(8, 5) * (1 + k % 7), torch.randn(8, 1)) for k in range(16)]
    return net, copy.deepcopy(net), batches


def flat(net):
    return nn.utils.parameters_to_vector(net.parameters())


def gradients(net, batch, maximize):
    x, y = batch
    net.zero_grad()
    loss = ((net(x) - y) ** 2).mean()
    (-loss if maximize else loss).backward()


def run_both(ours, theirs, net, twin, batches, maximize=False):
    for batch in batches:
        gradients(net, batch, maximize)
        gradients(twin, batch, maximize)
        ours.step()
        theirs()
        torch.testing.assert_close(flat(net), flat(twin), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("path", "max_norm"), [*((path, 1.5) for path in PATHS.values()), ({}, math.inf)], ids=str
)
@pytest.mark.parametrize("options", OPTIONS, ids=names)
def test_clipped_sgd_is_clip_grad_norm_and_sgd(options, path, max_norm):
    net, twin, batches = problem()
    ours = ClippedSGD(net.parameters(), lr=0.02, max_norm=max_norm, **options, **path)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.02, **options)

    def step():
        exact_clip_(list(twin.parameters()), max_norm)
        theirs.step()

    run_both(ours, step, net, twin, batches, options["maximize"])
    clipped = ours.clip_stats()["clipped_fraction"]
    assert 0.1 < clipped < 0.9 if max_norm == 1.5 else clipped == 0  # both branches of the rule were taken


@every_path
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_stays_as_it_is_beside_a_huge_gradient(momentum, path):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([3e9, 0.0, 4e9])
    ClippedSGD([p], lr=0.1, max_norm=1.0, momentum=momentum, weight_decay=0.5, **path).step()
    torch.testing.assert_close(p.detach(), torch.tensor([0.89, 0.95, 0.87]))


@every_path
@pytest.mark.parametrize("options", OPTIONS, ids=names)
def test_normalized_sgd_is_its_formula(options, path):
    net, twin, batches = problem()
    ours = NormalizedSGD(net.parameters(), lr=0.03, offset=1.5, **options, **path)
    theirs = ReferenceSGD(twin.parameters(), 0.03, coefficient=lambda g: 1 / (g + 1.5), **options)
    run_both(ours, theirs.step, net, twin, batches, options["maximize"])


@every_path
@pytest.mark.parametrize("options", [o for o in OPTIONS if o["momentum"]], ids=names)
def test_clipping_the_momentum_is_its_formula(options, path):
    net, twin, batches = problem()
    ours = ClippedSGD(net.parameters(), lr=0.02, max_norm=4.0, clip="momentum", **options, **path)
    theirs = ReferenceSGD(
        twin.parameters(), 0.02, coefficient=lambda g: min(1, 4.0 / g), clip="momentum", **options
    )
    run_both(ours, theirs.step, net, twin, batches, options["maximize"])
    assert 0 < ours.clip_stats()["clipped_fraction"] < 1


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_norm_scope_says_whose_norm_is_clipped(scope):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for p, size in zip(params, (3.0, 4.0, 12.0), strict=True):
        p.grad = torch.tensor([size, 0.0])
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    opt = ClippedSGD(groups, lr=1.0, max_norm=1.0, norm_scope=scope)
    opt.step()
    norms = {"global": [13, 13, 13], "group": [5, 5, 12], "tensor": [3, 4, 12]}[scope]
    moved = [-p[0].item() for p in params]
    assert moved == pytest.approx([g / n for g, n in zip((3, 4, 12), norms, strict=True)])
    assert opt.clip_stats()["grad_norm"] == pytest.approx(13.0)
    assert opt.clip_stats()["coefficient"] == pytest.approx(1 / max(norms))


def test_groups_have_their_own_lr_and_max_norm_under_one_norm():
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    opt = ClippedSGD([{"params": [a]}, {"params": [b], "lr": 2.0, "max_norm": 10.0}], lr=1.0, max_norm=1.0)
    opt.step()
    assert a.item() == pytest.approx(-3 / 5)
    assert b.item() == pytest.approx(-8.0)
    assert opt.clip_stats()["clipped_fraction"] == 0.5
