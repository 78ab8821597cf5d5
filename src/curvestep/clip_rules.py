r"""Thresholds that follow the gradients: rules to give wherever a ``max_norm`` is taken.

>>> import torch, curvestep as cs
>>> params = [torch.nn.Parameter(torch.ones(3))]
>>> optimizer = cs.ClippedSGD(params, lr=0.1, max_norm=cs.clip_rules.percentile(10))

A rule is a short function of what a step saw (:class:`Seen`) and of a few numbers that it remembers. It
returns the threshold and what to remember next: floats on the host, on a device tensors that are not read.
To add a rule, write a function like :func:`zscore` that returns a :class:`ClipRule`. The optimizer keeps
what a rule remembers, also in checkpoints; a rule itself never changes.

Steps that are left out, and gradients that are zero or not finite, are not remembered.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from curvestep.checks import check_count, check_inside, check_positive

# A float, or an array or tensor with a number for each tensor or unit; on a device a tensor, not read.
Quantity: TypeAlias = Any
State: TypeAlias = tuple[Quantity, ...]  # what a rule remembers
Plain: TypeAlias = Mapping[str, Any]  # a rule in a checkpoint
Each: TypeAlias = Literal["norm", "tensor", "unit"]


class Seen(NamedTuple):
    """Quantities that a rule looks at.

    Attributes:
        norm: Norm of the gradient that is clipped; with ``each`` a vector, one for each tensor or unit.
        total: Norm of the whole gradient.
        weight: Norm of the parameters, for a rule whose ``each`` is ``"unit"``.
        history: The last norms, for a rule with a ``window``; it has ``percentile(p)``.
    """

    norm: Quantity
    total: Quantity
    weight: Quantity = 0.0
    history: Quantity = None


@dataclass(frozen=True)
class ClipRule:
    """A threshold that follows the gradients. Rules with the same maker and parameters are equal.

    Attributes:
        make: The function that makes this rule from its parameters; a checkpoint keeps its name.
        parameters: What ``make`` was given, plain numbers by name.
        bound: The formula: threshold and new state from what was seen and the state.
        start: The state before the first step.
        window: How many norms ``Seen.history`` holds, 0 for none.
        each: What is clipped by a norm of its own: what ``norm_scope`` says (``"norm"``), every
            ``"tensor"``, or every ``"unit"``, a row of a matrix or a filter of a convolution.
        of_weights: Ratio and least norm of the weights, if the threshold is their product and no more: then
            our kernel follows the rule while it updates.
    """

    make: Callable[..., ClipRule]
    parameters: Mapping[str, float]
    bound: Callable[[Seen, State], tuple[Quantity, State]] = field(compare=False)
    start: tuple[float, ...] = field(default=(), compare=False)
    window: int = field(default=0, compare=False)
    each: Each = field(default="norm", compare=False)
    of_weights: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The name of the function that makes it."""
        return self.make.__name__

    def as_plain(self) -> Plain:
        """The rule as plain data, for a checkpoint."""
        return {"rule": self.name, **self.parameters}

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        return f"{self.name}({given})"

    def __reduce__(self) -> tuple[partial[ClipRule], tuple[()]]:
        return partial(self.make, **self.parameters), ()

    def __deepcopy__(self, memo: object) -> ClipRule:
        return self


def from_plain(plain: Plain, known: object = None) -> ClipRule:
    """The rule that :meth:`ClipRule.as_plain` described: one of this module, or made as ``known`` was."""
    parameters = dict(plain)
    name = parameters.pop("rule")
    makers: dict[str, Callable[..., ClipRule]] = {make.__name__: make for make in RULES}
    if isinstance(known, ClipRule):
        makers[known.name] = known.make
    if name not in makers:
        raise ValueError(
            f"The checkpoint clips by the rule `{name}`, which is not one of curvestep. Give it to the "
            "optimizer before you load."
        )
    return makers[name](**parameters)


def percentile(p: float = 10.0, *, window: int = 1000) -> ClipRule:
    r"""Clip at a percentile of the gradient norms so far: AutoClip (Seetharaman et al., 2020).

    .. math::
        \gamma_k = \operatorname{percentile}_p\{g_1, \dots, g_k\}

    With :math:`p = 10`, the authors' choice, nine steps of ten are clipped.

    Args:
        p: Which percentile, between 0 and 100.
        window: How many of the last norms count. The paper keeps all of them.
    """
    check_inside("p", p, 0, 100)

    def bound(seen: Seen, state: State) -> tuple[Quantity, State]:
        return seen.history.percentile(p), state

    parameters = {"p": p, "window": check_count("window", window)}
    return ClipRule(percentile, parameters, bound, window=window)


def zscore(z: float = 2.5, *, decay: float = 0.97, warmup: int = 25) -> ClipRule:
    r"""Clip only norms that stand out from their running mean: ZClip (Kumar et al., 2025, algorithm 1).

    With running mean :math:`\mu` and standard deviation :math:`\sigma` of the clipped norms, a norm :math:`g`
    more than :math:`z\sigma` above :math:`\mu` is clipped the harder the further out it is:

    .. math::
        \gamma_k = \mu + \frac{z^2 \sigma^2}{g_k - \mu} \quad\text{if}\quad g_k - \mu > z\sigma

    Args:
        z: Standard deviations from which on a norm is clipped.
        decay: :math:`\alpha` of :math:`\mu_k = \alpha\mu_{k-1} + (1-\alpha)g_k` and of the variance.
        warmup: Norms that start mean and variance; these steps are not clipped.

    Note:
        The released code adds 1e-6 to :math:`\sigma` and clips at 1 as well; the paper does neither.
    """
    check_positive("z", z)
    check_inside("decay", decay, 0, 1)

    def bound(seen: Seen, state: State) -> tuple[Quantity, State]:
        count, mean, variance = state
        above = seen.norm - mean
        is_warm = count < warmup
        stands_out = (count >= warmup) & (above > 0) & (above * above > z * z * variance)
        threshold = choose(stands_out, mean + z * z * variance / choose(stands_out, above, 1.0), math.inf)
        clipped = smaller(seen.norm, threshold)
        share = choose(is_warm, 1 / (count + 1), 1 - decay)
        new_mean = mean + share * (clipped - mean)
        # The first norms have the variance of a sample; later ones are averaged around the new mean.
        square = choose(is_warm, (clipped - mean) * (clipped - new_mean), (clipped - new_mean) ** 2)
        return threshold, (count + 1, new_mean, variance + share * (square - variance))

    parameters = {"z": z, "decay": decay, "warmup": check_count("warmup", warmup)}
    return ClipRule(zscore, parameters, bound, start=(0.0, 0.0, 0.0))


def ema(ratio: float = 1.05, *, decay: float = 0.98, warmup: int = 100, max_norm: float = 1.0) -> ClipRule:
    r"""Clip every tensor by the running mean of its own clipped norms: AdaGC (Wang et al., 2025).

    .. math::
        \gamma_{k,i} = \lambda\, m_{k-1,i}, \qquad
        m_{k,i} = \beta m_{k-1,i} + (1-\beta) \min\{g_{k,i}, \gamma_{k,i}\}

    Before step ``warmup`` the whole gradient is clipped at ``max_norm``, and :math:`m_i` is the smallest
    clipped norm so far.

    Args:
        ratio: :math:`\lambda`, how far above its mean a norm may be.
        decay: :math:`\beta`.
        warmup: The first step, counted from 1, that is clipped by the mean.
        max_norm: Threshold of the whole gradient before that.

    Note:
        By the algorithm as printed, a tensor with a zero gradient before step ``warmup`` would never move
        again; zero gradients are left out of the mean here.
    """
    check_positive("ratio", ratio)
    check_positive("max_norm", max_norm)
    check_inside("decay", decay, 0, 1)

    def bound(seen: Seen, state: State) -> tuple[Quantity, State]:
        count, mean = state
        is_warm = count + 1 < warmup
        joint = max_norm / larger(seen.total, max_norm)
        threshold = choose(is_warm, joint * seen.norm, ratio * mean)
        clipped = smaller(seen.norm, threshold)
        average = decay * mean + (1 - decay) * clipped
        return threshold, (count + 1, choose(is_warm, smaller(mean, clipped), average))

    parameters = {
        "ratio": ratio, "decay": decay, "warmup": check_count("warmup", warmup), "max_norm": max_norm,
    }  # fmt: skip
    return ClipRule(ema, parameters, bound, start=(0.0, math.inf), each="tensor")


def weight_ratio(ratio: float = 0.01, *, eps: float = 1e-3) -> ClipRule:
    r"""Clip every unit by the norm of its own weights: AGC (Brock et al., 2021, equation 3).

    .. math::
        \gamma_i = \lambda \max\{\lVert W_i \rVert, \epsilon\}

    A unit is what feeds one output: a row of a matrix, a filter of a convolution, a whole vector. The paper
    leaves the last layer out: give it a group of its own with ``max_norm=inf``.

    Args:
        ratio: :math:`\lambda`, the largest gradient in units of the weights.
        eps: Least norm of the weights, so that units that start at zero can move.
    """
    check_positive("ratio", ratio)
    check_positive("eps", eps)

    def bound(seen: Seen, state: State) -> tuple[Quantity, State]:
        return ratio * larger(seen.weight, eps), state

    parameters = {"ratio": ratio, "eps": eps}
    return ClipRule(weight_ratio, parameters, bound, each="unit", of_weights=(ratio, eps))


RULES = (percentile, zscore, ema, weight_ratio)


def choose(condition: Quantity, yes: Quantity, no: Quantity) -> Quantity:
    """``yes`` where the condition holds, else ``no``: numbers, or tensors of them."""
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def smaller(a: Quantity, b: Quantity) -> Quantity:
    """The smaller of two numbers, or of each pair."""
    if isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return choose(a < b, a, b)


def larger(a: Quantity, b: Quantity) -> Quantity:
    """The larger of two numbers, or of each pair."""
    return choose(a > b, a, b)


class Window:
    """The last norms as floats, in order of arrival and in order of size.

    Example:
        >>> window = Window(3, [5.0, 1.0, 2.0])
        >>> window.push(4.0)
        >>> window.values, window.percentile(50)
        ([1.0, 2.0, 4.0], 2.0)
    """

    def __init__(self, length: int, values: list[float]) -> None:
        self._length = length
        self.values = values[-length:] if length else []
        self._ordered = sorted(self.values)

    def push(self, norm: float) -> None:
        """Add a norm, and forget the oldest beyond the window."""
        self.values.append(norm)
        insort(self._ordered, norm)
        if len(self.values) > self._length:
            oldest = self.values.pop(0)
            del self._ordered[bisect_left(self._ordered, oldest)]

    def percentile(self, p: float) -> float:
        """The p-th percentile, interpolated as ``numpy.percentile`` does."""
        position = (len(self._ordered) - 1) * p / 100
        below = int(position)
        low, high = self._ordered[below], self._ordered[min(below + 1, len(self._ordered) - 1)]
        return low + (high - low) * (position - below)


class DeviceWindow(NamedTuple):
    """The last norms as a ring on a device, NaN where there is none yet, and how many there were."""

    ring: Tensor
    num_seen: Tensor

    @classmethod
    def of(cls, length: int, values: list[float], like: Tensor) -> DeviceWindow:
        """A window with these norms in it, where ``like`` is."""
        row = [*values, *[math.nan] * (length - len(values))]
        return cls(placed(row, like), placed(float(len(values)), like))

    def pushed(self, norm: Tensor) -> DeviceWindow:
        """The window with a norm in place of the oldest."""
        at = (self.num_seen % len(self.ring)).long().view(1)
        return DeviceWindow(self.ring.scatter(0, at, norm.to(self.ring).view(1)), self.num_seen + 1)

    def percentile(self, p: float) -> Tensor:
        """The p-th percentile; of no norms NaN."""
        position = (self.num_seen.clamp(1, len(self.ring)) - 1) * p / 100
        ordered = self.ring.sort().values  # NaN comes last
        ends = torch.stack([position.floor(), position.ceil()]).long()
        low, high = ordered.index_select(0, ends).unbind()
        return low + (high - low) * (position - position.floor())

    def read(self) -> list[float]:
        """The norms in order of arrival; waits for the device."""
        return in_order(*self.ring.tolist(), self.num_seen.item())


def in_order(*ring: float) -> list[float]:
    """The values of a ring, oldest first; its last entry is how many there were, and NaN is no value."""
    *values, count = ring
    oldest = int(count) % max(len(values), 1)
    return [value for value in values[oldest:] + values[:oldest] if not math.isnan(value)]


def placed(numbers: Quantity, like: Tensor) -> Tensor:
    """Numbers from the host where ``like`` is; the host need not wait for that."""
    return torch.tensor(numbers, dtype=like.dtype, device="cpu").to(like.device, non_blocking=True)
