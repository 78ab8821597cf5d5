"""A probe on a part of what the loss trains would change the other part's gradients: it says so instead."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.determinism import UntrackedParametersError
from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import mlp
from tests.smoothness.loops import block_steps


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

    model, x = mlp(), torch.randn(8, 6)
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
