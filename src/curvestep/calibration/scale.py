"""What learning rates are tried around, and the threshold of the trials.

Adam's learning rate has no unit. SGD's has one: its scale is the largest working step along a batch's
gradient at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from curvestep.bracket import Gradients, step_along_gradient
from curvestep.calibration.method import Method
from curvestep.loaders import Batch
from curvestep.lr_schedules import peak_lr, shares_of_parameters
from curvestep.optimizer_family import Family
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.vectors import difference, global_norm

CLIP_AT = (0.6, 1.75)  # thresholds by the first gradient norm: of batches with nothing, with all in common
ADAM_SCALE, ADAM_MAX_NORM = 0.004, 1.0  # of Adam, where it has no threshold of its own


def scale_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], method: Method, given: float
) -> tuple[float, float]:
    """The lr to try around, and the threshold: ``given``, or one of our own where that is infinite."""
    scale, threshold = ADAM_SCALE, ADAM_MAX_NORM
    if method.family.is_descent:
        shares = shares_of_parameters(method.optimizer, passes.parameters)
        step, threshold = _step_and_threshold(passes, batches, shares)
        scale = step * (1.0 - method.momentum)
    elif method.family is not Family.ADAM:
        scale, threshold = peak_lr(method.optimizer), math.inf
    if math.isfinite(given):
        threshold = given
    if method.family is Family.NORMALIZED:  # a length: the same step at gradients far below the offset
        scale *= threshold
    return scale, threshold


def _step_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], shares: Sequence[float]
) -> tuple[float, float]:
    r"""The median step, and the threshold :math:`c_0^{1-\rho^2} c_1^{\rho^2} \lVert g \rVert`.

    :math:`\rho` is the mean cosine between the batches' gradients. Where they agree, the norm at the start is
    that of a signal, which fades; where they do not, it is that of noise, which the signal will exceed.
    """
    steps, norms, guess = list[float](), list[float](), None
    total: Gradients = [None] * len(shares)  # of the directions, with the other sign
    for batch in batches:
        at = partial(_gradient_at, passes, batch)
        guess, gradients = step_along_gradient(at, passes.parameters, shares, guess)
        steps.append(guess)  # the next search begins there
        norms.append(global_norm(gradients).item())
        units = each(lambda g: g.to(torch.promote_types(g.dtype, torch.float32)) / norms[-1], gradients)
        total = difference(total, units, overwrite=True)
    passes.restart()
    count = len(norms)
    agreement = (global_norm(total).item() ** 2 - count) / max(1, count * (count - 1))
    weight = min(max(agreement, 0.0), 1.0) ** 2
    return median(steps), CLIP_AT[0] ** (1.0 - weight) * CLIP_AT[1] ** weight * median(norms)


def _gradient_at(
    passes: BatchReplay, batch: Batch, direction: Gradients, fraction: float
) -> tuple[float, Gradients]:
    passes.move(direction, fraction)
    loss, gradients = passes.gradient_of(batch)
    if fraction == 0:
        check_start(loss, global_norm(gradients).item())
    return loss, each(Tensor.to_dense, gradients)


def check_start(loss: float, grad_norm: float) -> None:
    """Refuse a start from which nothing can be trained."""
    if not math.isfinite(loss):
        raise ValueError(f"The loss at the start is {loss}. Look at the initialisation and the batch.")
    if not math.isfinite(grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is, as of a root at zero."
        )
    if grad_norm == 0:
        raise ValueError("The gradient at the start is zero. Are all parameters zero, or all units dead?")
