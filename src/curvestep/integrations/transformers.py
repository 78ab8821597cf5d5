"""Smoothness and calibration inside a Hugging Face Trainer, with PEFT models and TRL's trainers too.

.. code-block:: python

    from curvestep.integrations.transformers import SmoothnessCallback, calibrate

    trainer = Trainer(model, args, train_dataset=data, callbacks=[SmoothnessCallback(trace="trace.jsonl")])
    calibrate(trainer)  # sets args.learning_rate
    trainer.train()
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from curvestep.calibration import calibrate as trials
from curvestep.calibration.loaders import Readable, unmoved
from curvestep.calibration.result import Calibration, read_calibration, write_calibration
from curvestep.files import write_atomically
from curvestep.integrations.reporting import (
    StepMeasurement,
    is_one_shot,
    record_training_step,
    require,
    schedule_kind,
    warn_if_clipped_twice,
)
from curvestep.integrations.step_norms import ClipReport
from curvestep.optimizer_family import check_optimizer
from curvestep.smoothness.observer import ClipsItself
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.snapshot import restore_on_exit
from curvestep.tensors.distributed import whole

require("transformers", "4.57", "transformers")
require("accelerate", "1.1", "transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_callback import PrinterCallback, ProgressCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

STATE = "curvestep.json"  # in a checkpoint's folder
PRINTERS = (PrinterCallback, ProgressCallback)
ANY_NUM_STEPS = 1000  # of a run, to ask whether a share of it is warm-up


class SmoothnessCallback(StepMeasurement, TrainerCallback):
    """Measures smoothness along ``trainer.train()``; training stays bit for bit.

    For ``Trainer(callbacks=[...])`` or ``trainer.add_callback``, and for TRL's trainers. Gradient
    accumulation, ``max_grad_norm``, bf16, gradient checkpointing, ``torch_compile``, DDP and resuming from a
    checkpoint are taken care of. The options are those of
    :class:`~curvestep.integrations.reporting.StepMeasurement`.

    Attributes:
        probe: The probe, from the first training step on.
    """

    _trainer: Trainer  # once it is attached
    _training_step: Callable[..., Tensor]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Attach to the Trainer; warn where it clips before an optimizer that clips as well."""
        trainer = _calling_trainer()
        recorder = getattr(trainer.training_step, "__self__", None)
        if recorder is not self:  # a callback alone sees neither batch nor loss
            if isinstance(recorder, SmoothnessCallback):
                raise ValueError("This trainer has two `SmoothnessCallback`s: one is enough.")
            self._trainer = trainer
            self._training_step = trainer.training_step
            trainer.training_step = self._recorded_step
        self._close()
        self.probe = None
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            _warn_if_clipped_twice(args, check_optimizer(optimizer))

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        """End a step that the optimizer did not take."""
        self._end()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Keep beside the checkpoint what a resumed run needs to measure the same steps."""
        folder = _checkpoint_of(args, state)
        if self.probe is not None and state.is_world_process_zero and folder.is_dir():
            write_atomically(folder / STATE, json.dumps(self.probe.state_dict()))

    def on_train_end(self, *_: object, **__: object) -> None:
        """Take the hooks away and close the trace."""
        self._close()

    def _start_probe(self, model: nn.Module) -> SmoothnessProbe:
        """The probe, made where only now model and optimizer are prepared and wrapped."""
        trainer = self._trainer
        optimizer = check_optimizer(trainer.optimizer)
        scaler = trainer.accelerator.scaler
        step = trainer.state.global_step
        kept = _checkpoint_of(trainer.args, trainer.state) / STATE
        if step > 0 and kept.exists():
            self._saved = json.loads(kept.read_text(encoding="utf-8"))
        self.options["num_steps"] = trainer.state.max_steps
        # A scaler may skip the step after the gradients were shown: there the step itself must begin it.
        return self._start(model, optimizer, scaler, self._report, step, watches=scaler is not None)

    def _recorded_step(self, model: nn.Module, inputs: object, num_items_in_batch: object = None) -> Tensor:
        """The Trainer's ``training_step``, its loss recorded."""
        trainer = self._trainer
        probe = self.probe or self._start_probe(model)
        num_parts = trainer.current_gradient_accumulation_steps
        kept = inputs
        if probe.due:  # a training step may pop from its inputs
            kept = copy.copy(inputs)

        def replayed() -> Tensor:
            with _metrics_restored(trainer), _losses_caught(trainer) as caught:
                self._training_step(model, copy.copy(kept), num_items_in_batch)
            return caught[0] * num_parts

        train = partial(self._training_step, model, inputs, num_items_in_batch)
        # Each loss is this batch's share of a sum, and the probe takes means.
        loss = record_training_step(probe, train, lambda loss: loss * num_parts, replayed, inputs)
        if trainer.accelerator.sync_gradients and self._begins:
            # Clipping by max_grad_norm comes next.
            probe._begin(check_optimizer(trainer.optimizer), clipped=False)
            self._begun = True
        return loss

    def _report(self, numbers: dict[str, float]) -> None:
        _to_callbacks(self._trainer, numbers)


class ClipCallback(ClipReport, TrainerCallback):
    """Sends what clipping does to whatever ``report_to`` names; training stays bit for bit.

    At every logging step it gets ``curvestep/grad_norm`` before clipping, the ``coefficient`` that the
    gradient was multiplied by, the ``clipped_fraction`` of the last 100 steps, and
    ``curvestep/grad_norm/NAME`` of the largest layers. No gradient is computed again. Who clips does not
    matter: ``max_grad_norm``, ``cs.clip``, or an optimizer of ours. If the Trainer and the optimizer both
    clip, a warning says so. DeepSpeed, which clips out of sight, is not supported.

    Args:
        layers: How many of the largest layers are named, by the norm of their gradient before clipping.
    """

    _trainer: Trainer  # once it is attached
    _undo: Callable[[], object] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Look at the optimizer's steps; warn where the Trainer clips before an optimizer that clips too."""
        trainer = _calling_trainer()
        self._trainer = trainer
        self._detach()
        if trainer.is_deepspeed_enabled:
            raise NotImplementedError("ClipCallback cannot see how DeepSpeed clips. Use its own logs.")
        assert trainer.model is not None
        optimizer = check_optimizer(kwargs["optimizer"])
        self._watch(trainer.model, [optimizer])
        _warn_if_clipped_twice(args, optimizer)
        # No event comes between the gradients and their clipping, so the function that clips is listened to.
        own = vars(trainer.accelerator)
        clip = trainer.accelerator.clip_grad_norm_

        def listening(parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
            norm = clip(parameters, max_norm, norm_type)
            if norm_type == 2 and max_norm < math.inf and isinstance(norm, Tensor):
                self._watched[0].expect_clipping(max_norm, whole(norm).detach())
            return norm

        own["clip_grad_norm_"] = listening
        self._undo = partial(own.pop, "clip_grad_norm_", None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Write to the loggers where the Trainer is about to do so."""
        if control.should_log:
            numbers = self._numbers()
            if numbers:
                _to_callbacks(self._trainer, numbers)

    on_epoch_end = on_step_end  # with ``logging_strategy="epoch"`` the Trainer writes there

    def on_train_end(self, *_: object, **__: object) -> None:
        """Take the hooks away."""
        self._detach()

    def _detach(self) -> None:
        self._close()
        if self._undo is not None:
            self._undo()
            self._undo = None


def _warn_if_clipped_twice(args: TrainingArguments, optimizer: Optimizer) -> None:
    if args.max_grad_norm:
        setting = f"TrainingArguments(max_grad_norm={args.max_grad_norm:g})"
        warn_if_clipped_twice(optimizer, setting, "Set max_grad_norm=0.")


def _to_callbacks(trainer: Trainer, numbers: dict[str, float]) -> None:
    """To the callbacks that do not print: one more call of ``trainer.log`` would empty TRL's metrics."""
    handler = trainer.callback_handler
    callbacks = handler.callbacks
    handler.callbacks = [c for c in callbacks if not isinstance(c, PRINTERS)]
    try:
        handler.call_event("on_log", trainer.args, trainer.state, trainer.control, logs=dict(numbers))
    finally:
        handler.callbacks = callbacks


def calibrate(
    trainer: Trainer,
    *,
    schedule: str | None = None,
    budget: float | None = None,
    resume_from_checkpoint: str | Path | bool | None = None,
) -> Calibration:
    """Measure learning rate and threshold before ``trainer.train()``, and set them; about 230 gradients.

    Sets ``args.learning_rate``; of an optimizer given as ``optimizers=`` or ``optimizer_cls_and_kwargs=`` its
    own ``lr``, and its ``max_norm`` if that is infinite. The trials clip at ``args.max_grad_norm``, which
    stays. So do model, random states and the Trainer's metrics. Every checkpoint keeps what was found. Under
    DDP every process calls it, and all get the same numbers.

    Args:
        trainer: A ``Trainer``, or one of TRL's, that has not trained yet.
        schedule: ``"constant"`` or ``"warmup-decay"``, of which the learning rate is the peak. Default: the
            latter unless ``args.lr_scheduler_type`` is constant.
        budget: Gradients that the trials may take, or, below one, their share of the steps of training.
        resume_from_checkpoint: What ``trainer.train`` will be given. With a checkpoint, its numbers are set
            again and nothing is measured; True for the last one.

    Returns:
        The calibration, which the Trainer now uses.

    Raises:
        ValueError: the Trainer has trained, or cannot be calibrated.
        TypeError: ``trainer`` is no Trainer.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"`trainer` must be a transformers Trainer, got a {type(trainer).__name__}.")
    if resume_from_checkpoint:
        calibration = _kept_calibration(trainer, resume_from_checkpoint)
    else:
        calibration = _calibrate(trainer, schedule, budget)
    trainer.remove_callback(_KeepCalibration)  # of a call before
    trainer.add_callback(_KeepCalibration(calibration))
    trainer.args.learning_rate = calibration.lr
    _set_in_optimizer(trainer, calibration)
    return calibration


def _set_in_optimizer(trainer: Trainer, calibration: Calibration) -> None:
    """Set the numbers in an optimizer that the Trainer was given."""
    own = trainer.optimizer_cls_and_kwargs
    if trainer.optimizer is not None:
        optimizer = check_optimizer(trainer.optimizer)
        schedulers = [] if trainer.lr_scheduler is None else [trainer.lr_scheduler]
        with warnings.catch_warnings():  # of a threshold that is not set: the Trainer clips
            warnings.simplefilter("ignore")
            calibration.apply(optimizer, *schedulers)
    elif own is not None:
        kind, values = own
        settings = {**values, "lr": calibration.lr}
        for name in values.keys() & {"max_norm", "offset"}:
            settings[name] = calibration.max_norm
        trainer.optimizer_cls_and_kwargs = (kind, settings)


class _KeepCalibration(TrainerCallback):
    """Writes a calibration beside every checkpoint: a resumed Trainer reads no ``max_grad_norm`` there."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        folder = _checkpoint_of(args, state)
        if state.is_world_process_zero and folder.is_dir():
            write_calibration(folder, self.calibration)


def _kept_calibration(trainer: Trainer, checkpoint: str | Path | bool) -> Calibration:
    output = str(trainer.args.output_dir)
    folder = str(checkpoint)
    if checkpoint is True:
        folder = get_last_checkpoint(output) or output
    calibration = read_calibration(folder)
    if calibration is None:
        raise ValueError(
            f"`resume_from_checkpoint`: {folder} holds no calibration. The run "
            "that wrote it was not calibrated, or was killed while it wrote. Leave out `calibrate`, or "
            "resume from the checkpoint before."
        )
    return calibration


def _calibrate(trainer: Trainer, schedule: str | None, budget: float | None) -> Calibration:
    """Calibrate on the batches that training will see, micro-batches and all."""
    args = trainer.args
    model = trainer.model
    assert model is not None
    if trainer.state.global_step > 0:
        raise ValueError("calibrate(trainer) needs a Trainer that has not trained yet. Make a new one.")
    if is_one_shot(trainer.train_dataset):
        raise ValueError(
            "calibrate would use up samples of `train_dataset`, which is an iterator. Give the Trainer a "
            "data set that can be read again."
        )
    if trainer.accelerator.scaler is not None:
        raise ValueError("calibrate(trainer) does not undo fp16's loss scale. Use bf16=True, or float32.")
    if schedule is None:
        kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        schedule = schedule_kind(not kind.startswith("constant"))
    optimizer = _optimizer_of(trainer, model)
    max_norm = None if isinstance(optimizer, ClipsItself) else args.max_grad_norm or None
    loader = trainer.get_train_dataloader()
    parallel = _over_processes(trainer, model)

    def batches() -> Iterator[object]:
        source = iter(loader)
        while True:
            batch = trainer.get_batch_samples(source, args.gradient_accumulation_steps, args.device)
            if not batch[0]:
                return
            yield batch

    def loss_of_batch(batch: Any) -> float:
        samples, count = batch
        trainer.current_gradient_accumulation_steps = len(samples)
        total = 0.0
        for inputs in samples:
            with _metrics_restored(trainer), trainer.accelerator.autocast():
                # Of the class: the trainer's own may be the one that a SmoothnessCallback records.
                loss = type(trainer).training_step(trainer, parallel, copy.copy(inputs), count)
            total += loss.item()
        return total

    training = model.training
    try:
        with unmoved(loader):
            found = trials.calibrate(
                parallel.train(),
                loss_of_batch,
                Readable(batches),
                optimizer=optimizer,
                max_norm=max_norm,
                schedule=schedule,
                num_steps=args.max_steps if args.max_steps > 0 else None,
                budget=budget,
                progress=False,
            )
        if schedule == "warmup-decay" and args.get_warmup_steps(ANY_NUM_STEPS) == 0:
            return found.doubted("no-warmup")
        return found
    finally:
        model.train(training)
        if hasattr(loader, "end"):  # of Accelerate's, which counts the loaders that are being read
            loader.end()  # pyright: ignore[reportAttributeAccessIssue]


def _over_processes(trainer: Trainer, model: nn.Module) -> nn.Module:
    """The model as the Trainer will wrap it: gradients are averaged where there are several processes."""
    args = trainer.args
    if args.world_size == 1:
        return model
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "calibrate(trainer) cannot try a model that FSDP or DeepSpeed will shard. Run it in one process, "
            "and give `learning_rate` to the run with several."
        )
    find_unused = args.ddp_find_unused_parameters
    if find_unused is None:  # as the Trainer decides
        find_unused = not getattr(model, "is_gradient_checkpointing", False)
    return DistributedDataParallel(model, find_unused_parameters=find_unused)


def _optimizer_of(trainer: Trainer, model: nn.Module) -> Optimizer:
    """The optimizer that the Trainer has, or one as it will make."""
    if trainer.optimizer is not None:
        return check_optimizer(trainer.optimizer)
    own = trainer.optimizer_cls_and_kwargs
    kind, settings = own or trainer.get_optimizer_cls_and_kwargs(trainer.args, cast(Any, model))
    group: dict[str, object] = {"params": [p for p in model.parameters() if p.requires_grad]}
    if own is None:
        group["weight_decay"] = trainer.args.weight_decay
    return kind([group], **settings)


def _checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _calling_trainer() -> Trainer:
    """The Trainer that calls its callbacks, which hands them everything but itself."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise RuntimeError("This callback is for the `callbacks` of a transformers Trainer.")


@contextmanager
def _losses_caught(trainer: Trainer) -> Iterator[list[Tensor]]:
    """The losses that ``accelerator.backward`` is given, which does not run."""
    own = vars(trainer.accelerator)
    caught: list[Tensor] = []
    with restore_on_exit(lambda: own.pop("backward", None)):
        own["backward"] = lambda loss, **_: caught.append(loss)
        yield caught


@contextmanager
def _metrics_restored(trainer: Trainer) -> Iterator[None]:
    """TRL's trainers count tokens and keep metrics in attributes, which a replay must not add to."""
    kept = {
        name: copy.deepcopy(value)
        for name, value in vars(trainer).items()
        if _is_plain(value) and not name.endswith("_dataset")
    }
    with restore_on_exit(lambda: vars(trainer).update(kept)):
        yield


def _is_plain(value: object) -> bool:
    """Whether a value is a number, or nested lists and dicts of numbers."""
    if isinstance(value, dict):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    return isinstance(value, (Number, str)) and not isinstance(value, bool)
