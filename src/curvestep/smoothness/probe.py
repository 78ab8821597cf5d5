r"""Measurement of smoothness along a training loop, which changes nothing.

:class:`SmoothnessProbe` decides when to measure, where rows go and who hears of them. One step, from its
start to its row, is :class:`~curvestep.smoothness.probed_step.ProbedStep`'s.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvestep._checks import check_choice, check_count, check_positive
from curvestep.distributed import any_rank, from_rank_zero, is_writer, spans_ranks
from curvestep.optimizer_family import check_optimizer
from curvestep.smoothness.determinism import NonDeterministicError
from curvestep.smoothness.estimators import check_estimators, check_fractions
from curvestep.smoothness.observer import (
    ForwardCalls,
    ForwardHook,
    Pass,
    StepObserver,
    optimizer_facts,
    trains_any,
)
from curvestep.smoothness.oracle import GradientOracle, check_oracle
from curvestep.smoothness.probed_step import ProbedStep, Setup
from curvestep.smoothness.replay import Closure, trainable_parameters
from curvestep.smoothness.schedule import Schedule
from curvestep.smoothness.snapshot import PassState
from curvestep.smoothness.trace import FAILED, Row, Trace

_CONTINUES = "Training continues; further failures are only recorded in the trace."


class SmoothnessProbe:
    r"""Measures smoothness at the steps of a training loop.

    .. code-block:: python

        probe = cs.SmoothnessProbe(model, every=5, trace="runs/mine/trace.jsonl")
        for x, y in loader:
            def loss_fn(): return F.cross_entropy(model(x), y)
            loss = loss_fn(); loss.backward()
            with probe(loss_fn):
                opt.step()
            opt.zero_grad()

    Where the loop is a framework's, or accumulates, scales or clips before the step, hooks do the same:

    .. code-block:: python

        probe = cs.SmoothnessProbe(model, every=50).watch(opt)
        loss = probe.record(lambda: F.cross_entropy(model(x), y))    # before each backward pass

    Any optimizer, and any clipping inside the block. Parameters, buffers, ``.grad``, optimizer state and
    random states end up as they would without the probe, bit for bit. On the training batch one fraction
    costs one extra forward and backward pass, because the gradient at :math:`x_k` is taken from ``.grad``.
    The first measurement checks that the closure is a function of the parameters alone and raises
    :class:`~curvestep.smoothness.determinism.NonDeterministicError`, which names the cause, if it is not.

    Args:
        model: The module that the loop calls, with all that the loss trains; the wrapped one under DDP, FSDP2
            and ``torch.compile``.
        every: Steps between measurements, whatever they cost. Default: the first ten rows come five steps
            apart, then so many that measuring takes 5 % of the gradients that training does.
        fractions: Where on the step to take gradients, each in (0, 1]. Default: three. Two are short, chosen
            by the last rows so that the gradient changes by at most a quarter of its norm: only before the
            overshoot can growth of smoothness be told from the step's own doing. The third is the whole
            step, for κ, the loss after it and the paper's estimate. Memory beyond training's, from the
            first measurement on: twice the parameters and once the largest of them, however many fractions;
            under DDP and FSDP2 three times the parameters.
        estimators: Columns of the trace: ``"smoothness"`` (the paper's), ``"local_smoothness"`` (four more
            gradients, and up to four more copies of the parameters) and ``"spectral_smoothness"`` (dozens to
            hundreds of gradients, and as many for each layer), and ``"optimizer_spectral"`` (the same in the
            optimizer's metric, without layers). A mapping ``{"smoothness": 1, "spectral_smoothness": 50}``
            takes each at every n-th measurement only; one without the first takes one gradient more, for κ,
            curvature and the loss after the step.
        oracle: Measure on this fixed set of batches instead of the training batch; costs one more gradient.
        trace: Where the rows go: a path, a :class:`~curvestep.smoothness.trace.Trace`, or None for memory.
        if_exists: What to do with a file that holds a run: ``"resume"`` continues it after
            :meth:`load_state_dict`, and without it writes to a new file beside it and prints
            its name (``trace-2.jsonl``; ``probe.trace.path``), ``"new"`` does that in any case,
            ``"overwrite"`` starts it again.
        max_overhead: Gradients for measuring over those for training, such as 0.05, after the first ten rows.
            Counted, not timed: rows do not depend on the machine. Never more often than ``every``.
        layers: Also measure each layer: True for one group per module, or names with their parameters.
        on_error: ``"mark"`` notes a failed measurement in its row and goes on, ``"raise"`` stops after the
            step, ``"off"`` warns once and measures nothing more, whatever the failure. The step itself is
            always untouched.
        keep: Objects that the loss function changes besides the model, such as metrics or a trainer with
            counters: replays put their attributes back.
        geometry: ``"auto"`` adds the smoothness along the step in the metric that the optimizer steps in
            (``optimizer_smoothness``), read from its state: no more gradients. ``"euclidean"`` leaves it out.
        backward: What replays call instead of ``loss.backward()``, such as ``fabric.backward`` or, for
            float16, ``lambda loss: scaler.scale(loss).backward()``.
        num_steps: How many steps are planned, for the header: later one can tell how far the run got.

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
        estimators: Iterable[str] | Mapping[str, int] = ("smoothness",),
        oracle: GradientOracle | None = None,
        trace: Trace | str | Path | None = None,
        if_exists: str = "resume",
        max_overhead: float | None = None,
        layers: bool | Mapping[str, Iterable[Tensor]] = False,
        on_error: str = "mark",
        geometry: str = "auto",
        keep: Sequence[object] = (),
        backward: Callable[[Tensor], object] | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.model = model
        self.parameters = trainable_parameters(model)
        self.fractions = None if fractions is None else check_fractions(fractions)
        self.estimators = check_estimators(estimators)
        self.oracle = check_oracle(oracle)
        self.on_error = check_choice("on_error", on_error, ("mark", "raise", "off"))
        self.geometry = check_choice("geometry", geometry, ("auto", "euclidean"))
        if geometry != "auto" and "optimizer_spectral" in self.estimators:
            raise ValueError('`estimators` has "optimizer_spectral", which needs geometry="auto".')
        for other in keep:
            if not hasattr(other, "__dict__"):
                raise TypeError(f"`keep` must hold objects with attributes, got {other!r}.")
        self.num_steps = None if num_steps is None else check_count("num_steps", num_steps)
        self.schedule = Schedule(every=every, max_overhead=max_overhead)
        check_choice("if_exists", if_exists, ("resume", "new", "overwrite"))
        choice = "continue" if if_exists == "resume" else if_exists
        self._is_own_file = isinstance(trace, (str, Path))
        self.trace = trace if isinstance(trace, Trace) else self._new_trace(trace, choice)
        self.step = 0
        self._setup = Setup(
            model=model,
            parameters=self.parameters,
            fractions=self.fractions,
            estimators=self.estimators,
            oracle=self.oracle,
            groups=layer_groups(model, self.parameters, layers),
            in_metric=geometry == "auto",
            keep=list(keep),
            backward=backward,
        )
        self._current = ProbedStep(self._setup)
        self._resumed = self._closed = self._failed = False
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
            record = self._current.record
            record.passes = [Pass(closure, state=record.state, loss=loss)]
        self._begin(batch_size=batch_size, halves=halves)
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

        At a step that is not due this is ``loss_fn()`` and nothing else.

        Args:
            loss_fn: Computes the loss of this batch, and again in replays: bind the batch's own variables.
                One that runs ``backward()`` itself will do, and is replayed whole.
            weight: Share of this micro-batch in the loss of the step, in any unit: of losses averaged over
                tokens, their number. The loss measured is :math:`\sum w_i f_i / \sum w_i`.
            batch_size: Samples in it, for the row. Default: the length of the model's first input.
        """
        _check_loss_fn(loss_fn)
        if self.due:
            self._check_fresh()
        if not self.due:
            return loss_fn()
        check_positive("weight", weight)
        if self._current.optimizers is not None:  # the step that had begun raised
            self._forget_step()
        record = self._current.record
        part = Pass(loss_fn, weight, PassState(self.model, self._setup.keep))
        if record.state is None:
            record.state = part.state
        loss = record.run(part, self.parameters)
        if batch_size is not None:
            part.calls.size = batch_size
            part.calls.calls = max(part.calls.calls, 1)
        return loss

    def _begin(
        self,
        optimizer: Optimizer | None = None,
        *,
        clipped: bool = False,
        batch_size: int | None = None,
        halves: tuple[Closure, Closure] | None = None,
    ) -> None:
        """Measure before the optimizer's step, if this step is due. Its batches were given to :meth:`record`.

        Args:
            optimizer: The one that steps, where its ``step`` has begun already, as in a framework's callback.
            clipped: Whether the gradient may have been clipped or scaled since the backward pass. It is then
                computed again: one more pass over the batch.
            batch_size: As of the probe's own call.
            halves: Likewise.
        """
        if self.step == 0 and not self._closed:
            self._check_fresh()
        if not self.due:
            return
        step = self._current
        step.row = {"step": self.step, "batch_size": batch_size}
        self._check_mode()
        try:
            self._attempt(partial(step.measure_start, clipped=clipped))
            if halves is not None:
                self._attempt(partial(step.measure_noise, halves))
        except BaseException:
            self._finish_step()
            raise
        if any_rank(step.start is None, self.model):
            step.start = None
        step.stepping = True
        step.optimizers = StepObserver(self.parameters)
        if optimizer is not None:
            step.optimizers.expect(check_optimizer(optimizer))

    def _end(self) -> None:
        """Measure after the optimizer's step, write the row, and count the step."""
        step, steps = self._current, self._current.optimizers
        if steps is None:
            self._finish_step()
            return
        try:
            step.stepping = False
            steps.stop()
            if step.start is not None:
                self._attempt(step.measure_end)
            if step.row.get("noise") is not None and step.row["batch_size"] is not None:
                step.row["grad_variance"] = step.row["batch_size"] * step.row["noise"] ** 2
            self._describe_run(steps)
            step.row["num_gradients"] = step.num_gradients
            self._write(step.row)
            self._setup.measurements += 1
        finally:
            self._finish_step()

    def watch(self, optimizer: Optimizer) -> SmoothnessProbe:
        """Measure around every step of ``optimizer`` that is due, by hooks on it; returns the probe.

        Another optimizer that trains the same model moves it outside of the measured steps; that is warned
        of once.

        The gradient may be clipped or scaled before the step: at a due step it is computed again, which costs
        one more pass. A step that a GradScaler skips is no step.
        """
        optimizer = check_optimizer(optimizer)
        if not trains_any(optimizer, self.parameters):
            raise ValueError(
                "`optimizer` has none of the model's trainable parameters: nothing would be measured."
            )
        if self._watched is not None:
            raise ValueError(
                "This probe watches an optimizer already. Make a probe for each, with the module that it "
                "trains, or put the steps of all into one `with probe(loss_fn):`."
            )
        self._watched = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._unheld = [p for p in self.parameters if id(p) not in held]
        return self

    def listen(self, listener: Callable[[Row], object]) -> SmoothnessProbe:
        """Call ``listener(row)`` with every row, on the rank that writes; returns the probe.

        The row is a dict with the keys of the trace. A listener
        that raises is reported once; training goes on.
        """
        self._listeners.append(listener)
        return self

    @property
    def due(self) -> bool:
        """Whether the step that comes is measured."""
        return self.step == self.schedule.next and not self._closed

    @property
    def self_test(self) -> float | None:
        """Relative difference of one gradient replayed twice: zero or rounding; None until tested."""
        return self._setup.test.error

    def __repr__(self) -> str:
        rows, spent = self.schedule.num_rows, self.schedule.num_gradients
        share = spent / max(self.step, 1)
        return f"<SmoothnessProbe: {rows} rows in {self.step} steps, {spent} extra gradients ({share:.0%})>"

    def snapshot(self) -> None:
        """Remember random states and buffers as they are now, as those that the training pass starts from.

        Only needed where the loss draws random numbers before it calls the model, or does not call it as a
        whole: then call this just before the loss is computed.
        """
        if self.due:
            record = self._current.record
            record.state = PassState(self.model, self._setup.keep)
            record.trained = ForwardCalls()

    def close(self) -> None:
        """Stop observing model and optimizer and close the trace's file; later steps are not measured."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self.trace.close()

    def state_dict(self) -> Row:
        """State for a checkpoint: a resumed run measures the same steps. The rows are in the trace."""
        return {
            "step": self.step,
            "measurements": self._setup.measurements,
            "rates": list(self._setup.rates),
            "spikes": list(self._setup.spikes),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Row) -> None:
        """Continue where :meth:`state_dict` was taken; rows measured after it are cut from the trace."""
        self.step = check_count("step", state["step"], least=0)
        self._setup.measurements = state["measurements"]
        self._setup.rates.extend(state.get("rates", ()))
        self._setup.spikes = list(state.get("spikes", ()))
        self.schedule.load_state_dict(state["schedule"])
        self._resumed = True
        self.trace.cut(self.step)
        self._forget_step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin, after the closure if the optimizer is given one: before it there is no gradient."""
        self._check_others()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not self.due or not callable(closure):
            self._begin(optimizer, clipped=True)
            return None

        def first_closure() -> object:
            loss = closure()
            if self._current.optimizers is None:
                self._begin(optimizer, clipped=True)
            return loss

        return (args[0],), {**kwargs, "closure": first_closure}

    def _check_fresh(self) -> None:
        """Do not add a run to the rows of another; a trace would keep the first row of a step."""
        if self.step == 0 and not self._resumed and any_rank(len(self.trace) > 0, self.model):
            if self._is_own_file:
                self._start_new_file()
                return
            where = self.trace.path or "in memory"
            words = (
                f"`trace` already holds a run ({where}), and this probe begins at step 0. Make it with "
                'if_exists="new" for a new file beside it, or "overwrite" to replace it. To resume '
                "that run, call `probe.load_state_dict(state)` first."
            )
            if self.on_error != "off":
                raise ValueError(words)
            self._warn_once("measure", f"{words} Nothing is measured.")
            self.close()

    def _see_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if not self.due or self._current.stepping or not torch.is_grad_enabled():
            return
        self._current.see_forward(args, kwargs)

    def _attempt(self, measure: Callable[[], None]) -> None:
        """Call ``measure``; its failure is noted in the row."""
        try:
            measure()
        except NonDeterministicError as error:
            if self.on_error != "off":
                raise  # no measurement would mean anything: better now than after the run
            self._note_failure(error)
        except Exception as error:
            self._note_failure(error)
            if self.on_error == "raise":
                self._write(self._current.row)
                raise

    def _note_failure(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._current.row["status"] = f"{FAILED}{reason}"
        text = f"A smoothness measurement failed at step {self.step}: {reason}"
        if self.on_error == "off":
            self._failed = True
            self._warn_once("measure", f"{text} No more are taken. {_CONTINUES}")
        elif self.on_error == "mark":
            self._warn_once("measure", f"{text} {_CONTINUES}")

    def _start_new_file(self) -> None:
        """Write this run beside the one that the file holds."""
        path = self.trace.path
        self.trace.close()
        self.trace = self._new_trace(path, "new")
        if path is not None:
            print(
                f"{path} holds another run. This run writes to {self.trace.path}. "
                "To resume the other, call `probe.load_state_dict(state)` first.",
                file=sys.stderr,
            )

    def _check_mode(self) -> None:
        """Warn of a model in eval mode, where that makes another loss."""
        layers = () if self.model.training else [m for m in self.model.modules() if _differs_in_eval(m)]
        if layers:
            self._warn_once(
                "mode",
                f"The model is in eval mode, and {type(layers[0]).__name__} acts otherwise in training. "
                "Sharpness is that of another loss. Call `model.train()` before the forward pass.",
            )

    def _after_step(self, *_: object) -> None:
        """End, and remember what the watched optimizer has no hold of."""
        self._end()
        self._versions = [p._version for p in self._unheld]

    def _check_others(self) -> None:
        """Warn once where such parameters move between two steps of the watched optimizer."""
        if self._versions and self._versions != [p._version for p in self._unheld]:
            self._warn_once(
                "optimizers",
                f"The probe watches {type(self._watched).__name__}, and something else trains "
                f"{len(self._unheld)} parameters of the same model outside of the measured steps. Make a "
                "probe for each optimizer, with its module. Or put the steps of all into one "
                "`with probe(loss_fn):`.",
            )

    def _describe_run(self, steps: StepObserver) -> None:
        """Complete the trace's header by what is known at the first measured step."""
        facts = optimizer_facts(steps.optimizers[0]) if steps.optimizers else {}
        known = {"start_lr": steps.lr, "training_mode": self.model.training, "num_steps": self.num_steps}
        with self._writing():
            self.trace.describe({**facts, **known})

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A block whose failure to write is reported once; the rows stay in memory."""
        try:
            yield
        except OSError as error:
            if self.on_error == "raise":
                raise
            self._warn_once(
                "write", f"The trace cannot be written, rows stay in memory: {error}. {_CONTINUES}"
            )

    def _write(self, row: Row) -> None:
        with self._writing():
            self.trace.append(row)
        for listener in self._listeners if is_writer(self.model) else ():
            try:
                listener(dict(row))
            except Exception as error:
                self._warn_once("listen", f"A listener of the probe failed at step {self.step}: {error!r}.")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=3)

    def _finish_step(self) -> None:
        step = self._current
        if self.on_error == "off" and step.optimizers is not None and any_rank(self._failed, self.model):
            self.close()
        if self.step == self.schedule.next:
            self._forget_step()
            self.schedule.finished(self.step, num_gradients=step.num_gradients)
            if self.schedule.max_overhead is not None:  # a rank that failed may have counted otherwise
                self.schedule.next = round(from_rank_zero(self.schedule.next, self.model))
        self.step += 1

    def _forget_step(self) -> None:
        if self._current.optimizers is not None:
            self._current.optimizers.stop()
        self._current = ProbedStep(self._setup)

    def _new_trace(self, path: str | Path | None, if_exists: str) -> Trace:
        header = {
            "model": type(self.model).__name__,
            "num_parameters": sum(p.numel() for p in self.parameters),
            "dtype": str(self.parameters[0].dtype).removeprefix("torch."),
            "measured_on": "training batch" if self.oracle is None else f"{len(self.oracle)} fixed batches",
            "fractions": self.fractions and list(self.fractions),
            "estimators": dict(self.estimators),
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


def _differs_in_eval(module: nn.Module) -> bool:
    """Whether a layer acts in training in another way: it normalizes by the batch, or drops."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm)


def layer_groups(
    model: nn.Module, parameters: Sequence[Tensor], layers: bool | Mapping[str, Iterable[Tensor]]
) -> dict[str, list[int]]:
    """Names of layers with the indices of their parameters: one for each module, or as given."""
    if not layers:
        return {}
    index = {id(p): i for i, p in enumerate(parameters)}
    if layers is True:
        return _groups_of_modules(model, index)
    chosen = {name: list(tensors) for name, tensors in layers.items()}
    for name, tensors in chosen.items():
        foreign = sum(id(p) not in index for p in tensors)
        if foreign or not tensors:
            raise ValueError(
                f"`layers[{name!r}]` must be trainable parameters of the model, at least one; "
                f"{foreign} of {len(tensors)} are not."
            )
    return {name: [index[id(p)] for p in tensors] for name, tensors in chosen.items()}


def _groups_of_modules(model: nn.Module, index: Mapping[int, int]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for name, p in model.named_parameters():
        if id(p) in index:
            plain = name.removeprefix("module.").removeprefix("_orig_mod.")
            groups.setdefault(plain.rpartition(".")[0] or plain, []).append(index[id(p)])
    return groups
