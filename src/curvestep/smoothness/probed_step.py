r"""One measured step, from its start at :math:`x_k` to its row.

:class:`ProbedStep` keeps :math:`x_k` and the gradient there and, once the optimizer has stepped to
:math:`x_{k+1}`, replays the batch at points between the two. The functions of
:mod:`~curvestep.smoothness.measurement` return parts of the row; here they are put together, in the order in
which they are measured.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.optimizer_family import check_optimizer
from curvestep.smoothness.determinism import SelfTest, untracked_error
from curvestep.smoothness.estimators import each
from curvestep.smoothness.geometry import geometry_of
from curvestep.smoothness.measurement import (
    PARTS_AT_START,
    Segment,
    Start,
    along_step,
    noise_of_halves,
    norms_part,
    summary_part,
)
from curvestep.smoothness.observer import (
    ForwardCalls,
    ObservedStep,
    StepObserver,
    TrainingLoss,
    optimizer_facts,
    trains_any,
)
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.replay import (
    Closure,
    Gradients,
    Replay,
    gradients_of,
    is_empty,
    trainable_parameters,
)
from curvestep.smoothness.schedule import FOLLOWED_ROWS, short_fractions
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import any_rank, copies, over_ranks
from curvestep.tensors.vectors import global_norm, precision
from curvestep.trace.clipping import is_clipped
from curvestep.trace.schema import NONFINITE, ZERO_STEP, Row


@dataclass
class Setup:
    """Settings and memory that all steps of one probe share."""

    model: nn.Module
    parameters: list[nn.Parameter]
    fractions: tuple[float, ...] | None  # of a step; None: two short ones that follow the run, and the whole
    estimators: Mapping[str, int]  # their periods, in measurements
    oracle: GradientOracle | None
    backward: Callable[[Tensor], object] | None
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)  # layers: indices of their parameters
    test: SelfTest = field(default_factory=SelfTest)
    measurements: int = 0  # so far
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=FOLLOWED_ROWS))  # of the last rows
    spikes: list[Row] = field(default_factory=list[Row])  # that the optimizers had logged at the last row

    @property
    def facts(self) -> Row:
        """What is measured on what, for the trace's header."""
        batches = f"{len(self.oracle)} fixed batches" if self.oracle else "training batch"
        return {
            "model": type(self.model).__name__,
            "num_parameters": sum(map(torch.numel, self.parameters)),
            "dtype": str(self.parameters[0].dtype).removeprefix("torch."),
            "measured_on": batches,
            "fractions": self.fractions,
            "estimators": dict(self.estimators),
        }


class ProbedStep:
    """One training step that a probe measures."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.record = ObservedStep()  # what training did, as far as the probe saw it
        self.row: Row = {}  # the parts measured so far
        self.optimizers: StepObserver | None = None  # that step; None until the step begins
        self.start: Start | None = None  # None if it could not be measured
        self.stepping = False  # while the optimizer may call the model as often as it likes
        # For measuring, one for each batch of an oracle. Without the self-test, which a resumed run repeats.
        self.num_gradients = 0
        self._loss: TrainingLoss | None = None
        self._oracle_state: PassState | None = None  # where the first gradient of the oracle started
        self._replays = False

    def see_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take note of a call of the model."""
        with_inputs = not self.setup.test.confirmed
        if self._replays:
            self.record.replayed.record(args, kwargs, with_inputs=with_inputs)
        elif not Replay.running.replays:  # else somebody else's
            self.record.state = self.record.state or PassState(self.setup.model)
            self.record.see(args, kwargs, self.setup.parameters[0])
            self.record.trained.record(args, kwargs, with_inputs=with_inputs)

    def measure_start(self, *, clipped: bool) -> None:
        """Keep point and gradient before the step, which may be clipped, and test the replays if due."""
        setup = self.setup
        self._check_parameters()
        self._take_passes()
        self._loss = TrainingLoss(self.record.passes, setup.parameters, setup.backward)
        losses = [part.loss for part in self.record.passes]
        if setup.oracle is None and not any(loss is None for loss in losses):
            self.row |= {"loss": _mean(self._loss.mean(losses), setup.model)}
        raw = self._raw_gradient(self._loss, clipped=clipped)
        raw_norm = global_norm(raw).item()
        self._test_replays(raw, clipped=clipped)
        self.row |= {"self_test": setup.test.error}
        gradients, grad_norm = raw, raw_norm
        if setup.oracle is not None:
            with self.replaying(setup.oracle) as replay:
                first = replay.gradient()
            gradients, grad_norm = first.gradients, global_norm(first.gradients).item()
            self.row |= {"loss": _mean(first.loss, setup.model)}
            raw = None
        elif not clipped:  # they are in ``.grad``, where the step may change them
            raw = gradients = each(lambda gradient: gradient.detach().clone(), raw)
        self.start = Start(copies(setup.parameters), gradients, grad_norm, raw, raw_norm)

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
        # An oracle's passes may have another precision than training's.
        computed_in = max(self.record.eps, setup.test.eps) if setup.oracle is None else setup.oracle.eps
        eps = max(precision(setup.parameters), computed_in)
        self.row |= self._batch_size()
        self.row |= norms_part(start, setup.parameters, setup.groups)
        self.row |= {"eps": eps, **self._optimizer_part(start, steps), **self._spikes_part(steps)}
        geometry = geometry_of(steps.optimizers, steps.rates, setup.parameters)
        self.row |= geometry.part
        step_norm = self.row["step_norm"]
        if not all(map(math.isfinite, (start.grad_norm, step_norm))):
            self.row |= {"status": NONFINITE}
            return
        if step_norm == 0:
            self.row |= {"status": ZERO_STEP}
            return
        segment = Segment(
            start=start,
            step_norm=step_norm,
            eps=eps,
            groups=setup.groups,
            layers=self.row.get("layers", {}),
            geometry=geometry,
        )
        with self.replaying(self._measured_loss()) as replay:
            for part in self._estimates(segment, replay):
                self.row |= part
        self.row |= summary_part(self.row)

    def begin(self, optimizer: Optimizer | None) -> None:
        """Observe the optimizers that step from now on; ``optimizer`` has begun already."""
        self.stepping = True
        self.optimizers = StepObserver(self.setup.parameters)
        if optimizer is not None:
            self.optimizers.expect(check_optimizer(optimizer))

    @property
    def facts(self) -> Row:
        """Facts about the run for the header: how the optimizer steps and clips."""
        steps = self.optimizers
        if steps is None or not steps.optimizers:
            return {}
        rates = {"start_lr": steps.lr, "peak_lr": max(steps.peaks, default=None)}
        return {**optimizer_facts(steps.optimizers[0]), **rates}

    def finished_row(self) -> Row:
        """The row, with its cost and the variance of the gradient."""
        noise, size = self.row.get("noise"), self.row["batch_size"]
        if noise is not None and size is not None:
            self.row |= {"grad_variance": size * noise**2}
        return {**self.row, "num_gradients": self.num_gradients}

    @contextmanager
    def replaying(self, closure: Closure, *, most: float = math.inf) -> Iterator[Replay]:
        """A replay from the state in which training's first pass started; of its gradients ``most`` count."""
        setup, state, batches = self.setup, self.record.state, 1
        if isinstance(closure, GradientOracle):  # its batches are its own: its gradients start from now
            state = self._oracle_state = self._oracle_state or PassState(setup.model)
            batches = len(closure)
        self._replays = True
        inputs = [(tensor, tensor.grad) for tensor in self.record.inputs.values()]
        replay = Replay(setup.model, closure, state=state)
        try:
            for tensor, _ in inputs:
                tensor.grad = None
            with replay:
                yield replay
        finally:
            self._replays = False
            self.num_gradients += int(min(replay.num_passes, most)) * batches
            for tensor, gradient in inputs:
                tensor.grad = gradient

    def _check_parameters(self) -> None:
        now, then = trainable_parameters(self.setup.model), self.setup.parameters
        if list(map(id, now)) != list(map(id, then)):
            raise ValueError(
                f"the model has other trainable parameters ({len(now)}) than when the probe was made "
                f"({len(then)}): some were frozen, unfrozen or replaced. Make a new probe, "
                "and give it this one's `state_dict()` to continue the trace."
            )

    def _check_inputs(self, steps: StepObserver) -> None:
        """Refuse an input of the model that the optimizer trains: replays do not move it."""
        pairs = itertools.product(steps.optimizers, self.record.inputs.values())
        trained = [tensor for optimizer, tensor in pairs if trains_any(optimizer, [tensor])]
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
            record.trained = sum((part.calls for part in record.passes), ForwardCalls())

    def _raw_gradient(self, loss: TrainingLoss, *, clipped: bool) -> Gradients:
        """The gradient that training computed, before any clipping: from ``.grad``, or by a replay."""
        gradients = gradients_of(self.setup.parameters)
        # A hook that leaves a step out hides the gradient that was summed.
        if is_empty(gradients) and not any(part.summed for part in self.record.passes):
            raise ValueError(
                "`.grad` is empty before the step. Call `loss.backward()` before it, and `zero_grad()` "
                "after it."
            )
        if not clipped:
            return gradients
        with self.replaying(loss, most=1) as replay:
            return self.setup.test.run(replay, gradients, self.record, clipped=True)

    def _test_replays(self, raw: Gradients, *, clipped: bool) -> None:
        """Test the closure that is measured, where the gradient was not replayed and tested already."""
        test = self.setup.test
        compared = self.setup.oracle is None  # else training's passes do not matter
        again = compared and not clipped
        if test.error is not None and not (again and any_rank(test.is_due(self.record), self.setup.model)):
            return
        with self.replaying(self._measured_loss(), most=0) as replay:
            if again and test.confirms(replay, raw, self.record):
                return
            test.run(replay, raw if compared else None, self.record)

    def _measured_loss(self) -> Closure:
        assert self._loss is not None
        return self.setup.oracle or self._loss

    def _batch_size(self) -> Row:
        if self.row["batch_size"] is not None or not self.record.trained.calls:
            return {}
        size = over_ranks(self.record.trained.size, self.setup.model, mean=False)
        return {"batch_size": round(size)}

    def _optimizer_part(self, start: Start, steps: StepObserver) -> Row:
        coefficient = steps.coefficient(start.raw, start.raw_norm)
        part: Row = {"lr": steps.lr, "coefficient": coefficient}
        if steps.optimizers:
            part["optimizer"] = type(steps.optimizers[0]).__name__
        if coefficient is not None:
            max_norm, edge = steps.clip_edge
            part["clipped"] = bool(is_clipped(coefficient, edge=edge))
            if edge < 1 and math.isfinite(max_norm):  # a smooth rule: the coefficient does not tell it
                part["max_norm"] = max_norm
        return part

    def _spikes_part(self, steps: StepObserver) -> Row:
        optimizers: list[Any] = steps.optimizers
        logs = [optimizer.spikes() for optimizer in optimizers if hasattr(optimizer, "spikes")]
        if not logs:
            return {}
        before, self.setup.spikes = self.setup.spikes, list(itertools.chain.from_iterable(logs))
        return {"spikes": [spike for spike in self.setup.spikes if spike not in before]}

    def _estimates(self, segment: Segment, replay: Replay) -> Iterator[Row]:
        """The parts of the row that are due, one by one: what comes before a failure is kept."""
        setup = self.setup
        for name, measure in PARTS_AT_START.items():
            if name in setup.estimators and setup.measurements % setup.estimators[name] == 0:
                yield measure(segment, replay)
        along = along_step(segment, replay, setup.fractions or (*short_fractions(setup.rates), 1.0))
        if segment.start.grad_norm > 0:
            rate = along["secants"][0] * segment.step_norm / segment.start.grad_norm
            if 0 < rate < math.inf:
                setup.rates.append(rate)
        yield along


def _mean(loss: Tensor, model: nn.Module) -> float:
    return over_ranks(loss.detach().item(), model, mean=True)
