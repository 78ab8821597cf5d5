r"""Thresholds that follow the gradients: rules to give wherever a ``max_norm`` is taken.

>>> import torch, curvestep as cs
>>> params = [torch.nn.Parameter(torch.ones(3))]
>>> optimizer = cs.ClippedSGD(params, lr=0.1, max_norm=cs.clip_rules.percentile(10))

A rule is a short function of what a step sees (:class:`Observation`) and of a few numbers that it remembers.
It returns the threshold and what to remember next: floats, or arrays with a number for each tensor or unit.
On an accelerator a step with a rule reads the norms, which waits once.
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

from curvestep.checks import check_count, check_inside, check_positive

FloatOrArray: TypeAlias = "float | np.ndarray[Any, Any]"  # an array has a number for each tensor or unit
State: TypeAlias = tuple[FloatOrArray, ...]  # what a rule remembers
Plain: TypeAlias = Mapping[str, Any]  # a rule in a checkpoint
Saved: TypeAlias = dict[str, Any]  # what a rule remembers, as plain numbers
Each: TypeAlias = Literal["norm", "tensor", "unit"]

_LARGEST = float(np.finfo(np.float64).max)


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
        low = self._ordered[below]
        high = self._ordered[min(below + 1, len(self._ordered) - 1)]
        return low + (high - low) * (position - below)


class Observation(NamedTuple):
    """What a rule looks at.

    Attributes:
        norm: Norm of the gradient that is clipped; with ``each`` a vector, one for each tensor or unit.
        total: Norm of the whole gradient.
        weight: Norm of the parameters, for a rule whose ``each`` is ``"unit"``.
        history: The last norms, for a rule with a ``window``; it has ``percentile(p)``.
    """

    norm: FloatOrArray
    total: float
    weight: FloatOrArray = 0.0
    history: Window = Window(0, [])


@dataclass(frozen=True)
class ClipRule:
    """A threshold that follows the gradients. Rules with the same maker and parameters are equal.

    Attributes:
        make: The function that makes this rule from its parameters; a checkpoint keeps its name.
        parameters: What ``make`` was given, plain numbers by name.
        bound: The formula: threshold and new state from what was seen and the state.
        start: The state before the first step.
        window: How many norms ``Observation.history`` holds, 0 for none.
        each: What is clipped by a norm of its own: what ``norm_scope`` says (``"norm"``), every
            ``"tensor"``, or every ``"unit"``, a row of a matrix or a filter of a convolution.
        of_weights: Ratio and least norm of the weights, if the threshold is their product and no more: then
            our kernel follows the rule while it updates.
    """

    make: Callable[..., ClipRule]
    parameters: Mapping[str, float]
    bound: Callable[[Observation, State], tuple[FloatOrArray, State]] = field(compare=False)
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
    name = parameters.pop("rule", None)
    makers: dict[str, Callable[..., ClipRule]] = {make.__name__: make for make in RULES}
    if isinstance(known, ClipRule):
        makers[known.name] = known.make
    if name not in makers:
        raise ValueError(
            f"The checkpoint clips by the rule `{name}`, which is not one of curvestep. Give it to the "
            "optimizer before you load."
        )
    try:
        return makers[name](**parameters)
    except TypeError as error:
        raise ValueError(f"The checkpoint is damaged: no rule is `{dict(plain)}` ({error}).") from None


def percentile(p: float = 10.0, *, window: int = 1000) -> ClipRule:
    r"""Clip at a percentile of the gradient norms so far: AutoClip (Seetharaman et al., 2020).

    .. math::
        \gamma_k = \operatorname{percentile}_p\{g_1, \dots, g_k\}

    With :math:`p = 10`, the authors' choice, about 90 % of the steps are clipped.

    Args:
        p: Which percentile, between 0 and 100.
        window: How many of the last norms count. The paper keeps all of them.

    Returns:
        A rule for `max_norm`.

    Raises:
        ValueError: ``p`` is not between 0 and 100, or ``window`` is no positive whole number.
    """
    check_inside("p", p, 0, 100)

    def bound(seen: Observation, state: State) -> tuple[float, State]:
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

    Returns:
        A rule for `max_norm`.

    Raises:
        ValueError: an argument is outside of the range above.

    Note:
        The released code adds 1e-6 to :math:`\sigma` and clips at 1 as well; the paper does neither.
    """
    check_positive("z", z)
    check_inside("decay", decay, 0, 1)

    def bound(seen: Observation, state: State) -> tuple[FloatOrArray, State]:
        count, mean, variance = state
        above = seen.norm - mean
        is_warm = count < warmup
        stands_out = (count >= warmup) & (above > 0) & (above * above > z * z * variance)
        threshold = choose(stands_out, mean + z * z * variance / choose(stands_out, above, 1.0), math.inf)
        clipped = smaller(seen.norm, threshold)
        share = choose(is_warm, 1 / (count + 1), 1 - decay)
        new_mean = mean + share * (clipped - mean)
        # The first norms have the variance of a sample; later ones are averaged around the new mean.
        # A product, as the power of a float raises where it overflows; then the largest float stands for it.
        deviation = clipped - new_mean
        square = smaller(choose(is_warm, clipped - mean, deviation) * deviation, _LARGEST)
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

    Returns:
        A rule for `max_norm`.

    Raises:
        ValueError: an argument is outside of the range above.

    Note:
        By the algorithm as printed, a tensor with a zero gradient before step ``warmup`` would never move
        again; zero gradients are left out of the mean here.
    """
    check_positive("ratio", ratio)
    check_positive("max_norm", max_norm)
    check_inside("decay", decay, 0, 1)

    def bound(seen: Observation, state: State) -> tuple[FloatOrArray, State]:
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

    Returns:
        A rule for `max_norm`.

    Raises:
        ValueError: ``ratio`` or ``eps`` is not positive.
    """
    check_positive("ratio", ratio)
    check_positive("eps", eps)

    def bound(seen: Observation, state: State) -> tuple[FloatOrArray, State]:
        return ratio * larger(seen.weight, eps), state

    parameters = {"ratio": ratio, "eps": eps}
    return ClipRule(weight_ratio, parameters, bound, each="unit", of_weights=(ratio, eps))


RULES = (percentile, zscore, ema, weight_ratio)

# The same rules under the names of their papers.
autoclip = percentile
zclip = zscore
adagc = ema
agc = weight_ratio


def choose(condition: bool | np.ndarray[Any, Any], yes: FloatOrArray, no: FloatOrArray) -> FloatOrArray:
    """``yes`` where the condition holds, else ``no``: numbers, or arrays of them."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def smaller(a: FloatOrArray, b: FloatOrArray) -> FloatOrArray:
    """The smaller of two numbers, or of each pair."""
    if isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return choose(a < b, a, b)


def larger(a: FloatOrArray, b: FloatOrArray) -> FloatOrArray:
    """The larger of two numbers, or of each pair."""
    return choose(a > b, a, b)


class RuleMemory:
    """What a rule remembers: floats of one norm, or arrays of several."""

    def __init__(self, rule: ClipRule, saved: Saved) -> None:
        self.rule = rule
        self._state: State = tuple([_number_or_array(numbers) for numbers in saved["state"]])
        self._window = Window(rule.window, saved["norms"])

    def threshold(self, norm: float, total: float) -> float:
        """The threshold for a gradient of this norm, which is remembered."""
        if not 0.0 < norm < math.inf:
            return math.inf
        if self.rule.window:
            self._window.push(norm)
        threshold, self._state = self.rule.bound(Observation(norm, total, 0.0, self._window), self._state)
        return float(threshold)

    def thresholds(self, norms: np.ndarray[Any, Any], total: float) -> np.ndarray[Any, Any]:
        """A threshold for each of several norms, which are remembered."""
        thresholds, state = self.rule.bound(Observation(norms, total), self._state)
        if total < math.inf and np.count_nonzero(norms) == len(norms):
            self._state = state
            return np.asarray(thresholds)
        is_usual = (norms > 0) & (norms < math.inf)
        kept: list[FloatOrArray] = []
        for new, old in zip(state, self._state, strict=True):
            kept.append(np.where(is_usual, new, old))
        self._state = tuple(kept)
        return np.where(is_usual, thresholds, math.inf)

    def read(self) -> Saved:
        """The numbers for a checkpoint."""
        numbers = [np.asarray(n).tolist() for n in self._state]
        return {"rule": self.rule.as_plain(), "state": numbers, "norms": list(self._window.values)}


def _number_or_array(numbers: float | list[float]) -> FloatOrArray:
    return np.array(numbers) if isinstance(numbers, list) else numbers
