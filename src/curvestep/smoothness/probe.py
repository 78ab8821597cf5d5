r"""Measurement of smoothness along a training loop, which changes nothing.

:class:`SmoothnessProbe` decides when to measure, where rows go and who hears of them. One step, from its
start to its row, is :class:`~curvestep.smoothness.probed_step.ProbedStep`'s.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvestep.checks import check_choice, check_count, check_positive
from curvestep.optimizer_family import check_optimizer
from curvestep.parameter_names import remember_names
from curvestep.smoothness.determinism import NonDeterministicError
from curvestep.smoothness.measurement import check_estimators, layer_groups
from curvestep.smoothness.observer import (
    ForwardCalls,
    ForwardHook,
    ObservedStep,
    Pass,
    RecentLoss,
    differs_in_eval,
    trains_any,
)
from curvestep.smoothness.oracle import GradientOracle, check_oracle
from curvestep.smoothness.probed_step import Memory, ProbedStep, Settings, no_closure
from curvestep.smoothness.replay import Closure, Replay, versions_of
from curvestep.smoothness.schedule import Schedule, check_fractions
from curvestep.smoothness.snapshot import PassState, restore_on_exit
from curvestep.smoothness.surroundings import Surroundings
from curvestep.tensors.distributed import any_rank, from_rank_zero, is_writer, over_ranks, spans_ranks
from curvestep.trace.schema import LAYER_CURVATURE, Row
from curvestep.trace.trace import Trace

_CONTINUES = "Training continues; further failures are only recorded in the trace."


class SmoothnessProbe:
    r"""Measures smoothness at the steps of a training loop.

    .. code-block:: python

        probe = cs.SmoothnessProbe(model, every=50, trace="runs/mine/trace.jsonl").watch(optimizer)
        for x, y in loader:
            loss = probe.record(lambda: F.cross_entropy(model(x), y))    # before each backward pass
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    It works with any optimizer, clipping, loss scaling or accumulation. Where hooks do not fit,
    ``with probe(loss_fn): optimizer.step()`` measures the one step inside the block, for one gradient less.

    Parameters, buffers, ``.grad``, optimizer state and random states end up as they would without the probe,
    bit for bit. The first measurement checks that the closure is a function of the parameters alone; if not,
    :class:`~curvestep.smoothness.determinism.NonDeterministicError` names the cause.

    Args:
        model: The module that the loop calls, with all that the loss trains; the wrapped one under DDP, FSDP2
            and ``torch.compile``.
        every: Steps between measurements, whatever they cost. Default: the first ten rows come five steps
            apart, then so many that measuring takes 5 % of the gradients that training does.
        fractions: Where on the step to take gradients, each in (0, 1]. Default: the whole step, for κ and the
            paper's estimate, and two short ones, over which the gradient changes by at most a quarter of its
            norm: only before the overshoot can growth of smoothness be told from the step's own doing.
            Memory beyond training's: twice the parameters and once the largest of them, however many
            fractions; under DDP and FSDP2 three times the parameters.
        estimators: What to measure beside the paper's ``"smoothness"``, which is in every row:
            ``"local_smoothness"`` (four more gradients, and up to four more copies of the parameters),
            ``"spectral_smoothness"`` (dozens to hundreds of gradients) and ``"layer_curvature"``, how much of
            the curvature along the step lies within layers (one gradient for each layer). A mapping
            ``{"local_smoothness": 1, "spectral_smoothness": 50}`` takes each at every n-th measurement only.
        oracle: Measure on this fixed set of batches instead of the training batch; costs one more gradient.
        trace: File that the rows go to; None for memory.
        if_exists: What to do with a file that holds a run: ``"resume"`` continues it after
            :meth:`load_state_dict`, and without it writes to a new file beside it (``trace-2.jsonl``) and
            prints its name; ``"new"`` does that in any case, ``"overwrite"`` starts it again.
        max_overhead: Gradients for measuring over those for training, such as 0.05, after the first ten rows.
            Counted, not timed: rows do not depend on the machine. Never more often than ``every``.
        layers: Also measure smoothness and norms of each layer: the parameters of one module. On with
            ``"layer_curvature"``.
        on_error: ``"mark"`` notes a failed measurement in its row and goes on, ``"raise"`` stops after the
            step, ``"off"`` warns once and measures nothing more. The step itself is always untouched.
        backward: What replays call instead of ``loss.backward()``, such as ``fabric.backward`` or, for
            float16, ``lambda loss: scaler.scale(loss).backward()``.
        num_steps: How many steps are planned, for the header.

    Attributes:
        trace: The rows measured so far.
        step: How many steps have been taken.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | None = None,
        fractions: Iterable[float] | None = None,
        estimators: Iterable[str] | Mapping[str, int] = (),
        oracle: GradientOracle | None = None,
        trace: str | Path | None = None,
        if_exists: str = "resume",
        max_overhead: float | None = None,
        layers: bool = False,
        on_error: str = "mark",
        backward: Callable[[Tensor], object] | None = None,
        num_steps: int | None = None,
    ) -> None:
        if fractions is not None:
            fractions = check_fractions(fractions)
        if num_steps is not None:
            check_count("num_steps", num_steps)
        self.on_error = check_choice("on_error", on_error, ("mark", "raise", "off"))
        chosen = check_estimators(estimators)
        replay = Replay(model, no_closure)
        remember_names(model)
        self.model = model
        self.num_steps = num_steps
        self.parameters = replay.parameters
        self.oracle = check_oracle(oracle)
        self._settings = Settings(
            model=model,
            parameters=replay.parameters,
            replay=replay,
            fractions=fractions,
            estimators=chosen,
            oracle=self.oracle,
            backward=backward,
            groups=layer_groups(model, self.parameters) if layers or LAYER_CURVATURE in chosen else {},
        )
        self.schedule = Schedule(every=every, max_overhead=max_overhead)
        self.trace = self._new_trace(trace, if_exists)
        self.step = 0
        self._memory = Memory()
        self._recent = RecentLoss()
        self._seen = ObservedStep()  # what training does for the step that comes
        self._measured: ProbedStep | None = None  # that step, once its measurement began
        self._optimizer_steps = False  # and may call the model as often as it likes
        self._closed = False
        self._failed = False
        self._warned: set[str] = set()
        self._listeners: list[Callable[[Row], object]] = []
        hook = ForwardHook(self._see_forward)
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(hook, with_kwargs=True)]
        self._watched: Optimizer | None = None
        self._unheld: list[Tensor] = []  # parameters that the watched optimizer does not have
        self._versions: list[int] = []  # theirs after its last step

    @contextmanager
    def __call__(
        self,
        closure: Closure,
        *,
        loss: Tensor | float | None = None,
        batch_size: int | None = None,
        halves: tuple[Closure, Closure] | None = None,
    ) -> Iterator[None]:
        r"""Run the optimizer's step inside; measure around it if this step is due.

        Args:
            closure: Computes this step's loss again, as in :class:`~curvestep.smoothness.replay.Replay`.
            loss: The loss that training computed, for the row. Without it the row holds the loss of the same
                batch after the step.
            batch_size: For the row. Default: the length of the model's first input, over all calls.
            halves: The mean loss of each half of the batch, for the noise of the batch's gradient,
                :math:`\sigma = \lVert g_1 - g_2 \rVert / 2`, and the two parts of the gradient noise scale,
                ``grad_variance`` and ``grad_signal``. Costs one more pass over the batch.
        """
        _check_loss_fn(closure)
        if self.due:
            self._seen.passes = [Pass(closure, state=self._seen.state, loss=loss)]
        self._begin(None, clipped=False, batch_size=batch_size, halves=halves)
        try:
            yield
        except BaseException:
            self._finish_step()
            raise
        self._end()

    def record(self, loss_fn: Closure, weight: float = 1.0, *, batch_size: int | None = None) -> Any:
        r"""``loss_fn()``, remembered for the step that comes; call it before each backward pass.

        .. code-block:: python

            for x, y in micro_batches:
                loss = probe.record(lambda: F.cross_entropy(model(x), y))
                (loss / len(micro_batches)).backward()

        At a step that is not due this is ``loss_fn()``, whose loss is added up for the next row.

        Args:
            loss_fn: Computes the loss of this batch, and again in replays: bind the batch's own variables.
                One that runs ``backward()`` itself will do, and is replayed whole.
            weight: Share of this micro-batch in the loss of the step, in any unit: of losses averaged over
                tokens, their number. The loss measured is :math:`\sum w_i f_i / \sum w_i`.
            batch_size: Samples in it, for the row. Default: the length of the model's first input.

        Returns:
            What ``loss_fn`` returns.

        Raises:
            TypeError: ``loss_fn`` is no function.
            ValueError: ``weight`` is not positive and finite.
        """
        _check_loss_fn(loss_fn)
        if weight != 1.0:
            check_positive("weight", weight)
        if not self._measures():
            loss = loss_fn()
            self._recent.see(loss, weight, self.step)
            return loss
        if self._measured is not None:  # the step that had begun raised
            self._forget_step()
        part = Pass(loss_fn, weight, PassState(self.model))
        self._seen.state = self._seen.state or part.state
        loss = self._seen.run(part, self.parameters)
        self._recent.see(loss, weight, self.step)
        if batch_size is not None:
            part.calls.size = batch_size
            part.calls.calls = max(part.calls.calls, 1)
        return loss

    def _begin(
        self,
        optimizer: Optimizer | None,
        *,
        clipped: bool,
        batch_size: int | None = None,
        halves: tuple[Closure, Closure] | None = None,
    ) -> None:
        """Measure before the optimizer's step, if this one is due; ``optimizer`` has begun its own."""
        if not self._measures():
            return
        if not self.model.training:
            self._warn_of_eval_mode()
        row: Row = {"step": self.step, "batch_size": batch_size}
        step = self._measured = ProbedStep(self._settings, self._memory, self._seen, row)
        try:
            self._attempt(step, partial(step.before, clipped=clipped, halves=halves))
            step.observe(optimizer, with_facts=len(self.trace) == 0)
        except BaseException:
            self._finish_step()
            raise
        self._optimizer_steps = True

    def _end(self, *_: object) -> None:
        """Measure after the optimizer's step, write the row, and count the step."""
        step = self._measured
        self._optimizer_steps = False
        try:
            if step is not None:
                self._attempt(step, step.after)
                self._write(step)
                self._memory.measurements += 1
        finally:
            self._finish_step()
        self._versions = versions_of(self._unheld)

    def watch(self, optimizer: Optimizer) -> SmoothnessProbe:
        """Measure around every step of ``optimizer`` that is due, by hooks on it; returns the probe.

        The gradient may be clipped or scaled before the step: at a due step it is computed again, which costs
        one more pass. A step that a GradScaler skips is no step. If something else trains the same model
        between the measured steps, that is warned of once.

        Returns:
            The probe itself.

        Raises:
            ValueError: the optimizer trains none of the parameters, or the probe watches one already.
        """
        optimizer = check_optimizer(optimizer)
        if not trains_any(optimizer, self.parameters):
            raise ValueError("`optimizer` has none of the model's trainable parameters: nothing to measure.")
        if self._watched is not None:
            raise ValueError(
                "This probe watches an optimizer already. Make a probe for each, with the module that it "
                "trains, or put the steps of all into one `with probe(loss_fn):`."
            )
        self._watched = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._end),
        ]
        self._unheld = [p for p in self.parameters if not trains_any(optimizer, [p])]
        return self

    def listen(self, listener: Callable[[Row], object]) -> SmoothnessProbe:
        """Call ``listener(row)`` with every row, a dict, on the rank that writes; returns the probe.

        A listener that raises is reported once; training goes on.

        Returns:
            The probe itself.
        """
        self._listeners.append(listener)
        return self

    @property
    def due(self) -> bool:
        """True if the next step will be measured."""
        return self.step == self.schedule.next and not self._closed

    def __repr__(self) -> str:
        rows = self.schedule.num_rows
        spent = self.schedule.num_gradients
        share = spent / max(self.step, 1)
        return f"<SmoothnessProbe: {rows} rows in {self.step} steps, {spent} extra gradients ({share:.0%})>"

    def snapshot(self) -> None:
        """Remember random states and buffers as they are now, as those that the training pass starts from.

        Only needed where the loss draws random numbers before it calls the model, or does not call it as a
        whole: then call this just before the loss is computed.
        """
        if self.due:
            self._seen.state = PassState(self.model)
            self._seen.trained = ForwardCalls()

    def close(self) -> None:
        """Stop observing model and optimizer and close the trace's file; later steps are not measured."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self.trace.close()

    def state_dict(self) -> Row:
        """State for a checkpoint: a resumed run measures the same steps. The rows are in the trace.

        Returns:
            A dictionary of plain values, for a checkpoint.
        """
        memory = self._memory
        return {
            "step": self.step,
            "measurements": memory.measurements,
            "rates": [*memory.rates],
            "spikes": [*memory.spikes],
            "recent": asdict(self._recent) | {"total": float(self._recent.total)},
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Row) -> None:
        """Continue where :meth:`state_dict` was taken; rows measured after it are cut from the trace."""
        self.step = check_count("step", state["step"], least=0)
        self._memory.measurements = state["measurements"]
        self._memory.rates.extend(state.get("rates", ()))
        self._memory.spikes = list(state.get("spikes", ()))
        self._recent = RecentLoss(**state.get("recent", {}))
        self.schedule.load_state_dict(state["schedule"])
        self.trace.cut(self.step)
        self._forget_step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin, after the closure if the optimizer is given one: before it there is no gradient."""
        if self._versions and self._versions != versions_of(self._unheld):
            self._warn_of_others()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not self.due or not callable(closure):
            self._begin(optimizer, clipped=True)
            return None

        def first_closure() -> object:
            loss = closure()
            if self._measured is None:
                self._begin(optimizer, clipped=True)
            return loss

        return (args[0],), {**kwargs, "closure": first_closure}

    def _measures(self) -> bool:
        """Whether this step is measured; a run is not added to the rows of another, nor cut from them."""
        if self.due and self.step == 0 and any_rank(len(self.trace) > 0, self.model):
            path = self.trace.path
            self.trace.close()
            self.trace = self._new_trace(path, "new")  # the old one would keep its own row of a step
            if path is not None:  # of the rank that writes
                words = (
                    f"{path} holds another run. This run writes to {self.trace.path}. To resume that run, "
                    "call `probe.load_state_dict(state)` first."
                )
                print(words, file=sys.stderr)
        return self.due

    def _see_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Called before each call of the model: by training, by this probe's replay, or by another's."""
        if self._optimizer_steps or not self.due or not torch.is_grad_enabled():
            return
        with_inputs = not self._memory.test.confirmed
        if self._settings.replay in Replay.running.replays:
            self._seen.replayed.record(args, kwargs, with_inputs=with_inputs)
        elif not Replay.running.replays:
            device = self.parameters[0].device.type
            self._seen.see_call(self.model, args, kwargs, device, with_inputs=with_inputs)

    def _attempt(self, step: ProbedStep, measure: Callable[[], None]) -> None:
        """Call ``measure``; its failure is noted in the row. What the loss reads elsewhere is put back."""
        try:
            with self._surroundings_kept():
                measure()
        except Exception as error:
            if isinstance(error, NonDeterministicError) and self.on_error != "off":
                raise  # no measurement would mean anything: better now than after the run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            step.fail(reason)
            self._failed = True
            self._warn_of_failure(reason)
            if self.on_error == "raise":
                self._write(step)
                raise

    def _surroundings_kept(self) -> restore_on_exit:
        """A block at whose end globals, closures and objects that the loss reads are as before."""
        losses = [part.loss_fn for part in self._seen.passes]
        if self.oracle is not None:
            losses.append(self.oracle.loss_of_batch)
        try:
            return restore_on_exit(Surroundings(losses, self.model).restore)
        except RuntimeError as error:
            raise NonDeterministicError(str(error)) from None

    def _warn_of_failure(self, reason: str) -> None:
        text = f"A smoothness measurement failed at step {self.step}: {reason}"
        if self.on_error == "off":
            text = f"{text} No more are taken."
        if self.on_error != "raise":
            self._warn_once("measure", f"{text} {_CONTINUES}")

    def _warn_of_eval_mode(self) -> None:
        """Warn of a model in eval mode, where that makes another loss."""
        for layer in self.model.modules():
            if differs_in_eval(layer):
                self._warn_once(
                    "mode",
                    f"The model is in eval mode, and {type(layer).__name__} behaves differently in training. "
                    "So the measured sharpness is not that of training. Call `model.train()` before the "
                    "forward pass.",
                )

    def _warn_of_others(self) -> None:
        """Warn once that such parameters moved between two steps of the watched optimizer."""
        self._warn_once(
            "optimizers",
            f"The probe watches {type(self._watched).__name__}, and something else trains "
            f"{len(self._unheld)} parameters of the same model outside of the measured steps. Make a "
            "probe for each optimizer, with its module. Or put the steps of all into one "
            "`with probe(loss_fn):`.",
        )

    def _write(self, step: ProbedStep) -> None:
        """Hand on the row; the first completes the trace's header."""
        row = step.row()
        recent = self._recent
        self._recent = RecentLoss()
        if recent.num_steps and self.oracle is None:  # an oracle's loss is no mean of batches
            row["recent_loss"] = over_ranks(float(recent.total) / recent.weight, self.model, mean=True)
            row["recent_steps"] = recent.num_steps
        if len(self.trace) == 0:
            facts = {**step.facts, "training_mode": self.model.training, "num_steps": self.num_steps}
            self._keep(partial(self.trace.describe, facts))
        self._keep(partial(self.trace.append, row))
        if not is_writer(self.model):
            return
        for listener in self._listeners:
            try:
                listener(dict(row))
            except Exception as error:
                text = f"A listener of the probe failed at step {self.step}: {error!r}."
                self._warn_once("listen", text)

    def _keep(self, write: Callable[[], object]) -> None:
        """Write to the trace; a full disk is reported once, and the rows stay in memory."""
        try:
            write()
        except OSError as error:
            if self.on_error == "raise":
                raise
            self._warn_once(
                "write", f"The trace cannot be written, so rows stay in memory: {error}. {_CONTINUES}"
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=3)

    def _finish_step(self) -> None:
        step = self._measured
        if self.on_error == "off" and step is not None and any_rank(self._failed, self.model):
            self.close()
        if self.step == self.schedule.next:
            self._forget_step()
            self.schedule.finished(self.step, num_gradients=0 if step is None else step.num_gradients)
            # A rank that failed may have counted otherwise.
            self.schedule.next = round(from_rank_zero(self.schedule.next, self.model))
        self.step += 1

    def _forget_step(self) -> None:
        if self._measured is not None:
            self._measured.close()  # Ctrl-C may have come just before a replay put everything back
        self._measured = None
        self._optimizer_steps = False
        self._seen = ObservedStep()

    def _new_trace(self, path: str | Path | None, if_exists: str) -> Trace:
        header = {
            **self._settings.facts,
            "every": self.schedule.every,
            "max_overhead": self.schedule.max_overhead,
            "world_size": dist.get_world_size() if spans_ranks(self.model) else 1,
        }
        return Trace(path if is_writer(self.model) else None, header=header, if_exists=if_exists)


def _check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn):
        raise TypeError(
            "The probe needs a function that computes the loss, to compute it again: "
            f"`lambda: criterion(model(x), y)`, got a {type(loss_fn).__name__}."
        )
