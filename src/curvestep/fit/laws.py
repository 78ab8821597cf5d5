r"""Which law smoothness follows along a run: affine in the gradient norm, a power of it, or of the loss.

.. math::
    L_0 + L_1\lVert g\rVert, \qquad L_0 + L_\alpha\lVert g\rVert^\alpha, \qquad H_0 + H_1(f - f^*)

(Zhang et al. 2020; Chen et al. 2023; Alimisis et al. 2025.) All are fitted to the logarithm of the
smoothness, through the middle of the rows, and compared by their error on blocks of consecutive rows that the
fit has not seen. Between gradient norm and loss the paired differences of these errors decide. Between the
affine law and a power the exponent and its interval do, since one law contains the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from curvestep.fit import fit_words as words
from curvestep.fit.correlation import UNKNOWN
from curvestep.fit.intervals import Interval
from curvestep.fit.samples import MOST_TESTED_ROWS, Samples, evenly_spaced
from curvestep.notes import Note
from curvestep.trace.schema import LEAST_ROWS

HELD_OUT = LEAST_ROWS  # blocks of consecutive rows, each predicted from the others
# Exponents up to this, or down to its inverse, are the affine law's: halfway, in logarithms, to 2 and to ½.
AFFINE_EXPONENT = math.sqrt(2.0)
_EXPONENTS = np.geomspace(0.1, 6.0, 60)
_CONSTANT_SHARES = np.append(
    0.0, 1 / (1 + np.exp(np.linspace(8.0, -6.0, 36)))
)  # of the constant, at the mean


@dataclass(frozen=True, kw_only=True)
class Law:
    """A law through the middle of the rows."""

    name: str  # "affine", "power" or "loss"
    offset: float  # L0 or H0
    slope: float  # L1, Lα or H1
    exponent: float  # α; 1 unless the law is a power
    error: float  # root mean square error of log smoothness on held-out rows


@dataclass(frozen=True, kw_only=True)
class LawComparison:
    """Result of :func:`compare_laws`."""

    laws: dict[str, Law]  # every law that could be fitted, by name
    best: str  # the winner's name; empty where the run does not tell
    exponent_interval: Interval  # interval of α, at level `(1 + level)/2`
    loss_gain_interval: Interval  # squared error by gradient norm less that by loss; NaN without losses
    doubt: Note | None  # why there is no winner; else None


def compare_laws(samples: Samples, *, level: float = 0.9, loss_floor: float = 0.0) -> LawComparison:
    """The laws of a run, and the one that predicts held-out rows best; ``loss_floor`` is f*."""
    used = samples.rows(np.flatnonzero(samples.smoothness > 0))
    if len(used) < HELD_OUT:
        raise ValueError(
            f"Laws need at least {HELD_OUT} rows with a smoothness above zero, got {len(used)}. "
            "Measure more rows."
        )
    used = used.rows(evenly_spaced(len(used), most=MOST_TESTED_ROWS))
    log_ell = np.log(used.smoothness)
    power = _Family(np.log(used.grad_norm), log_ell, _EXPONENTS)
    affine = _Family(np.log(used.grad_norm), log_ell, np.ones(1))
    laws = {"affine": affine.law("affine"), "power": power.law("power")}
    interval = power.exponent_interval(0.5 + level / 2)  # at 90 % one in eight affine runs was misnamed
    excess = used.loss - loss_floor
    gain = UNKNOWN
    best = ""
    doubt = words.doubt("no-losses", floor=loss_floor)
    if np.all(excess > 0):  # NaN where the loss was not recorded
        loss = _Family(np.log(excess), log_ell, np.ones(1))
        laws["loss"] = loss.law("loss")
        gain = _mean_interval(power.errors - loss.errors, level)
        best = _winner(laws["power"].exponent, interval, gain)
        doubt = None if best else words.laws_alike(interval, gain)
    return LawComparison(
        laws=laws, best=best, exponent_interval=interval, loss_gain_interval=gain, doubt=doubt
    )


def _winner(exponent: float, interval: Interval, gain: Interval) -> str:
    """The law that these numbers leave; empty if they leave several."""
    if gain[0] > 0:
        return "loss"
    if gain[1] >= 0:
        return ""
    low = 1 / AFFINE_EXPONENT
    high = AFFINE_EXPONENT
    if low <= interval[0] <= interval[1] <= high:
        return "affine"
    affine = low <= exponent <= high or interval[0] <= 1 <= interval[1]
    return "" if affine else "power"


class _Family:
    r"""Fits :math:`\log\ell = c + \log(\theta + (1 - \theta) x^\alpha/m_\alpha)` for all θ and α of a grid.

    m is the mean of :math:`x^\alpha`; for each θ and α the best c is a mean, so nothing is iterated.
    """

    def __init__(self, log_x: np.ndarray, log_ell: np.ndarray, exponents: np.ndarray) -> None:
        self.log_ell = log_ell
        self.exponents = exponents
        self.powers = np.exp(exponents[:, None] * (log_x - log_x.max()))
        self.means = self.powers.mean(axis=1) * np.exp(exponents * log_x.max())
        self.num = len(log_x)
        # Of each θ and α: the mean of what is left, and in each block its sum less that, and its square.
        shape = (len(_CONSTANT_SHARES), len(exponents))
        starts = [block[0] for block in self._blocks()]
        self.centres = np.empty(shape)
        sums = np.empty((*shape, HELD_OUT))
        squares = np.empty((*shape, HELD_OUT))
        for share in range(len(_CONSTANT_SHARES)):  # not all at once: that takes memory
            left = self._residual(share, slice(None))
            self.centres[share] = left.mean(axis=-1)
            left -= self.centres[share][:, None]
            sums[share] = np.add.reduceat(left, starts, axis=-1)
            squares[share] = np.add.reduceat(left**2, starts, axis=-1)
        self.squares = squares.sum(axis=-1)
        self.errors = np.array([self._held_out(block, sums, squares) for block in range(HELD_OUT)])

    def _blocks(self) -> list[np.ndarray]:
        """Consecutive rows, each block to be predicted from the others."""
        return np.array_split(np.arange(self.num), HELD_OUT)

    def _residual(self, share: int, exponent: int | slice) -> np.ndarray:
        """What these laws leave of log smoothness, before the best c is taken off."""
        constant = _CONSTANT_SHARES[share]
        powers = self.powers[exponent]
        relative = powers / powers.mean(axis=-1, keepdims=True)
        return self.log_ell - np.log(np.maximum(constant + (1 - constant) * relative, 1e-300))

    def _held_out(self, block: int, sums: np.ndarray, squares: np.ndarray) -> float:
        """Mean square error on the rows of a block of the fit to all others."""
        rows = self._blocks()[block]
        others = self.num - len(rows)
        shift = (sums.sum(axis=-1) - sums[..., block]) / others
        variance = (squares.sum(axis=-1) - squares[..., block]) / others - shift**2
        best = self._place_of_least(variance)
        predicted = self.centres[best] + shift[best]
        return float(np.mean((self._residual(*best)[rows] - predicted) ** 2))

    @staticmethod
    def _place_of_least(values: np.ndarray) -> tuple[int, int]:
        share, exponent = np.unravel_index(np.argmin(values), values.shape)
        return int(share), int(exponent)

    def law(self, name: str) -> Law:
        """The best of the grid."""
        share, exponent = self._place_of_least(self.squares)
        scale = math.exp(float(self.centres[share, exponent]))
        return Law(
            name=name,
            offset=float(scale * _CONSTANT_SHARES[share]),
            slope=float(scale * (1 - _CONSTANT_SHARES[share]) / self.means[exponent]),
            exponent=float(self.exponents[exponent]),
            error=math.sqrt(float(self.errors.mean())),
        )

    def exponent_interval(self, level: float) -> Interval:
        """Exponents that a likelihood-ratio test keeps; rows like their neighbours count for less."""
        profile = self.squares.min(axis=0)
        best = self._place_of_least(self.squares)
        left = self._residual(*best) - self.centres[best]
        repeat = max(0.0, float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300))
        effective = self.num * (1 - repeat) / (1 + repeat)
        ratio = effective * np.log(profile / max(float(profile.min()), 1e-300))
        kept = self.exponents[ratio <= stats.chi2.ppf(level, 1)]
        return float(kept.min()), float(kept.max())


def _mean_interval(values: np.ndarray, level: float) -> Interval:
    """Student's interval of a mean."""
    reach = float(stats.t.ppf(0.5 + level / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - reach, float(values.mean()) + reach
