"""The paper's statements, one row each: what it says, which scale decides it, and what the runs show.

To add a row, write a function from ``Results`` to ``Evidence`` in ``judges.py`` and put it into
:data:`STATEMENTS`. The rule of the verdicts is in ``claims.py`` and ``docs/results/rule.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from curvestep_reproduction.claims import judges, theorem_judges
from curvestep_reproduction.claims.claims import (
    ADDITION,
    CORRECTED,
    DOES_NOT_HOLD,
    ERRATUM,
    HOLDS,
    IN_PART,
    NOT_REPRODUCED,
    NOT_TESTED,
    OPEN,
    PAPER,
    REPRODUCED,
    Claim,
    Evidence,
    MissingRuns,
    NotPlanned,
    decide,
    what_decides,
)
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.fig7_synthetic import summary_of
from curvestep_reproduction.figures.plan import Results

_OF_ADDITIONS = {REPRODUCED: HOLDS, IN_PART: HOLDS, NOT_REPRODUCED: DOES_NOT_HOLD}  # other words, same rule


@dataclass(frozen=True)
class Statement:
    """One row before it is judged."""

    name: str  # short name, for links
    source: str  # figure, section or theorem of the paper
    says: str  # what the paper says; of an addition, what is asked
    judge: Callable[[Results], Evidence]  # what the runs of one scale show
    figures: tuple[str, ...] = ()  # figures of the plan whose runs it needs; none where nothing is trained
    _: KW_ONLY
    scale: str = ""  # scale whose runs decide, the one with the paper's own model and data; empty likewise
    kind: str = PAPER  # ``paper``, ``erratum`` or ``addition``


def make_claims(results: Results, *, trained: bool = False) -> list[Claim]:
    """Every statement whose figures are in the plan, judged at its scale; or those alone that runs decide."""
    planned = {figure.name for figure in results.plan.figures}
    asked = [one for one in STATEMENTS if planned.issuperset(one.figures) and (one.scale or not trained)]
    return [_claim(one, results) for one in asked]


def _claim(statement: Statement, results: Results) -> Claim:
    """A statement with what the runs show, and what is missing where they do not decide."""
    note = ""
    try:
        evidence = statement.judge(results)
    except NotPlanned:
        evidence = Evidence(verdict=NOT_TESTED, sentence="This scale has no such runs.")
    except MissingRuns as error:
        evidence = Evidence(
            verdict=NOT_TESTED, sentence="Its runs have not ended.", numbers={"why": str(error)}
        )
        note = _how_to_run(error, statement)
    except ValueError as error:  # runs are too short to fit
        evidence = Evidence(
            verdict=NOT_TESTED, sentence="These runs cannot tell.", numbers={"why": str(error)}
        )
    verdict = evidence.verdict
    if evidence.margins:
        margins = [
            judges.with_deviation(margin, lambda other, i=i: statement.judge(other).margins[i], results)
            for i, margin in enumerate(evidence.margins)
        ]
        verdict = decide(*margins)
        if verdict == OPEN:
            note = what_decides(margins)
        elif len(margins[0].values) == 1:
            note = "one seed"
        if statement.kind == ADDITION:
            verdict = _OF_ADDITIONS.get(verdict, verdict)
    trains = bool(statement.scale)
    return Claim(
        name=statement.name,
        kind=statement.kind,
        source=statement.source,
        paper=statement.says,
        verdict=verdict,
        sentence=evidence.sentence,
        numbers=evidence.numbers,
        scale=results.plan.scale if trains else "",
        decides=statement.scale,
        note=note,
    )


def _how_to_run(missing: MissingRuns, statement: Statement) -> str:
    """Core-hours of runs that have not ended, and the command that names them; empty if none is known."""
    if not missing.runs:
        return ""
    names = " ".join(dict.fromkeys(run.name for run in missing.runs))
    hours = sum(run.cost for run in missing.runs) / 3600
    command = f"curvestep reproduce {statement.figures[0]} --scale {missing.runs[0].recipe.scale}"
    return f"{hours:.2g} core-hours, `{command} --only {names}`"


def _fixed(verdict: str, sentence: str, **numbers: str) -> Callable[[Results], Evidence]:
    """A finding that no run of the plan changes: what was not run, or what a test shows."""
    return lambda results: Evidence(verdict=verdict, sentence=sentence, numbers=numbers)


# Findings that need no training: the synthetic experiment, and the theorems as printed.


def _verdict(holds: bool) -> str:
    return REPRODUCED if holds else NOT_REPRODUCED


def quartic_faster(results: Results) -> Evidence:
    """Final gradients on x⁴."""
    summary = summary_of(results)
    low, high = summary.jittered_range
    return Evidence(
        verdict=_verdict(low > 1),
        sentence=f"After {summary.config.num_steps} steps |f'| is {summary.gd_grad_norm:.2g} for GD, "
        f"{summary.clipped_grad_norm:.2g} with clipping.",
        numbers={
            "ratio": f"{summary.ratio:.2g}",
            "median over jittered starts": f"{summary.jittered_ratio:.2g}, from {low:.2g} to {high:.2g}",
            "not stated in the paper": "the number of iterations and the step sizes; both were chosen so "
            "that its two gradients, 0.36 and 1.3e-8, come out",
        },
    )


def quartic_conservative(results: Results) -> Evidence:
    """Whether the measured gain is at least what theory predicts."""
    summary = summary_of(results)
    return Evidence(
        verdict=_verdict(summary.ratio >= summary.predicted_ratio),
        sentence=f"Theory predicts a factor of {summary.predicted_ratio:.0f}; "
        f"measured is {summary.ratio:.2g}.",
        numbers={
            "predicted with the paper's L0, which x⁴ does not have": f"{summary.printed_ratio:.0f}",
            **{row.quantity: f"measured {row.measured}" for row in summary.table},
        },
    )


def quartic_arithmetic(results: Results) -> Evidence:
    """The paper's prediction for x⁴, computed again."""
    summary = summary_of(results)
    return Evidence(
        verdict=CORRECTED,
        sentence=f"The ratio is {summary.printed_ratio**2:.3g}; its square root, which the bounds have, "
        f"{summary.printed_ratio:.0f}.",
        numbers={row.quantity: f"printed {row.printed}, corrected {row.corrected}" for row in summary.table},
    )


STATEMENTS = (
    Statement("smoothness-varies", "Figure 1", "Smoothness varies greatly along training.",
              judges.varies, ("fig1",), scale="epoch"),
    Statement("follows-gradient", "Figure 2(a)",
              "With lr 30 and clipping, smoothness follows the gradient norm.",
              partial(judges.follows, setting=legend.BY_HAND), ("fig2",), scale="epoch"),
    Statement("less-without-clipping", "Figure 2(b)", "At lr 2 without clipping it does so much less.",
              partial(judges.much_weaker, large=legend.BY_HAND, small=legend.SMALL_LR),
              ("fig2",), scale="epoch"),
    Statement("less-at-small-lr", "Figure 2(c)", "At lr 2 with clipping it does so much less, too.",
              partial(judges.much_weaker, large=legend.BY_HAND, small=legend.SMALL_LR_CLIPPED),
              ("fig2",), scale="epoch"),
    Statement("why-clipping-helps", "Section 5",
              "With clipping a run crosses regions of other smoothness; without it smoothness hardly varies.",
              judges.explanation, ("fig2",), scale="epoch"),
    Statement("momentum-none", "Figure 3(a)", "On images with SGD and momentum there is no correlation.",
              partial(judges.no_correlation, setting=legend.MOMENTUM), ("fig3",), scale="paper"),
    Statement("images-large-lr", "Figure 3(b)",
              "On images at lr 1 without clipping the correlation is much weaker than with clipping.",
              partial(judges.much_weaker, large=legend.CLIPPED_IMAGES, small=legend.LARGE_LR_IMAGES),
              ("fig3",), scale="paper"),
    Statement("images-clipped", "Figure 3(c)",
              "On images with a large lr and clipping smoothness follows the gradient norm.",
              partial(judges.follows, setting=legend.CLIPPED_IMAGES), ("fig3",), scale="paper"),
    Statement("large-lr-diverges", "Figure 4",
              "Clipping allows a learning rate at which training without it diverges.",
              judges.allows_large_lr, ("fig4",), scale="epoch"),
    Statement("clipping-accelerates", "Figure 4(a)",
              "Clipping accelerates the training of the language model.",
              judges.accelerates, ("fig4",), scale="epoch"),
    Statement("best-validation", "Figure 4(b)", "Models trained with clipping have the best validation loss.",
              judges.best_validation, ("fig4",), scale="epoch"),
    Statement("perplexity", "Appendix H",
              "AWD-LSTM with clipped SGD reaches a test perplexity of 56.5 after 500 epochs.",
              judges.perplexity, ("fig4",), scale="paper"),
    Statement("images-fastest", "Figure 4(c)", "On images clipped descent converges fastest.",
              judges.fastest_on_images, ("fig4",), scale="paper"),
    Statement("images-accuracy", "Figure 4(d)",
              "On images clipped descent matches the test accuracy of momentum.",
              judges.images_accuracy, ("fig4",), scale="paper"),
    Statement("images-95", "Appendix H",
              "ResNet20 reaches 95.0 % test accuracy with momentum, 95.2 % with clipping.",
              judges.reaches_95, ("fig4",), scale="paper"),
    Statement("language-more", "Section 1",
              "Clipping accelerates language models more than image classifiers.",
              judges.language_more, ("fig4",), scale="paper"),
    Statement("correlation-lasts", "Figure 5(b)", "The correlation lasts over 200 epochs.",
              partial(judges.follows, setting=legend.LONG, past=0.5), ("fig5",), scale="epoch"),
    Statement("tenth-smoothness", "Figure 6(b)",
              "A tenth of the data gives an accurate estimate of smoothness.",
              partial(judges.accurate_share, quantity=1, name="smoothness"), ("fig6",), scale="epoch"),
    Statement("tenth-gradient", "Figure 6(a)",
              "A tenth of the data gives an accurate estimate of the gradient norm.",
              partial(judges.accurate_share, quantity=0, name="gradient norm"), ("fig6",), scale="epoch"),
    Statement("quartic-faster", "Figure 7",
              "On x⁴ clipped descent converges much faster than gradient descent.",
              quartic_faster, ("fig7",)),
    Statement("quartic-conservative", "Appendix I", "There the theory is right, but conservative.",
              quartic_conservative, ("fig7",)),
    Statement("gradients-stay", "Figure 8(a, b)", "GD lowers the loss but not the gradient norm.",
              judges.gradients_stay, ("fig8",), scale="longer"),
    Statement("about-three-times", "Figure 8(a)", "GD's gradients are about 3 times those of clipped GD.",
              judges.about_three_times, ("fig8",), scale="longer"),
    Statement("normalizing-is-clipping", "Section 3",
              "Clipping and normalizing are the same up to a constant factor of the step size.",
              judges.same_up_to_a_factor),
    Statement("lemma-2", "Lemma 2",
              "Polynomials of degree 3 and more are (L0, L1)-smooth but not L-smooth.",
              theorem_judges.LEMMA_2),
    Statement("theorem-3", "Theorem 3",
              "Clipped gradient descent converges within the printed number of iterations.",
              theorem_judges.THEOREM_3),
    Statement("theorem-4", "Theorem 4",
              "Every fixed step needs at least the printed number of iterations on some function.",
              theorem_judges.THEOREM_4),
    Statement("theorem-6", "Theorem 6",
              "Gradient descent with a fixed step converges within the printed number of iterations.",
              theorem_judges.THEOREM_6),
    Statement("theorem-7", "Theorem 7",
              "Clipped SGD with the printed step converges within the printed number of iterations.",
              theorem_judges.THEOREM_7),
    Statement("theorem-8", "Theorem 8",
              "SGD with the printed step converges within the printed number of iterations.",
              theorem_judges.THEOREM_8),
    Statement("quartic-arithmetic", "Appendix I", "On x⁴ theory predicts gradients about 1e5 times smaller.",
              quartic_arithmetic, ("fig7",), kind=ERRATUM),
    Statement("fine-tuning", "Appendix H", "The public recipe reaches 56.5.",
              _fixed(CORRECTED, "The public recipe reports 58.8, and 56.5 only after fine-tuning."),
              kind=ERRATUM),
    Statement("affine-law", "Equation 1", "Does smoothness grow at most linearly with the gradient norm?",
              judges.at_most_linear, ("fig2",), scale="epoch", kind=ADDITION),
    Statement("beyond-control", "Figure 2(a)",
              "Is the growth more than a constant Hessian shows under the same steps?",
              judges.beyond_control, ("fig2",), scale="epoch", kind=ADDITION),
    Statement("inside-steps", "Figure 2(a)",
              "Does smoothness grow with the gradient norm inside single steps?",
              judges.inside_steps, ("fig2",), scale="epoch", kind=ADDITION),
    Statement("equal-steps", "Figure 2",
              "Where every step is clipped, do equal steps make the correlation, not the landscape?",
              judges.equal_steps_make_it, ("fig2",), scale="laptop", kind=ADDITION),
    Statement("calibrated", "Figure 4",
              "Do lr and max_norm that were measured before training do as well as the best by hand?",
              judges.calibrated_as_good, ("fig4",), scale="laptop", kind=ADDITION),
)  # fmt: skip
