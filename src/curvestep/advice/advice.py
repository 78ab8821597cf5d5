"""A learning rate, a clipping threshold and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from curvestep._checks import check_count, check_positive
from curvestep.advice.decision import KEEP, LOWER, Decision, decide, room, untold
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.advice.rule import (
    Rule,
    below_spectral,
    check_steps,
    highest_unclipped_lr,
    rule_for,
)
from curvestep.advice.settings import (
    Setting,
    best_of,
    check_alike,
    neighbours,
    next_setting,
    rate_name,
    settings_of,
)
from curvestep.advice.verdict import (
    does_clipping_pay,
    doubts,
    first_line,
    is_inert,
    reasons,
    reasons_of_lost,
    reasons_of_method,
    reasons_of_normalized,
    reasons_of_settings,
    verdict_on_settings,
    what_the_threshold_does,
    why_stable,
)
from curvestep.display.markup import html_table
from curvestep.fit.fit import SmoothnessFit, fit_samples, fit_smoothness
from curvestep.fit.frontier import quantile_line
from curvestep.fit.intervals import Interval
from curvestep.fit.samples import LEAST_ROWS, History, check_share, check_trace
from curvestep.smoothness.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """What :func:`advise` recommends; ``print`` it for words.

    ``verdict`` is one sentence to act on and ``action`` its kind: ``"keep"``, ``"raise"``, ``"lower"``,
    ``"rescue"`` (the run was lost), ``"try"`` (too few rows to tell), ``"take"`` (one of several settings) or
    ``"none"``. ``lr`` and ``max_norm`` are what to run next, ``step_cap`` (the longest step) their product;
    None if advice was refused. For NormalizedSGD ``lr`` is itself that length, and ``max_norm`` the offset.
    Their intervals hold what the (L0, L1) line of the region tolerates; from several traces those of ``lr``
    and ``max_norm`` are the settings tried on either side.
    Under a schedule every lr here is its peak (``lr_is_peak``): scale the schedule as a whole.
    ``clipped_fraction`` is the share of the measured steps that ``max_norm`` would clip, ``gain`` the
    condition 1 + L1·M/L0 with M the largest gradient norm seen: how much larger a step clipping allows where
    the gradient is small. ``clipping`` says whether clipping pays, ``reasons`` what the verdict rests on,
    ``warnings`` what to doubt. ``next_setting`` names an ``lr`` and ``max_norm`` worth trying after several.
    ``fit`` is what the advice rests on; None if there was none.
    """

    lr: float | None = None
    max_norm: float | None = None
    step_cap: float | None = None
    lr_interval: Interval | None = None
    max_norm_interval: Interval | None = None
    step_cap_interval: Interval | None = None
    clipped_fraction: float | None = None
    gain: float | None = None
    noise: float | None = None
    lr_is_inert: bool = False
    lr_is_peak: bool = False
    next_setting: dict[str, float] | None = None
    action: str = "none"
    verdict: str
    clipping: str = ""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    fit: SmoothnessFit | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> bool:
        """Whether the trace could not support advice; ``reasons`` say why."""
        return self.lr is None

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {name:<12}{value}" for name, value in self._table()]
        lines += [f"  - {reason}" for reason in self._notes()]
        return "\n".join(lines + [f"  ! {warning}" for warning in self.warnings])

    def __repr__(self) -> str:
        return f"<Advice: {shorten(self.verdict, 120, placeholder=' …')}>"

    def _repr_html_(self) -> str:
        return html_table(self.verdict, self._table(), (*self._notes(), *self.warnings))

    def plot(self) -> Figure:
        """Step sizes as taken, at the edge of stability and as advised; needs matplotlib."""
        from curvestep.display.drawing import figure_of
        from curvestep.display.results import advised

        if self.fit is None or self.lr is None or self.max_norm is None:
            raise ValueError(f"There is no setting to plot. {self.verdict}")
        return figure_of([advised(self.fit, lr=self.lr, max_norm=self.max_norm)])

    def _notes(self) -> tuple[str, ...]:
        return (*self.reasons, self.clipping) if self.clipping else self.reasons

    def _table(self) -> list[tuple[str, str]]:
        if self.action == KEEP:  # nothing to set
            return []
        rate = rate_name(self.lr_is_peak)
        rows = [
            (name, f"{value:.3g}" + (f"  [{span[0]:.3g}, {span[1]:.3g}]" if span else ""))
            for name, value, span in (
                (rate, self.lr, self.lr_interval),
                ("max_norm", self.max_norm, self.max_norm_interval),
                ("step_cap", self.step_cap, self.step_cap_interval),
            )
            if value is not None and math.isfinite(value)
        ]
        if self.next_setting is not None:
            tried = {rate if key == "lr" else key: value for key, value in self.next_setting.items()}
            rows.append(("try next", ", ".join(f"{key} {value:.3g}" for key, value in tried.items())))
        return rows


def advise(
    *runs: Trace | SmoothnessFit | str | Path,
    constant: float = 1.5,
    quantile: float = 0.75,
    level: float = 0.9,
    resamples: int = 300,
    seed: int = 0,
) -> Advice:
    r"""A learning rate and ``max_norm`` for the task that was measured, and why.

    From one run: the same setting again, shorter steps, or longer ones, by how its loss went, by how much a
    step lowered the loss of its own batch (:mod:`~curvestep.advice.outcome`), and by what the first rows say
    of the start. Steps become at most three times as long, and stay below c over a spectral smoothness that
    was recorded (:func:`~curvestep.advice.rule.highest_lr`). A run that was lost needs one row. Beside it the
    (L0, L1) line of the region that the run visited, and the clipped descent below
    :math:`c/(L_0 + L_1 g)`: a local statement, because curvature adapts to the step.

    From several runs of one task, or one run whose lr was raised in stages: the largest setting whose loss
    fell furthest, and the next setting to try if the best one lies at the edge of what was tried.

    Args:
        runs: Probed runs, at least one: traces, their files or run folders, or fits, which are then taken as
            they are (``level`` and ``seed`` of the fit were its own). Several must be of one task, with one
            kind of optimizer and one batch size.
        constant: c in :math:`c/(L_0 + L_1 g)`; 0.5 is what theory proves, 1.5 what training needs.
        quantile: Share of the points below the line that stands for the region, in (0, 1).
        level: Level of the intervals, in (0, 1). They hold what the rule gives for every line that the
            rank-score test of :func:`~curvestep.fit.intervals.slope_interval` does not reject, for a
            higher, a lower and a shifted range of points (block bootstrap), and what is advised.
        resamples: Bootstrap samples, at least 50.
        seed: Of the bootstrap.

    Returns:
        An :class:`Advice`; if the traces cannot support one, an advice that is ``refused`` and says why.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> trace = Trace()
        >>> for step, g in enumerate(rng.lognormal(size=100)):
        ...     _ = trace.append({"step": step, "loss": 3 - step / 50, "grad_norm": g, "lr": 0.02,
        ...                       "smoothness": (1 + 2 * g) * rng.uniform(0.8, 1), "step_norm": 0.02 * g})
        >>> print(advise(trace).verdict)
        Raise lr to 0.06, max_norm 1.13.
    """
    if not runs:
        raise ValueError("`runs` must be at least one trace, fit or path, got none.")
    loaded = [run if isinstance(run, SmoothnessFit) else check_trace(run) for run in runs]
    check_positive("constant", constant)
    check_share("quantile", quantile)
    check_share("level", level)
    check_count("resamples", resamples, least=50)
    # A run without rows says nothing.
    used = [run for run in loaded if isinstance(run, SmoothnessFit) or len(run)] or loaded[:1]
    options = {
        "constant": constant,
        "quantile": quantile,
        "level": level,
        "resamples": resamples,
        "seed": seed,
    }
    try:
        if len(used) == 1:
            return _from_run(used[0], options)
        histories = [_history(run) for run in used]
        check_alike(histories)
        settings = settings_of(used)
        if all(setting.diverged for setting in settings):
            return _from_run(used[int(np.argmin([setting.lr for setting in settings]))], options)
        return _from_settings(settings, options)
    except ValueError as error:
        return Advice(verdict=f"No advice: {error}", reasons=(str(error),))


def _history(run: Trace | SmoothnessFit) -> History:
    return History.of(run) if isinstance(run, Trace) else run.samples.history


def _from_run(run: Trace | SmoothnessFit, options: dict[str, Any]) -> Advice:
    outcome = outcome_of(_history(run))
    if outcome.diverged_at is not None:
        found = reasons_of_lost(outcome)
        return _without_fit(outcome, decide(outcome), found, constant=options["constant"])
    if outcome.num_rows < LEAST_ROWS and math.isfinite(outcome.lr) and outcome.num_rows:
        return _without_fit(outcome, untold(outcome), (), constant=options["constant"])
    settings = settings_of([run])
    if len(settings) > 1:
        return _from_settings(settings, options)
    fit = run
    if isinstance(run, Trace):
        fit = fit_smoothness(run, level=options["level"], seed=options["seed"])
    assert isinstance(fit, SmoothnessFit)
    return _from_fit(fit, outcome, options)


def _without_fit(outcome: Outcome, decision: Decision, found: tuple[str, ...], *, constant: float) -> Advice:
    """From rows that are too few for a fit, or of a run that was lost."""
    start = outcome.start
    if start is not None and start.spectral > 0 and outcome.method.descent:
        decision = replace(decision, lr=min(decision.lr, constant / start.spectral))
    return Advice(
        lr=decision.lr,
        max_norm=decision.max_norm,
        step_cap=decision.lr * (1.0 if outcome.method.normalized else decision.max_norm),
        lr_is_peak=outcome.scheduled,
        action=decision.action,
        verdict=first_line(decision, outcome),
        reasons=(*found, decision.why) if decision.why else found,
    )


def _from_fit(fit: SmoothnessFit, outcome: Outcome, options: dict[str, Any]) -> Advice:
    samples = fit.samples
    if not outcome.method.descent:
        return _of_other_steps(fit, outcome, options)
    check_steps(samples)
    rule = rule_for(fit, outcome.start, **options)
    decision = decide(outcome, most_factor=rule.most_lr / rule.today)
    decision = _guarded(decision, fit, rule, outcome)
    lr, max_norm = decision.lr, decision.max_norm
    return Advice(
        lr=lr,
        max_norm=max_norm,
        step_cap=lr * max_norm,
        lr_interval=_around(lr, rule.lr_interval),
        max_norm_interval=_around(max_norm, rule.max_norm_interval),
        step_cap_interval=_around(lr * max_norm, rule.step_cap_interval),
        clipped_fraction=float(np.mean(samples.grad_norm > max_norm)),
        gain=rule.gain,
        noise=rule.noise,
        lr_is_inert=is_inert(fit),
        lr_is_peak=outcome.scheduled,
        action=decision.action,
        verdict=first_line(decision, outcome),
        clipping=does_clipping_pay(fit, rule),
        reasons=reasons(fit, rule, outcome, decision),
        warnings=(*doubts(outcome), *rule.warnings),
        fit=fit,
    )


def _of_other_steps(fit: SmoothnessFit, outcome: Outcome, options: dict[str, Any]) -> Advice:
    """For momentum, Adam and the like, to whose steps (L0, L1) gives no bound, and normalized descent."""
    if not outcome.method.name:
        check_steps(fit.samples)
    decision = decide(outcome, most_factor=room(outcome.method))
    if outcome.method.normalized:
        line = quantile_line(fit.samples.grad_norm, fit.samples.smoothness, quantile=options["quantile"])
        return Advice(
            lr=decision.lr,
            max_norm=decision.max_norm,
            step_cap=decision.lr,
            lr_is_peak=outcome.scheduled,
            action=decision.action,
            verdict=first_line(decision, outcome),
            reasons=reasons_of_normalized(outcome, decision, *line, constant=options["constant"]),
            warnings=(*doubts(outcome), *map(str, fit.warnings)),
            fit=fit,
        )
    return Advice(
        lr=decision.lr,
        max_norm=decision.max_norm,
        step_cap=None if outcome.method.adaptive else decision.lr * decision.max_norm,
        clipped_fraction=float(np.mean(fit.samples.grad_norm > decision.max_norm)),
        lr_is_inert=is_inert(fit) and not outcome.method.adaptive,
        lr_is_peak=outcome.scheduled,
        action=decision.action,
        verdict=first_line(decision, outcome),
        clipping=what_the_threshold_does(outcome),
        reasons=reasons_of_method(fit, outcome, decision),
        warnings=(*doubts(outcome), *map(str, fit.warnings)),
        fit=fit,
    )


def _guarded(decision: Decision, fit: SmoothnessFit, rule: Rule, outcome: Outcome) -> Decision:
    """No new threshold below five times the noise, and no lr that is unstable where steps are not clipped.

    Where lr falls for that, the threshold rises by as much: a clipped step is as long as lr·max_norm.
    """
    lr, max_norm, action = decision.lr, decision.max_norm, decision.action
    run_cap = outcome.lr * outcome.max_norm
    if action != KEEP:
        max_norm = max(max_norm, 5.0 * rule.noise) if rule.noise is not None else max_norm
        lr = below_spectral(fit.samples, lr, max_norm, constant=rule.constant)
    most, limit = highest_unclipped_lr(fit, decision, constant=rule.constant)
    if lr <= most:
        return replace(decision, lr=lr, max_norm=max_norm)
    if action == KEEP or (most < outcome.lr and lr * max_norm <= run_cap):
        action = LOWER
    guarded = replace(decision, action=action, lr=most, max_norm=lr * max_norm / most)
    words = why_stable(fit, guarded, limit, as_long=math.isclose(lr * max_norm, run_cap))
    return replace(guarded, why=f"{decision.why}. {words}")


def _around(value: float, interval: Interval) -> Interval:
    return min(value, interval[0]), max(value, interval[1])


def _from_settings(settings: list[Setting], options: dict[str, Any]) -> Advice:
    """The best setting as it was run, with what its region tolerates."""
    best = best_of(settings)
    assert best.samples is not None
    fit = best.fit or fit_samples(
        best.samples,
        quantile=0.95,
        level=options["level"],
        resamples=400,
        seed=options["seed"],
        control=True,
    )
    rule = rule_for(fit, None, **options)
    g = best.samples.grad_norm
    tolerated = rule.step_cap if math.isfinite(rule.step_cap) else rule.lr * float(np.quantile(g, 0.95))
    # A length that was run and stayed stable is safe; without clipping the curvature has to say.
    cap = best.lr * best.max_norm if math.isfinite(best.max_norm) else tolerated
    max_norm = cap / best.lr
    following = next_setting(best, settings)
    return Advice(
        lr=best.lr,
        max_norm=max_norm,
        step_cap=cap,
        lr_interval=neighbours(best.lr, [s.lr for s in settings]),
        max_norm_interval=neighbours(max_norm, [s.max_norm for s in settings if s.lr == best.lr]),
        step_cap_interval=_around(cap, rule.step_cap_interval),  # a length that was run is one of them
        clipped_fraction=float(np.mean(g > max_norm)),
        gain=rule.gain,
        noise=rule.noise,
        lr_is_inert=is_inert(fit),
        lr_is_peak=best.scheduled,
        next_setting=following,
        action="take",
        verdict=verdict_on_settings(best, max_norm, following),
        clipping=does_clipping_pay(fit, rule),
        reasons=reasons_of_settings(best, settings, following),
        warnings=rule.warnings,
        fit=fit,
    )
