r"""One measured step, from its start at :math:`x_k` to its row.

:class:`ProbedStep` keeps :math:`x_k` and the gradient there and, once the optimizer has stepped to
:math:`x_{k+1}`, replays the batch at points between the two. The functions of
:mod:`~curvestep.smoothness.measurement` return parts of the row; here they are put together, in the order in
which they are measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.smoothness.determinism import (
    NonDeterministicError,
    check_determinism,
    clipped_by_value,
    untracked_error,
)
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
    trains_any,
)
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.replay import (
    Closure,
    Gradients,
    Replay,
    gradients_of,
    is_empty,
    share_turned,
    trainable_parameters,
)
from curvestep.smoothness.schedule import FOLLOWED_ROWS, short_fractions
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import any_rank, copies, over_ranks
from curvestep.tensors.vectors import global_norm, precision
from curvestep.trace.schema import FAILED, NONFINITE, ZERO_STEP, Row

NEARBY = 1e-3  # of the parameters' norm: a move that shows, to a point where a replay may well be


def no_closure() -> float:
    """The closure of a replay between two measurements."""
    return math.nan


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one probe measures, and on what."""

    model: nn.Module
    parameters: list[nn.Parameter]  # what training moves
    replay: Replay  # of the model; a step gives it the closure
    fractions: tuple[float, ...] | None  # of a step; None: two short ones that follow the run, and the whole
    estimators: Mapping[str, int]  # their periods, in measurements
    oracle: GradientOracle | None
    backward: Callable[[Tensor], object] | None
    groups: Mapping[str, Sequence[int]]  # layers: indices of their parameters; empty if not asked for

    @property
    def facts(self) -> Row:
        """What is measured on what, for the trace's header."""
        batches = f"{len(self.oracle)} fixed batches" if self.oracle else "training batch"
        return {
            "model": type(self.model).__name__,
            "num_parameters": sum(p.numel() for p in self.parameters),
            "dtype": str(self.parameters[0].dtype).removeprefix("torch."),
            "measured_on": batches,
            "fractions": self.fractions,
            "estimators": dict(self.estimators),
        }


@dataclass
class SelfTest:
    """A probe's test that its replays are training's passes again, and what it knows from it."""

    # Relative difference of one gradient replayed twice; None until one was finite.
    error: float | None = None
    eps: float = 0.0  # relative precision of the coarsest dtype that the loss was computed in
    calls: int = 0  # how often training had called the model before the tested step
    # Whether a second test was passed: a ``zero_grad()`` that is missing does not show at the first step.
    confirmed: bool = False

    def is_due(self, seen: ObservedStep) -> bool:
        """Whether too little was tested, or training called the model in another way than it did then."""
        if not self.confirmed or seen.trained.calls != self.calls:
            return True
        return seen.state is not None and seen.state.modes_changed()

    def replayed_gradient(self, replay: Replay, trained: Gradients, seen: ObservedStep) -> Gradients:
        """The gradient of training's passes, where ``trained`` may be clipped or scaled, from one replay.

        Each time it is compared with what training has: a stray pass may be taken for training's. Only the
        first replays are searched for whatever else may be wrong.
        """
        if self.error is None:
            return self.run(replay, trained, seen, clipped=True)
        replay.keep_home()  # a closure that moves the parameters is undone
        gradients = replay.gradient().gradients
        self.eps = max(self.eps, seen.eps, precision(replay.parameters))
        tolerance = self.eps**0.5
        differs = any_rank(share_turned(gradients, trained) > tolerance, replay.model)
        if differs and not clipped_by_value(gradients, trained, tolerance):
            raise RuntimeError(
                "`.grad` does not belong to the recorded losses. Give "
                "`probe.record` every loss that is run backward, all of it, and each once; and begin "
                "every step with `zero_grad()`."
            )
        self.confirmed = True
        self.calls = seen.trained.calls
        return gradients

    def confirms(self, replay: Replay, trained: Gradients, seen: ObservedStep) -> bool:
        """Whether a replay gives the gradient of training again, at a step like the one that was tested.

        Without a whole gradient more in memory; if it does not, :meth:`run` says why.
        """
        if self.error is None or seen.trained.calls != self.calls:
            return False
        gap = global_norm(replay.change(trained).parts).item() / (global_norm(trained).item() or 1.0)
        agrees = not any_rank(not gap <= self.eps**0.5, replay.model)
        self.confirmed |= agrees
        return agrees

    def run(
        self, replay: Replay, trained: Gradients | None, seen: ObservedStep, *, clipped: bool = False
    ) -> Gradients:
        """Test ``replay``, whose gradient is returned; a gradient that is not finite tests nothing.

        A later step that called the model in another way may have run another number of micro-batches, or a
        stray pass may have been taken for training's.
        """
        seen.replayed = ForwardCalls()
        try:
            error, gradients, eps = check_determinism(replay, trained, seen, clipped=clipped)
        except NonDeterministicError as reason:
            if self.error is None:
                raise
            if seen.trained.calls == self.calls:
                raise RuntimeError(str(reason)) from reason
            raise RuntimeError(
                "the replay does not give the gradient in `.grad`. The model was called "
                f"{seen.trained.calls} times since the last step, {self.calls} before the tested one. "
                "Call the model under `torch.no_grad()` for anything but training. Or call "
                "`probe.snapshot()` just before the loss is computed."
            ) from reason
        if math.isfinite(error):
            recorded = any(part.calls.calls for part in seen.passes)
            if self.error is not None and seen.replayed.calls and not recorded:
                # A stray pass is among training's calls, but neither among the two replays nor recorded.
                seen.trained.size = seen.replayed.size / 2
            self.confirmed = self.error is not None
            if self.error is None:
                self.error = error
            self.calls = seen.trained.calls
            self.eps = eps
        return gradients


@dataclass
class Memory:
    """What the measured steps of one probe leave to the next."""

    test: SelfTest = field(default_factory=SelfTest)
    writes_tested: bool = False  # the loss writes to no parameter
    writes_found: bool = False
    measurements: int = 0  # so far
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=FOLLOWED_ROWS))  # of the last rows
    spikes: list[Row] = field(default_factory=list[Row])  # that the optimizers had logged at the last row


class ProbedStep:
    """One training step that is measured: :meth:`before` the optimizer moves, and :meth:`after` it did.

    Args:
        settings: Of the probe.
        memory: What the steps before left, and this one adds to.
        seen: What training did for this step.
        row: The parts of the row that are known already.
    """

    def __init__(self, settings: Settings, memory: Memory, seen: ObservedStep, row: Row) -> None:
        self._settings = settings
        self._memory = memory
        self._seen = seen
        self._row = row
        self._start: Start | None = None  # None if it could not be measured
        self._optimizers: StepObserver | None = None  # that step; None until they may
        self._measured: Closure | None = None  # the loss along the step: of the training batch, or the oracle
        self._oracle_state: PassState | None = None  # where the first gradient of the oracle started
        # For measuring, one for each batch of an oracle. Without the self-test, which a resumed run repeats.
        self.num_gradients = 0

    def before(self, *, clipped: bool, halves: tuple[Closure, Closure] | None) -> None:
        """Keep point, loss and gradient at the start of the step, and test the replays where that is due.

        A gradient that may have been ``clipped`` or scaled since the backward pass is computed again.
        """
        settings = self._settings
        oracle = settings.oracle
        row = self._row
        self._check_parameters()
        self._seen.take_recorded()
        loss = TrainingLoss(self._seen.passes, settings.parameters, settings.backward)
        losses = [part.loss for part in self._seen.passes]
        if oracle is None and not any(value is None for value in losses):
            row["loss"] = over_ranks(loss.mean(losses), settings.model, mean=True)
        raw = self._raw_gradient(loss, clipped=clipped)
        raw_norm = global_norm(raw).item()
        self._measured = oracle or loss
        is_tested = self._memory.test.error is not None
        if is_tested:
            self._test_writes(raw, raw_norm)
        if oracle is not None:
            self._test_replays(None)
        elif not clipped:
            self._test_replays(raw)
        if not is_tested:  # now it is known that the loss trains nothing outside of the model
            self._test_writes(raw, raw_norm)
        row["self_test"] = self._memory.test.error
        if oracle is not None:
            self.num_gradients += len(oracle)
            with self._replay(oracle) as replay:
                first = replay.gradient()
            row["loss"] = over_ranks(first.loss.item(), settings.model, mean=True)
            grad_norm = global_norm(first.gradients).item()
            self._start = Start(copies(settings.parameters), first.gradients, grad_norm, None, raw_norm)
        else:
            if not clipped:  # it is in ``.grad``, where the step may change it
                raw = [None if gradient is None else gradient.detach().clone() for gradient in raw]
            self._start = Start(copies(settings.parameters), raw, raw_norm, raw, raw_norm)
        if halves is not None:  # after the step they would not be independent
            gradients: list[Gradients] = []
            for half in halves:
                self.num_gradients += 1
                with self._replay(half) as replay:
                    gradients.append(replay.gradient().gradients)
            row |= noise_of_halves(*gradients)

    def observe(self, optimizer: Optimizer | None, *, with_facts: bool) -> None:
        """Observe the optimizers that step from now on; ``optimizer`` has begun already.

        If another rank could not measure the start, this one does not go on either.
        """
        if any_rank(self._start is None, self._settings.model) and self._start is not None:
            self._start = None
            self.fail("another rank could not measure the start of the step")
        self._optimizers = StepObserver(self._settings.parameters, with_facts=with_facts)
        if optimizer is not None:
            self._optimizers.expect(optimizer)

    def after(self) -> None:
        """Measure along the step that the optimizers have taken, if its start was measured."""
        settings = self._settings
        start = self._start
        steps = self._optimizers
        assert steps is not None
        steps.stop()
        if start is None:
            return
        if self._seen.inputs:
            self._check_inputs(steps.optimizers)
        # An oracle's passes may have another precision than training's.
        oracle = settings.oracle
        computed_in = max(self._seen.eps, self._memory.test.eps) if oracle is None else oracle.eps
        eps = max(precision(settings.parameters), computed_in)
        row = self._row
        if row["batch_size"] is None and self._seen.trained.calls:
            row["batch_size"] = round(over_ranks(self._seen.trained.size, settings.model, mean=False))
        row |= norms_part(start, settings.parameters, settings.groups)
        row |= {"eps": eps, **steps.part(start.raw, start.raw_norm)}
        spikes = steps.spike_log()
        if spikes is not None:
            row["spikes"] = [spike for spike in spikes if spike not in self._memory.spikes]
            self._memory.spikes = spikes
        geometry = geometry_of(steps.optimizers, steps.rates, settings.parameters)
        row |= geometry.part
        if not (math.isfinite(start.grad_norm) and math.isfinite(row["step_norm"])):
            row["status"] = NONFINITE
        elif row["step_norm"] == 0:
            row["status"] = ZERO_STEP
        else:
            segment = Segment(
                start=start,
                step_norm=row["step_norm"],
                eps=eps,
                groups=settings.groups,
                layers=row.get("layers", {}),
                geometry=geometry,
            )
            self._measure_along(segment)
            row |= summary_part(row)

    def row(self) -> Row:
        """The row as far as it was measured, with its cost and the variance of the gradient."""
        row = dict(self._row)
        noise = row.get("noise")
        if noise is not None and row["batch_size"] is not None:
            row["grad_variance"] = row["batch_size"] * noise**2
        row["num_gradients"] = self.num_gradients
        return row

    @property
    def facts(self) -> Row:
        """Facts about the run for the header: how the optimizer steps and clips."""
        return {} if self._optimizers is None else self._optimizers.facts

    def fail(self, reason: str) -> None:
        """Note in the row why it is not complete."""
        self._row["status"] = f"{FAILED}{reason}"

    def close(self) -> None:
        """Put everything back, and observe no longer; may be called at any time, and more than once."""
        replay = self._settings.replay
        replay.close()
        replay.closure = no_closure  # it holds a batch
        replay.state = None
        replay.inputs = ()
        if self._optimizers is not None:
            self._optimizers.stop()

    def _check_parameters(self) -> None:
        now = trainable_parameters(self._settings.model)
        then = self._settings.parameters
        if [id(p) for p in now] != [id(p) for p in then]:
            raise ValueError(
                f"the model has other trainable parameters ({len(now)}) than when the probe was made "
                f"({len(then)}): some were frozen, unfrozen or replaced. Make a new probe, "
                "and give it this one's `state_dict()` to continue the trace."
            )

    def _check_inputs(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse an input of the model that an optimizer trains: replays do not move it."""
        inputs = self._seen.inputs.values()
        trained = [tensor for tensor in inputs for one in optimizers if trains_any(one, [tensor])]
        if trained:
            raise untracked_error(trained)

    def _raw_gradient(self, loss: TrainingLoss, *, clipped: bool) -> Gradients:
        """The gradient that training computed, before any clipping: from ``.grad``, or by a replay."""
        gradients = gradients_of(self._settings.parameters)
        # A hook that leaves a step out hides the gradient that was summed.
        if is_empty(gradients) and not any(part.summed for part in self._seen.passes):
            raise ValueError(
                "`.grad` is empty before the step. Call `loss.backward()` before it, and `zero_grad()` "
                "after it."
            )
        if not clipped:
            return gradients
        self.num_gradients += 1
        with self._replay(loss) as replay:
            return self._memory.test.replayed_gradient(replay, gradients, self._seen)

    def _test_replays(self, trained: Gradients | None) -> None:
        """Test the replays of the loss that is measured; they must give the gradient of training, if any."""
        test = self._memory.test
        is_due = trained is not None and any_rank(test.is_due(self._seen), self._settings.model)
        if test.error is not None and not is_due:
            return
        assert self._measured is not None
        with self._replay(self._measured) as replay:
            if trained is None or not test.confirms(replay, trained, self._seen):
                test.run(replay, trained, self._seen)

    def _test_writes(self, raw: Gradients, raw_norm: float) -> None:
        """Refuse a loss that writes to parameters where a replay moved them; they would not come back.

        The first time that fails the row alone: the first pass of a model may set its parameters up.
        """
        memory = self._memory
        is_of_batch = not isinstance(self._measured, GradientOracle)
        if memory.writes_tested or not is_of_batch or not 0 < raw_norm < math.inf:
            return
        assert self._measured is not None
        fraction = NEARBY * global_norm(self._settings.parameters).item() / raw_norm
        with self._replay(self._measured) as replay:
            replay.move(raw, fraction)
            try:
                replay.loss()
            except RuntimeError:  # it differentiates inside
                replay.gradient()
            is_moved = any_rank(replay.is_moved_from(raw, fraction), replay.model)
        if not is_moved:
            memory.writes_tested = True
            return
        reason = (
            "`closure` writes to trained parameters, through `.data` or in a hook. Write to them after "
            "`optimizer.step()`, or use `torch.nn.utils.parametrize`."
        )
        kind = NonDeterministicError if memory.writes_found else RuntimeError
        memory.writes_found = True
        raise kind(reason)

    def _replay(self, closure: Closure) -> Replay:
        """The replay of ``closure``, not yet open, from the state in which training's first pass started."""
        replay = self._settings.replay
        replay.closure = closure
        replay.state = self._seen.state
        if isinstance(closure, GradientOracle):  # its batches are its own: its gradients start from now
            self._oracle_state = self._oracle_state or PassState(self._settings.model)
            replay.state = self._oracle_state
        replay.inputs = list(self._seen.inputs.values())
        return replay

    def _measure_along(self, segment: Segment) -> None:
        """Measure the step that was taken, part by part: what comes before a failure is kept."""
        settings = self._settings
        memory = self._memory
        assert self._measured is not None
        replay = self._replay(self._measured)
        passes_before = replay.num_passes
        try:
            with replay:
                for name, measure in PARTS_AT_START.items():
                    if name in settings.estimators and memory.measurements % settings.estimators[name] == 0:
                        self._row |= measure(segment, replay)
                fractions = settings.fractions or (*short_fractions(memory.rates), 1.0)
                along = along_step(segment, replay, fractions)
        finally:
            price = 1 if settings.oracle is None else len(settings.oracle)
            self.num_gradients += price * (replay.num_passes - passes_before)
        self._row |= along
        if segment.start.grad_norm > 0:
            rate = along["secants"][0] * segment.step_norm / segment.start.grad_norm
            if 0 < rate < math.inf:
                memory.rates.append(rate)
