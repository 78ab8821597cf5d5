"""Kept steps, taken again in the model itself, which is put back bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.autopsy.alteration import Alteration
from curvestep.autopsy.kept_step import KeptStep, StepStart, norms_of
from curvestep.smoothness.determinism import computed_precision
from curvestep.smoothness.observer import ClipsItself, Pass, TrainingLoss
from curvestep.smoothness.replay import Gradients, Replay, checked_loss
from curvestep.tensors.vectors import distance, precision

NUM_VALIDATION_BATCHES = 8  # kept batches that a rise is the median of

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class StepEffect:
    """What a step did to the losses of the validation batches and to the parameters."""

    before: Losses
    after: Losses
    lengths: NDArray[np.float64]  # that each parameter moved

    @property
    def rise(self) -> float:
        """The median rise of the losses."""
        return median_rise(self.before, self.after)


@dataclass(frozen=True)
class AskedStep:
    """The step to explain."""

    step: KeptStep
    start: StepStart  # where it began
    factors: list[float]  # of each gradient between the backward pass and the optimizer
    losses: Losses  # of the validation batches before it


class Retakes:
    """Kept steps, in order, in the model again; ``starts`` is where some of them began, the first among them.

    The model is put back at the end of the ``with`` block.
    """

    def __init__(self, model: nn.Module, starts: Sequence[StepStart], steps: Sequence[KeptStep]) -> None:
        self.model = model
        self._steps = steps
        self._starts = {start.number: start for start in starts}
        self._replay = Replay(model, lambda: math.nan)
        self.parameters = self._replay.parameters
        self.precision = 0.0  # coarsest of the last gradient's computation
        self._needs_graph = False  # a loss that differentiates inside fails without
        places = np.linspace(0, len(steps) - 1, min(NUM_VALIDATION_BATCHES, len(steps))).round().astype(int)
        self._validation_passes = [steps[place].passes[0] for place in places]

    def __enter__(self) -> Retakes:
        self._replay.__enter__()
        self._home = self._replay.keep_home()
        return self

    def __exit__(self, *exception: object) -> None:
        self._replay.__exit__(*exception)

    def replay_all(self) -> list[StepEffect]:
        """Effect of each kept step."""
        effects: list[StepEffect] = []
        after: Losses | None = None
        for step, optimizer in self._each_step():
            before = self.losses() if after is None or step.number in self._starts else after
            point = [p.detach().clone() for p in self.parameters]
            self._take(step, optimizer)
            after = self.losses()
            lengths = [distance(p.detach(), x).item() for p, x in zip(self.parameters, point, strict=True)]
            effects.append(StepEffect(before, after, np.array(lengths)))
        self._check(self._home)
        return effects

    def asked(self, number: int, losses: Losses) -> AskedStep:
        """The kept step of this number, with where it began."""
        for step, optimizer in self._each_step():
            if step.number == number:
                start = StepStart(number, self.parameters, optimizer)
                factors = gradient_factors(step, norms_of(self.gradients(step)))
                return AskedStep(step, start, factors, losses)
            self._take(step, optimizer)
        raise AssertionError(f"step {number} is not kept")

    def rise_with(self, change: Alteration, asked: AskedStep) -> float:
        """The rise of the loss by the step with one thing changed; infinite if the optimizer refuses it."""
        self._go_to(asked.start.point)
        optimizer = asked.start.optimizer()
        with change.computed_in():
            gradients = self.gradients(change.batch_of or asked.step)
        gradients = scaled(gradients, asked.factors)
        norm = joint_norm(norms_of(gradients))
        if norm > change.max_norm:
            gradients = scaled(gradients, [change.max_norm / norm] * len(gradients))
        change.change_state(optimizer, gradients)
        try:
            self._move(asked.step, optimizer, gradients)
        except FloatingPointError:
            return median_rise(asked.losses, np.full_like(asked.losses, math.inf))
        with torch.no_grad():
            for p, x in zip(self.parameters, asked.start.point, strict=True):
                p.copy_(torch.lerp(x.to(p.device), p, change.fraction))
            for i in change.left_out:
                self.parameters[i].copy_(asked.start.point[i])
        return median_rise(asked.losses, self.losses())

    def coefficient(self, asked: AskedStep) -> float:
        """The factor by which the optimizer itself clipped the gradient of the step."""
        self._go_to(asked.start.point)
        optimizer = asked.start.optimizer()
        self._move(asked.step, optimizer, scaled(self.gradients(asked.step), asked.factors))
        return optimizer.clip_stats()["coefficient"] if isinstance(optimizer, ClipsItself) else 1.0

    def gradients(self, step: KeptStep) -> Gradients:
        """The gradient of a step's batches where the parameters are."""
        self._replay.closure = TrainingLoss(step.passes, self.parameters, self._backward)
        return self._replay.gradient().gradients

    def losses(self) -> Losses:
        """The losses of the validation batches where the parameters are."""
        return np.array([self._loss(validation_pass) for validation_pass in self._validation_passes])

    def _loss(self, validation_pass: Pass) -> float:
        def loss() -> Tensor:
            assert validation_pass.state is not None
            validation_pass.state.restore()
            with torch.set_grad_enabled(self._needs_graph):
                return checked_loss(validation_pass.loss_fn())

        self._replay.closure = loss
        if not self._needs_graph:
            try:
                return self._replay.loss().item()
            except RuntimeError:  # torch: "element 0 of tensors does not require grad"
                self._needs_graph = True
        return self._replay.loss().item()

    def _backward(self, loss: Tensor) -> None:
        self.precision = computed_precision(loss)
        loss.backward()

    def _each_step(self) -> Iterator[tuple[KeptStep, Optimizer]]:
        """Each kept step with the optimizer that takes it; who asks takes it."""
        first = self._steps[0].number
        start = self._starts[first]
        self._go_to(start.point)
        optimizer = start.optimizer()
        for step in self._steps:
            start = self._starts.get(step.number, start)
            if start.number == step.number > first:
                if not start.is_break:
                    self._check(start.point)
                self._go_to(start.point)
                optimizer = start.optimizer()
            yield step, optimizer

    def _take(self, step: KeptStep, optimizer: Optimizer) -> None:
        """Take a step as training did."""
        gradients = self.gradients(step)
        self._move(step, optimizer, scaled(gradients, gradient_factors(step, norms_of(gradients))))

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
                    "Taking the kept steps again does not lead to the same parameters, so no step can be "
                    "explained. Give `record` every batch, let nothing else move the parameters, and let "
                    "`loss_of_batch` draw only from global generators."
                )


def median_rise(before: Losses, after: Losses) -> float:
    """The median rise of losses; infinite where a finite loss is lost.

    Example:
        >>> median_rise(np.array([1.0, 1.0, 1.0]), np.array([2.0, 1.5, math.nan]))
        1.0
    """
    ended = np.where(np.isfinite(after), after, math.inf)
    begun = np.where(np.isfinite(before), before, math.inf)
    with np.errstate(invalid="ignore"):
        return float(np.median(np.where(np.isfinite(begun), ended - begun, 0.0)))


def gradient_factors(step: KeptStep, norms: Sequence[Tensor | None]) -> list[float]:
    """Factor of each gradient between the backward pass and the optimizer, as by clipping."""
    return [_factor(handed, norm) for handed, norm in zip(step.norms, norms, strict=True)]


def _factor(handed: Tensor | None, norm: Tensor | None) -> float:
    if handed is None or norm is None or handed == norm or not math.isfinite(handed / norm):
        return 1.0
    return float(handed / norm)


def scaled(gradients: Gradients, factors: Sequence[float]) -> Gradients:
    """Gradients, each times its factor; without one where that is 1."""
    pairs = zip(gradients, factors, strict=True)
    return [g if g is None or factor == 1.0 else g * factor for g, factor in pairs]


def joint_norm(norms: Sequence[Tensor | None]) -> float:
    """The norm of all gradients, from the norms of each."""
    return math.hypot(*(float(norm) for norm in norms if norm is not None))
