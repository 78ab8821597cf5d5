"""The recorder of the last steps of a training loop, which can be asked why one of them raised the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
    norms_of,
    settings_of,
    versions_of,
)
from curvestep.autopsy.surroundings import Surroundings
from curvestep.checks import check_count
from curvestep.optimizer_family import check_optimizer, parameters_of
from curvestep.smoothness.observer import ObservedStep, Pass, trains_any
from curvestep.smoothness.replay import trainable_parameters
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import communicates


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
            raise NotImplementedError("`model` is trained by several processes: steps are kept on one only.")
        self.model = model
        self.loss_of_batch = loss_of_batch
        self.keep = check_count("keep", keep, least=FEWEST_STEPS + 1)
        self.step = 0
        self._record = ObservedStep()  # of the step that comes
        self._nbytes = 0  # of its batches
        self._starts: list[StepStart] = []
        self._steps: list[KeptStep] = []
        self._versions: list[tuple[int, int]] = []  # of parameters and moments after the last step
        self._settings: list[dict[str, object]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, optimizer: Optimizer) -> Autopsy:
        """Keep the steps of ``optimizer`` from now on, by hooks on it; returns the recorder."""
        inner = check_optimizer(optimizer)
        if self._hooks:
            raise ValueError("`optimizer`: this recorder watches one already. Make a recorder for each.")
        known = {id(p) for p in self.model.parameters()}
        others = sum(id(p) not in known for p in parameters_of(inner))
        if others or not trains_any(inner, self.parameters):
            raise ValueError(
                f"`optimizer` must train parameters of `model` alone; {others} of its parameters are others."
            )
        self._hooks = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        ]
        return self

    def record(self, batch: object) -> Tensor:
        """``loss_of_batch(batch)``, kept for the step that comes; once for each micro-batch of the step."""
        if not self._hooks:
            raise RuntimeError("No optimizer is watched. Call `watch(optimizer)` before `record(batch)`.")
        kept = KeptBatch(batch)
        again = KeptLoss(self.loss_of_batch, kept, self.parameters[0].device.type)
        part = Pass(partial(self.loss_of_batch, batch), state=PassState(self.model))
        loss = self._record.run(part, self.parameters)
        part.loss_fn = again
        self._nbytes += kept.nbytes
        return loss

    def explain(self, step: int | None = None) -> Explanation:
        """Explain why a kept step raised the loss, with the share of the rise that each change takes away.

        Takes about as long as a hundred training steps. The rise is the median over kept batches.

        Args:
            step: Its number, counted from 0 at :meth:`watch`. Default: the step that raised the loss by the
                largest multiple of what the steps before it changed it by.
        """
        self._check_kept(step)
        surroundings = Surroundings(self.loss_of_batch, self.model)
        try:
            return explain(self.model, self._starts, self._steps, step)
        finally:
            surroundings.restore()

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
        for kept in self._steps:
            if not kept.passes:
                raise RuntimeError(
                    f"Step {kept.number} was taken without `record(batch)`, so that it cannot be taken again."
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
        norms = norms_of([p.grad for p in self.parameters])
        self._steps.append(KeptStep(self.step, self._record.passes, self._settings, norms, self._nbytes))
        self._record = ObservedStep()
        self._nbytes = 0
        self.step += 1
