"""The recorder of the last steps of a training loop, which can be asked why one of them raised the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.autopsy.cause import FEWEST_STEPS
from curvestep.autopsy.explain import explain
from curvestep.autopsy.explanation import Explanation
from curvestep.autopsy.kept_step import (
    KeptBatch,
    KeptLoss,
    KeptStep,
    StepStart,
    first_entries,
    norms_of,
    scaler_state_of,
    settings_of,
    versions_of,
)
from curvestep.autopsy.rewind import check_unmoved, go_back
from curvestep.checks import check_count
from curvestep.optimizer_family import check_optimizer, parameters_of, register_first_step_pre_hook
from curvestep.parameter_names import remember_names
from curvestep.smoothness.observer import ObservedStep, Pass, trains_any
from curvestep.smoothness.replay import trainable_parameters
from curvestep.smoothness.snapshot import PassState
from curvestep.smoothness.surroundings import Surroundings
from curvestep.tensors.distributed import communicates


@runtime_checkable
class Stateful(Protocol):
    """What steps along with an optimizer and has a state, such as a scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state."""
        ...


class Autopsy:
    r"""Keeps the last steps of a training loop, and says why one of them raised the loss.

    .. code-block:: python

        spikes = cs.Autopsy(model, loss_of_batch).watch(optimizer)
        for batch in loader:
            optimizer.zero_grad()
            loss = spikes.record(batch)          # instead of loss_of_batch(batch)
            loss.backward()
            optimizer.step()
        print(spikes.explain())                  # the largest spike of the kept steps; or explain(412)
        spikes.rewind(412)                       # go on as if that batch had never been seen

    :meth:`explain` takes the step again with one thing changed at a time: half its length, another batch, the
    momentum or the second moment of this batch alone, float32, clipped, one block left out.

    The run itself is untouched, bit for bit. What the loss reads outside of the model comes back too:
    globals, variables around it, attributes of objects, lists and dicts. A loss that takes from an iterator
    is refused before it is run again. Attributes of classes and of imported modules are not put back.

    The function gets the batch as an argument, because a closure over the loop's variables would see the
    last batch whenever it is called later.

    Memory, on the host: two copies of the parameters and of the optimizer's state, and ``2 * keep`` batches,
    each with some 30 kB of random states and the model's buffers. Copies are taken every ``keep`` steps; the
    steps between are found again by replaying them. Something else that writes to parameters or moments
    between steps, such as a loaded checkpoint, costs a copy more, and there are four at most.

    Args:
        model: The module that the loss trains; on one process.
        loss_of_batch: The loss of a batch, as a scalar tensor, from the model in training.
        keep: How many steps are kept, at least; at most twice as many are.

    Attributes:
        step: How many steps were taken since :meth:`watch`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> spikes = Autopsy(model, lambda x: model(x).square().mean(), keep=8).watch(opt)
        >>> for k in range(8):
        ...     opt.zero_grad()
        ...     spikes.record(torch.full((2, 1), 30.0 if k == 6 else 1.0)).backward()
        ...     opt.step()
        >>> spikes.explain(6).cause
        'batch'
    """

    def __init__(self, model: nn.Module, loss_of_batch: Callable[..., object], *, keep: int = 16) -> None:
        if not callable(loss_of_batch):
            raise TypeError(f"`loss_of_batch` must be a function of a batch, got {loss_of_batch!r}.")
        self.parameters = trainable_parameters(model)
        if communicates(model):
            raise NotImplementedError("`model` is trained by several processes; Autopsy works with one.")
        self.model = model
        self.loss_of_batch = loss_of_batch
        self.keep = check_count("keep", keep, least=FEWEST_STEPS + 1)
        self.step = 0
        self._record = ObservedStep()  # of the step that comes
        self._nbytes = 0  # of its batches
        self._changed_for_good = False  # a tensor that no replay could put back
        self._starts: list[StepStart] = []
        self._steps: list[KeptStep] = []
        self._versions: list[tuple[int, int]] = []  # of parameters and moments after the last step
        self._settings: list[dict[str, object]] = []
        self._norms: list[Tensor | None] = []  # of the gradient that the step found
        self._entries: Tensor | None = None
        self._scaler_state: dict[str, Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._stateful: Sequence[Stateful] = ()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, optimizer: Optimizer, *stateful: Stateful) -> Autopsy:
        """Keep the steps of ``optimizer`` from now on, by hooks on it; returns the recorder.

        Args:
            optimizer: Trains parameters of the model.
            *stateful: What steps along with it and :meth:`rewind` is to put back as well: schedulers, a
                GradScaler, or whatever else has ``state_dict()`` and ``load_state_dict()``.

        Returns:
            The recorder itself.

        Raises:
            ValueError: an optimizer is watched already, or it trains other parameters too.
            TypeError: an object has no ``state_dict()``.
        """
        inner = check_optimizer(optimizer)
        if self._hooks:
            raise ValueError("`optimizer`: this recorder watches one already. Make a recorder for each.")
        known = {id(p) for p in self.model.parameters()}
        others = sum(id(p) not in known for p in parameters_of(inner))
        if others or not trains_any(inner, self.parameters):
            raise ValueError(
                f"`optimizer` must train parameters of `model` alone; {others} of its parameters are others."
            )
        for one in stateful:
            if not isinstance(one, Stateful):
                raise TypeError(
                    "What is watched beside the optimizer must have `state_dict()` and `load_state_dict()`, "
                    f"got a {type(one).__name__}."
                )
        remember_names(self.model)
        self._optimizer = inner
        self._stateful = stateful
        self._hooks = [
            register_first_step_pre_hook(inner, self._before_step),  # before `clip` sees the gradient
            inner.register_step_post_hook(self._after_step),
        ]
        return self

    def record(self, batch: object) -> Tensor:
        """``loss_of_batch(batch)``, kept for the step that comes; once for each micro-batch of the step.

        Returns:
            The loss.

        Raises:
            RuntimeError: no optimizer is watched.
        """
        if not self._hooks:
            raise RuntimeError("No optimizer is watched. Call `watch(optimizer)` before `record(batch)`.")
        kept = KeptBatch(batch)
        states = [copy.deepcopy(one.state_dict()) for one in self._stateful]
        again = KeptLoss(self.loss_of_batch, kept, self.parameters[0].device.type, states)
        state = PassState(self.model)
        checksums = [] if self._steps else state.checksums()
        part = Pass(partial(self.loss_of_batch, batch), state=state)
        loss = self._record.run(part, self.parameters)
        self._changed_for_good = self._changed_for_good or state.changed_since(checksums) is not None
        part.loss_fn = again
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(again.keep_scale)
        self._nbytes += kept.nbytes
        return loss

    def explain(self, step: int | None = None) -> Explanation:
        """Explain why a kept step raised the loss, with the share of the rise that each change takes away.

        Takes about as long as a hundred training steps. The rise is the median over kept batches.

        Args:
            step: Its number, counted from 0 at :meth:`watch`. Default: the step that raised the loss by the
                largest multiple of what the steps before it changed it by.

        Returns:
            What was found: print it, or read its ``cause``.

        Raises:
            RuntimeError: too few steps are kept, or taking them again does not lead to the same parameters.
            ValueError: ``step`` is not kept.
        """
        self._check_kept(step)
        surroundings = Surroundings(self.loss_of_batch, self.model)
        try:
            return explain(self.model, self._starts, self._steps, step)
        finally:
            surroundings.restore()

    def rewind(self, step: int) -> None:
        """Put training back to where it was when ``step`` got its first batch, to go on without that batch.

        .. code-block:: python

            if loss > 10:
                spikes.rewind(spikes.step)               # of a step that was not taken yet
            if (spike := spikes.explain()).step > 400:
                spikes.rewind(spike.step)                # and feed the batches after that one

        Put back are parameters, moments, counters of clipping, buffers, random states, attributes of the
        modules, the settings of the optimizer's groups, and what :meth:`watch` was given besides. The run
        goes on, bit for bit, as one that never saw the batches since. Gradients are cleared. The data loader
        is yours: feed the batches that are to be trained on.

        Args:
            step: Its number, counted from 0 at :meth:`watch`. The step that is open is one, too.

        Raises:
            ValueError: the step is not kept. Nothing was changed.
            RuntimeError: the model was moved to another device or type since, or the kept steps, taken again,
                do not give the same bits. Nothing was changed.
        """
        numbers = [kept.number for kept in self._steps]
        if step == self.step and self._record.passes:
            passes = self._record.passes
            check_unmoved(self.parameters, self._starts[-1:])
        elif step in numbers:
            place = numbers.index(step)
            passes = self._steps[place].passes
            assert self._optimizer is not None
            is_home_known = self._versions == versions_of(self.parameters, self._optimizer)
            go_back(self.model, self._optimizer, self._starts, self._steps, step, is_home_known=is_home_known)
            self._starts = [start for start in self._starts if start.number <= step]
            self._steps = self._steps[:place]
            self.step = step
            self._versions = versions_of(self.parameters, self._optimizer)
        else:
            kept = f"Steps {numbers[0]} to {numbers[-1]} are." if numbers else "None is."
            raise ValueError(f"`step` {step} is not kept, so nothing was changed. {kept}")
        first = passes[0]
        assert first.state is not None
        assert isinstance(first.loss_fn, KeptLoss)
        for p in self.parameters:
            p.grad = None
        for one, state in zip(self._stateful, first.loss_fn.stateful, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        first.state.restore()
        self._record = ObservedStep()
        self._nbytes = 0

    def _check_kept(self, step: int | None) -> None:
        if len(self._steps) <= FEWEST_STEPS:
            raise RuntimeError(
                f"{len(self._steps)} steps are kept, too few to tell a spike: at least {FEWEST_STEPS} must "
                "come before it."
            )
        numbers = [kept.number for kept in self._steps]
        if step is not None and step not in numbers[FEWEST_STEPS:]:
            raise ValueError(
                f"`step` {step} is not kept with {FEWEST_STEPS} before it. Ask for {numbers[FEWEST_STEPS]} "
                f"to {numbers[-1]}, sooner after a spike, or with a larger `keep`."
            )
        if self._changed_for_good:
            raise RuntimeError(
                "No step can be explained: a pass changes a large tensor in place, and nothing puts it back. "
                "Make it a buffer: `module.register_buffer(name, tensor)`."
            )
        self._check_recorded()

    def _check_recorded(self) -> None:
        for kept in self._steps:
            if not kept.passes:
                raise RuntimeError(
                    f"Step {kept.number} was taken without `record(batch)`, so it cannot be taken again."
                )

    @property
    def nbytes(self) -> int:
        """Host memory of the kept parameters, moments and batches."""
        return sum(kept.nbytes for kept in (*self._steps, *self._starts))

    def close(self) -> None:
        """Stop watching; what was kept can still be explained."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._settings = settings_of(optimizer)
        gradients = [p.grad for p in self.parameters]
        self._norms = norms_of(gradients)
        self._entries = first_entries(gradients)
        self._scaler_state = scaler_state_of(optimizer)
        is_break = self._versions != versions_of(self.parameters, optimizer)
        if is_break or self.step >= self._starts[-1].number + self.keep:
            start = StepStart(self.step, self.parameters, optimizer, is_break=is_break)
            # More breaks than that leave too few steps to explain one, whatever is kept.
            self._starts = [*self._starts, start][-FEWEST_STEPS:]
        while len(self._starts) > 1 and self._starts[1].number <= self.step - self.keep:
            del self._starts[0]
        self._steps = [kept for kept in self._steps if kept.number >= self._starts[0].number]

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._versions = versions_of(self.parameters, optimizer)
        norms = self._norms
        if len(optimizer._optimizer_step_pre_hooks) > 1:
            norms = norms_of([p.grad for p in self.parameters])
        kept = KeptStep(
            number=self.step,
            passes=self._record.passes,
            settings=self._settings,
            norms=norms,
            nbytes=self._nbytes,
            norms_before_hooks=self._norms,
            entries=self._entries,
            scaler_state=self._scaler_state,
        )
        self._steps.append(kept)
        self._record = ObservedStep()
        self._nbytes = 0
        self.step += 1
