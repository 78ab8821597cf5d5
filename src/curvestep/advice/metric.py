"""A metric of one's own, by which several runs are ranked: validation loss, accuracy, reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from curvestep.advice.training_log import is_log, read_log
from curvestep.checks import check_choice
from curvestep.trace.trace import Trace

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "error", "rmse", "mae", "nll")
HIGHER_IS_BETTER = ("acc", "reward", "return", "score", "f1", "auc", "bleu", "iou")

Given = str | Mapping[str, Sequence[float | str | Path]]


@dataclass(frozen=True)
class Metric:
    """What ranks runs in place of the training loss.

    Args:
        name: What it is called.
        sign: 1 if lower is better, -1 if higher is.
        values: One for each run; NaN where a run has none.
    """

    name: str
    sign: int
    values: tuple[float, ...]

    @property
    def is_loss(self) -> bool:
        """Whether it measures what the training loss does."""
        return "loss" in self.name.lower()

    @property
    def rank(self) -> str:
        """How it ranks, in words."""
        return f"{'lowest' if self.sign > 0 else 'highest'} {self.name}"


def metric_of(given: Given, mode: str | None, traces: Sequence[Trace]) -> Metric:
    """The metric that a caller gave for these runs, in their order.

    Raises:
        ValueError: nobody can tell which way is better, or no run has a value.
    """
    entries: Sequence[float | str | Path | None]
    if isinstance(given, str):
        name = given
        entries = [None] * len(traces)
    else:
        if len(given) != 1:
            raise ValueError(f"`metric` must name one metric, got {len(given)}: {', '.join(given)}.")
        name = next(iter(given))
        entries = given[name]
        if len(entries) != len(traces):
            raise ValueError(
                f"`metric` must have a value for each run: {len(traces)} runs, got {len(entries)}."
            )
    sign = _sign_of(name, mode)
    values = tuple(_value(name, entry, trace) for entry, trace in zip(entries, traces, strict=True))
    if not np.isfinite(values).any():
        raise ValueError(f"No run has a value of {name!r}: neither its rows nor a log beside them.")
    return Metric(name, sign, values)


def _sign_of(name: str, mode: str | None) -> int:
    if mode is not None:
        check_choice("mode", mode, ("min", "max"))
        return 1 if mode == "min" else -1
    lower = any(word in name.lower() for word in LOWER_IS_BETTER)
    higher = any(word in name.lower() for word in HIGHER_IS_BETTER)
    if lower == higher:
        raise ValueError(f"Is a low or a high {name!r} better? Pass `mode='min'` or `mode='max'`.")
    return 1 if lower else -1


def _value(name: str, entry: float | str | Path | None, trace: Trace) -> float:
    """The last value: as given, of a trainer's log, of the rows, or of a log beside the trace."""
    if isinstance(entry, (str, Path)):
        return read_log(entry).last_of(name)
    if entry is not None:
        return float(entry)
    if name in trace.names:
        column = trace.column(name)
        known = column[np.isfinite(column)] if column.dtype != object else column[:0]
        return float(known[-1]) if len(known) else math.nan
    if trace.path is not None and is_log(trace.path.parent):
        return read_log(trace.path.parent).last_of(name)
    return math.nan
