"""Advice that is followed to its end on quadratics never diverges, nor leaves what their rows showed."""

import math

import pytest
import torch
from torch import nn

from curvestep import ClippedSGD, NormalizedSGD, SmoothnessProbe, advise
from curvestep.advice.decision import LARGE_FACTOR, LR_FACTOR
from curvestep.trace.trace import Trace

CURVATURES = {
    "one sharp": [1.0, *[1e-2] * 5],
    "worked off": [1.0, *[1e-4] * 5],
    "power": [k**-2.0 for k in range(1, 13)],
    "even": [k / 12 for k in range(1, 13)],
}
OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "clipped": lambda p, lr: ClippedSGD(p, lr=lr, max_norm=0.5),
    "normalized": lambda p, lr: NormalizedSGD(p, lr=lr, offset=0.5),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.0),
}
MOST_ROUNDS = 8
STEPS = 40


def descend(curvatures, make, lr, *, noise=0.0, spectral=False, steps=STEPS):
    """The trace of a descent from a random start, with batches that pull to targets of their own."""
    torch.manual_seed(0)
    hessian = torch.tensor(curvatures)
    model = nn.ParameterList([nn.Parameter(torch.randn(len(hessian)))])
    optimizer = make(model.parameters(), lr)
    estimators = {"smoothness": 1, "spectral_smoothness": 1} if spectral else None
    options = {} if estimators is None else {"estimators": estimators}
    probe = SmoothnessProbe(model, every=4, **options).watch(optimizer)
    for _ in range(steps):
        target = noise * torch.randn(len(hessian))
        optimizer.zero_grad()
        loss = probe.record(lambda target=target: 0.5 * (hessian * (model[0] - target) ** 2).sum())
        loss.backward()
        optimizer.step()
    return probe.trace


def rows_from(trace, step):
    """The rows from a step on, as of a probe that came later."""
    later = Trace(header=trace.header)
    for row in trace:
        if row["step"] >= step:
            later.append(row)
    return later


def follow(measure, lr):
    """Every trace on the way, with its lr, until the advice is to stay."""
    path = []
    for _ in range(MOST_ROUNDS):
        trace = measure(lr)
        advice = advise(trace)
        path.append((lr, trace, advice))
        if advice.lr is None or advice.lr == lr:
            return path
        lr = advice.lr
    return path


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CURVATURES)
def test_followed_to_its_end_advice_never_diverges(name, optimizer, noise):
    curvatures = CURVATURES[name]
    path = follow(lambda lr: descend(curvatures, OPTIMIZERS[optimizer], lr, noise=noise), 0.01)
    usual = 4 * noise**2 * sum(curvatures)  # the loss that noise alone keeps up
    for lr, trace, advice in path:
        loss = trace.column("loss")
        assert advice.action != "diverged"
        assert loss[-1] <= 3 * max(loss[0], usual)
        assert advice.lr is None or advice.lr <= LARGE_FACTOR * lr * (1 + 1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("name", CURVATURES)
def test_no_advised_lr_is_beyond_the_stability_of_any_sharpness_in_the_rows(name, optimizer):
    limit = {"sgd": 2.0, "momentum": 3.8}[optimizer]
    measure = lambda lr: descend(CURVATURES[name], OPTIMIZERS[optimizer], lr, spectral=True)  # noqa: E731
    for lr, trace, advice in follow(measure, 0.01):
        sharpest = max(trace.column("spectral_smoothness").max(), trace.column("smoothness").max())
        assert advice.lr == lr or advice.lr * sharpest <= limit * (1 + 1e-6)


@pytest.mark.parametrize("lr", [0.01, 0.9])
@pytest.mark.parametrize("spectral", [True, False])
def test_rows_that_begin_later_raise_lr_three_times_or_not_at_all(lr, spectral):
    # At lr 0.9 a step of three times that length would diverge, along a direction that no longer shows.
    late = rows_from(descend(CURVATURES["worked off"], OPTIMIZERS["sgd"], lr, spectral=spectral, steps=60), 1)
    advice = advise(late)
    assert "late-rows" in [note.kind for note in advice.warnings]
    if spectral and lr < 0.1:
        assert lr < advice.lr <= LR_FACTOR * lr * (1 + 1e-9)
    elif advice.lr is not None:
        assert advice.lr == lr


def test_the_sharpness_of_a_direction_that_was_worked_off_still_bounds_the_advice():
    trace = descend(CURVATURES["worked off"], OPTIMIZERS["sgd"], 0.3)
    assert trace.column("smoothness")[-1] < 0.02
    advice = advise(trace)
    assert advice.lr is None or advice.lr < 2.0
    assert math.isfinite(advice.lr)
