r"""How one run went: whether its loss was lost, rose or fell, and how far its steps were from too long.

Three numbers tell a step that is too short from one that is too long, whatever the optimizer:

- :math:`\kappa`, by how much a step changes the gradient, relative to its norm. Where training starts, a step
  with :math:`\kappa = 1` is the one that :func:`~curvestep.calibration.calibrate.calibrate` measures.
- The *yield* of a step: by how much it lowers the loss of its own batch, over what the slope promises,

  .. math::
      \frac{f(x) - f(x + d)}{-\langle \nabla f(x), d \rangle} ,

  1 for a short step, 1/2 for the best one along a parabola, 0 at the edge where a step gains nothing.
- Whether the loss rises along the run.

Under a schedule, steps, and whether the loss still falls, are judged where lr is at least half its peak: at
the end of a decay every step is short, and no loss falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.fit.intervals import Interval
from curvestep.fit.samples import History, typical_clip_norm
from curvestep.optimizer_family import Family, family_of
from curvestep.smoothness.trace import NONFINITE

ADAM_SHARE = 0.2
UNKNOWN_SHARE = 0.1  # for steps that are not lr times the gradient, by an optimizer that is not known
NEAR_PEAK = 0.5  # of the largest lr: below it a schedule, not the setting, makes steps short
_NEAR_START = 3  # rows that count as the start


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the first rows say, before curvature has adapted to the step."""

    grad_norm: float
    factor: float  # times the run's step: there κ is 1 for plain descent, calibrate's share of it for others
    lr: float  # that gives this step
    batches: int  # that measured it
    edge: float  # step size · smoothness / 2 of the first row
    searched: bool  # the probe searched a long step for its safe fraction, by what calibrate calls safe
    spectral: float  # largest converged spectral smoothness of these rows; 0 if there is none


@dataclass(frozen=True, kw_only=True)
class Method:
    """The optimizer that stepped, as far as the rows tell."""

    name: str  # its class; empty if unknown
    momentum: float
    descent: bool  # plain or clipped descent: steps are lr times the gradient, clipped or not
    product: float  # lr times smoothness in its own metric, in the median of the later half near the peak lr
    spectral: float  # lr times the largest converged spectral value in its metric
    limit: float  # of that product, on a quadratic
    offset: float  # β of normalized descent, whose lr is a length; NaN for every other

    @property
    def normalized(self) -> bool:
        """Whether steps are lr·g/(‖g‖ + β)."""
        return math.isfinite(self.offset)

    @property
    def adaptive(self) -> bool:
        """Whether it divides by the gradient's own size."""
        return family_of(self.name).is_adaptive

    @property
    def share(self) -> float:
        """Of the step that changes the start's gradient by its norm: calibrate's, for this optimizer.

        Momentum makes a step 1/(1 − β) times as long in the end. For Adam a fifth is what calibrate takes.
        """
        if self.adaptive:
            return ADAM_SHARE
        if self.momentum > 0:
            return 1 - self.momentum
        return 1.0 if self.descent or self.name else UNKNOWN_SHARE

    @property
    def uneven(self) -> bool:
        """Whether steps are not lr times the gradient although nothing but lr should make them."""
        return bool(self.name) and not (self.descent or self.adaptive or self.momentum > 0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went, from every row there is; NaN where the rows do not say."""

    method: Method
    num_rows: int  # with a measurement
    lr: float  # the largest: the peak of a schedule
    scheduled: bool  # whether lr changed along the run
    max_norm: float  # inf if no step was clipped; the offset of normalized descent
    clipped: float  # share of the steps
    diverged_at: int | None  # training step, counted from one
    losses: Interval  # first, and last that is finite, before or after its step
    rise: Interval | None  # mean of the first and of the last losses, if it rose
    fell: bool | None  # whether the last losses are clearly below the first; None if there is no saying
    falling: bool | None  # whether the loss still falls at the end, or before lr decays
    step_yield: float  # of the later half of the run, near the peak lr
    own_fall: float  # what all steps together took off the losses of their own batches, about
    scatter: float  # of the last losses
    kappa: float  # as the yield
    step_size: float  # length of a step over the gradient norm, in the median
    grad_norm: float  # the largest
    start: Start | None  # None if the first step was not measured


def outcome_of(history: History) -> Outcome:
    """How the run with these rows went."""
    with np.errstate(all="ignore"):  # a lost run's numbers overflow
        return _outcome(history)


def _outcome(history: History) -> Outcome:
    rows = history.columns
    lr, scheduled = peak(history.lr)
    share = share_of_peak(history.lr)
    g, length, kappa = rows["grad_norm"], rows["step_norm"], rows["kappa"]
    kappa = np.where(np.isfinite(kappa), kappa, rows["smoothness"] * length / g)
    measured = history.ok & np.isfinite(kappa) & (g > 0) & (length > 0)
    near = share >= NEAR_PEAK
    late = measured & near if (measured & near).any() else measured.copy()
    late[np.flatnonzero(late)[: int(late.sum()) // 2]] = False
    clip = history.clip_norm
    finite = history.loss[np.isfinite(history.loss)]
    method, gained = _method(history, measured, late), _gained(rows, late)
    max_norm = typical_clip_norm(clip[measured]) if measured.any() else typical_clip_norm(clip)
    if method.normalized:  # it shortens every step, by a rule without an edge at β
        max_norm, clip = method.offset, np.full_like(clip, math.inf)
    known = clip[~np.isnan(clip) & history.ok]
    return Outcome(
        method=method,
        num_rows=int(measured.sum()),
        lr=lr,
        scheduled=scheduled,
        max_norm=max_norm,
        clipped=float(np.isfinite(known).mean()) if len(known) else math.nan,
        diverged_at=diverged_at(history),
        losses=(float(finite[0]), float(np.fmax(finite[-1], rows["loss_after"][-1])))
        if len(finite)
        else (math.nan, math.nan),
        rise=loss_rise(history.loss),
        fell=has_fallen(history.loss),
        falling=is_falling(history.loss[near]),
        step_yield=gained[1],
        own_fall=gained[0] * share.mean() * float(np.ptp(history.step) + 1) if len(share) else math.nan,
        scatter=float(finite[-max(5, len(finite) // 10) :].std()) if len(finite) else math.nan,
        kappa=float(np.median(kappa[late])) if late.any() else math.nan,
        step_size=float(np.median((length / g)[measured])) if measured.any() else math.nan,
        grad_norm=float(g[measured].max()) if measured.any() else math.nan,
        start=_start(history, kappa, measured, method),
    )


def peak(rates: np.ndarray) -> tuple[float, bool]:
    """The largest learning rate of a run, and whether it changed by more than a tenth; NaN if none is known.

    Example:
        >>> peak(np.array([0.1, 0.3, 0.2])), peak(np.array([0.3, 0.3]))
        ((0.3, True), (0.3, False))
    """
    rates = rates[np.isfinite(rates)]
    if not len(rates):
        return math.nan, False
    return float(rates.max()), bool(rates.min() < 0.9 * rates.max())


def share_of_peak(rates: np.ndarray) -> np.ndarray:
    """The learning rate of each row, as a share of the largest; 1 where it is not known."""
    with np.errstate(invalid="ignore"):
        share = rates / peak(rates)[0]
    return np.where(np.isfinite(share), share, 1.0)


def diverged_at(history: History) -> int | None:
    """The training step from which the loss is lost: not finite, or far above the first; None if it is not.

    Counted from one, as runs count theirs, while rows are numbered from zero.

    Far above: the last losses lie above the first by more than four times the losses' own spread. That of
    the middle half, so that a sudden rise at the end does not add to it; a steady rise stays below three.
    Losses may be negative. Or the last one, before or after its step, is three times the largest of all
    others (of the first itself, after a single step): such a run was ended because of it.
    """
    loss, lost = history.loss, history.columns["status"] == NONFINITE
    known = np.isfinite(loss)
    if not len(loss) or not (known.any() or lost.any()):
        return None  # nobody recorded the loss
    if not history.ends_finite:
        gone = lost | ~known
        begin = len(gone) - int(np.argmin(gone[::-1])) if not gone.all() else 0
        return int(history.step[min(begin, len(gone) - 1)]) + 1
    losses, steps = loss[known], history.step[known]
    last, after = float(losses[-1]), float(history.columns["loss_after"][known][-1])
    if losses.min() > 0:
        most = 3 * float(losses[: max(1, len(losses) - 1)].max())
        if last > most:
            return int(steps[-1]) + 1
        if after > most:
            return int(steps[-1]) + 2
    low, high = np.quantile(losses, [0.25, 0.75])
    bound = losses[0] + 4 * (high - low) / 1.349
    return int(steps[np.argmax(losses > bound)]) + 1 if np.median(losses[-3:]) > bound else None


def loss_rise(losses: np.ndarray) -> Interval | None:
    """Mean loss over the first five rows and the last tenth (five at least), if the last lies clearly above.

    Clearly: by more than three standard errors, by the larger scatter of the two. Five rows, since noise can
    raise a loss to its new level within the first tenth. Losses that are not finite are left out.

    Example:
        >>> loss_rise(np.arange(20.0))
        (2.0, 17.0)
        >>> loss_rise(-np.arange(20.0)) is None
        True
    """
    losses = losses[np.isfinite(losses)]
    part = max(5, len(losses) // 10)
    if len(losses) < 5 + part:
        return None
    first, last = losses[:5], losses[-part:]
    error = math.sqrt(max(first.var(ddof=1), last.var(ddof=1)) * (1 / 5 + 1 / part))
    low, high = float(first.mean()), float(last.mean())
    return (low, high) if high - low > 3 * error else None


def has_fallen(losses: np.ndarray) -> bool | None:
    r"""Whether the losses came down, by more than they scatter.

    The last tenth (five at least) lies below the first loss by twice the scatter, of the last or between
    neighbours along the run: the first loss is that of one batch, and a few last ones may agree by chance.
    Or, of a slow fall among noise, the mean of the last third lies below the first loss and below the median
    of the first third by twice the error that the scatter :math:`\sigma` between neighbours gives the
    difference of two means of n losses, :math:`\sigma\sqrt{2/n}`.

    Example:
        >>> has_fallen(np.linspace(3, 2, 40)), has_fallen(np.array([2.0, 9.0, *[2.1, 1.9] * 20]))
        (True, False)
        >>> has_fallen(np.array([2.1, *[2.1, 1.9, 2.1, 1.9] * 5, *[2.0] * 5]))
        False
        >>> has_fallen(np.linspace(2.3, 2.0, 48) + np.array([0.1, -0.1] * 24))
        True
    """
    losses = losses[np.isfinite(losses)]
    part, third = max(5, len(losses) // 10), len(losses) // 3
    if len(losses) < 2 * part:
        return None
    last = losses[-part:]
    # Of two values with standard deviation σ, the difference has the median 0.95 σ.
    between = float(np.median(np.abs(np.diff(losses)))) / 0.954
    slowly = min(losses[0], float(np.median(losses[:third]))) - losses[-third:].mean()
    return bool(
        losses[0] - last.mean() > 2 * max(last.std(ddof=1), between)
        or slowly > 2 * between * math.sqrt(2 / third)
    )


def is_falling(losses: np.ndarray) -> bool | None:
    """Whether the last third of the losses lies below the third before it by more than twice the error.

    Example:
        >>> is_falling(np.linspace(3, 2, 40)), is_falling(np.array([9.0, *[2.1, 1.9] * 20]))
        (True, False)
    """
    losses = losses[np.isfinite(losses)]
    part = len(losses) // 3
    if part < 3:
        return None
    before, last = losses[-2 * part : -part], losses[-part:]
    error = math.sqrt((before.var(ddof=1) + last.var(ddof=1)) / part)
    return bool(before.mean() - last.mean() > 2 * error)


def _gained(rows: dict[str, np.ndarray], part: np.ndarray) -> tuple[float, float]:
    """Median fall of a step's own loss, and the same over the median of what its slope promises."""
    length = rows["step_norm"][part]
    cosine = np.where(np.isfinite(rows["cosine"]), rows["cosine"], 1.0)[part]  # 1 along the gradient
    promise = cosine * rows["grad_norm"][part] * length
    fall = (rows["loss"] - rows["loss_after"])[part]
    # Without training's own loss the row holds that after the step, twice. Then the gradients at both ends
    # of the step have to do, by the trapezoidal rule.
    if not np.isfinite(fall).any() or np.nanmax(np.abs(fall)) == 0:
        fall = promise - rows["curvature"][part] * length**2 / 2
    known = np.isfinite(fall) & np.isfinite(promise)
    if not known.any() or not np.median(promise[known]) > 0:
        return math.nan, math.nan
    middle = float(np.median(fall[known]))
    return middle, middle / float(np.median(promise[known]))


def _method(history: History, measured: np.ndarray, late: np.ndarray) -> Method:
    rows = history.columns
    name = next((str(word) for word in rows["optimizer"] if word is not None), "")
    momentum = _median(rows["momentum"][measured], missing=0.0)
    product = rows["lr"] * rows["optimizer_smoothness"]
    spectral = (rows["lr"] * rows["optimizer_spectral"])[rows["optimizer_converged"] != 0]
    expected = rows["lr"] * rows["grad_norm"]
    expected = expected * np.where(np.isfinite(rows["coefficient"]), rows["coefficient"], 1.0)
    ratio = _median((rows["step_norm"] / expected)[measured], missing=1.0)
    # Where no coefficient was recorded, a step shorter than lr·‖g‖ may simply have been clipped.
    clipped = ratio < 0.9 and not np.isfinite(rows["coefficient"][measured]).all()
    offset = _offset(rows, measured, name) if momentum == 0 else math.nan
    if math.isfinite(offset):
        name, ratio, clipped = name or "NormalizedSGD", math.nan, False
    return Method(
        name=name,
        momentum=momentum,
        descent=not family_of(name).is_adaptive and momentum == 0 and (0.9 <= ratio <= 1.1 or clipped),
        product=_median(product[late], missing=math.nan),
        spectral=float(np.nanmax(spectral, initial=-math.inf)),
        limit=_median(rows["optimizer_limit"], missing=math.nan),
        offset=offset,
    )


def _offset(rows: dict[str, np.ndarray], measured: np.ndarray, name: str) -> float:
    """β, if steps of length ρ = ηg/(g + β) were taken: ηg/ρ - g is then the same all along; NaN if not."""
    if name and family_of(name) is not Family.NORMALIZED:
        return math.nan
    g = rows["grad_norm"][measured]
    ratios = rows["lr"][measured] * g / rows["step_norm"][measured]
    if not np.isfinite(ratios).all() or len(g) < 3:
        return math.nan
    low, middle, high = np.quantile(ratios - g, [0.1, 0.5, 0.9])
    # Of plain descent ηg/ρ is 1: among norms far below 1 that, too, is nearly g + β with a β of 1.
    if not name and np.ptp(np.quantile(ratios, [0.1, 0.9])) <= high - low:
        return math.nan
    alike = high - low <= 0.01 * middle + 1e-4 * float(np.median(g))
    # Norms that are all the same would make any step look like one.
    varies = float(np.ptp(np.quantile(g, [0.1, 0.9]))) > 0.02 * float(np.median(g))
    return float(middle) if middle > 0 and alike and (varies or name) else math.nan


def _median(values: np.ndarray, *, missing: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else missing


def _start(history: History, kappa: np.ndarray, measured: np.ndarray, method: Method) -> Start | None:
    """The first rows up to the first step with κ above 1: beyond that the run is somewhere else."""
    rows = history.columns
    safe = rows["safe_fraction"]
    # A step that ends where nothing is finite is not measured, but may have been searched.
    first = np.flatnonzero(measured | np.isfinite(safe))[:_NEAR_START]
    if not len(first) or rows["step"][first[0]] > 0:
        return None
    long = np.flatnonzero(~(kappa[first] <= 1))
    first = first[: long[0] + 1] if len(long) else first
    g, length = rows["grad_norm"][first], rows["step_norm"][first]
    fractions = np.asarray(history.header.get("fractions") or [], dtype=float)
    factors = []
    for row, norm, step in zip(first, g, length, strict=True):
        secants = rows["secants"][row]
        if np.isfinite(safe[row]):
            factors.append(float(safe[row]))
        elif len(fractions) and len(fractions) == len(secants) and np.isfinite(secants).all():
            factors.append(factor_to_kappa_one(fractions, secants * fractions * step / norm))
        else:
            factors.append(1 / max(float(kappa[row]), 1e-300))
    again = np.isfinite(rows["start_step"])  # other batches, asked where the run began
    if again.any():
        first, length = first[:1], length[:1]
        factors = [factors[0], *(rows["start_step"][again] * g[0] / length)]
        g = np.array([g[0], *rows["start_grad_norm"][again]])
    scaled = method.share * np.array(factors)
    spectral = rows["spectral_smoothness"][first][rows["spectral_converged"][first] != 0]
    lr = rows["lr"][first]
    sizes = length / g[: len(length)]
    part = share_of_peak(history.lr)[first]  # under a warm-up the start's lr is not the run's
    return Start(
        grad_norm=float(np.median(g)),
        factor=float(np.median(scaled * part)),
        lr=float(np.median(scaled * (lr if method.adaptive or method.uneven else sizes))),
        batches=len(scaled),
        edge=float(rows["smoothness"][first[0]] * length[0] / g[0] / 2),
        searched=bool(np.isfinite(safe[first]).any()),
        spectral=float(np.nanmax(spectral, initial=0.0)),
    )


def factor_to_kappa_one(fractions: np.ndarray, kappa: np.ndarray) -> float:
    r"""How many times a step has :math:`\kappa = 1`, from its values at fractions of the step.

    Between the fractions it is interpolated, from 0 at none; beyond the last it goes on in proportion.

    Example:
        >>> factor_to_kappa_one(np.array([0.5, 1.0]), np.array([0.1, 0.2]))
        5.0
        >>> factor_to_kappa_one(np.array([0.5, 1.0]), np.array([0.5, 1.5]))
        0.75
        >>> factor_to_kappa_one(np.array([0.5, 1.0]), np.array([2.0, 9.0]))
        0.25
    """
    beyond = np.flatnonzero(kappa > 1)
    if not len(beyond):
        return float(fractions[-1] / max(kappa[-1], 1e-300))
    end = int(beyond[0])
    low, below = (fractions[end - 1], kappa[end - 1]) if end else (0.0, 0.0)
    return float(low + (fractions[end] - low) * (1 - below) / (kappa[end] - below))
