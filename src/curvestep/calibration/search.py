r"""Learning rate and clipping threshold before training, from a few dozen gradients at the starting point.

For each of a handful of batches, the largest step :math:`h` along the gradient with

.. math::
    h\,\hat L(h) \le \kappa_{\max} \quad\text{and}\quad f(x - h g) \le f(x) - \tfrac{1}{10} h \lVert g
    \rVert^2, \qquad \hat L(h) = \frac{\lVert \nabla f(x - h g) - g \rVert}{\lVert h g \rVert},
    \quad g = \nabla f(x).

The learning rate is the median of these steps. With :math:`\kappa_{\max} = 1` the step is the self-consistent
:math:`1/\hat L`; clipping then keeps every later step within a multiple of the length that was measured to
be safe: the trust radius of clipped gradient descent, measured instead of assumed. The multiple depends on
how far the batches agree, by the mean cosine :math:`\rho` between their gradients:

.. math::
    \gamma = c_0^{1-\rho^2}\, c_1^{\rho^2}\, \lVert g \rVert, \qquad 0 \le \rho \le 1 .

Where they agree, the norm at the start is that of a signal, which fades while noise grows; where they do not,
it is that of noise, which the signal will exceed, and steps of that length in its direction are already long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count, islice
from statistics import median
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep._checks import check_choice, check_count, check_positive
from curvestep.bracket import (
    LARGEST,
    LONG_STRIDE,
    PER_OCTAVE,
    SMALLEST,
    START,
    NoBracket,
    OutOfBudget,
    crossing,
    find_bracket,
)
from curvestep.calibration.line import Agreement, Line
from curvestep.calibration.method import SCHEDULES, Method, method_of
from curvestep.calibration.pilot import (
    ARM_STEPS,
    LEAST_FRACTION,
    LONGEST,
    LOOK_EVERY,
    MOST_JUDGES,
    MOST_OTHERS,
    MOST_STEPS,
    PART,
    Closure,
    Others,
    Trial,
    lowest,
    mean_and_error,
    run_pilots,
)
from curvestep.calibration.refusals import (
    OutsideParameters,
    check_arguments,
    check_start,
    closure_of,
    no_bracket,
    shared,
    standing_still,
    vanishing,
)
from curvestep.calibration.result import RISES, BatchCurve, Calibration, limited
from curvestep.optimizer_family import Family, family_of
from curvestep.smoothness.snapshot import RandomState

# Chosen on the development tasks of `benchmarks/calibrate.py` and `benchmarks/schedules.py`; the evidence is
# in docs/calibrate.md.
MAX_KAPPA = 1.0
CLIP_AT = (0.6, 1.75)
ADAM_CLIP_AT = (1 / 3, 1 / 3)
NO_CLIP = (math.inf, math.inf)  # Adam at a constant learning rate: there is no evidence for a threshold
ADAM_SHARE = 0.75  # of the safe step along signs; under a schedule it is multiplied as below
SLOPE_SHARE = 1 / 5  # of the step that ends the slope along signs, for a constant learning rate
# The peak of a schedule with warm-up and decay, in units of the best constant learning rate.
SCHEDULED = {"signs": 2.4, "momentum": 3.0, "plain": 2.0}

SHORT_STRIDE = PER_OCTAVE // 2  # from the answer of one batch to that of the next
FEWEST = 6  # gradients that one more batch is likely to take
FEWEST_PILOT = 20  # steps, of which two are warm-up
DISAGREEMENT = 10.0
FEWEST_ARM = 8  # steps of each of two trials
TRIAL_SHARE = 0.1  # of the steps of training that a trial may take
SURELY = 2.0  # standard errors by which the larger learning rate must be ahead in them to be kept
LARGE_FALL = 0.3  # of a batch's loss over its own safe step
MAX_ROUNDING_ERROR = 0.1
SURE = math.log(1.25)  # half-width of the interval, in logarithms, at which no further batch is asked


def calibrate(
    model: nn.Module,
    loss_of_batch: Callable[[Any], Tensor | float],
    batches: Iterable[Any],
    *,
    optimizer: str | type | Optimizer = "ClippedSGD",
    momentum: float | None = None,
    weight_decay: float | None = None,
    schedule: str = "constant",
    pilot: int = 0,
    max_kappa: float = MAX_KAPPA,
    clip_at: float | tuple[float, float] | list[float] | None = None,
    num_batches: int = 3,
    max_gradients: int = 40,
    num_steps: int | None = None,
) -> Calibration:
    r"""Learning rate and ``max_norm`` measured where training is about to start; nothing is changed.

    Give it the batches that training will see: the size of a batch, and gradient accumulation inside
    ``loss_of_batch``, are part of what is measured. Parameters, buffers, ``.grad`` and random states are what
    they were afterwards, bit for bit. Under DDP and FSDP2 every rank calls with its share of each batch.

    The answer changes as the problem does: with the loss times :math:`s`, ``lr`` is divided by :math:`s` and
    ``max_norm`` multiplied; in parameters :math:`s` times as large, ``lr`` is multiplied by :math:`s^2`. The
    order of the batches does not matter as long as all are used.

    Args:
        model: The model to be trained, in the mode it will be trained in: plain, DDP or FSDP2.
        loss_of_batch: Loss of a batch, a scalar; or a function that itself calls ``backward()`` for several
            micro-batches and returns the loss as a number.
        batches: At least one batch, better eight; a data loader will do.
        optimizer: ``ClippedSGD``, ``ClippedAdamW``, ``NormalizedSGD``, torch's ``SGD``, ``Adam``, ``AdamW``:
            a name, a class, or the instance that will train. An instance says itself what its momentum, betas
            and decay are; of its learning rates only the ratios of the groups count, and they are kept.
        momentum: :math:`\beta` of SGD; the effective step is :math:`\eta/(1-\beta)`, so ``lr`` is
            :math:`(1-\beta)h`, three times that as the peak of a schedule.
        weight_decay: :math:`\lambda` of the L2 penalty of SGD or Adam, which belongs to the loss that is
            measured. AdamW's decay is apart from the gradient and does not enter.
        schedule: ``"constant"``, or ``"warmup-decay"``: ``lr`` is then the peak of a warm-up over about a
            tenth of the steps and a decay to zero, and larger.
        pilot: Steps of a pilot, say 100; 0 for none. Copies of the model run the whole schedule in that many
            steps at three to five peaks, three times apart, and ``lr`` becomes the geometric mean of the best
            of them and the measured one. It costs that many gradients for each peak and reads that many
            batches.
        max_kappa: Largest safe :math:`\kappa`, the change of the gradient relative to itself.
        clip_at: Threshold in units of the gradient norm at the start: one number, or two, for batches whose
            gradients have nothing in common and for batches that agree. Default: 0.6 and 1.75 for SGD;
            for Adam 1/3 under a schedule, and none without.
        num_batches: Batches to measure; then further ones until ``lr`` is known to a factor of 1.25.
        max_gradients: Largest number of gradients to evaluate.
        num_steps: Steps that training will take, if known. In less than 240 there are no trials of ``lr``
            against a third of it where the loss of other batches falls over the step anyway: they would cost
            more than they save.

    Returns:
        A :class:`Calibration`; print it.

    Raises:
        ValueError: the start is unusable, and the message says why and what to do.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> quadratic = lambda scale: 2.0 * scale * model.weight.square().sum()  # curvature 4 * scale
        >>> cal = calibrate(model, quadratic, [1.0, 1.0, 1.0])
        >>> round(cal.lr, 6), round(cal.max_norm / cal.grad_norm, 6)
        (0.25, 1.75)
    """
    check_arguments(model, loss_of_batch, batches)
    check_positive("max_kappa", max_kappa)
    check_count("num_batches", num_batches)
    check_count("max_gradients", max_gradients, least=20)
    if num_steps is not None:
        check_count("num_steps", num_steps)
    check_choice("schedule", schedule, SCHEDULES)
    if check_count("pilot", pilot, least=0) and (schedule == "constant" or pilot < FEWEST_PILOT):
        raise ValueError(
            f"`pilot` is {pilot}: it needs schedule='warmup-decay', which it runs in that many steps, and at "
            f"least {FEWEST_PILOT} of them."
        )
    method = method_of(optimizer, model, momentum=momentum, weight_decay=weight_decay)
    slope = schedule == "constant"
    ends = CLIP_AT if not method.along_signs else NO_CLIP if slope else ADAM_CLIP_AT
    if clip_at is not None:
        ends = tuple(clip_at) if isinstance(clip_at, (tuple, list)) else (clip_at, clip_at)
        if len(ends) != 2:
            raise ValueError(f"`clip_at` must be one number or two, got {clip_at!r}.")
        for end in ends:
            check_positive("clip_at", end)
    share = (SLOPE_SHARE if slope else ADAM_SHARE) if method.along_signs else min(1.0, ends[0])
    line_of = partial(Line, model, max_kappa=max_kappa, method=method, slope=slope)
    outside = OutsideParameters(model)
    search = _Search(model, method, line_of, max_gradients, share=share, outside=outside)
    before = RandomState.capture()  # a data loader that shuffles draws from it
    try:
        stream = (closure_of(loss_of_batch, batch, model, outside) for batch in shared(batches, model))
        known = list(islice(stream, num_batches))
        for i in count():
            known += islice(stream, max(0, i + 1 - len(known)))
            if i == len(known):
                break
            with line_of(known[i]) as line:
                if search.add(line):
                    search.look_at(line, known[:i] + known[i + 1 :])
            enough = len(search.curve) >= num_batches and (search.half_width <= SURE or search.noisy)
            kept = 2 * FEWEST_ARM if search.steep and len(search.curve) >= num_batches else 0
            if enough or search.left < FEWEST + kept:
                break
        found = search.result(max_kappa=max_kappa, clip_at=ends, num_batches=num_batches)
        short = num_steps is not None and 2 * ARM_STEPS > TRIAL_SHARE * num_steps
        if short and search.steep and not search.noisy:
            found = search.untried(found, f"in {num_steps} steps of training trials cost more than they save")
        elif search.steep or search.noisy:
            known += islice(stream, max(0, MOST_JUDGES + MOST_STEPS - len(known)))
            found = search.compared(found, known) if search.steep else search.tried(found, known)
        if schedule != "constant":
            kind = "signs" if method.along_signs else "momentum" if method.momentum else "plain"
            found = replace(found.times(SCHEDULED[kind]), schedule=schedule)
        if pilot:
            known += islice(stream, max(0, MOST_JUDGES + pilot - len(known)))
            found = search.piloted(found, known, pilot)
    finally:
        outside.restore()
        before.restore()
    return found


def threshold_multiple(agreement: float, clip_at: tuple[float, float]) -> float:
    r"""The threshold in units of the gradient norm, :math:`c_0^{1-\rho^2} c_1^{\rho^2}`.

    Args:
        agreement: Mean cosine :math:`\rho` of the batches' gradients; a negative one counts as zero, and so
            does NaN, for a single batch.
        clip_at: :math:`c_0` and :math:`c_1`.

    Example:
        >>> [round(threshold_multiple(rho, (0.5, 2.0)), 3) for rho in (-0.3, 0.0, 0.5, 1.0, math.nan)]
        [0.5, 0.5, 0.707, 2.0, 0.5]
    """
    rho = 0.0 if math.isnan(agreement) else min(max(agreement, 0.0), 1.0)
    return clip_at[0] ** (1.0 - rho**2) * clip_at[1] ** rho**2


class _Search:
    """Safe steps of one batch after another, each search starting at the answer before it."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        line_of: Callable[[Closure], Line],
        max_gradients: int,
        *,
        share: float,
        outside: OutsideParameters,
    ) -> None:
        self.model, self.method, self.line_of, self.outside = model, method, line_of, outside
        self.max_gradients, self.share = max_gradients, share
        self.num_gradients = 0
        self.num_fitted = 0  # batches whose loss ends before their gradient changes too much
        self.falls: list[float] = []  # of each batch's loss over its safe step, as a share of it
        self.curve: list[BatchCurve] = []
        self.changes: list[tuple[float, float]] = []  # of other batches' loss, over part of the step and all
        self.agreement = Agreement()
        self.faintest: str | None = None
        self.still: str | None = None
        self.warnings: list[str] = []

    @property
    def left(self) -> int:
        """Gradients that may still be evaluated."""
        return self.max_gradients - self.num_gradients

    def add(self, line: Line) -> bool:
        """Measure one more batch; whether the gradients lasted. If not, it is left out."""
        check_start(line)
        start, stride = START, LONG_STRIDE
        if self.curve:
            step = median(batch.safe_step for batch in self.curve)
            start = round(PER_OCTAVE * math.log2(step / line.unit))
            start, stride = min(max(start, SMALLEST), LARGEST), SHORT_STRIDE
        else:
            line.check_repeatable()
            self.faintest = vanishing(line)
            self.still = standing_still(line, self.outside)
        try:
            bracket = find_bracket(line.at, start=start, stride=stride, budget=self.left - line.num_gradients)
        except NoBracket as end:
            if line.half and not end.point.safe:  # steps that rounding swallows do not lower the loss, either
                self._check_precision(line, end.point.step)
            raise no_bracket(end.point, line) from None
        except OutOfBudget:
            if not self.curve:
                raise ValueError(
                    "`max_gradients` is too small to find the first batch's safe step."
                ) from None
            self.num_gradients += line.num_gradients
            return False
        step = crossing(bracket, max_kappa=line.max_kappa, loss=line.highest_loss)
        self._check_precision(line, bracket.low.step)
        self.num_fitted += bracket.high.kappa <= line.max_kappa and bracket.high.loss < line.loss
        self.falls.append((line.loss - bracket.low.loss) / abs(line.loss) if line.loss else 0.0)
        points = tuple(sorted(line.points, key=lambda point: point.step))
        self.curve.append(BatchCurve(points=points, safe_step=step, loss=line.loss, grad_norm=line.raw_norm))
        self.agreement.add(line.raw_gradients)
        self.num_gradients += line.num_gradients
        return True

    def look_at(self, line: Line, closures: list[Closure]) -> None:
        """Watch the loss of the other batches along the line of the batch that was measured last."""
        if not closures:
            return
        others, step = Others(line, closures), self.curve[-1].safe_step
        part, whole = others.change(PART * self.share * step), others.change(self.share * step)
        self.changes.append((part, whole))
        if not line.method.along_signs:  # along signs no straight line was found to matter
            stretch = others.straight(step, -part / (PART * self.share * step))
            self.curve[-1] = replace(self.curve[-1], stretch=stretch)

    @property
    def noisy(self) -> bool:
        """Whether the other batches' loss may rise over the step, or is lower after part of it."""
        if len(self.changes) < 2:
            return False
        part = np.mean([part for part, _ in self.changes])
        whole, error = mean_and_error([whole for _, whole in self.changes])
        return not (whole + error <= 0.0 and whole <= part)

    @property
    def steep(self) -> bool:
        """Whether one safe step takes a large share of its batch's loss: later steps will be other ones."""
        return not self.method.along_signs and bool(self.falls) and median(self.falls) >= LARGE_FALL

    def untried(self, found: Calibration, why: str) -> Calibration:
        """``found`` with the doubt that two trials would have settled."""
        words = (
            f"cannot tell whether lr is too large: {self._takes_much}; {why}. A third of it is worth a try."
        )
        return replace(found, warnings=(*found.warnings, words))

    @property
    def _takes_much(self) -> str:
        share = f"{median(self.falls):.0%}"
        return f"a safe step takes {share} of its batch's loss, so later steps are unlike the first"

    def compared(self, found: Calibration, closures: list[Closure]) -> Calibration:
        """``found`` after trial steps with its ``lr`` and with a third of it, and the better of both."""
        says = self._takes_much
        num_steps = min(ARM_STEPS, self.left // 2)
        if num_steps < FEWEST_ARM or len(closures) < 2:
            return self.untried(found, "there are not enough gradients, or batches, for two trials")
        trial, window = self.trial(found, closures), num_steps // 3
        whole, _ = trial.run([found.lr] * num_steps, window=window)
        third, _ = trial.run([found.lr / 3] * num_steps, window=window)
        self.num_gradients += 2 * num_steps
        found = replace(found, num_gradients=self.num_gradients)
        falls, falls_by_third = (sum(mean_and_error(arm)) < 0 for arm in (whole, third))
        if not (falls or falls_by_third):  # NaN, from a trial that diverged, does not fall
            return limited(found, LEAST_FRACTION, "unknown")
        ahead, error = mean_and_error(third - whole)
        fraction = 1 / 9 if not falls else 1 / 3 if ahead < SURELY * error else 1.0
        words = f"{says}. Of two trials of {num_steps} steps, that with a third of lr ended higher."
        if fraction < 1:
            kept = f"lr is {fraction:.2g} of what curvature allows."
            words = f"{words.replace('ended higher', 'did not clearly end higher')} {kept}"
        return replace(found.times(fraction), warnings=(*found.warnings, words))

    def trial(self, found: Calibration, closures: list[Closure]) -> Trial:
        """Training that steps on some of the batches and is judged by the others."""
        num_judges = min((len(closures) + 1) // 2, MOST_JUDGES)
        return Trial(
            self.model, self.method, found.max_norm, steps=closures[num_judges:], judges=closures[:num_judges]
        )

    def piloted(self, found: Calibration, closures: list[Closure], num_steps: int) -> Calibration:
        """``found`` with the geometric mean of its ``lr`` and that of a pilot."""
        if len(closures) < 2:
            raise ValueError("`pilot` needs two batches at least: one to step on and another to judge by.")
        pilots = run_pilots(self.trial(found, closures), found.lr, num_steps)
        lr = found.lr if pilots.lr is None else math.sqrt(found.lr * pilots.lr)
        words = () if pilots.lr else ("the pilots cannot be told apart: lr is the measured one.",)
        return replace(
            found.times(lr / found.lr),
            pilot=tuple(zip(pilots.rates, pilots.changes, strict=True)),
            num_gradients=found.num_gradients + pilots.num_gradients,
            warnings=(*found.warnings, *words),
        )

    def tried(self, found: Calibration, closures: list[Closure]) -> Calibration:
        """``found`` after trial steps, with a smaller ``lr`` if the loss of other batches does not fall."""
        trial = self.trial(found, closures)
        num_lines = min(len(self.curve), max(0, self.left - FEWEST))
        num_steps = min(MOST_STEPS, self.left - num_lines)
        change, error = math.inf, 0.0
        if num_steps >= FEWEST:
            window = max(1, num_steps // 4)
            changes, num_steps = trial.run([found.lr] * num_steps, window=window, look_every=LOOK_EVERY)
            self.num_gradients += num_steps
            change, error = mean_and_error(changes)
        if change + error < 0:
            words = f"{RISES}, but {num_steps} trial steps lower it. A third of this lr is worth a try."
            return replace(found, num_gradients=self.num_gradients, warnings=(*found.warnings, words))
        # Trial steps that come back to the same batches fit those, and say less of others.
        if change <= 0.5 * error and len(trial.steps) < num_steps:
            words = (
                f"cannot tell whether noise is the limit: {RISES}, and after {num_steps} trial steps it is "
                "neither clearly lower nor clearly higher. A tenth of this lr is worth a try."
            )
            return replace(
                found, num_gradients=self.num_gradients, limit="unknown", warnings=(*found.warnings, words)
            )
        step = self.share * median(batch.safe_step for batch in self.curve)
        if len(closures) > len(self.curve) and num_lines > 1:  # more batches to watch than before
            self.changes = []
            for i in range(num_lines):
                others = [*closures[:i], *closures[i + 1 :]][:MOST_OTHERS]
                with self.line_of(closures[i]) as line:
                    watched = Others(line, others)
                    self.changes.append((watched.change(PART * step), watched.change(step)))
            self.num_gradients += num_lines
        found = replace(found, num_gradients=self.num_gradients)
        part, error = mean_and_error([part for part, _ in self.changes])
        whole = float(np.mean([whole for _, whole in self.changes]))
        part += float(stats.t.ppf(0.95, len(self.changes) - 1)) * error  # what the slope is at least
        fraction = lowest(part, whole) if part < 0 else LEAST_FRACTION
        return limited(found, fraction, "noise" if part < 0 else "unknown")

    def _check_precision(self, line: Line, step: float) -> None:
        error = line.rounding_error(step)
        if error > MAX_ROUNDING_ERROR:
            raise ValueError(
                f"The safe step drowns in rounding: in the parameters' precision it ends {error:.0%} of its "
                "length from where it should. Calibrate a copy in float32 (`model.float()`); its lr and "
                "max_norm hold for the model in half precision, too."
            )
        if line.half and not self.warnings:
            self.warnings.append(
                f"measured in half precision, where a step is off by {error:.1%} of its length. "
                "float32 is surer."
            )

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval of the mean logarithm of the steps, by Student's t; inf for one batch."""
        number = len(self.curve)
        if number < 2:
            return math.inf
        # Besides their spread, steps carry the error of interpolating between neighbours of the lattice.
        logs = np.log([batch.safe_step for batch in self.curve])
        spread = max(float(np.std(logs, ddof=1)), math.log(2) / PER_OCTAVE / math.sqrt(12))
        return float(stats.t.ppf(0.95, number - 1)) * spread / math.sqrt(number)

    def result(self, *, max_kappa: float, clip_at: tuple[float, float], num_batches: int) -> Calibration:
        """The medians, as the optimizer takes them."""
        name, momentum, signs = self.method.name, self.method.momentum, self.method.along_signs
        if not self.curve:
            raise ValueError("`batches` must hold at least one batch, got none. Is it a used-up iterator?")
        steps = [batch.safe_step for batch in self.curve]
        if max(steps) > DISAGREEMENT * min(steps):
            raise ValueError(
                f"The batches disagree: their safe steps reach from {min(steps):.3g} to {max(steps):.3g}, a "
                f"factor of more than {DISAGREEMENT:g}. Use larger batches, shuffle the data, or look for a "
                "batch that is not like the others."
            )
        grad_norm = median(batch.grad_norm for batch in self.curve)
        agreement = self.agreement.cosine
        multiple = threshold_multiple(agreement, clip_at)
        max_norm = multiple * grad_norm
        lr = (
            median(batch.safe_step * batch.stretch for batch in self.curve)
            * (1.0 - momentum)
            * (self.share if signs else 1.0)
        )
        family = family_of(name)
        if family is Family.NORMALIZED:  # its lr is a length: the same step at gradients far below the offset
            lr *= max_norm
        factor = math.exp(self.half_width) if len(steps) > 1 else math.nan
        warnings = list(self.warnings)
        if len(steps) < num_batches and self.left < FEWEST:
            warnings.append(
                f"`max_gradients` ended the measurement at {len(steps)} of {num_batches} batches."
            )
        if len(steps) == 1:
            warnings.append("a single batch: nothing says how far another one would differ. Give eight.")
        if 2 * self.num_fitted > len(steps):
            warnings.append(
                "one step fits most batches, until their loss cannot fall further: they say little about the "
                "steps of training. Larger batches say more; a third of this lr is worth a try."
            )
        stretched = [batch.stretch for batch in self.curve if batch.stretch > 1.0]
        if 2 * len(stretched) > len(steps) and max(stretched) >= LONGEST:
            warnings.append(
                "the loss falls straight on to twice the safe step: the first gradient is that of few "
                "parameters, as with many words, or the start is a plateau, where ten times this lr is worth "
                "a try."
            )
        warnings += [words for words in (self.faintest, self.still) if words is not None]
        if family is not Family.SGD:
            warnings.append(
                f"for {name} the benchmark's evidence is weaker than for ClippedSGD; a third of this lr and "
                "three times it are worth a try."
            )
        cap = math.inf if signs else lr if family is Family.NORMALIZED else lr * max_norm
        return Calibration(
            optimizer=name,
            momentum=momentum,
            lr=lr,
            max_norm=max_norm,
            step_cap=cap / (1.0 - momentum),
            lr_interval=(lr / factor, lr * factor),
            grad_norm=grad_norm,
            num_gradients=self.num_gradients,
            max_kappa=max_kappa,
            clip_at=multiple,
            agreement=agreement,
            curve=tuple(self.curve),
            warnings=tuple(warnings),
        )
