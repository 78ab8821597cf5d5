"""Ten planted faults, trained: each is named for what the trace can show, and none gets NO SIGN."""

import pytest
import torch
from torch import nn

from curvestep import ClippedSGD, SmoothnessProbe, advise
from tests.advice.runs import network, points, train


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


GOOD = sgd(0.3)


def trained(*, optimizer=GOOD, prepare=nn.Module.train, change=lambda step, x, y: (x, y), **options):
    """The probe of a run that is healthy but for these."""
    model = network()
    prepare(model)
    return train(model, optimizer(model), batch=lambda step: change(step, *points(step)), **options)


def shuffled(step, x, y):
    return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(step))]


def bad_batch(step, x, y):
    return (x * float("nan") if step == 48 else x), y


FAULTS = {
    "too long": ({"optimizer": sgd(300.0)}, {"diverged", "stuck"}, True),
    "too short": ({"optimizer": sgd(3e-4)}, {"raise"}, True),
    "adam too long": (
        {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3.0)}, {"stuck", "lower"}, True,
    ),
    "dead units": ({"prepare": lambda model: nn.init.constant_(model[2].bias, -100.0)}, {"raise"}, True),
    "shuffled labels": ({"change": shuffled}, {"stuck"}, False),
    "bad batch": ({"change": bad_batch}, {"data"}, False),
    "no zero_grad": ({"zero_grad": False}, {"cannot tell"}, False),
    "eval mode": ({"prepare": nn.Module.eval}, {"cannot tell"}, False),
    "wrong parameters": ({"optimizer": lambda _: GOOD(network())}, {"cannot tell"}, False),
    "tiny threshold": (
        {"optimizer": lambda model: ClippedSGD(model.parameters(), lr=0.3, max_norm=1e-3)}, {"raise"}, True,
    ),
    "huge inputs": ({"change": lambda step, x, y: (1000 * x, y)}, {"diverged", "stuck"}, True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
@pytest.mark.parametrize("options", [{}, {"every": None, "steps": 120}], ids=["every", "default"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, options):
    torch.set_default_dtype(torch.float32)
    change, actions, has_lr = FAULTS[fault]
    advice = advise(trained(**change, **options))
    assert advice.action in actions
    assert (advice.lr is not None) == has_lr
    assert {"no zero_grad": "`.grad`", "bad batch": "look at the data and the loss of steps"}.get(
        fault, ""
    ) in advice.verdict


def test_a_healthy_run_gets_no_sign():
    assert advise(trained()).action == "no sign"


def test_a_probe_is_as_good_as_its_trace():
    probe = SmoothnessProbe(network())
    assert advise(probe) == advise(probe.trace)
