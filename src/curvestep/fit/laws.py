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
from curvestep.fit.samples import Samples
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
    used = samples.rows(samples.smoothness > 0)
    log_ell = np.log(used.smoothness)
    power = _Family(np.log(used.grad_norm), log_ell, _EXPONENTS)
    affine = _Family(np.log(used.grad_norm), log_ell, np.ones(1))
    laws = {"affine": affine.law("affine"), "power": power.law("power")}
    interval = power.exponent_interval(0.5 + level / 2)  # at 90 % one in eight affine runs was misnamed
    excess = used.loss - loss_floor
    gain, best, doubt = UNKNOWN, "", words.doubt("no-losses", floor=loss_floor)
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
    low, high = 1 / AFFINE_EXPONENT, AFFINE_EXPONENT
    if low <= interval[0] <= interval[1] <= high:
        return "affine"
    affine = low <= exponent <= high or interval[0] <= 1 <= interval[1]
    return "" if affine else "power"


class _Family:
    r"""Fits :math:`\log\ell = c + \log(\theta + (1 - \theta) x^\alpha/m_\alpha)` for all θ and α of a grid.

    m is the mean of :math:`x^\alpha`; for each θ and α the best c is a mean, so nothing is iterated.
    """

    def __init__(self, log_x: np.ndarray, log_ell: np.ndarray, exponents: np.ndarray) -> None:
        self.exponents, self.num = exponents, len(log_x)
        powers = np.exp(exponents[:, None] * (log_x - log_x.max()))
        self.means = powers.mean(axis=1) * np.exp(exponents * log_x.max())
        relative = powers / powers.mean(axis=1, keepdims=True)
        shares = _CONSTANT_SHARES[:, None, None]
        self.residual = log_ell - np.log(np.maximum(shares + (1 - shares) * relative, 1e-300))
        self.squares = self.num * self.residual.var(axis=-1)  # shape (shares, exponents)
        self.errors = np.array(list(map(self._held_out, np.array_split(np.arange(self.num), HELD_OUT))))

    def _held_out(self, rows: np.ndarray) -> float:
        """Mean square error on ``rows`` of the fit to all others."""
        seen = np.delete(self.residual, rows, axis=-1)
        best = np.unravel_index(np.argmin(seen.var(axis=-1)), self.squares.shape)
        return float(np.mean((self.residual[best][rows] - seen[best].mean()) ** 2))

    def law(self, name: str) -> Law:
        """The best of the grid."""
        share, exponent = np.unravel_index(np.argmin(self.squares), self.squares.shape)
        scale = math.exp(float(self.residual[share, exponent].mean()))
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
        best = np.unravel_index(np.argmin(self.squares), self.squares.shape)
        left = self.residual[best] - self.residual[best].mean()
        repeat = max(0.0, float(left[1:] @ left[:-1]) / max(float(left @ left), 1e-300))
        effective = self.num * (1 - repeat) / (1 + repeat)
        ratio = effective * np.log(profile / max(float(profile.min()), 1e-300))
        kept = self.exponents[ratio <= stats.chi2.ppf(level, 1)]
        return float(kept.min()), float(kept.max())


def _mean_interval(values: np.ndarray, level: float) -> Interval:
    """Student's interval of a mean."""
    reach = float(stats.t.ppf(0.5 + level / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return float(values.mean()) - reach, float(values.mean()) + reach
