r"""Whether smoothness follows the gradient norm inside single steps, on a stretch that does not overshoot.

Across the rows of a trace gradient norm and smoothness share causes: time, the batch, directions that were
worked off, the length of the step. Inside one step, on one batch, they do not. With :math:`g(t)` the gradient
at :math:`x + t d`, the secant at a fraction is the Hessian along the step, averaged up to there:

.. math::
    s(\gamma) = \frac{\lVert g(\gamma) - g(0)\rVert}{\gamma\lVert d\rVert}
    = \frac{1}{\lVert d\rVert}\Bigl\lVert \frac1\gamma\int_0^\gamma \nabla^2 f(x + t d)\,d\;dt\Bigr\rVert

It is compared with the gradient norm averaged over the same stretch, :math:`m(\gamma)`, from the first
fraction :math:`\gamma` to the last one :math:`\gamma'` before the overshoot:

.. math::
    u = \log\frac{s(\gamma')}{s(\gamma)}, \qquad v = \log\frac{m(\gamma')}{m(\gamma)}, \qquad
    \text{elasticity} = \frac{\sum u v}{\sum v^2} \approx \frac{d\log L}{d\log\lVert g\rVert}

u and v are taken for the same length of the stretch in all rows, less their means and trends over the run:
what all steps share (kinks, directions that turn) and what training changes slowly drops out. A constant
Hessian gives 0, a smoothness :math:`L_1\lVert g\rVert` gives 1.

A Hessian that changes without regard to the gradient does not give 0, because :math:`g(\gamma')` is in both u
and v. So every elasticity has a zero of its own. The profile of each step, by how much its secant grows and
its gradient turns from :math:`\gamma` to :math:`\gamma'`, is dealt out at random to the other rows; start
gradient, first secant and first angle stay, and the gradient norms follow from them. The test asks whether
the elasticity exceeds that zero. Beyond an overshoot (:math:`\lVert g(\gamma') - g(0)\rVert`
above a third of :math:`\lVert g(0)\rVert`) u and v are one quantity, and nothing can be told. Nor can it
where no growth shows and steps run across the gradient: the curvature along them is not that along it.

The size of the elasticity is another question. Where directions differ in curvature, the gradient changes at
an angle :math:`\theta` to itself. If each direction follows its own part of the gradient, and not the norm of
all, the elasticity comes out :math:`1 + 2\tan^2\theta` times as large, to second order in the spread of
curvature. Nothing in the rows tells the two apart. And where the elasticity itself changes with the gradient
norm, as under :math:`L_0 + L_1\lVert g\rVert`, the slope between steps is not the ratio inside them. So the
size is said to be unknown where that factor, and half the interval or the distance to the slope through the
origin, leave an error above 0.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from curvestep.fit import fit_words as words
from curvestep.fit.samples import check_share
from curvestep.notes import Note
from curvestep.smoothness.schedule import short_fractions
from curvestep.trace.history import typical

# Chosen on seeds below 10,000 of benchmarks/within.py, which judges them on others.
MOST_KAPPA = 1 / 3  # change of the gradient over its norm, up to which a stretch does not overshoot
LEAST_ELASTICITY = 0.2  # less is no growth that clipping could use
LEAST_COSINE = 0.5  # of gradient and step, or its own change, below which steps without growth say nothing
BLOCK = 8  # neighbouring rows that count as one observation
LEAST_TESTED_ROWS = 4 * BLOCK
SHUFFLES = 100
ROWS_AT_ONCE = 20_000  # of all shuffles that are computed together
TAIL = 0.05  # share of the rows at either end that count as no further out than the rest
MOST_SIZE_ERROR = 0.15  # of an elasticity that may be read as a number
RESOLVED = 100.0  # spread of v in units of the rounding error of u, from which u can be read


@dataclass(frozen=True, kw_only=True)
class Within:
    """How smoothness follows the gradient norm inside steps."""

    level: float  # of the intervals; growth counts as shown where `p_value <= 1 - level`
    elasticity: float = math.nan  # d log L/d log ‖g‖: 0 for a constant Hessian, 1 where L1 rules
    elasticity_interval: tuple[float, float] = (math.nan, math.nan)  # its confidence interval
    zero: float = math.nan  # what the same steps show where curvature has nothing to do with the gradient
    through_origin: float = math.nan  # the slope with means and trends left in: u over v inside steps
    p_value: float = math.nan  # one-sided, of an elasticity above neither its zero nor 0; NaN if untested
    num_rows: int = 0  # rows that were used
    stretch: tuple[float, float] = (math.nan, math.nan)  # first and last fraction that were compared
    kappa: float = math.nan  # median of ‖Δg‖/‖g‖ over whole steps
    along: float = math.nan  # median cosine between the gradient and its change, in size
    cosine: float = math.nan  # median cosine between the step and −g; NaN if unknown
    missing: Note | None = None  # why nothing could be tested, and the way out; else None

    @property
    def grows(self) -> bool:
        """Whether smoothness is shown to grow with the gradient norm."""
        return self.p_value <= 1 - self.level and self.elasticity >= LEAST_ELASTICITY

    @property
    def doubt(self) -> Note | None:
        """Why nobody can tell whether smoothness grows, and the way out."""
        if self.missing is None and self.cosine < LEAST_COSINE and not self.grows:
            return words.doubt("across", cosine=self.cosine)
        return self.missing

    @property
    def size_error(self) -> float:
        """How far the size of the elasticity may be off."""
        low, high = self.elasticity_interval
        across = 1 - self.along**2  # sin²θ
        directions = abs(self.elasticity) * 2 * across / (1 + across)
        return directions + max((high - low) / 2, abs(self.elasticity - self.through_origin))

    @property
    def size_known(self) -> bool:
        """Whether the elasticity may be read as a number, and not only as growth or none."""
        return self.size_error <= MOST_SIZE_ERROR

    @property
    def answer(self) -> str:
        """``"grows"``, ``"does-not-grow"``, ``"not-shown"`` or ``"cannot-tell"``."""
        if self.doubt:
            return "cannot-tell"
        if self.grows:
            return "grows"
        constant = self.elasticity_interval[1] <= LEAST_ELASTICITY and self.along >= LEAST_COSINE
        return "does-not-grow" if constant else "not-shown"

    def __str__(self) -> str:
        return words.within_words(self)


def within_steps(
    *,
    secants: ArrayLike,
    grad_norm: ArrayLike,
    grad_norms: ArrayLike,
    fractions: ArrayLike,
    kappa: ArrayLike,
    eps: float,
    cosine: ArrayLike = math.nan,
    level: float = 0.9,
    most_kappa: float = MOST_KAPPA,
) -> Within:
    r"""Elasticity of smoothness with the gradient norm inside steps, its zero, and a test against it.

    Blocks of eight neighbouring rows are the units: Student's t of what each adds gives interval and p-value,
    so rows that resemble their neighbours count for less. No p-value is below :math:`2^{-\text{blocks}}`.

    Args:
        secants: Secant smoothness, shape (rows, fractions), in the order of the steps; NaN where unknown.
        grad_norm: Gradient norm of the same batch at the start of the step.
        grad_norms: Gradient norm of the same batch at each fraction, shaped like ``secants``.
        fractions: Fractions of the step, rising, two or more: one list, or one a row; NaN where unknown.
        kappa: :math:`\lVert\Delta g\rVert/\lVert g\rVert` over the step, to its last fraction.
        eps: Machine precision of the gradients.
        cosine: Between the step and −g, one number or one a row; NaN where unknown.
        level: Confidence level in (0, 1).
        most_kappa: How much of its norm the gradient may change by up to the last fraction that is compared.

    Example:
        >>> x = np.linspace(3, 1, 48)                        # f = eˣ, whose Hessian is its gradient
        >>> start = np.exp(x)
        >>> d = 0.02 * start[:, None] * [0.05, 0.15]         # the beginning of a step of lr 0.02
        >>> ends = np.exp(x[:, None] - d)
        >>> secants = (start[:, None] - ends) / d
        >>> found = within_steps(secants=secants, grad_norm=start, grad_norms=ends, fractions=(0.05, 0.15),
        ...                      kappa=1 - ends[:, 1] / start, eps=2.2e-16)
        >>> found.answer, round(found.elasticity, 2), round(found.zero, 2), found.num_rows
        ('grows', 1.01, -0.11, 48)
    """
    check_share("level", level)
    needed = ((secants, "no-secants"), (grad_norms, "no-secants"), (fractions, "no-fractions"))
    for values, kind in needed:
        if _unknown(values):
            return Within(level=level, missing=words.doubt(kind))
    if np.asarray(fractions).shape[-1] < 2:
        return Within(level=level, missing=words.doubt("one-fraction"))
    if _unknown(kappa):
        return Within(level=level, missing=words.doubt("no-kappa"))
    s = np.asarray(secants, dtype=float)
    m = np.asarray(grad_norms, dtype=float)
    along = np.atleast_2d(np.asarray(fractions, dtype=float))
    rows = len(np.atleast_1d(grad_norm))
    if not s.shape == m.shape == (rows, along.shape[1]):
        raise ValueError(
            f"`secants` and `grad_norms` must have the shape {(rows, along.shape[1])}, steps by fractions, "
            f"got {s.shape} and {m.shape}."
        )
    if np.any(np.diff(along, axis=1, prepend=0.0) <= 0):  # not where one is unknown
        raise ValueError(f"`fractions` must be positive and rise, got {fractions!r}.")
    along = np.broadcast_to(along, s.shape)
    start = np.broadcast_to(np.asarray(grad_norm, dtype=float), rows)
    change = np.broadcast_to(np.asarray(kappa, dtype=float), rows)
    read = np.all(_readable(s) & _readable(m) & _readable(along), axis=1)
    read &= _readable(start) & _readable(change)
    steps = _Steps(s[read], m[read], along[read], start[read], change[read], eps=eps, given=rows)
    missing, last = _refusal(steps, most_kappa)
    if missing is not None:
        return Within(level=level, kappa=steps.kappa_median, missing=missing)
    tested = _tested(steps.up_to(last), level=level)
    return replace(tested, kappa=steps.kappa_median, cosine=typical(np.asarray(cosine, dtype=float)))


def _readable(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values > 0)


def _unknown(values: ArrayLike) -> bool:
    """Whether no number is there."""
    return not np.isfinite(np.asarray(values, dtype=float)).any()


@dataclass(frozen=True)
class _Steps:
    """Measurements along each step; arrays of shape (rows,) or (rows, fractions)."""

    secants: np.ndarray
    norms: np.ndarray
    fractions: np.ndarray
    start: np.ndarray
    kappa: np.ndarray
    eps: float
    given: int  # rows, readable or not

    @property
    def kappa_median(self) -> float:
        return typical(self.kappa)

    @property
    def length(self) -> np.ndarray:
        """‖d‖, as a column."""
        return (self.kappa * self.start / (self.secants[:, -1] * self.fractions[:, -1]))[:, None]

    @property
    def change(self) -> np.ndarray:
        """‖g(γ) − g(0)‖ over ‖g(0)‖."""
        return self.secants * self.fractions * self.length / self.start[:, None]

    def up_to(self, last: int) -> _Steps:
        """These steps to the fraction in column ``last``, without the rows that rounding hides."""
        cut = slice(last + 1)
        kept = self.resolved(last)
        return replace(
            self,
            secants=self.secants[kept, cut],
            norms=self.norms[kept, cut],
            fractions=self.fractions[kept, cut],
            start=self.start[kept],
            kappa=self.change[kept, last],
        )

    def resolved(self, last: int) -> np.ndarray:
        """Rows in which u can be read beside the spread of v."""
        norms = np.log(mean_norms(self.start, self.norms, self.fractions))
        v = norms[:, last] - norms[:, 0]
        spread = float(np.median(np.abs(v - np.median(v))))
        return RESOLVED * self.eps <= spread * self.change[:, 0]


def _refusal(steps: _Steps, most_kappa: float) -> tuple[Note | None, int]:
    """Why these steps cannot be tested, or None; and the column of the last fraction before the overshoot."""
    if len(steps.start) < LEAST_TESTED_ROWS:
        return words.doubt(
            "few-rows", readable=len(steps.start), rows=steps.given, least=LEAST_TESTED_ROWS
        ), 0
    short = np.median(steps.change, axis=0) <= most_kappa
    last = int(np.argmin(np.append(short, False))) - 1  # the last of those that are short from the first on
    if last < 1:
        rate = float(np.median(steps.change[:, 0] / steps.fractions[:, 0]))
        first, second = short_fractions([rate])
        return words.doubt("overshoot", kappa=steps.kappa_median, first=first, second=second), 0
    rows = len(steps.start)
    resolved = int(steps.resolved(last).sum())
    if resolved < LEAST_TESTED_ROWS:
        return words.doubt("alike", unresolved=rows - resolved, rows=rows, kappa=steps.kappa_median), 0
    return None, last


def _tested(steps: _Steps, *, level: float) -> Within:
    """The elasticity of steps that do not overshoot, beside what it is with their profiles shuffled."""
    profile = _Profile.of(steps)
    u, v = profile.changes(steps, profile.growth, profile.turn)
    products, squares = _block_parts(u, v)
    zero = _shuffled_elasticity(steps, profile)
    elasticity = float(products.sum() / squares.sum())
    away = products - elasticity * squares
    num = len(products)
    error = math.sqrt(float(away @ away) * num / (num - 1)) / float(squares.sum())
    reach = float(stats.t.ppf(0.5 + level / 2, num - 1)) * error
    excess = products - max(zero, 0.0) * squares
    deviation = max(float(excess.std(ddof=1)), 1e-300)
    p_value = float(stats.t.sf(excess.mean() * math.sqrt(num) / deviation, num - 1))
    return Within(
        level=level,
        elasticity=elasticity,
        elasticity_interval=(elasticity - reach, elasticity + reach),
        zero=zero,
        through_origin=float(u @ v / (v @ v)),
        p_value=max(p_value, 2.0**-num),
        num_rows=len(steps.start),
        stretch=(float(np.median(steps.fractions[:, 0])), float(np.median(steps.fractions[:, -1]))),
        along=float(np.median(np.abs(profile.cosine[:, -1]))),
    )


def _shuffled_elasticity(steps: _Steps, profile: _Profile) -> float:
    """The elasticity where each step has the profile of another one, over all shuffles together."""
    rng = np.random.default_rng(0)
    rows = len(steps.start)
    products = squares = 0.0
    left = SHUFFLES
    while left:
        # As many shuffles at a time as keep an array small.
        together = min(left, max(1, ROWS_AT_ONCE // rows))
        order = np.argsort(rng.random((together, rows)), axis=1)
        changes = profile.changes(steps, profile.growth[order], profile.turn[order])
        shuffled_products, shuffled_squares = _block_parts(*changes)
        products += float(shuffled_products.sum())
        squares += float(shuffled_squares.sum())
        left -= together
    return products / squares


@dataclass(frozen=True)
class _Profile:
    """How secant and angle change along each step; arrays of shape (rows, fractions)."""

    stretch: np.ndarray  # length of the stretch over the usual one, as a column
    cosine: np.ndarray  # of the gradient and its change
    growth: np.ndarray  # of the log secant from the first fraction on, for a stretch of the usual length
    turn: np.ndarray  # of the cosine, likewise

    @classmethod
    def of(cls, steps: _Steps) -> _Profile:
        """The profiles of these steps."""
        start = steps.start[:, None]
        change = steps.change
        cosine = np.clip(((steps.norms / start) ** 2 - 1 - change**2) / (2 * change), -1, 1)
        # Where the fractions follow the run, stretches differ in length, and profiles in proportion.
        stretch = steps.fractions[:, -1:] / np.median(steps.fractions[:, -1])
        growth = np.log(steps.secants / steps.secants[:, :1]) / stretch
        return cls(stretch, cosine, growth, (cosine - cosine[:, :1]) / stretch)

    def changes(self, steps: _Steps, growth: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Changes u and v for profiles of shape (..., rows, fractions)."""
        longer = steps.fractions / steps.fractions[:, :1]
        moved = steps.change[:, :1] * np.exp(growth * self.stretch) * longer
        angle = np.clip(self.cosine[:, :1] + turn * self.stretch, -1, 1)
        norms = steps.start[:, None] * np.sqrt(np.maximum(1 + 2 * angle * moved + moved**2, 0))
        start = np.broadcast_to(steps.start, norms.shape[:-1])
        means = np.log(mean_norms(start, norms, steps.fractions))
        return growth[..., -1], (means[..., -1] - means[..., 0]) / self.stretch[:, 0]


def _block_parts(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Σuv and Σv² of each block, without means and trends."""
    u = _detrended(u)
    v = _detrended(v)
    return _block_sums(u * v), _block_sums(v * v)


def _block_sums(values: np.ndarray) -> np.ndarray:
    """Sums over blocks of at least ``BLOCK`` neighbours, along the last axis."""
    rows = values.shape[-1]
    num = rows // BLOCK
    return np.add.reduceat(values, np.arange(num) * rows // num, axis=-1)


def _detrended(values: np.ndarray) -> np.ndarray:
    """Values without their tails, less their mean and their linear trend along the last axis."""
    low, high = np.quantile(values, [TAIL, 1 - TAIL], axis=-1, keepdims=True)
    kept = np.clip(values, low, high)
    time = np.linspace(-1, 1, values.shape[-1])
    trend = (kept @ time)[..., None] * time / (time @ time)
    return kept - kept.mean(axis=-1, keepdims=True) - trend


def mean_norms(grad_norm: np.ndarray, grad_norms: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Mean gradient norm from the start of the step to each fraction, by the trapezoid rule.

    Example:
        >>> mean_norms(np.array([4.0]), np.array([[2.0, 1.0]]), np.array([0.5, 1.0]))
        array([[3.  , 2.25]])
    """
    nodes = np.concatenate([grad_norm[..., None], grad_norms], axis=-1)
    panels = np.diff(fractions, prepend=0.0) * (nodes[..., 1:] + nodes[..., :-1]) / 2
    return np.cumsum(panels, axis=-1) / fractions
