r"""What clipping does to the direction: the mean clipped gradient beside the mean gradient, at one point.

With :math:`s_i = \min\{1, c / \lVert g_i \rVert\}` of the gradients :math:`g_i` of m batches, the lengths of
the two means and the angle between them come from sums over *pairs* of batches,

.. math::
    \langle \bar c, \bar g \rangle = \frac{1}{m (m - 1)} \sum_{i \ne j} s_i \langle g_i, g_j \rangle ,

which the noise leaves unbiased. The means of the same batches share their noise: the angle between those is
that of a sample, not of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor, nn

from curvestep.calibration.loaders import Batch, check_batches, unmoved
from curvestep.checks import check_count, check_positive
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.tensors.vectors import dot, global_norm
from curvestep.theory.theorems.clipped_sgd import clipping_floor

LEAST_BATCHES = 8  # fewer have no interval worth its name
LEVEL = 0.9  # of every interval

Gradients = list["Tensor | None"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ClippingBias:
    """How the mean clipped gradient differs from the mean gradient; intervals are 90 % ones.

    Args:
        max_norm: The threshold.
        angle: Angle between the two, in degrees, with its ``angle_interval``; NaN where noise hides it.
        length: Length of the mean clipped gradient over that of the mean gradient, with its
            ``length_interval``; NaN where noise hides it.
        clipped_fraction: Share of the batches whose gradient is longer than the threshold.
        grad_norm: Norm of the mean gradient; NaN where noise hides it.
        noise: Root mean square distance of a batch's gradient from the mean gradient.
        floor: Gradient norm at which clipped SGD may stop making progress, in the worst case known.
        num_batches: How many batches were read; each is run backward twice.
    """

    max_norm: float
    angle: float
    angle_interval: tuple[float, float]
    length: float
    length_interval: tuple[float, float]
    clipped_fraction: float
    grad_norm: float
    noise: float
    floor: float
    num_batches: int

    @property
    def is_known(self) -> bool:
        """Whether the batches show the mean gradient through their noise."""
        return math.isfinite(self.angle)

    def __str__(self) -> str:
        beside = [
            f"{self.clipped_fraction:.0%} of {self.num_batches} batches have a gradient above the threshold.",
            f"The noise of a batch is {self.noise:.3g}. In the worst case known, clipping at "
            f"{self.max_norm:g} stops progress at a gradient norm of {self.floor:.3g}.",
        ]
        if not self.is_known:
            answer = (
                f"Clipping at {self.max_norm:g}: cannot tell. The noise of {self.num_batches} batches hides "
                "the mean gradient. Give more batches, or larger ones."
            )
            return "\n".join([answer, *beside])
        low, high = self.angle_interval
        short, long = self.length_interval
        answer = (
            f"Clipping at {self.max_norm:g} turns the mean gradient by {self.angle:.1f} degrees "
            f"[{low:.1f}, {high:.1f}] and leaves {self.length:.0%} [{short:.0%}, {long:.0%}] of its length."
        )
        return "\n".join([answer, f"The norm of the mean gradient is {self.grad_norm:.3g}.", *beside])


def clipping_bias(
    model: nn.Module,
    loss_of_batch: Callable[[Batch], Tensor | float],
    batches: Iterable[Batch],
    max_norm: float,
    *,
    num_batches: int = 64,
) -> ClippingBias:
    """How clipping changes the mean gradient where the parameters are: by what angle, to what length.

    Each batch is run backward twice; memory is that of two gradients more. Parameters, ``.grad``, buffers and
    random states are restored bit for bit. A one-shot iterator loses the batches read here.

    Note:
        Where a few rare batches turn the mean (one in ten), the interval of 64 batches holds the angle in 72
        of 100 cases, that of 256 in 86. Without a turn it holds zero in 99.

    Args:
        model: The model, in the mode it trains in.
        loss_of_batch: The mean loss of one batch.
        batches: At least 8, better 64, of the size that training uses; a data loader will do.
        max_norm: The threshold that clips the global norm.
        num_batches: At most so many of them are read.

    Returns:
        The angle and the length with their intervals, beside the floor of the theory.

    Raises:
        ValueError: There are too few batches, or a gradient is not finite.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 1)
        >>> batches = [torch.randn(4, 3) + 1.0 for _ in range(32)]
        >>> bias = clipping_bias(model, lambda x: (model(x) - 5.0).square().mean(), batches, max_norm=1.0)
        >>> bias.is_known, bias.clipped_fraction, bias.length < 0.2
        (True, 1.0, True)
    """
    check_positive("max_norm", max_norm)
    check_count("num_batches", num_batches, least=LEAST_BATCHES)
    check_batches(batches)
    with unmoved(batches):
        read = list(islice(batches, num_batches))
    if len(read) < LEAST_BATCHES:
        raise ValueError(f"`batches` must hold at least {LEAST_BATCHES} batches, got {len(read)}.")
    passes = BatchReplay(model, loss_of_batch)
    with passes:
        norms, total, clipped_total = _sums(passes, read, max_norm)
        along = np.zeros((len(read), 2))
        for i, batch in enumerate(read):
            gradient = _gradient_of(passes, batch, i)
            along[i] = dot(gradient, total), dot(gradient, clipped_total)
    return bias_of(norms, along[:, 0], along[:, 1], max_norm)


def bias_of(norms: Floats, along_sum: Floats, along_clipped: Floats, max_norm: float) -> ClippingBias:
    """The bias from each gradient's norm and its products with the sums of all and of the clipped ones."""
    scales = _scales(norms, max_norm)
    squares = norms**2
    whole = _Moments.of(squares, scales, along_sum, along_clipped)
    # Without batch k: its own part leaves each of the three sums.
    without = _Moments(
        plain=whole.plain - 2 * (along_sum - squares),
        clipped=whole.clipped - 2 * scales * (along_clipped - scales * squares),
        mixed=whole.mixed - along_clipped - scales * (along_sum - 2 * squares),
    )
    count = len(norms)
    grad_square = float(whole.plain) / (count * (count - 1))
    noise = math.sqrt(max(0.0, float(squares.mean()) - grad_square))
    values = {
        "max_norm": max_norm,
        "clipped_fraction": float((norms > max_norm).mean()),
        "noise": noise,
        "floor": clipping_floor(noise, max_norm),
        "num_batches": count,
    }
    if min(without.plain.min(), without.clipped.min(), whole.plain, whole.clipped) <= 0:
        unknown = (math.nan, math.nan)
        return ClippingBias(
            angle=math.nan,
            angle_interval=unknown,
            length=math.nan,
            length_interval=unknown,
            grad_norm=math.nan,
            **values,
        )
    turn, error = _jackknife(float(whole.turn), without.turn)
    log_length, log_error = _jackknife(float(whole.log_length), without.log_length)
    width = float(student.ppf((1 + LEVEL) / 2, count - 1))
    return ClippingBias(
        angle=_degrees(turn),
        angle_interval=(_degrees(turn - width * error), _degrees(turn + width * error)),
        length=math.exp(log_length),
        length_interval=(
            math.exp(log_length - width * log_error),
            math.exp(log_length + width * log_error),
        ),
        grad_norm=math.sqrt(grad_square),
        **values,
    )


@dataclass(frozen=True)
class _Moments:
    """Sums over the pairs of different batches: of g with g, of c with c, and of c with g."""

    plain: Floats
    clipped: Floats
    mixed: Floats

    @classmethod
    def of(cls, squares: Floats, scales: Floats, along_sum: Floats, along_clipped: Floats) -> _Moments:
        return cls(
            plain=(along_sum - squares).sum(),
            clipped=(scales * along_clipped - scales**2 * squares).sum(),
            mixed=(along_clipped - scales * squares).sum(),
        )

    @property
    def turn(self) -> Floats:
        """One less the cosine of the angle between the two means."""
        return 1.0 - self.mixed / np.sqrt(self.plain * self.clipped)

    @property
    def log_length(self) -> Floats:
        return 0.5 * np.log(self.clipped / self.plain)


def _jackknife(whole: float, without: Floats) -> tuple[float, float]:
    """The estimate with its bias of order 1/m taken off, and its standard error."""
    count = len(without)
    mean = float(without.mean())
    error = math.sqrt((count - 1) / count * float(((without - mean) ** 2).sum()))
    return whole - (count - 1) * (mean - whole), error


def _degrees(turn: float) -> float:
    return math.degrees(math.acos(min(1.0, max(-1.0, 1.0 - turn))))


def _scales(norms: Floats, max_norm: float) -> Floats:
    return np.minimum(1.0, max_norm / np.maximum(norms, np.finfo(float).tiny))


def _sums(
    passes: BatchReplay, batches: Sequence[Batch], max_norm: float
) -> tuple[Floats, Gradients, Gradients]:
    """The norms of the gradients, their sum, and the sum of the clipped ones."""
    norms = np.zeros(len(batches))
    total: Gradients = [None] * len(passes.parameters)
    clipped_total = list(total)
    for i, batch in enumerate(batches):
        gradient = _gradient_of(passes, batch, i)
        norms[i] = global_norm(gradient).item()
        if not math.isfinite(norms[i]):
            raise ValueError(f"The gradient of batch {i} is not finite. Look at that batch, or at the loss.")
        scale = float(_scales(norms[i : i + 1], max_norm)[0])
        _add_(total, gradient, 1.0)
        _add_(clipped_total, gradient, scale)
    return norms, total, clipped_total


def _gradient_of(passes: BatchReplay, batch: Batch, seed: int) -> Gradients:
    """A batch's gradient, the same when it is asked for again."""
    return each(Tensor.to_dense, passes.gradient_of(batch, seed=seed)[1])


def _add_(total: Gradients, gradient: Gradients, scale: float) -> None:
    """Add a multiple of the gradient to the sum, which is kept in float32 at least."""
    for i, part in enumerate(gradient):
        if part is None:
            continue
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        so_far = total[i]
        if so_far is None:
            total[i] = wide * scale
        else:
            so_far.add_(wide, alpha=scale)
