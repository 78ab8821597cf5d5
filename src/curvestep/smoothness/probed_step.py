r"""One measured step, from its start at :math:`x_k` to its row.

:class:`ProbedStep` keeps :math:`x_k` and the gradient there and, once the optimizer has stepped to
:math:`x_{k+1}`, replays the batch at points between the two. The functions of
:mod:`~curvestep.smoothness.measurement` return parts of the row; here they are put together, in the order in
which they are measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor, nn

from curvestep.distributed import any_rank, over_ranks
from curvestep.smoothness.determinism import SelfTest, untracked_error
from curvestep.smoothness.estimators import spectral_smoothness
from curvestep.smoothness.geometry import Geometry, geometry_of
from curvestep.smoothness.measurement import (
    Segment,
    Start,
    along_step,
    change_part,
    end_part,
    joined,
    local_part,
    noise_of_halves,
    norms_part,
    optimizer_spectral_part,
    secant_at,
    spectral_part,
    summary_part,
)
from curvestep.smoothness.observer import ForwardCalls, ObservedStep, StepObserver, TrainingLoss, trains_any
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.replay import Closure, Gradients, Replay, trainable_parameters
from curvestep.smoothness.schedule import FOLLOWED_ROWS, short_fractions
from curvestep.smoothness.snapshot import PassState, Workspace
from curvestep.smoothness.trace import NONFINITE, ZERO_STEP, Row
from curvestep.steps import is_clipped
from curvestep.vectors import global_norm, precision


@dataclass
class Setup:
    """Settings and memory that all steps of one probe share."""

    model: nn.Module
    parameters: list[nn.Parameter]
    fractions: tuple[float, ...] | None  # of a step; None: two short ones that follow the run, and the whole
    estimators: Mapping[str, int]  # their periods, in measurements
    oracle: GradientOracle | None
    groups: Mapping[str, Sequence[int]]  # names of layers with the indices of their parameters
    in_metric: bool  # whether the optimizer's metric is measured, too
    keep: Sequence[object]
    backward: Callable[[Tensor], object] | None
    test: SelfTest = field(default_factory=SelfTest)
    measurements: int = 0  # so far
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=FOLLOWED_ROWS))  # of the last rows
    spikes: list[Row] = field(default_factory=list[Row])  # that the optimizers had logged at the last row
    start_memory: Workspace = field(default_factory=Workspace)
    gradient_memory: Workspace = field(default_factory=Workspace)

    def batches_of(self, closure: Closure) -> int:
        """How many batches a closure computes its loss of: of training, one step's."""
        return len(closure) if isinstance(closure, GradientOracle) else 1

    @property
    def next_fractions(self) -> tuple[float, ...]:
        """Where on the step that comes gradients are taken."""
        return self.fractions or (*short_fractions(self.rates), 1.0)


class ProbedStep:
    """One training step that a probe measures.

    Attributes:
        record: What training did, as far as the probe saw it.
        row: The parts measured so far.
        optimizers: The optimizers that step; None until the step begins.
        start: What is known before the step; None if that could not be measured.
        stepping: Whether the optimizer is stepping: it may call the model as often as it likes.
        num_gradients: How many of them measuring took; of an oracle, one for each of its batches. Without
            the self-test, which a resumed run takes again.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.record = ObservedStep()
        self.row: Row = {}
        self.optimizers: StepObserver | None = None
        self.start: Start | None = None
        self.stepping = False
        self.num_gradients = 0
        self._loss: TrainingLoss | None = None
        self._oracle_state: PassState | None = None  # where the first gradient of the oracle started
        self._replays = False

    def see_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take note of a call of the model."""
        with_inputs = not self.setup.test.is_complete
        if self._replays:
            self.record.replayed.record(args, kwargs, with_inputs=with_inputs)
            return
        if Replay.running:  # somebody else's
            return
        if self.record.state is None:
            self.record.state = PassState(self.setup.model, self.setup.keep)
        self.record.see_precision(self.setup.parameters[0])
        self.record.see_inputs(args, kwargs)
        self.record.trained.record(args, kwargs, with_inputs=with_inputs)

    def measure_start(self, *, clipped: bool) -> None:
        """Keep the point and the gradient before the step, and test the replays if that is due.

        Args:
            clipped: Whether the gradient may have been clipped or scaled since the backward pass.
        """
        setup = self.setup
        self._check_parameters()
        self._take_passes()
        self._loss = TrainingLoss(self.record.passes, setup.parameters, setup.backward)
        self.row |= self._recorded_loss(self._loss)
        raw = self._raw_gradient(self._loss, clipped=clipped)
        raw_norm = global_norm(raw).item()
        self._test_replays(raw, clipped=clipped)
        self.row["self_test"] = setup.test.error
        gradients, grad_norm = raw, raw_norm
        if setup.oracle is not None:
            with self.replaying(setup.oracle) as replay:
                first = replay.gradient()
            gradients, grad_norm = first.gradients, global_norm(first.gradients).item()
            self.row["loss"] = _mean(first.loss, setup.model)
        elif not clipped:  # they are in ``.grad``, where the step may change them
            gradients = setup.gradient_memory.copies(raw)
        point = [p for p in setup.start_memory.copies(setup.parameters) if p is not None]
        self.start = Start(point, gradients, grad_norm, raw_norm)

    def measure_noise(self, halves: tuple[Closure, Closure]) -> None:
        """Measure the noise of the gradient; before the step, after it the halves are not independent."""
        gradients = []
        for half in halves:
            with self.replaying(half) as replay:
                gradients.append(replay.gradient().gradients)
        self.row |= noise_of_halves(*gradients)

    def measure_end(self) -> None:
        """Measure along the step that the optimizer has taken."""
        setup, start, steps = self.setup, self.start, self.optimizers
        assert start is not None
        assert steps is not None
        self._check_inputs(steps)
        self.row |= self._batch_size()
        self.row |= norms_part(start, setup.parameters, setup.groups)
        eps = self.row["eps"] = max(precision(setup.parameters), self.record.eps, setup.test.eps)
        self.row |= self._optimizer_part(start, steps)
        self.row |= self._spikes_part(steps)
        geometry = self._geometry(steps)
        if geometry is not None:
            self.row |= {"momentum": geometry.momentum, "optimizer_limit": geometry.limit}
            self.row["optimizer_missing"] = geometry.missing or None
        if not (math.isfinite(self.row["grad_norm"]) and math.isfinite(self.row["step_norm"])):
            self.row["status"] = NONFINITE
            return
        if self.row["step_norm"] == 0:
            self.row["status"] = ZERO_STEP
            return
        segment = Segment(
            start=start.point,
            gradients=start.gradients,
            grad_norm=start.grad_norm,
            step_norm=self.row["step_norm"],
            eps=eps,
            groups=setup.groups,
            layer_lengths={name: layer["step_norm"] for name, layer in self.row.get("layers", {}).items()},
            geometry=None if geometry is None or geometry.missing else geometry,
        )
        with self.replaying(self._measured_loss()) as replay:
            for part in self._estimates(segment, replay):
                self.row = joined(self.row, part)
        self.row |= summary_part(self.row)

    @contextmanager
    def replaying(self, closure: Closure, *, counted: int | None = None) -> Iterator[Replay]:
        """A replay of a closure from the state in which training's first pass started.

        Args:
            closure: Computes the loss.
            counted: Gradients to count; default: all that are taken.
        """
        setup, state = self.setup, self.record.state
        if closure is setup.oracle:  # its batches are its own: its gradients start from the state of now
            self._oracle_state = self._oracle_state or PassState(setup.model, setup.keep)
            state = self._oracle_state
        self._replays = True
        inputs = [(tensor, tensor.grad) for tensor in self.record.inputs]
        replay = Replay(setup.model, closure, state=state, keep=setup.keep)
        try:
            for tensor, _ in inputs:
                tensor.grad = None
            with replay:
                yield replay
        finally:
            self._replays = False
            passes = replay.num_passes if counted is None else counted
            self.num_gradients += passes * setup.batches_of(closure)
            for tensor, gradient in inputs:
                tensor.grad = gradient

    def _check_parameters(self) -> None:
        now, then = trainable_parameters(self.setup.model), self.setup.parameters
        if [id(p) for p in now] != [id(p) for p in then]:
            raise ValueError(
                f"the model has other trainable parameters ({len(now)}) than when the probe was made "
                f"({len(then)}): some were frozen, unfrozen or replaced. Make a new probe, "
                "and give it this one's `state_dict()` to continue the trace."
            )

    def _check_inputs(self, steps: StepObserver) -> None:
        """Refuse an input of the model that the optimizer trains: replays do not move it."""
        trained = [t for t in self.record.inputs if any(trains_any(o, [t]) for o in steps.optimizers)]
        if trained:
            raise untracked_error(trained)

    def _take_passes(self) -> None:
        """Take over the passes of training that were recorded."""
        record = self.record
        if not record.passes:
            raise ValueError(
                "no loss was recorded for this step. Compute it with `loss = probe.record(loss_fn)` before "
                "each backward pass; with Lightning's manual optimization, `loss = record(self, loss_fn)`."
            )
        record.state = record.passes[0].state
        if record.passes[0].calls.calls:
            record.trained = ForwardCalls.sum([part.calls for part in record.passes])

    def _recorded_loss(self, loss: TrainingLoss) -> Row:
        losses = [part.loss for part in self.record.passes]
        if self.setup.oracle is not None or any(value is None for value in losses):
            return {}
        return {"loss": _mean(loss.mean(losses), self.setup.model)}

    def _raw_gradient(self, loss: TrainingLoss, *, clipped: bool) -> Gradients:
        """The gradient that training computed, before any clipping: from ``.grad``, or by a replay."""
        gradients = [p.grad for p in self.setup.parameters]
        hidden = all(g is None for g in gradients)
        if hidden and not clipped:
            raise ValueError(
                "`.grad` is empty at the start of the block. Call `loss.backward()` before it, and "
                "`zero_grad()` after it."
            )
        if not clipped:
            return gradients
        # A hook that leaves a step out hides the gradient: there is nothing to compare with.
        trained = None if hidden else gradients
        with self.replaying(loss, counted=1) as replay:
            return list(self.setup.test.run(replay, trained, self.record, clipped=True))

    def _test_replays(self, raw: Gradients, *, clipped: bool) -> None:
        """Test the closure that is measured, where the gradient was not replayed and tested already."""
        test, oracle = self.setup.test, self.setup.oracle
        with_oracle = oracle is not None  # then training's passes do not matter
        if test.error is not None:
            if clipped or with_oracle:
                return
            if not any_rank(test.is_due(self.record), self.setup.model):
                return
        with self.replaying(self._measured_loss(), counted=0) as replay:
            if not (with_oracle or clipped) and test.confirms(replay, raw, self.record):
                return
            test.run(replay, None if with_oracle else raw, self.record)

    def _measured_loss(self) -> Closure:
        assert self._loss is not None
        return self.setup.oracle or self._loss

    def _batch_size(self) -> Row:
        if self.row["batch_size"] is not None or not self.record.trained.calls:
            return {}
        size = over_ranks(self.record.trained.size, self.setup.model, mean=False)
        return {"batch_size": round(size)}

    def _optimizer_part(self, start: Start, steps: StepObserver) -> Row:
        gradients = start.gradients if self.setup.oracle is None else None
        coefficient = steps.coefficient(gradients, start.raw_norm)
        part: Row = {"lr": steps.lr, "coefficient": coefficient}
        if steps.optimizers:
            name = part["optimizer"] = type(steps.optimizers[0]).__name__
            if coefficient is not None:
                part["clipped"] = bool(is_clipped(coefficient, optimizer=name))
        return part

    def _spikes_part(self, steps: StepObserver) -> Row:
        logs, before = steps.spike_logs(), self.setup.spikes
        if not logs:
            return {}
        self.setup.spikes = list(chain.from_iterable(logs))
        return {"spikes": [spike for spike in self.setup.spikes if spike not in before]}

    def _geometry(self, steps: StepObserver) -> Geometry | None:
        if not (steps.optimizers and self.setup.in_metric):
            return None
        return geometry_of(steps.optimizers, steps.rates, self.setup.parameters)

    def _estimates(self, segment: Segment, replay: Replay) -> Iterator[Row]:
        """The parts of the row that are due, one by one: what comes before a failure is kept."""
        setup = self.setup
        due = {name for name, period in setup.estimators.items() if setup.measurements % period == 0}
        if "local_smoothness" in due:
            yield local_part(segment, replay)
        spectrum = None
        if "spectral_smoothness" in due:
            spectrum = spectral_smoothness(replay, segment.start, eps=segment.eps)
            yield spectral_part(segment, replay, spectrum)
        yield optimizer_spectral_part(segment, replay, spectrum, due=due)
        if "smoothness" in due:
            along = along_step(segment, replay, setup.next_fractions)
            self._remember_rate(segment, along["secants"][0])
            yield along
        elif due:
            end = secant_at(segment, replay, 1.0, in_metric=True)
            yield {**change_part(segment, end), **end_part(segment, replay, end)}

    def _remember_rate(self, segment: Segment, first_secant: float) -> None:
        if segment.grad_norm > 0:
            rate = first_secant * segment.step_norm / segment.grad_norm
            if math.isfinite(rate) and rate > 0:
                self.setup.rates.append(rate)


def _mean(loss: Tensor, model: nn.Module) -> float:
    return over_ranks(loss.detach().item(), model, mean=True)
