r"""Which steps of a run were clipped, and at which gradient norm, from the columns of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from curvestep.optimizer_family import family_of
from curvestep.steps import is_clipped

CLIP_COLUMNS = ("clipped", "coefficient", "grad_norm", "step_norm", "lr", "max_norm")


def clip_norms(columns: Mapping[str, ArrayLike]) -> np.ndarray:
    r"""The gradient norm at which each step was clipped: inf where it was not, NaN where that is unknown.

    Rows say whether a step was ``clipped``. Of rows that do not, the ``coefficient`` tells, and without it,
    but for Adam, a step shorter than lr·‖g‖. The threshold is the ``max_norm`` of the row where it has one,
    else coefficient times gradient norm, or step length over lr.

    Args:
        columns: Columns of a trace, of which any may be missing and any number NaN: ``clipped``,
            ``coefficient``, ``grad_norm``, ``step_norm``, ``lr``, ``max_norm`` and ``optimizer``.

    Example:
        >>> clip_norms({"coefficient": [0.5, 1.0], "grad_norm": 4.0})
        array([ 2., inf])
        >>> clip_norms({"grad_norm": 4.0, "step_norm": [1, np.nan], "lr": 0.5})
        array([ 2., nan])
        >>> clip_norms({"clipped": [False, True], "coefficient": 0.5, "grad_norm": 4.0})
        array([inf,  2.])
        >>> clip_norms({"clipped": True, "coefficient": 0.25, "grad_norm": 4.0, "max_norm": 3.0})
        array(3.)
    """
    numbers = [np.asarray(columns.get(name, math.nan), dtype=float) for name in CLIP_COLUMNS]
    flag, coefficient, g, length, lr, max_norm = np.broadcast_arrays(*numbers)
    optimizer = columns.get("optimizer", "")
    # Adam's steps do not grow with the gradient: their length tells nothing.
    has_length = np.isfinite(length * lr) & ~_is_adaptive(optimizer)
    has_coefficient = np.isfinite(coefficient)
    # Older rows have no `max_norm`. Normalized descent multiplied by offset / (norm + offset) in them.
    normalized = np.asarray(optimizer, dtype=object) == "NormalizedSGD"
    edge = np.where(normalized, 0.5, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_coefficient = coefficient * g / np.where(normalized, 1 - coefficient, 1.0)
        threshold = np.where(has_coefficient, by_coefficient, length / lr)
        is_shorter = length < (1 - 1e-3) * (lr * g)
    threshold = np.where(np.isfinite(max_norm), max_norm, threshold)
    inferred = np.where(has_coefficient, is_clipped(coefficient, edge=edge), is_shorter)
    clipped = np.where(np.isfinite(flag), flag != 0, inferred)
    known = np.isfinite(flag) | has_coefficient | has_length
    return np.where(known, np.where(clipped, threshold, math.inf), math.nan)


def _is_adaptive(optimizer: ArrayLike) -> np.ndarray:
    names = np.asarray(optimizer, dtype=object)
    adaptive = {name: family_of(name).is_adaptive for name in set(names.flat)}
    return np.array([adaptive[name] for name in names.flat], dtype=bool).reshape(names.shape)
