"""Rows of a probe in TensorBoard, W&B, MLflow and the trackers of Accelerate.

``probe.listen(cs.loggers.tensorboard(writer))`` and the others below.
All write the same numbers, under names that are shown together: ``curvestep/grad_norm`` (before
clipping), ``curvestep/clipped_fraction``, ``curvestep/smoothness``, ``curvestep/stability_margin`` and the
others below, at the step of the row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from curvestep.checks import needs_extra
from curvestep.trace.schema import FIELDS

# Numbers of a row that are shown as they are; spikes are counted and clipped rows averaged.
COLUMNS = tuple(name for name, field in FIELDS.items() if field.logged)
WINDOW = 100  # rows that the share of clipped steps is taken over


Row = Mapping[str, Any]


class Logger:
    """A listener for rows that hands numbers with names to ``write(numbers, step)``.

    Steps never go back: a row at or before the last step, as after a restart from an older checkpoint, is
    left out. ``spikes`` is how many the optimizer logged since the row before, ``clipped_fraction`` the share
    of clipped steps among the last 100 rows.

    Args:
        write: Called with ``{name: number}`` and the step. Only finite numbers are handed over.

    Example:
        >>> log = Logger(lambda numbers, step: print(step, numbers))
        >>> log({"step": 5, "grad_norm": 2.0, "clipped": True, "smoothness": 8.0, "kappa": float("nan")})
        5 {'curvestep/grad_norm': 2.0, 'curvestep/smoothness': 8.0, 'curvestep/clipped_fraction': 1.0}
        >>> log({"step": 5, "grad_norm": 3.0})
    """

    def __init__(self, write: Callable[[dict[str, float], int], object]) -> None:
        self._write = write
        self._clipped: deque[bool] = deque(maxlen=WINDOW)  # where it is known
        self._last_step = -1

    def __call__(self, row: Row) -> None:
        """Write one row."""
        step = int(row["step"])
        if step <= self._last_step:
            return
        self._last_step = step
        numbers = {name: row.get(name) for name in COLUMNS}
        if row.get("spikes") is not None:
            numbers["spikes"] = len(row["spikes"])
        if row.get("clipped") is not None:
            self._clipped.append(row["clipped"])
        if self._clipped:
            numbers["clipped_fraction"] = fmean(self._clipped)
        finite = {
            f"curvestep/{name}": float(value)
            for name, value in numbers.items()
            if value is not None and math.isfinite(value)
        }
        if finite:
            self._write(finite, step)


def tensorboard(writer: Any) -> Logger:
    """A listener that writes rows as scalars of TensorBoard.

    .. code-block:: python

        probe.listen(cs.loggers.tensorboard(torch.utils.tensorboard.SummaryWriter("runs/mine")))

    Args:
        writer: A ``SummaryWriter``, or what has its ``add_scalar(name, value, step)``.

    Returns:
        A function for ``probe.listen``.

    Raises:
        TypeError: ``writer`` is no SummaryWriter.
    """
    _check_has(writer, "add_scalar", "`writer` must be a SummaryWriter")

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Logger(write)


def wandb(run: Any) -> Logger:
    """A listener that logs rows to a run of Weights & Biases, against their own step axis.

    .. code-block:: python

        probe.listen(cs.loggers.wandb(wandb.init(project="mine")))

    The charts are over ``curvestep/step``, so it does not matter how the loop counts its own ``run.log``.
    W&B's counter is moved on only where nobody else has done so since the last row: it drops whatever is
    logged at a step before it.

    Args:
        run: What ``wandb.init()`` returns.

    Returns:
        A function for ``probe.listen``.

    Raises:
        TypeError: ``run`` is not what ``wandb.init()`` returns.
    """
    _check_has(run, "define_metric", "`run` must be what `wandb.init()` returns")
    axis = "curvestep/step"
    run.define_metric(axis, hidden=True)
    run.define_metric("curvestep/*", step_metric=axis)
    last = -1

    def write(numbers: dict[str, float], step: int) -> None:
        nonlocal last
        last = max(run.step, last + 1)
        run.log({axis: step, **numbers}, step=last)

    return Logger(write)


def mlflow() -> Logger:
    """A listener that logs rows as metrics of the MLflow run that is active now.

    .. code-block:: python

        with mlflow.start_run():
            probe.listen(cs.loggers.mlflow())

    Returns:
        A function for ``probe.listen``.

    Raises:
        ValueError: no run is active.
    """
    with needs_extra("loggers"):
        import mlflow

    run = mlflow.active_run()
    if run is None:
        raise ValueError("`mlflow` has no active run. Make the logger inside `with mlflow.start_run():`.")
    return Logger(partial(mlflow.log_metrics, run_id=run.info.run_id))


def accelerate(accelerator: Any) -> Logger:
    """A listener that logs rows to the trackers of an ``Accelerator``, whichever they are.

    .. code-block:: python

        accelerator.init_trackers("mine")
        probe.listen(cs.loggers.accelerate(accelerator))

    Args:
        accelerator: An ``Accelerator`` whose ``init_trackers`` was called.

    Returns:
        A function for ``probe.listen``.

    Raises:
        TypeError: ``accelerator`` is no Accelerator.
        ValueError: it has no trackers.
    """
    _check_has(accelerator, "init_trackers", "`accelerator` must be an Accelerator")
    if accelerator.is_main_process and not accelerator.trackers:
        raise ValueError(
            "`accelerator` has no trackers, so rows would be lost. Give it `log_with=`, and call its "
            "`init_trackers` before."
        )
    return Logger(accelerator.log)


def _check_has(value: object, method: str, needed: str) -> None:
    if not callable(getattr(value, method, None)):
        raise TypeError(f"{needed}, with a method `{method}`, got {type(value).__name__}.")
