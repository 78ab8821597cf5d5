"""The sentences of a fit: every word that a user reads about the smoothness of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvestep.notes import Note

if TYPE_CHECKING:
    from curvestep.fit.fit import SmoothnessFit
    from curvestep.fit.within import Within

# Why there is no answer, and the way out.
DOUBTS = {
    "no-secants": "No point within a step was measured. Measure again with the estimator `smoothness`.",
    "one-layer": "Points within a step are measured for the whole model, not for one layer. Fit the model.",
    "no-fractions": "The trace does not say which fractions of the step were measured. Add `fractions` to "
    "the header, or measure again.",
    "no-kappa": "No row says how much its step changes the gradient. Record `kappa` or `step_norm`, or "
    "measure again.",
    "across": "No growth shows, but steps do not follow the gradient (cosine {cosine:.2f}). Along the "
    "gradient it may differ. Measure on the training batch, or with plain SGD.",
    "one-fraction": "Only one fraction of each step was measured, so there is nothing to compare. "
    "Measure with the probe's own fractions (its default).",
    "few-rows": "The test needs {least} rows that were measured at every fraction; {readable} of {rows} "
    "were. Measure more steps.",
    "overshoot": "Steps overshoot: a step changes the gradient by {kappa:.2g} times its norm. "
    "Beyond the minimum along the step, the overshoot itself enlarges the gradient. Measure "
    "with the probe's own fractions (its default), or with fractions=({first:.2g}, {second:.2g}, 1.0).",
    "alike": "Steps are too short or too similar in {unresolved} of {rows} rows. A step changes the "
    "gradient by {kappa:.2g} of its norm. Measure with a larger lr or max_norm, earlier in training, or in a "
    "higher precision.",
    "no-losses": "Not every row has a loss above `loss_floor` ({floor:g}), so the law of the loss cannot be "
    "compared. Record losses (the probe does), or give the least loss that can be reached.",
    "laws-alike": "These rows cannot tell the law of sharpness: {reason}. Measure more rows, or a longer "
    "part of the run.",
}


def doubt(kind: str, **facts: object) -> Note:
    """The doubt of this kind, with its numbers."""
    return Note(kind, DOUBTS[kind].format(**facts))


def laws_alike(exponent: tuple[float, float], gain: tuple[float, float]) -> Note:
    """Laws that predict equally well."""
    reason = f"its exponent lies between {exponent[0]:.2g} and {exponent[1]:.2g}"
    if gain[0] <= 0 <= gain[1]:
        reason = "gradient norm and loss predict it equally well"
    return doubt("laws-alike", reason=reason)


def within_words(within: Within) -> str:
    """The answer of the test within steps, in a sentence or two."""
    if within.doubt is not None:
        return f"Within steps: cannot tell. {within.doubt}"
    answer = {
        "grows": "sharpness grows with the gradient norm",
        "does-not-grow": "sharpness does not grow with the gradient norm",
        "not-shown": "no growth of sharpness with the gradient norm is shown",
    }[within.answer]
    numbers = (
        f"{_size(within)}, shuffled steps show {_rounded(within.zero)}, p {within.p_value:.1g}, "
        f"{within.num_rows} rows"
    )
    return f"Within steps: {answer} ({numbers})."


def _size(within: Within) -> str:
    """The elasticity and its interval, where its size is known."""
    if not within.size_known:
        return "its size cannot be estimated"
    low, high = within.elasticity_interval
    return f"elasticity {_rounded(within.elasticity)} [{_rounded(low)}, {_rounded(high)}]"


def _rounded(number: float) -> str:
    return f"{round(number, 2) + 0.0:.2f}"  # adding zero turns -0.0 into 0.0


def fit_words(fit: SmoothnessFit) -> str:
    """The fit in at most eight lines, the answer first."""
    within = fit.within
    answer = within.answer.replace("-", " ").upper()
    lines = [f"Does sharpness grow with the gradient norm?  {answer}  ({_inside(within)})"]
    numbers = f"L0 {_estimate(fit.L0, fit.L0_interval)}   L1 {_estimate(fit.L1, fit.L1_interval)}"
    meaning = f"({fit.quantile:.0%} of {fit.num_points} points, {fit.level:.0%} intervals)"
    lines.append(f"  sharpness <= L0 + L1 * grad_norm   {numbers}   {meaning}")
    lines.append(f"  along the run   {_along(fit)}")
    if fit.laws is not None:
        lines.append(f"  law             {_law(fit)}")
    lines.append(f"  reliable?       {_reliable(fit.warnings)}")
    lines.append("More: print(fit.details()), fit.plot()")
    return "\n".join(lines)


def _inside(within: Within) -> str:
    if within.doubt is not None:
        return f"not tested within steps: {within.doubt.kind.replace('-', ' ')}"
    test = f"p = {within.p_value:.1g}; shuffled steps show {within.zero:.2f}"
    if not within.size_known:
        return f"within steps, {test}; size cannot be estimated"
    size = f"elasticity {within.elasticity:.2f} {span(within.elasticity_interval)}"
    return f"within steps: {size}, {test}; 0 is no growth, 1 is in proportion"


def _along(fit: SmoothnessFit) -> str:
    rank = f"rank correlation {fit.spearman:.2f} {span(fit.spearman_interval)}"
    exponent = f"exponent {fit.exponent:.2f} {span(fit.exponent_interval)}"
    if fit.control is None:
        return f"{rank}, {exponent}"
    verdict = "no evidence" if fit.explained else "the run shows more"
    top_rank = fit.control.spearman_interval[1]
    top_exponent = fit.control.exponent_interval[1]
    control = f"a constant Hessian reaches {top_rank:.2f} and {top_exponent:.2f}: {verdict}"
    return f"{rank}, {exponent}; {control}"


def _law(fit: SmoothnessFit) -> str:
    assert fit.laws is not None
    if not fit.law:
        return f"cannot tell: {fit.laws.doubt}"
    law = fit.laws.laws[fit.law]
    return f"{law.name}, exponent {law.exponent:.2g}, typical error on held-out rows {law.error:.0%}"


def _reliable(warnings: tuple[Note, ...]) -> str:
    """Kinds of the warnings; what the first line says already is left out."""
    kinds = [warning.kind.replace("-", " ") for warning in warnings if warning.kind != "inside-steps"]
    return f"with care: {', '.join(kinds)}" if kinds else "no warning"


def _estimate(value: float, interval: tuple[float, float]) -> str:
    """A coefficient with its interval; one without width says nothing of how sure it is."""
    if interval[0] == interval[1]:
        return f"{value:.3g} (not identified)"
    return f"{value:.3g} {span(interval)}"


def span(interval: tuple[float, float]) -> str:
    """An interval as it is printed."""
    return f"[{interval[0]:.3g}, {interval[1]:.3g}]"
