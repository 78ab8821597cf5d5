"""The library's fast paths and the authors' estimate against the sixty lines of reproduction/reference."""

import copy

import pytest
import torch

import curvestep as cs
from curvestep_reproduction.training.controls import authors_smoothness
from reproduction.benchmarks.authors import AUTHORS, DIVIDED, authors_estimate
from reproduction.reference import clipped_sgd as reference

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


@pytest.fixture
def problem():
    """A small network in float64, and its loss on fixed data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    rows = torch.randn(12, 5, dtype=torch.float64)
    targets = torch.randn(12, 1, dtype=torch.float64)
    return model, lambda: (model(rows) - targets).square().mean()


def gradient_of(model, loss):
    """The gradient at any point, by a copy's parameters."""

    def gradient(point):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), point, strict=True):
                parameter.copy_(value)
        return torch.autograd.grad(loss(), list(model.parameters()))

    return gradient


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (
            lambda p: cs.ClippedSGD(p, lr=0.3, max_norm=0.4),
            lambda x, g: reference.clipped_step(x, g, lr=0.3, max_norm=0.4),
        ),
        (
            lambda p: cs.NormalizedSGD(p, lr=0.12, offset=0.4),
            lambda x, g: reference.normalized_step(x, g, lr=0.12, offset=0.4),
        ),
    ],
    ids=["clipped", "normalized"],
)
def test_optimizers_walk_the_path_of_the_reference(problem, make, step):
    model, loss = problem
    optimizer = make(model.parameters())
    clipped = 0
    for _ in range(30):
        x = copies(model.parameters())
        optimizer.zero_grad()
        loss().backward()
        gradients = [p.grad for p in model.parameters()]
        clipped += float(reference.norm(gradients)) > 0.4
        expected = step(x, gradients)
        optimizer.step()
        for parameter, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-13)
    assert 0 < clipped < 30  # both branches were taken


def test_the_probes_row_is_the_estimate_of_appendix_h(problem):
    model, loss = problem
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.3, max_norm=0.4)
    probe = cs.SmoothnessProbe(model, every=1, fractions=FRACTIONS).watch(optimizer)
    gradient = gradient_of(model, loss)
    for _ in range(5):
        start = copies(model.parameters())
        optimizer.zero_grad()
        probe.record(loss).backward()
        optimizer.step()
        end = copies(model.parameters())
        expected = reference.smoothness(gradient, start, end, delta=0.25)
        for parameter, value in zip(model.parameters(), end, strict=True):
            parameter.data.copy_(value)
        assert probe.trace[-1]["smoothness"] == pytest.approx(expected, rel=1e-12)


def test_the_librarys_function_is_the_estimate_of_appendix_h(problem):
    model, loss = problem
    gradient = gradient_of(model, loss)
    start = copies(model.parameters())
    end = [x + 0.1 * torch.randn_like(x) for x in start]
    found = cs.segment_smoothness(gradient, start, end, fractions=FRACTIONS)
    assert float(found) == pytest.approx(reference.smoothness(gradient, start, end, delta=0.25), rel=1e-12)


def test_on_a_quadratic_the_released_estimate_is_off_by_the_pieces():
    start = [torch.zeros(4, dtype=torch.float64)]
    end = [torch.ones(4, dtype=torch.float64)]
    gradient = lambda x: [3.0 * x[0]]  # noqa: E731
    assert reference.smoothness(gradient, start, end, delta=0.1) == pytest.approx(3.0)
    released = reference.smoothness_as_released(lambda x: [gradient(x)] * 7, start, end)
    assert released == pytest.approx(7 * 3.0)


def test_the_released_estimate_differs_by_grid_and_sum_over_pieces(problem):
    model, loss = problem
    start = copies(model.parameters())
    end = [x + 0.1 * torch.randn_like(x) for x in start]
    gradient = gradient_of(model, loss)
    released = reference.smoothness_as_released(lambda x: [gradient(x)] * 3, start, end)
    middle = float(cs.segment_smoothness(gradient, start, end, fractions=(0.5,)))
    assert released == pytest.approx(3 * middle, rel=1e-12)
    assert reference.smoothness(gradient, start, end, delta=0.25) > middle


@pytest.mark.parametrize("pieces", [1, 4])
def test_both_copies_of_the_authors_estimate_are_that_of_the_reference(problem, pieces):
    """Where every piece is the same, and no mask or cut is drawn: what is left is their arithmetic."""
    model, _ = problem
    rows = torch.randn(12, 5, dtype=torch.float64)
    start = copies(model.parameters())
    end = [x + 0.1 * torch.randn_like(x) for x in start]

    def summed(module):
        for _ in range(pieces):
            module(rows).square().mean().backward()
        return [p.grad for p in module.parameters()], pieces

    at = copy.deepcopy(model)
    gradient = gradient_of(at, lambda: at(rows).square().mean())
    expected = reference.smoothness_as_released(lambda x: [gradient(x)] * pieces, start, end)

    steps = [y - x for x, y in zip(start, end, strict=True)]
    found = authors_estimate(model, steps, lambda module: (*summed(module), 12), 12)
    assert found[AUTHORS].value == pytest.approx(expected, rel=1e-12)
    assert found[DIVIDED].value == pytest.approx(expected / pieces, rel=1e-12)

    mine = authors_smoothness(copy.deepcopy(model), end, summed)
    assert mine["smoothness_as_released"] == pytest.approx(expected, rel=1e-12)
    assert mine["smoothness"] == pytest.approx(expected / pieces, rel=1e-12)
