"""A kept step, taken again with one thing changed: in the model itself, which is put back bit for bit.

What each change makes of the rise of the loss says why there was one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.autopsy.cause import BLOCK, FEWEST_STEPS, cause_of, share
from curvestep.autopsy.explanation import Explanation
from curvestep.autopsy.kept_step import KeptStep, StepStart, norms_of
from curvestep.smoothness.determinism import computed_precision
from curvestep.smoothness.measurement import layer_groups
from curvestep.smoothness.observer import ClipsItself, Pass, TrainingLoss
from curvestep.smoothness.replay import Gradients, Replay, checked_loss
from curvestep.tensors.vectors import distance, precision

NUM_JUDGES = 8  # kept batches that a rise is the median of

Losses = NDArray[np.float64]
Entries = dict[str, Any]  # a parameter group, or the state of a parameter, as torch keeps them


@dataclass(frozen=True)
class Alteration:
    """One thing to change in a step; by default nothing."""

    fraction: float = 1.0  # of the step's length
    batch: KeptStep | None = None  # the step whose batch gives the gradient
    max_norm: float = math.inf  # at which the gradient is clipped before the optimizer gets it
    # Changes the optimizer's state, given the gradient, before the step.
    moments: Callable[[Optimizer, Gradients], None] = lambda optimizer, gradients: None
    computing: Callable[[], AbstractContextManager[None]] = nullcontext  # to compute the gradient in
    left_out: Sequence[int] = ()  # parameters that are not moved


@dataclass(frozen=True)
class Walked:
    """Effect of a step: the judges' losses before and after it, and the length that each parameter moved."""

    before: Losses
    after: Losses
    lengths: NDArray[np.float64]


class Retakes:
    """Kept steps, in order, in the model again; ``starts`` is where some of them began, the first among them.

    The model is put back at the end of the ``with`` block.
    """

    def __init__(self, model: nn.Module, starts: Sequence[StepStart], steps: Sequence[KeptStep]) -> None:
        self.model, self._steps = model, steps
        self._starts = {start.number: start for start in starts}
        self._replay = Replay(model, lambda: math.nan)
        self.parameters = self._replay.parameters
        self.precision = 0.0  # coarsest of the last gradient's computation
        indices = np.linspace(0, len(steps) - 1, min(NUM_JUDGES, len(steps))).round().astype(int)
        self._judges = [steps[i].passes[0] for i in indices]

    def __enter__(self) -> Retakes:
        self._replay.__enter__()
        self._home = self._replay.keep_home()
        return self

    def __exit__(self, *exception: object) -> None:
        self._replay.__exit__(*exception)

    def walk(self) -> list[Walked]:
        """Effect of each kept step."""
        walked: list[Walked] = []
        after: Losses | None = None
        for step, optimizer in self._follow():
            before = self.losses() if after is None or step.number in self._starts else after
            point = [p.detach().clone() for p in self.parameters]
            self.take(step, optimizer)
            after = self.losses()
            lengths = [distance(p.detach(), x).item() for p, x in zip(self.parameters, point, strict=True)]
            walked.append(Walked(before, after, np.array(lengths)))
        self._check(self._home)
        return walked

    def before(self, number: int) -> StepStart:
        """Where a step began."""
        for step, optimizer in self._follow():
            if step.number == number:
                return StepStart(number, self.parameters, optimizer)
            self.take(step, optimizer)
        raise AssertionError(f"step {number} is not kept")

    def _follow(self) -> Iterator[tuple[KeptStep, Optimizer]]:
        """Each kept step with the optimizer that takes it; who asks takes it."""
        start = self._starts[self._steps[0].number]
        self._go_to(start.point)
        optimizer = start.optimizer()
        for step in self._steps:
            start = self._starts.get(step.number, start)
            if start.number == step.number > self._steps[0].number:
                if not start.is_break:
                    self._check(start.point)
                self._go_to(start.point)
                optimizer = start.optimizer()
            yield step, optimizer

    def take(self, step: KeptStep, optimizer: Optimizer) -> None:
        """Take a step as training did."""
        gradients = self.gradients(step)
        self._move(step, optimizer, times(gradients, factors(step, norms_of(gradients))))

    def retake(self, step: KeptStep, here: StepStart, scales: list[float], change: Alteration) -> Losses:
        """The judges' losses after a step with one thing changed; infinite if the optimizer refuses it."""
        self._go_to(here.point)
        optimizer = here.optimizer()
        with change.computing():
            gradients = times(self.gradients(change.batch or step), scales)
        norm = joint(norms_of(gradients))
        if norm > change.max_norm:
            gradients = times(gradients, [change.max_norm / norm] * len(gradients))
        change.moments(optimizer, gradients)
        try:
            self._move(step, optimizer, gradients)
        except FloatingPointError:
            return np.full(len(self._judges), math.inf)
        with torch.no_grad():
            for p, x in zip(self.parameters, here.point, strict=True):
                p.copy_(torch.lerp(x.to(p.device), p, change.fraction))
            for i in change.left_out:
                self.parameters[i].copy_(here.point[i])
        return self.losses()

    def coefficient(self, step: KeptStep, here: StepStart, scales: list[float]) -> float:
        """The factor by which the optimizer itself clipped the gradient of a step."""
        self._go_to(here.point)
        optimizer = here.optimizer()
        self._move(step, optimizer, times(self.gradients(step), scales))
        return optimizer.clip_stats()["coefficient"] if isinstance(optimizer, ClipsItself) else 1.0

    def gradients(self, step: KeptStep) -> Gradients:
        """The gradient of a step's batches where the parameters are."""
        self._replay.closure = TrainingLoss(step.passes, self.parameters, self._backward)
        return self._replay.gradient().gradients

    def losses(self) -> Losses:
        """The judges' losses where the parameters are."""
        return np.array([self._loss(judge) for judge in self._judges])

    def _loss(self, judge: Pass) -> float:
        def loss() -> Tensor:
            assert judge.state is not None
            judge.state.restore()
            with torch.no_grad():
                return checked_loss(judge.loss_fn())

        self._replay.closure = loss
        return self._replay.loss().item()

    def _backward(self, loss: Tensor) -> None:
        self.precision = computed_precision(loss)
        loss.backward()

    def _move(self, step: KeptStep, optimizer: Optimizer, gradients: Gradients) -> None:
        for group, settings in zip(optimizer.param_groups, step.settings, strict=True):
            group.update(settings)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        optimizer.step()

    def _go_to(self, point: Sequence[Tensor]) -> None:
        self._replay.move([None] * len(point), 0.0, origin=point)

    def _check(self, point: Sequence[Tensor]) -> None:
        """Refuse to explain steps that, taken again, do not lead where training was."""
        tolerance = precision(self.parameters) ** 0.5
        for p, x in zip(self.parameters, point, strict=True):
            if not torch.allclose(p, x.to(p.device), rtol=tolerance, atol=tolerance, equal_nan=True):
                raise RuntimeError(
                    "The kept steps, taken again, do not lead where training was, so that none can be "
                    "explained. Give `record` every batch, let nothing else move the parameters, and let "
                    "`loss_of_batch` draw only from global generators."
                )


def factors(step: KeptStep, norms: Sequence[Tensor | None]) -> list[float]:
    """Factor of each gradient between the backward pass and the optimizer, as by clipping."""
    return [_factor(handed, norm) for handed, norm in zip(step.norms, norms, strict=True)]


def _factor(handed: Tensor | None, norm: Tensor | None) -> float:
    if handed is None or norm is None or handed == norm or not math.isfinite(handed / norm):
        return 1.0
    return float(handed / norm)


def times(gradients: Gradients, scales: Sequence[float]) -> Gradients:
    """Gradients, each times its factor; without one where that is 1."""
    pairs = zip(gradients, scales, strict=True)
    return [g if g is None or scale == 1.0 else g * scale for g, scale in pairs]


def joint(norms: Sequence[Tensor | None]) -> float:
    """The norm of all, from the norms of each."""
    return math.hypot(*(float(norm) for norm in norms if norm is not None))


@contextmanager
def full_precision() -> Iterator[None]:
    """A block in which autocast does nothing, wherever it is entered. It is the process's."""
    enable = torch.set_autocast_enabled
    torch.set_autocast_enabled = lambda device, enabled: enable(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled = enable


def has_first(state: Entries) -> bool:
    """Whether a parameter has momentum."""
    return "exp_avg" in state or state.get("momentum_buffer") is not None


@dataclass(frozen=True)
class BatchMoments:
    """Moments as if all gradients so far had been this one. The length of a usual step stays what it is."""

    parameters: Sequence[Tensor]  # those whose gradients are given
    coefficient: float  # by which the optimizer itself clips this gradient

    def set_first(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`m = (1 - \beta_1^t)\,g`; of SGD with dampening d, :math:`g\,(1 - d)/(1 - \beta)`."""
        for group, state, gradient in self._states(optimizer, gradients):
            if "exp_avg" in state:
                state["exp_avg"].copy_(gradient).mul_(_weight(group["betas"][0], state))
            elif has_first(state):
                weight = (1.0 - group["dampening"]) / (1.0 - group["momentum"])
                state["momentum_buffer"].copy_(gradient).mul_(weight)

    def set_second(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`v`, at least :math:`(1 - \beta_2^t)` times the mean of :math:`g^2` in the tensor.

        Coordinate by coordinate, steps would be divided by gradients that happen to be zero.
        """
        for group, state, gradient in self._states(optimizer, gradients):
            if "exp_avg_sq" in state:
                least = gradient.square().mean().mul(_weight(group["betas"][1], state))
                state["exp_avg_sq"].clamp_(min=least.to(state["exp_avg_sq"]))

    def _states(
        self, optimizer: Optimizer, gradients: Gradients
    ) -> Iterator[tuple[Entries, Entries, Tensor]]:
        """Group, state and gradient, as the optimizer clips it, of each parameter that has all three."""
        by_parameter = {id(p): g for p, g in zip(self.parameters, gradients, strict=True)}
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = by_parameter.get(id(p))
                if gradient is not None:
                    yield group, optimizer.state[p], gradient * self.coefficient


def _weight(beta: float, state: Entries) -> float:
    """Sum of the weights of a running mean after the steps so far."""
    return 1.0 - beta ** float(state.get("step", math.inf))


def explained(
    model: nn.Module, starts: Sequence[StepStart], steps: Sequence[KeptStep], number: int | None
) -> Explanation:
    """Why a kept step raised the loss: that of this ``number``, or the one that raised it most."""
    with Retakes(model, starts, steps) as again:
        walked = again.walk()
        rises = [rise(step.before, step.after) for step in walked]
        largest = max(range(FEWEST_STEPS, len(steps)), key=rises.__getitem__)
        place = largest if number is None else number - steps[0].number
        step, before = steps[place], walked[place].before
        here = again.before(step.number)
        scales = factors(step, norms_of(again.gradients(step)))
        blocks = {
            f"{BLOCK}{name}": indices for name, indices in layer_groups(model, again.parameters).items()
        }
        changes = alterations(again, steps[:place], step, here, scales)
        changes |= {name: Alteration(left_out=indices) for name, indices in blocks.items()}
        changed = {name: rise(before, again.retake(step, here, scales, c)) for name, c in changes.items()}
    usual = max(map(abs, rises[:place]))
    longer = times_longer(walked[: place + 1], blocks)
    return Explanation(
        step=step.number,
        cause=cause_of(rises[place], usual, changed, longer),
        rise=rises[place],
        usual=usual,
        shares={name: share(rises[place], value) for name, value in changed.items()},
        largest=steps[largest].number,
    )


def times_longer(walked: Sequence[Walked], blocks: Mapping[str, list[int]]) -> dict[str, float]:
    """How many times as far as usual each block moved in the last step."""
    longer: dict[str, float] = {}
    for name, indices in blocks.items():
        *usual, last = [float(np.linalg.norm(step.lengths[indices])) for step in walked]
        longer[name] = last / (median(usual) or math.inf)
    return longer


def rise(before: Losses, after: Losses) -> float:
    """The median rise of the judges' losses; infinite where a finite loss is lost.

    Example:
        >>> rise(np.array([1.0, 1.0, 1.0]), np.array([2.0, 1.5, math.nan]))
        1.0
    """
    ended = np.where(np.isfinite(after), after, math.inf)
    begun = np.where(np.isfinite(before), before, math.inf)
    with np.errstate(invalid="ignore"):
        return float(np.median(np.where(np.isfinite(begun), ended - begun, 0.0)))


def alterations(
    again: Retakes, earlier: Sequence[KeptStep], step: KeptStep, here: StepStart, scales: list[float]
) -> dict[str, Alteration]:
    """Changes of a whole step, by name."""
    moments = BatchMoments(again.parameters, again.coefficient(step, here, scales))
    states = here.optimizer().state.values()
    changes = {
        "half": Alteration(fraction=0.5),
        "batch": Alteration(batch=earlier[-1]),
        "clipped": Alteration(max_norm=median(joint(kept.norms) for kept in earlier)),
    }
    if any(map(has_first, states)):
        changes["momentum"] = Alteration(moments=moments.set_first)
    if any("exp_avg_sq" in state for state in states):
        changes["second moment"] = Alteration(moments=moments.set_second)
    if again.precision > precision(again.parameters):
        changes["precision"] = Alteration(computing=full_precision)
    return changes
