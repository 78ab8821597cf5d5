"""Ten planted faults, trained: each is named for what the trace can show, and none is told to keep."""

from functools import partial

import pytest
import torch
from torch import nn

from curvestep import ClippedSGD, SmoothnessProbe, advise
from tests.advice.runs import network, points, train


def plain(model, lr=0.3, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def too_long():
    model = network()
    return train(model, plain(model, 300.0))


def too_short():
    model = network()
    return train(model, plain(model, 3e-4))


def adam_too_long():
    model = network()
    return train(model, torch.optim.AdamW(model.parameters(), lr=3.0))


def dead_units():
    model = network()
    nn.init.constant_(model[2].bias, -100.0)
    return train(model, plain(model))


def shuffled_labels():
    model = network()

    def batch(step):
        x, y = points(step)
        return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(step))]

    return train(model, plain(model), batch=batch)


def bad_batch():
    model = network()

    def batch(step):
        x, y = points(step)
        return (x if step != 48 else x * float("nan")), y

    return train(model, plain(model), batch=batch)


def no_zero_grad():
    model = network()
    return train(model, plain(model), zero_grad=False)


def eval_mode():
    model = network().eval()
    return train(model, plain(model))


def wrong_parameters():
    model = network()
    return train(model, plain(network()))


def tiny_threshold():
    model = network()
    return train(model, ClippedSGD(model.parameters(), lr=0.3, max_norm=1e-3))


def huge_inputs():
    model = network()

    def batch(step):
        x, y = points(step)
        return 1000 * x, y

    return train(model, plain(model), batch=batch)


FAULTS = {
    too_long: ({"diverged", "stuck"}, True),
    too_short: ({"raise"}, True),
    adam_too_long: ({"stuck", "lower"}, True),
    dead_units: ({"raise"}, True),
    shuffled_labels: ({"stuck"}, False),
    bad_batch: ({"data"}, False),
    no_zero_grad: ({"cannot tell"}, False),
    eval_mode: ({"cannot tell"}, False),
    wrong_parameters: ({"cannot tell"}, False),
    tiny_threshold: ({"raise"}, True),
    huge_inputs: ({"diverged", "stuck"}, True),
}


@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
@pytest.mark.parametrize("options", [{}, {"every": None, "steps": 120}], ids=["every", "default"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named(fault, options, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(fault.__globals__, "train", partial(train, **options))
    actions, has_lr = FAULTS[fault]
    advice = advise(fault())
    assert advice.action in actions
    assert (advice.lr is not None) == has_lr


def test_a_healthy_run_is_kept():
    model = network()
    assert advise(train(model, plain(model))).action == "keep"


@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
def test_the_step_of_a_bad_batch_and_the_cause_of_a_failure_are_named():
    assert "step 49" in advise(bad_batch()).verdict
    assert "`.grad`" in advise(no_zero_grad()).verdict


def test_a_probe_is_as_good_as_its_trace():
    probe = SmoothnessProbe(network())
    assert advise(probe) == advise(probe.trace)
