"""Fields of recipes: their values read and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from curvestep.checks import check_count, check_nonnegative, check_positive, check_threshold


def check_nothing(name: str, value: object) -> None:
    """Whatever value: for a field that has no check of its own."""


def _check_range(name: str, value: float | tuple[float, ...], *, low: float, high: float, words: str) -> None:
    """An error unless a number, or each of several, lies from ``low`` to ``high``."""
    values = np.atleast_1d(value)
    if not ((values >= low) & (values <= high)).all():
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")


_check_size = partial(check_count, least=0)  # 0 stands for none, or for all
_ABOVE_0 = math.nextafter(0, 1)
_BELOW_1 = math.nextafter(1, 0)
_check_probability = partial(_check_range, low=0, high=_BELOW_1, words="a probability below 1")
CHECKS: dict[str, Callable[..., object]] = {
    "lr": check_positive, "offset": check_positive,
    "max_norm": check_threshold, "diverged_above": check_threshold,
    "momentum": check_nonnegative, "weight_decay": check_nonnegative,
    "activation_penalty": check_nonnegative, "temporal_penalty": check_nonnegative,
    "probe_data": partial(_check_range, low=0, high=1, words="a share of the data, at most 1"),
    "fractions": partial(_check_range, low=_ABOVE_0, high=1, words="numbers in (0, 1]"),
    "eval_part": partial(_check_range, low=_ABOVE_0, high=1, words="a share of the data, above 0"),
    "lr_drops": partial(_check_range, low=_ABOVE_0, high=_BELOW_1, words="shares of the run in (0, 1)"),
    "authors_at": partial(_check_range, low=0, high=_BELOW_1, words="shares of the run in [0, 1)"),
    **dict.fromkeys(("batch_size", "log_every", "embedding", "hidden", "layers", "bptt"), check_count),
    **dict.fromkeys(("seed", "steps", "epochs", "probe_every", "probe_from", "spectral_every"), _check_size),
    **dict.fromkeys(("eval_every", "eval_size", "num_words", "probe_pieces", "num_images"), _check_size),
    **dict.fromkeys(("dropout", "weight_drop", "dropout_input", "dropout_hidden"), _check_probability),
    "dropout_embedding": _check_probability,
}  # fmt: skip


def read_value(name: str, value: object, hint: object) -> object:
    """``value`` as the field's type, if that loses nothing."""
    try:
        return _CONVERTERS.get(hint, str)(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        needed = getattr(hint, "__name__", hint)
        raise ValueError(f"`{name}` must be of type {needed}, got {value!r}.") from None


def _to_float(value: str | float) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _to_int(value: str | float) -> int:
    number = _to_float(value)
    if int(number) != number:
        raise ValueError
    return int(number)


_CONVERTERS: dict[object, Callable[..., object]] = {
    bool: lambda value: {"true": True, "false": False}[str(value).lower()],
    int: _to_int,
    float: _to_float,
    tuple[float, ...]: lambda values: tuple(_to_float(value) for value in values),
}
