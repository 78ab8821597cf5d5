r"""Whether smoothness follows the gradient norm inside single steps, where a constant Hessian shows nothing.

Across the rows of a trace gradient norm and smoothness share causes: time, the batch, directions that were
worked off, the length of the step. Inside one step, on one batch, they do not. With :math:`g(t)` the gradient
at :math:`x + t d`, the secant at a fraction is the Hessian along the step, averaged up to there:

.. math::
    s(\gamma) = \frac{\lVert g(\gamma) - g(0)\rVert}{\gamma\lVert d\rVert}
    = \frac{1}{\lVert d\rVert}\Bigl\lVert \frac1\gamma\int_0^\gamma \nabla^2 f(x + t d)\,d\;dt\Bigr\rVert

So it is compared with the gradient norm averaged over the same stretch, :math:`m(\gamma)`. From one fraction
to the next

.. math::
    u = \log\frac{s(\gamma')}{s(\gamma)}, \qquad v = \log\frac{m(\gamma')}{m(\gamma)}, \qquad
    \text{elasticity} = \frac{d\log L}{d\log\lVert g\rVert} \approx \frac uv

A constant Hessian gives u = 0, whatever its spectrum, the noise, the clipping or the batch. A smoothness
:math:`L_1\lVert g\rVert` gives u = v.

A Hessian that changes without regard to the gradient gives u any sign, but not evenly. Where gradients have
kinks (ReLU) or sharp directions turn along a long step, changes of the gradient cancel in part, and u is
negative in nearly all steps. The gradient norm falls in most, so u and v agree without reason. Therefore the
test compares steps with each other: u and v less their medians. A u that is lower where v is lower counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from scipy.optimize import root_scalar

from curvestep.fit.samples import LEAST_ROWS

# Chosen on seeds below 10,000 of benchmarks/within.py, which judges them on others.
LEAST_ELASTICITY = 0.2  # what the test must exceed: less is no growth that clipping could use
LEAST_FALL = 0.02  # a common fall of the secants by less than this is left in the elasticity
REACH = 1.0  # a ratio u/v that lies further from the centre counts as this far
MOST_BLOCKS = 16
INDEPENDENT = 0.5  # blocks for each row that neighbours do not repeat, at most
LEAST_BLOCKS = 5
ROUNDING = 10.0  # error of a gradient difference, in units of eps times the gradient norm
SHORT = 0.1  # steps of a smaller kappa show little


@dataclass(frozen=True, kw_only=True)
class Within:
    r"""How smoothness follows the gradient norm inside steps.

    Attributes:
        elasticity: :math:`d\log L/d\log\lVert g\rVert`: 0 where L0 rules (constant Hessian), 1 where L1 does.
        elasticity_interval: Its confidence interval.
        p_value: One-sided, of an elasticity of at most 0.2 between steps. NaN where nothing could be tested.
        num_rows: Rows that were used.
        kappa: Median of :math:`\lVert\Delta g\rVert/\lVert g\rVert` over the rows that could be read.
        level: Of the interval; growth counts as shown where ``p_value <= 1 - level``.
        fall: How far log L falls along all steps, whatever the gradient norm does (kinks, directions that
            turn). It is taken off before the elasticity is read. Zero where no such fall is sure.
        missing: Why nothing could be tested, and the way out; empty otherwise.
    """

    level: float
    elasticity: float = math.nan
    elasticity_interval: tuple[float, float] = (math.nan, math.nan)
    p_value: float = math.nan
    num_rows: int = 0
    kappa: float = math.nan
    fall: float = 0.0
    missing: str = ""

    @property
    def grows(self) -> bool:
        """Whether smoothness grows with the gradient norm by more than chance."""
        return self.p_value <= 1 - self.level and self.elasticity > 0

    def __str__(self) -> str:
        if self.missing:
            return f"Within steps: cannot tell. {self.missing}"
        # Adding zero turns -0.0 into 0.0.
        centre, low, high = (round(x, 2) + 0.0 for x in (self.elasticity, *self.elasticity_interval))
        numbers = (
            f"elasticity {centre:.2f} [{low:.2f}, {high:.2f}], {self.num_rows} rows, p {self.p_value:.1g}"
        )
        if self.grows:
            words = f"Within steps: smoothness grows with the gradient norm ({numbers})."
        elif high <= LEAST_ELASTICITY:
            words = f"Within steps: smoothness does not grow with the gradient norm ({numbers})."
        else:
            words = f"Within steps: no growth of smoothness with the gradient norm is shown ({numbers})."
            if self.kappa < SHORT:
                words += (
                    f" Steps are short (median kappa {self.kappa:.2g}): above about {SHORT} they show more."
                )
        if self.fall:
            words += (
                f" Along all steps the secants fall by {-math.expm1(-self.fall):.0%}, whatever the gradient "
                "norm does: kinks, or sharp directions that turn. That part is left out."
            )
        return words


def within_steps(
    *,
    secants: ArrayLike | None,
    grad_norm: ArrayLike,
    grad_norms: ArrayLike | None,
    fractions: Sequence[float] | None,
    kappa: ArrayLike,
    eps: ArrayLike,
    level: float = 0.9,
) -> Within:
    r"""Elasticity of smoothness with the gradient norm inside steps, its interval and a test.

    The elasticity is the mean of u/v with weights |v|: how far log L moved in the direction of log g, over
    how far log g moved. A ratio further than 1 from the mean counts as 1 away. Rows are cut into at most 16
    blocks of consecutive rows of about equal weight; Student's t of the block sums gives an interval. The
    test does the same with u and v less their medians, and so does the elasticity where all secants fall. No
    p-value is below :math:`2^{-\text{blocks}}`, what fair coins would give.

    Args:
        secants: Secant smoothness, shape (rows, fractions), in the order of the steps; NaN where unknown.
        grad_norm: Gradient norm of the same batch at the start of the step.
        grad_norms: Gradient norm of the same batch at each fraction, shaped like ``secants``.
        fractions: Fractions of the step, two or more.
        kappa: :math:`\lVert\Delta g\rVert/\lVert g\rVert` over the step.
        eps: Machine precision of the gradients, one number or one a row.
        level: Confidence level in (0, 1).

    Example:
        >>> x = np.linspace(3, 1, 40)                        # f = eˣ, whose Hessian is its gradient
        >>> start = np.exp(x)
        >>> d = 0.05 * start[:, None] * [0.5, 1.0]           # half a step of lr 0.05, and all of it
        >>> ends = np.exp(x[:, None] - d)
        >>> secants = (start[:, None] - ends) / d
        >>> found = within_steps(secants=secants, grad_norm=start, grad_norms=ends, fractions=(0.5, 1.0),
        ...                      kappa=1 - ends[:, 1] / start, eps=2.2e-16)
        >>> found.grows, round(found.elasticity, 6), found.num_rows
        (True, 1.0, 40)
    """
    if not 0 < level < 1:
        raise ValueError(f"`level` must lie between 0 and 1, got {level!r}.")
    if secants is None or grad_norms is None or fractions is None or not len(fractions):
        return Within(
            level=level,
            missing="The rows hold no secants and gradient norms at fractions of the step. "
            "Measure again with the estimator `smoothness`, which records both.",
        )
    along = np.asarray(fractions, dtype=float)
    s, m = np.asarray(secants, dtype=float), np.asarray(grad_norms, dtype=float)
    start, change, precision = (
        np.broadcast_to(np.asarray(column, dtype=float), s.shape[:1]) for column in (grad_norm, kappa, eps)
    )
    if s.shape != (len(start), len(along)) or m.shape != s.shape:
        raise ValueError(
            "`secants` and `grad_norms` must have one row a step and one column a fraction, got shapes "
            f"{s.shape} and {m.shape} for {len(start)} steps and {len(along)} fractions."
        )
    if not (np.all(along > 0) and np.all(np.diff(along) > 0)):
        raise ValueError(f"`fractions` must be positive and rise, got {tuple(fractions)!r}.")
    if len(along) < 2:
        return Within(
            level=level,
            missing=f"Only the fraction {along[0]:g} of each step was recorded, and one secant has nothing "
            "to be compared with. Measure with fractions=(0.5, 1.0).",
        )
    columns = np.column_stack([s, m, start, change, precision])
    read = np.all(np.isfinite(columns) & (columns > 0), axis=1)
    num_read = int(read.sum())
    if num_read < LEAST_ROWS:
        return Within(
            level=level,
            missing=f"{num_read} of {len(read)} rows hold positive, finite secants and gradient norms at "
            f"every fraction, and {LEAST_ROWS} are needed. Measure more steps with fractions=(0.5, 1.0).",
        )
    s, m, start, change, precision = s[read], m[read], start[read], change[read], precision[read]
    kappa_median = float(np.median(change))
    u, v = np.diff(np.log(s), axis=1), np.diff(np.log(mean_norms(start, m, along)), axis=1)
    # The secant at the smaller fraction has the larger error.
    error = ROUNDING * precision[:, None] / (change[:, None] * along[:-1])
    plain = _blocks(u, v, error)
    between = _blocks(u - np.median(u, axis=0), v - np.median(v, axis=0), error)
    if plain is None or (between is None and plain.interval(level)[1] > LEAST_ELASTICITY):
        return Within(
            level=level,
            kappa=kappa_median,
            missing=f"Too few of {num_read} steps can be compared: along the others the gradient norm "
            f"changes too little, or by the same factor (median kappa {kappa_median:.2g}). The steps are too "
            f"short, or too much alike. Measure more steps, and where kappa is above about {SHORT:g}: with a "
            "larger lr or max_norm, or earlier in training.",
        )
    fall, chosen = 0.0, plain
    if between is not None:
        left = (u - between.centre * v).sum(axis=1, keepdims=True)
        rest = _Blocks(ratio=left, weight=np.ones_like(left))
        if rest.centre < -LEAST_FALL and rest.interval(level)[1] < 0:
            fall, chosen = -rest.centre, between
    return Within(
        elasticity=chosen.centre,
        elasticity_interval=chosen.interval(level),
        p_value=1.0 if between is None else between.p_value(LEAST_ELASTICITY),
        num_rows=int((chosen.weight > 0).any(axis=1).sum()),
        kappa=kappa_median,
        level=level,
        fall=fall,
    )


def mean_norms(grad_norm: np.ndarray, grad_norms: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Mean gradient norm from the start of the step to each fraction, by the trapezoid rule.

    If the norm falls or rises exponentially, the rule is off by one factor at fractions 1/2 and 1, so that
    their ratio is exact. And unlike rules of higher order it bears a norm that falls to zero and rises again.

    Example:
        >>> mean_norms(np.array([4.0]), np.array([[2.0, 1.0]]), np.array([0.5, 1.0]))
        array([[3.  , 2.25]])
    """
    nodes = np.column_stack([grad_norm, grad_norms])
    panels = np.diff(fractions, prepend=0.0) * (nodes[:, 1:] + nodes[:, :-1]) / 2
    return np.cumsum(panels, axis=1) / fractions


class _Blocks:
    """Ratios u/v in blocks of consecutive rows that have the same weight, as nearly as rows can be cut."""

    def __init__(self, *, ratio: np.ndarray, weight: np.ndarray) -> None:
        self.ratio, self.weight = ratio, weight / weight.sum()
        rows = self.weight.sum(axis=1)
        effective = 1 / float(rows @ rows)  # number of rows, were they of one weight
        self._cut(min(MOST_BLOCKS, math.ceil(effective)))
        scores = self.scores(self.centre)
        square = float(scores @ scores)
        # Neighbours that resemble each other count as so much less, and blocks get longer. Not for rounding.
        varies = square * effective > 1e-12
        repeat = max(0.0, float(scores[1:] @ scores[:-1]) / square) if varies else 0.0
        fewer = max(LEAST_BLOCKS, math.ceil(INDEPENDENT * effective * (1 - repeat) / (1 + repeat)))
        if fewer < self.num:
            self._cut(fewer)

    def _cut(self, num: int) -> None:
        rows = self.weight.sum(axis=1)
        middle = np.cumsum(rows) - rows / 2
        # A row that outweighs a block leaves its neighbour empty; rounding may put the last beyond the end.
        filled, self.block = np.unique(np.minimum((middle * num).astype(int), num - 1), return_inverse=True)
        self.num, self.share = len(filled), np.bincount(self.block, rows)

    def scores(self, centre: float) -> np.ndarray:
        """Weighted distance of each row from a centre, before weighting at most ``REACH``."""
        return (self.weight * np.clip(self.ratio - centre, -REACH, REACH)).sum(axis=1)

    def distance(self, centre: float) -> tuple[float, float]:
        """Mean distance from a centre, and its standard error."""
        sums = np.bincount(self.block, self.scores(centre))
        away = sums - sums.sum() * self.share
        return float(sums.sum()), math.sqrt(float(away @ away) * self.num / max(self.num - 1, 1))

    def bound(self, centre: float, quantile: float) -> float:
        """The distance, less a multiple of its standard error."""
        mean, error = self.distance(centre)
        return mean - quantile * error

    @cached_property
    def centre(self) -> float:
        """Where the mean distance is zero."""
        used = self.ratio[self.weight > 0]
        low, high = float(used.min()), float(used.max())
        return low if low == high else self._root(low, high, 0.0)

    def interval(self, level: float) -> tuple[float, float]:
        """The centres that Student's t does not reject."""
        quantile = float(stats.t.ppf(0.5 + level / 2, self.num - 1))
        return self._end(quantile, -1.0), self._end(-quantile, 1.0)

    def _end(self, quantile: float, direction: float) -> float:
        near, step = self.centre, 1e-3
        while direction * self.bound(far := near + direction * step, quantile) > 0:
            near, step = far, 2 * step
        if direction * self.bound(near, quantile) <= 0:
            return near  # all ratios are equal, up to rounding
        return self._root(near, far, quantile)

    def _root(self, low: float, high: float, quantile: float) -> float:
        return root_scalar(self.bound, args=(quantile,), bracket=(low, high), xtol=1e-12).root

    def p_value(self, centre: float) -> float:
        """One-sided, of a true centre at or below this one; never less than so many fair coins could give."""
        mean, error = self.distance(centre)
        t = mean / error if error > 0 else math.copysign(math.inf, mean)
        return max(float(stats.t.sf(t, self.num - 1)), 2.0**-self.num)


def _blocks(u: np.ndarray, v: np.ndarray, error: np.ndarray) -> _Blocks | None:
    """Blocks of the rows where rounding leaves u/v known to a tenth; None if they are too few."""
    resolved = error <= 0.1 * np.abs(v)
    if resolved.any(axis=1).sum() < LEAST_ROWS:
        return None
    blocks = _Blocks(ratio=u / np.where(resolved, v, 1.0), weight=np.where(resolved, np.abs(v), 0.0))
    return blocks if blocks.num >= LEAST_BLOCKS else None
