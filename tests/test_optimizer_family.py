"""Every question which optimizer this is has one answer, for names, classes, instances and wrappers."""

import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.optimizer_family import Family, family_of, inner_optimizer, torch_name


def parameters():
    return [nn.Parameter(torch.ones(2, 2))]


class Mine(cs.ClippedAdamW):
    pass


class Corrected(torch.optim.NAdam):
    pass


class Wrapper:
    """As Accelerate, Fabric and Lightning wrap one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


KINDS = {
    torch.optim.SGD: Family.SGD,
    cs.ClippedSGD: Family.SGD,
    cs.NormalizedSGD: Family.SGD,
    torch.optim.Adam: Family.ADAM,
    torch.optim.AdamW: Family.ADAM,
    cs.ClippedAdamW: Family.ADAM,
    Mine: Family.ADAM,
    torch.optim.NAdam: Family.ADAM_LIKE,
    torch.optim.RAdam: Family.ADAM_LIKE,
    torch.optim.Adamax: Family.ADAM_LIKE,
    Corrected: Family.ADAM_LIKE,
    torch.optim.RMSprop: Family.UNKNOWN,
    torch.optim.Adagrad: Family.UNKNOWN,
}
SETTINGS = {cs.ClippedSGD: {"max_norm": 1.0}, cs.NormalizedSGD: {"offset": 1.0}}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_class_instance_and_wrapped_instance_are_of_one_family(kind):
    settings = {"max_norm": 1.0} if issubclass(kind, cs.ClippedAdamW) else SETTINGS.get(kind, {})
    optimizer = kind(parameters(), lr=0.1, **settings)
    expected = KINDS[kind]
    assert family_of(kind) is family_of(optimizer) is expected
    assert family_of(Wrapper(optimizer)) is family_of(Wrapper(Wrapper(optimizer))) is expected
    if expected is not Family.UNKNOWN and kind not in (Mine, Corrected):
        assert family_of(kind.__name__) is expected


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("AdamW8bit", Family.ADAM_LIKE),
        ("FusedAdam", Family.ADAM),
        ("Lion", Family.SIGN),
        ("Muon", Family.MUON),
        ("Adafactor", Family.UNKNOWN),
        ("", Family.UNKNOWN),
        (None, Family.UNKNOWN),
    ],
)
def test_optimizers_of_others_are_known_by_name(name, family):
    assert family_of(name) is family


@pytest.mark.parametrize("make", [torch.optim.SGD, lambda p, **k: cs.ClippedSGD(p, max_norm=1.0, **k)])
def test_momentum_is_seen_in_an_instance_and_in_any_of_its_groups(make):
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert family_of(make([one], lr=0.1)) is Family.SGD
    assert family_of(make([one], lr=0.1, momentum=0.9)) is Family.MOMENTUM
    mixed = make([{"params": [one]}, {"params": [two], "momentum": 0.5}], lr=0.1)
    assert family_of(mixed) is Family.MOMENTUM
    assert family_of(type(mixed)) is Family.SGD


def test_clipping_by_a_hook_leaves_the_family():
    optimizer = torch.optim.RMSprop(parameters(), lr=0.1)
    cs.clip(optimizer, max_norm=1.0)
    assert family_of(optimizer) is Family.UNKNOWN
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    cs.clip(Wrapper(optimizer), max_norm=1.0)
    assert family_of(optimizer) is Family.ADAM


def test_only_adam_and_its_variants_divide_by_the_size_of_the_gradient():
    assert {family for family in Family if family.is_adaptive} == {Family.ADAM, Family.ADAM_LIKE}
    assert {f for f in Family if f.is_descent} == {Family.SGD, Family.MOMENTUM}


def test_names_of_ours_are_those_of_torch_but_for_clipping():
    assert torch_name("ClippedSGD") == "SGD"


def test_an_optimizer_of_torch_that_holds_another_steps_itself():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    outer = Lookahead(torch.optim.SGD(parameters(), lr=0.1))
    assert inner_optimizer(outer) is outer
