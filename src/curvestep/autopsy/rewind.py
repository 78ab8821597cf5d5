"""Going back to the start of a kept step: the steps before it are taken again, to the bit."""
# pyright: reportPrivateUsage=false
# torch has no public name for the hooks of an optimizer.

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.autopsy.kept_step import KeptLoss, KeptStep, Settings, StepStart, first_entries, norms_of
from curvestep.smoothness.observer import ClipsItself
from curvestep.smoothness.replay import trainable_parameters
from curvestep.smoothness.snapshot import PassState, map_tensors

# Units in the last place that the factor of clipping is looked for around the ratio of two norms.
NEAREST_FACTORS = 64

State = dict[Tensor, dict[str, object]]  # of an optimizer


def go_back(
    model: nn.Module,
    optimizer: Optimizer,
    starts: Sequence[StepStart],
    steps: Sequence[KeptStep],
    number: int,
    *,
    is_home_known: bool,
) -> None:
    """Put parameters and optimizer back to where the kept step of this ``number`` began.

    From the last copy before it the steps are taken again with the optimizer itself, because the hooks of
    ``clip`` are in no copy. Beyond the step they are followed up to the next copy, or to where training is
    now: bits that are right there are right at the step.

    Args:
        model: What is trained.
        optimizer: What trains it.
        starts: Where some of the steps began.
        steps: The kept steps, in order.
        number: Of the step to go back to.
        is_home_known: Whether the last step led to where the parameters are now.
    """
    parameters = trainable_parameters(model)
    check_unmoved(parameters, starts)
    start = max((start for start in starts if start.number <= number), key=lambda start: start.number)
    after = [other for other in starts if other.number > number]
    home = Position(model, parameters, optimizer)
    goal: Sequence[Tensor] | None = None
    end = steps[-1].number + 1
    if after:
        end = after[0].number
        goal = None if after[0].is_break else after[0].point
    elif is_home_known:
        goal = home.point
    if start.number == number:  # a copy
        end = number
        goal = None
    try:
        _load(optimizer, start.optimizer().state, start.groups)
        _move_to(parameters, start.point)
        there = Position(model, parameters, optimizer)
        for step in steps:
            if step.number == number:
                there = Position(model, parameters, optimizer)
            if start.number <= step.number < end:
                _take_again(step, parameters, optimizer)
        if goal is not None and not _are_same(parameters, goal):
            raise _NotTheSameError
    except BaseException as error:
        home.restore()
        if isinstance(error, _NotTheSameError):
            raise RuntimeError(_not_the_same(starts)) from None
        raise
    there.restore()
    _set_groups(optimizer, steps[number - steps[0].number].settings)


def check_unmoved(parameters: Sequence[Tensor], starts: Sequence[StepStart]) -> None:
    """Raise if parameters are of another kind than when they were copied."""
    for start in starts:
        if len(start.kinds) != len(parameters):
            raise RuntimeError(
                f"`model` has {len(parameters)} trained parameters, and had {len(start.kinds)} at step "
                f"{start.number}. Nothing was changed."
            )
        for p, (device, dtype) in zip(parameters, start.kinds, strict=True):
            if (p.device, p.dtype) != (device, dtype):
                raise RuntimeError(
                    f"`model` was moved from {device} {dtype} to {p.device} {p.dtype} since step "
                    f"{start.number}. Move it back before `rewind`. Nothing was changed."
                )


class Position:
    """All that a step changes, as it is now: parameters, gradients, optimizer, buffers, random states."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self.point = [p.detach().clone() for p in parameters]
        self._parameters = parameters
        self._gradients = [p.grad for p in parameters]
        self._optimizer = optimizer
        self._state = {p: map_tensors(torch.clone, state) for p, state in optimizer.state.items()}
        self._groups: list[Settings] = copy.deepcopy(optimizer.state_dict()["param_groups"])
        self._modules = PassState(model)

    def restore(self) -> None:
        """Put it back."""
        _load(self._optimizer, self._state, self._groups)
        _move_to(self._parameters, self.point)
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        self._modules.restore()


class _NotTheSameError(Exception):
    """A step, taken again, is another one."""


def _not_the_same(starts: Sequence[StepStart]) -> str:
    numbers = ", ".join(str(start.number) for start in starts)
    return (
        "Taking the kept steps again does not give the same bits. Nothing was changed. There are copies of "
        f"steps {numbers}: `rewind` to one of these. Or give `record` every batch and let nothing else move "
        "parameters."
    )


def _load(optimizer: Optimizer, state: Mapping[Tensor, dict[str, object]], groups: list[Settings]) -> None:
    """Give the optimizer this state. Its own ``load_state_dict`` may change the type of moments."""
    optimizer.load_state_dict({"state": {}, "param_groups": copy.deepcopy(groups)})
    for p, values in state.items():
        optimizer.state[p] = dict(values)


def _move_to(parameters: Sequence[Tensor], point: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, x in zip(parameters, point, strict=True):
            p.copy_(x)


def _set_groups(optimizer: Optimizer, settings: Sequence[Settings]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _are_same(parameters: Sequence[Tensor], point: Sequence[Tensor]) -> bool:
    pairs = zip(parameters, point, strict=True)
    return all(torch.allclose(p, x.to(p.device), rtol=0.0, atol=0.0, equal_nan=True) for p, x in pairs)


def _take_again(step: KeptStep, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Take a step with the gradients, settings and clipping that it had."""
    for p in parameters:
        p.grad = None
    for part in step.passes:
        assert part.state is not None
        assert isinstance(part.loss_fn, KeptLoss)
        part.state.restore()
        loss = part.loss_fn()
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward(part.loss_fn.scale)
    for p, norm in zip(parameters, step.norms_before_hooks, strict=True):
        if norm is None:
            p.grad = None
        elif p.grad is None:
            p.grad = torch.zeros_like(p)
    _scale_as_then(step, [p.grad for p in parameters if p.grad is not None])
    _set_groups(optimizer, step.settings)
    with _only_clipping(optimizer):
        vars(optimizer).update(step.scaler_state)
        optimizer.step()
        for name in step.scaler_state:
            delattr(optimizer, name)


def _scale_as_then(step: KeptStep, gradients: Sequence[Tensor]) -> None:
    """Multiply the gradients by the factor between the backward pass and the step, of unscaling and clipping.

    The factor is one number. Entries of one gradient tell it apart from those next to it.
    """
    handed = [norm for norm in step.norms_before_hooks if norm is not None]
    norms = [norm for norm in norms_of(gradients) if norm is not None]
    if _equal(norms, handed) and _is_exact(step, gradients):
        return
    for factor in _factors_near(norms, handed, gradients):
        scaled = [gradient * factor for gradient in gradients]
        if _is_exact(step, scaled):
            for gradient, value in zip(gradients, scaled, strict=True):
                gradient.copy_(value)
            return
    raise _NotTheSameError


def _is_exact(step: KeptStep, gradients: Sequence[Tensor]) -> bool:
    entries = first_entries(gradients)
    if entries is None or step.entries is None:
        return True
    return torch.allclose(entries, step.entries, rtol=0.0, atol=0.0, equal_nan=True)


def _equal(norms: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(norms, others, strict=True)
    return all(bool(a == b) or bool(a.isnan() & b.isnan()) for a, b in pairs)


def _factors_near(
    norms: Sequence[Tensor], handed: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Factors that the ratio of the largest norms may stand for, the nearest first."""
    at = max(range(len(norms)), key=lambda i: float(norms[i].nan_to_num(0.0, 0.0)))
    ratio = handed[at] / norms[at]
    if not bool(ratio.isfinite()):
        return
    # As torch computes it: in the type of the gradients, on their device.
    above = below = ratio.to(gradients[at].dtype)
    yield above
    for _ in range(NEAREST_FACTORS):
        above = torch.nextafter(above, torch.full_like(above, torch.inf))
        yield above
        below = torch.nextafter(below, torch.zeros_like(below))
        yield below


@contextmanager
def _only_clipping(optimizer: Optimizer) -> Iterator[None]:
    """Leave out the optimizer's hooks but those that clip: others saw these steps already."""
    before = optimizer._optimizer_step_pre_hooks
    after = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict(
        (key, hook) for key, hook in before.items() if _is_of_clipping(hook)
    )
    optimizer._optimizer_step_post_hooks = OrderedDict(
        (key, hook) for key, hook in after.items() if _is_of_clipping(hook)
    )
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after


def _is_of_clipping(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), ClipsItself)
