"""Smoothness and calibration inside a Lightning Trainer.

.. code-block:: python

    from curvestep.integrations.lightning import Calibrate, SmoothnessCallback

    trainer = L.Trainer(callbacks=[Calibrate(), SmoothnessCallback(trace="trace.jsonl")])
    trainer.fit(model, loader)
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from curvestep.calibration.calibrate import calibrate
from curvestep.calibration.loaders import Readable, unmoved
from curvestep.calibration.result import Calibration
from curvestep.integrations.reporting import (
    Options,
    State,
    StepMeasurement,
    call_first_then,
    groups_of,
    is_one_shot,
    record_training_step,
    require,
    schedule_kind,
    warn_if_clipped_twice,
)
from curvestep.integrations.step_norms import ClipReport
from curvestep.smoothness.observer import ClipsItself, batch_length
from curvestep.smoothness.snapshot import restore_on_exit
from curvestep.tensors.distributed import spans_ranks

require("lightning", "2.5", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402
from lightning.pytorch.utilities.types import STEP_OUTPUT  # noqa: E402
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn  # noqa: E402

Step = Callable[..., STEP_OUTPUT]


class SmoothnessCallback(StepMeasurement, Callback):
    """Measures smoothness along a run, and sends it to the Trainer's loggers; training stays bit for bit.

    With automatic optimization nothing else is needed. With manual optimization ``training_step`` computes
    its loss by :func:`record`. Accumulation, mixed precision, DDP and checkpoints are taken care of. The
    options are those of :class:`~curvestep.integrations.reporting.StepMeasurement`.

    Attributes:
        probe: The :class:`~curvestep.smoothness.probe.SmoothnessProbe`, from the start of ``fit`` on.
    """

    _num_parts = 0  # micro-batches of this step so far
    _batch_size: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the probe: by now the model is on its device and wrapped, and there are optimizers."""
        optimizer = _only_optimizer(trainer, "SmoothnessCallback")
        strategy: Any = trainer.strategy
        if not pl_module.automatic_optimization and spans_ranks(strategy.model):
            raise ValueError(
                "SmoothnessCallback measures manual optimization in one process only: a loss computed "
                "again is not averaged over ranks. Use automatic optimization."
            )
        _warn_if_clipped_twice(trainer)
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        step = trainer.global_step
        before = self.probe
        # A scaler may skip the step after the gradients were shown: there the step itself must begin it.
        watches = not pl_module.automatic_optimization or scaler is not None
        write = partial(_to_loggers, trainer)
        probe = self._start(strategy.model, optimizer, scaler, write, step, watches=watches)
        if before is not None and before.trace.path is None:  # `fit` is called again
            for row in before.trace:
                if row["step"] < step:
                    probe.trace.append(row)
        if pl_module.automatic_optimization:
            strategy.training_step = self._with_recording(strategy.training_step, trainer, pl_module)
            self._undo.append(lambda: vars(strategy).pop("training_step", None))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure before the step: gradients are complete here, and not yet clipped."""
        if self.probe is not None and self._begins:
            self._begun = True
            if not self.probe.due or any(p.grad is not None for p in self.probe.parameters):
                self.probe._begin(optimizer, clipped=False)  # else training_step left this batch out

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Keep the size of the batch, for :func:`record`."""
        self._batch_size = round(batch_length(batch))

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        """End a step that the optimizer did not take."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks away and close the trace."""
        self._close()

    def state_dict(self) -> State:
        """The state that a resumed run needs to measure the same steps."""
        return self._saved if self.probe is None else self.probe.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Kept until the probe is made."""
        self._saved = state_dict

    def _with_recording(self, training_step: Step, trainer: Trainer, pl_module: LightningModule) -> Step:
        """The strategy's ``training_step``, its loss recorded."""
        probe = self.probe
        assert probe is not None

        def step(*args: object, **kwargs: object) -> STEP_OUTPUT:
            if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
                self._num_parts = 0
            self._num_parts += 1
            kept = args
            if probe.due:  # a training step may pop from its batch
                kept = tuple(copy.copy(arg) for arg in args)

            def replayed() -> Tensor:
                with _without_logging(pl_module):
                    loss = _loss_of(training_step(*(copy.copy(arg) for arg in kept), **kwargs))
                # Lightning divides by the number it was given, also where an epoch ends with fewer batches.
                share = self._num_parts / trainer.accumulate_grad_batches
                return loss * share

            return record_training_step(
                probe, partial(training_step, *args, **kwargs), _loss_of, replayed, args
            )

        return step


class ClipCallback(ClipReport, Callback):
    """Sends what clipping does to the Trainer's loggers: no replays, and training stays bit for bit.

    Every ``log_every_n_steps`` steps they get ``curvestep/grad_norm`` before clipping, the ``coefficient``
    that the gradient was multiplied by, the ``clipped_fraction`` of the last 100 steps, and
    ``curvestep/grad_norm/NAME`` of the largest layers. Who clips does not matter: ``gradient_clip_val``,
    ``cs.clip``, or an optimizer of ours. If the Trainer and the optimizer both clip, a warning says so. Of
    several optimizers each has its own numbers, as ``curvestep/optimizer 1/grad_norm``.

    Args:
        layers: How many of the largest layers are named, by the norm of their gradient before clipping.
    """

    _last_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the optimizers' steps; warn where the Trainer clips before an optimizer that clips too."""
        self._watch(pl_module, _optimizers_of(trainer), looks_in_step=False)
        is_own = is_overridden("configure_gradient_clipping", pl_module)
        is_by_value = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value"
        for watched in self._watched:
            watched.measures_clipping = is_own or is_by_value
        self._last_step = trainer.global_step
        _warn_if_clipped_twice(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at the gradients: they are complete here, and not yet clipped."""
        watched = self._watcher_of(optimizer)
        if watched is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        watched.look(scaler.get_scale() if scaler is not None and unscales else 1.0)
        if trainer.gradient_clip_val and not watched.measures_clipping:
            watched.expect_clipping(trainer.gradient_clip_val)

    def on_train_batch_end(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Write to the loggers where Lightning writes, once a step."""
        has_stepped = trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        if has_stepped and trainer._logger_connector.should_update_logs:
            numbers = self._numbers()
            if numbers:
                _to_loggers(trainer, numbers)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks away."""
        self._close()


def record(pl_module: LightningModule, loss_fn: Callable[[], Tensor], weight: float = 1.0) -> Tensor:
    """``loss_fn()``, remembered for the step that comes: for ``training_step`` with manual optimization.

    .. code-block:: python

        loss = record(self, lambda: self.loss(batch))
        self.manual_backward(loss)
        self.optimizers().step()

    Without a :class:`SmoothnessCallback` this is ``loss_fn()`` and nothing else.

    Args:
        pl_module: The module, ``self``.
        loss_fn: Computes the loss of this batch, and again in replays.
        weight: Share of this micro-batch in the loss of the step, in any unit.

    Returns:
        The loss.
    """
    if not isinstance(pl_module, LightningModule):
        raise TypeError(f"`pl_module` must be a LightningModule, got a {type(pl_module).__name__}.")
    callbacks: list[Callback] = pl_module.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callback = next((one for one in callbacks if isinstance(one, SmoothnessCallback)), None)
    if callback is None or callback.probe is None:
        return loss_fn()

    def replayed() -> Tensor:
        with _without_logging(pl_module):
            return loss_fn()

    size = callback._batch_size
    callback._batch_size = None  # a batch counts once
    return callback.probe.record(call_first_then(loss_fn, replayed), weight, batch_size=size)


class Calibrate(Callback):
    """Measures learning rate and threshold when training is about to start, and sets them.

    By then the model is on its device, wrapped and in its precision, and optimizer, schedulers and data are
    there. ``lr``, ``initial_lr`` and the schedulers' ``base_lrs`` are set, and ``max_norm`` where the
    optimizer clips and has none; a resumed run keeps what it has. It takes about 230 gradients; model, data
    loader and random states stay as they were.

    Args:
        schedule: ``"constant"`` or ``"warmup-decay"``, of which the learning rate is the peak. Default: the
            latter if the optimizer has a scheduler.
        budget: Gradients that the trials may take, or, below one, their share of the steps of training.

    Attributes:
        calibration: The result; None on a resumed run.
    """

    def __init__(self, schedule: str | None = None, budget: float | None = None) -> None:
        super().__init__()
        self.schedule = schedule
        self.budget = budget
        self.calibration: Calibration | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and set, unless this run goes on from a checkpoint."""
        if trainer.global_step > 0:
            return
        optimizer = _only_optimizer(trainer, "Calibrate")
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        schedule = self.schedule or schedule_kind(bool(schedulers))
        options: Options = {"schedule": schedule, "budget": self.budget, "max_norm": _clip_norm(trainer)}
        _check_batches_can_be_replayed(trainer, pl_module)
        calibration = _calibration(trainer, pl_module, optimizer, options)
        self.calibration = calibration
        with warnings.catch_warnings():  # of a threshold that is left to the Trainer, said below
            warnings.simplefilter("ignore")
            calibration.apply(optimizer, *schedulers)
        rank_zero_info(_summary(calibration, optimizer, options["max_norm"]))
        for doubt in calibration.warnings:
            rank_zero_warn(str(doubt))


def _summary(calibration: Calibration, optimizer: Optimizer, clip_norm: float | None) -> str:
    """The numbers that were set, in one line."""
    trials = f"{calibration.num_gradients} gradients of trials"
    line = f"Calibrate set lr {calibration.lr:.4g} of {type(optimizer).__name__} after {trials}"
    if isinstance(optimizer, ClipsItself):
        return f"{line}; it clips at {optimizer.param_groups[0].get('max_norm', math.inf):.4g}."
    if clip_norm is None and math.isfinite(calibration.max_norm):
        return f"{line}, with gradients clipped: use Trainer(gradient_clip_val={calibration.max_norm:.4g})."
    return f"{line}."


def _clip_norm(trainer: Trainer) -> float | None:
    """The gradient norm at which the Trainer clips, which it does at a norm unless told otherwise."""
    if trainer.gradient_clip_algorithm == "value":
        return None
    return trainer.gradient_clip_val or None


def _loaders(trainer: Trainer) -> list[object]:
    loaders = trainer.train_dataloader
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return [loaders]


def _check_batches_can_be_replayed(trainer: Trainer, pl_module: LightningModule) -> None:
    """Refuse data that measuring would use up, and training steps that give no loss of a batch."""
    for loader in _loaders(trainer):
        if is_one_shot(loader) or is_one_shot(getattr(loader, "dataset", None)):
            raise ValueError(
                "Calibrate would use up batches of the training data, which is an iterator. Give the Trainer "
                "a DataLoader over a data set that can be read again."
            )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "Calibrate cannot run a training_step that takes `dataloader_iter`: give it batches."
        )
    if not pl_module.automatic_optimization:
        raise ValueError(
            "Calibrate needs the loss of a batch, and with manual optimization training_step also steps. "
            "Call `curvestep.calibrate(model, loss_of_batch, loader, optimizer=optimizer)` before training."
        )


def _calibration(
    trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, options: Options
) -> Calibration:
    """Calibrate on the batches that training will see, micro-batches and all."""
    strategy: Any = trainer.strategy
    num_args = 1 + is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    # Of the class: the strategy's own may be the one that a SmoothnessCallback records.
    training_step = type(strategy).training_step

    # Not a generator expression: that would call iter(), which draws, too early.
    def batches() -> Iterator[object]:
        for batch, *_ in CombinedLoader(trainer.train_dataloader, "max_size_cycle"):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            yield strategy.batch_to_device(batch, dataloader_idx=0)

    def loss_of_batch(parts: list[object]) -> Tensor | float:
        total = 0.0
        for index, batch in enumerate(parts):
            args = (copy.copy(batch), index)[:num_args]
            with _without_logging(pl_module):
                loss = _loss_of(training_step(strategy, *args)) / len(parts)
            if len(parts) == 1:
                return loss
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        return total

    parts = Readable(lambda: groups_of(batches(), trainer.accumulate_grad_batches))
    steps = trainer.estimated_stepping_batches
    num_steps = int(steps) if 0 < steps < math.inf else None
    with ExitStack() as stack:
        for loader in _loaders(trainer):
            stack.enter_context(unmoved(loader))
        return calibrate(
            strategy.model,
            loss_of_batch,
            parts,
            optimizer=optimizer,
            num_steps=num_steps,
            progress=False,
            **options,
        )


def _warn_if_clipped_twice(trainer: Trainer) -> None:
    if trainer.gradient_clip_val:
        setting = f"Trainer(gradient_clip_val={trainer.gradient_clip_val:g})"
        for optimizer in _optimizers_of(trainer):
            warn_if_clipped_twice(optimizer, setting, "Leave gradient_clip_val out.")


def _optimizers_of(trainer: Trainer) -> list[Optimizer]:
    """The optimizers, without the stand-in that Lightning has where configure_optimizers returned None."""
    return [one for one in trainer.optimizers if type(one).__name__ != "_MockOptimizer"]


def _only_optimizer(trainer: Trainer, who: str) -> Optimizer:
    optimizers = _optimizers_of(trainer)
    if len(optimizers) != 1:
        raise ValueError(
            f"{who} needs one optimizer, and configure_optimizers gave {len(optimizers)}. For "
            "several, use curvestep.SmoothnessProbe or curvestep.calibrate with the module that each trains."
        )
    return optimizers[0]


def _loss_of(output: STEP_OUTPUT) -> Any:
    if isinstance(output, Mapping):
        return output["loss"]
    return output


def _to_loggers(trainer: Trainer, numbers: dict[str, float]) -> None:
    # The step that Lightning writes beside the loss of this batch; `global_step` counts each optimizer's.
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def _log_nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def _without_logging(pl_module: LightningModule) -> Iterator[None]:
    """A replay logs nothing: ``self.log`` would add to the means of the epoch."""
    own = vars(pl_module)
    before = {name: own[name] for name in ("log", "log_dict") if name in own}

    def put_back() -> None:
        own.pop("log", None)
        own.pop("log_dict", None)
        own.update(before)

    with restore_on_exit(put_back):
        own["log"] = own["log_dict"] = _log_nothing
        yield
