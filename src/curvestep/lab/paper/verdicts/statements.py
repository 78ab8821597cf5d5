"""The paper's statements, one row each: what it says, the statistic that tests it, and what was found.

To add a row, write a function from ``Results`` to a ``Finding`` in ``judges.py`` and put it into
:data:`STATEMENTS`. The rule of the verdicts and the protocol are in ``claims.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from curvestep.lab.paper.plan import (
    BY_HAND,
    CLIPPED_IMAGES,
    LARGE_LR_IMAGES,
    LONG,
    MOMENTUM,
    SMALL_LR,
    SMALL_LR_CLIPPED,
    Results,
)
from curvestep.lab.paper.verdicts import judges, theorem_judges
from curvestep.lab.paper.verdicts.claims import (
    ADDITION,
    CORRECTED,
    ERRATUM,
    NOT_TESTED,
    PAPER,
    Claim,
    Finding,
    NotPlanned,
)
from curvestep.theory import theorem3, theorem6


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One row before it is judged.

    Args:
        name: Short name, for links.
        source: Figure, section or theorem of the paper.
        says: What the paper says; of an addition, what is asked.
        figures: Figures of the plan whose runs it needs; none where nothing is trained.
        judge: What the runs of one scale show.
        kind: ``paper``, ``erratum`` or ``addition``.
    """

    name: str
    source: str
    says: str
    judge: Callable[[Results], Finding]
    figures: tuple[str, ...] = ()
    kind: str = PAPER


def make_claims(results: Results) -> list[Claim]:
    """Every statement whose figures are in the plan, judged at the plan's scale."""
    planned = {figure.name for figure in results.plan.figures}
    return [_claim(one, results) for one in STATEMENTS if planned.issuperset(one.figures)]


def _claim(statement: Statement, results: Results) -> Claim:
    """A statement with what the runs show; of a part of its seeds only what they show so far."""
    so_far = ""
    try:
        found = statement.judge(results)
    except NotPlanned:
        found = Finding(verdict=NOT_TESTED, sentence="This scale has no such runs.")
    except ValueError as error:  # runs are missing, or too short to fit
        found = Finding(verdict=NOT_TESTED, sentence="These runs cannot tell.", numbers={"why": str(error)})
        with suppress(ValueError):
            so_far = statement.judge(results.so_far()).sentence
    return Claim(
        name=statement.name,
        kind=statement.kind,
        source=statement.source,
        paper=statement.says,
        scale=results.plan.scale if statement.figures else "",
        so_far=so_far,
        **asdict(found),
    )


def _fixed(verdict: str, sentence: str, **numbers: str) -> Callable[[Results], Finding]:
    """A finding that no run of the plan changes: what was not run, or what a test shows."""
    return lambda results: Finding(verdict=verdict, sentence=sentence, numbers=numbers)


_IMAGES_FIGURES, _LANGUAGE_FIGURES = ("fig3",), ("fig2",)
STATEMENTS = (
    Statement(
        name="smoothness-varies", source="Figure 1", says="Smoothness varies greatly along training.",
        judge=judges.varies, figures=("fig1",),
    ),
    Statement(
        name="follows-gradient", source="Figure 2(a)", figures=_LANGUAGE_FIGURES,
        says="With lr 30 and clipping, smoothness follows the gradient norm.",
        judge=partial(judges.follows, setting=BY_HAND, scales=judges.AWD_LSTM),
    ),
    Statement(
        name="less-without-clipping", source="Figure 2(b)", figures=_LANGUAGE_FIGURES,
        says="At lr 2 without clipping it does so much less.",
        judge=partial(judges.much_weaker, large=BY_HAND, small=SMALL_LR, scales=judges.AWD_LSTM),
    ),
    Statement(
        name="less-at-small-lr", source="Figure 2(c)", figures=_LANGUAGE_FIGURES,
        says="At lr 2 with clipping it does so much less, too.",
        judge=partial(judges.much_weaker, large=BY_HAND, small=SMALL_LR_CLIPPED, scales=judges.AWD_LSTM),
    ),
    Statement(
        name="why-clipping-helps", source="Section 5", figures=_LANGUAGE_FIGURES,
        says="Clipping crosses less smooth regions; without it a run stays where smoothness hardly varies.",
        judge=judges.explanation,
    ),
    Statement(
        name="affine-law", source="Equation 1", figures=_LANGUAGE_FIGURES,
        says="Smoothness grows at most linearly with the gradient norm.", judge=judges.at_most_linear,
    ),
    Statement(
        name="momentum-none", source="Figure 3(a)", figures=_IMAGES_FIGURES,
        says="On images with SGD and momentum there is no correlation.",
        judge=partial(judges.no_correlation, setting=MOMENTUM, scales=judges.PAPER_ONLY),
    ),
    Statement(
        name="images-large-lr", source="Figure 3(b)", figures=_IMAGES_FIGURES,
        says="On images at lr 1 without clipping the correlation is much weaker than with clipping.",
        judge=partial(
            judges.much_weaker, large=CLIPPED_IMAGES, small=LARGE_LR_IMAGES, scales=judges.PAPER_ONLY
        ),
    ),
    Statement(
        name="images-clipped", source="Figure 3(c)", figures=_IMAGES_FIGURES,
        says="On images with a large lr and clipping smoothness follows the gradient norm.",
        judge=partial(judges.follows, setting=CLIPPED_IMAGES, scales=judges.PAPER_ONLY),
    ),
    Statement(
        name="large-lr-diverges", source="Figure 4", figures=("fig4",),
        says="Clipping allows a learning rate at which training without it diverges.",
        judge=judges.allows_large_lr,
    ),
    Statement(
        name="clipping-accelerates", source="Figure 4(a)", figures=("fig4",),
        says="Clipping accelerates the training of the language model.",
        judge=judges.accelerates,
    ),
    Statement(
        name="best-validation", source="Figure 4(b)", figures=("fig4",),
        says="Models trained with clipping have the best validation loss.",
        judge=judges.best_validation,
    ),
    Statement(
        name="perplexity", source="Appendix H", figures=("fig4",),
        says="AWD-LSTM with clipped SGD reaches a test perplexity of 56.5 after 500 epochs.",
        judge=_fixed(NOT_TESTED, "Not run: 500 epochs take about 300 core-hours."),
    ),
    Statement(
        name="images-fastest", source="Figure 4(c)", figures=("fig4",),
        says="On images clipped descent converges fastest.",
        judge=judges.fastest_on_images,
    ),
    Statement(
        name="images-accuracy", source="Figure 4(d)", figures=("fig4",),
        says="On images clipped descent matches the test accuracy of momentum.",
        judge=judges.images_accuracy,
    ),
    Statement(
        name="images-95", source="Appendix H", figures=("fig4",),
        says="ResNet20 reaches 95.0 % test accuracy with momentum, 95.2 % with clipping.",
        judge=judges.reaches_95,
    ),
    Statement(
        name="language-more", source="Section 1", figures=("fig4",),
        says="Clipping accelerates language models more than image classifiers.",
        judge=judges.language_more,
    ),
    Statement(
        name="correlation-lasts", source="Figure 5(b)", figures=("fig5",),
        says="The correlation lasts over 200 epochs.",
        judge=partial(judges.follows, setting=LONG, scales=judges.PAPER_ONLY, past=0.5),
    ),
    Statement(
        name="tenth-smoothness", source="Figure 6(b)", figures=("fig6",),
        says="A tenth of the data gives an accurate estimate of smoothness.",
        judge=partial(judges.accurate_share, quantity=1, name="smoothness"),
    ),
    Statement(
        name="tenth-gradient", source="Figure 6(a)", figures=("fig6",),
        says="A tenth of the data gives an accurate estimate of the gradient norm.",
        judge=partial(judges.accurate_share, quantity=0, name="gradient norm"),
    ),
    Statement(
        name="quartic-faster", source="Figure 7", figures=("fig7",),
        says="On x⁴ clipped descent converges much faster than gradient descent.",
        judge=theorem_judges.quartic_faster,
    ),
    Statement(
        name="quartic-conservative", source="Appendix I", figures=("fig7",),
        says="There the theory is right, but conservative.",
        judge=theorem_judges.quartic_conservative,
    ),
    Statement(
        name="gradients-stay", source="Figure 8(a, b)", figures=("fig8",),
        says="GD lowers the loss but not the gradient norm.",
        judge=judges.gradients_stay,
    ),
    Statement(
        name="about-three-times", source="Figure 8(a)", figures=("fig8",),
        says="GD's gradients are about 3 times those of clipped GD.",
        judge=judges.about_three_times,
    ),
    Statement(
        name="normalizing-is-clipping", source="Section 3", figures=("fig4", "equivalence"),
        judge=judges.same_up_to_a_factor,
        says="Clipping and normalizing are the same up to a constant factor of the step size.",
    ),
    Statement(
        name="theorem-3", source="Theorem 3", judge=partial(theorem_judges.certified, theorem=theorem3),
        says="Clipped gradient descent converges within the printed number of iterations.",
    ),
    Statement(
        name="theorem-6", source="Theorem 6", judge=partial(theorem_judges.certified, theorem=theorem6),
        says="Gradient descent with a fixed step converges within the printed number of iterations.",
    ),
    Statement(
        name="quartic-arithmetic", source="Appendix I", figures=("fig7",), kind=ERRATUM,
        judge=theorem_judges.quartic_arithmetic,
        says="On x⁴ theory predicts gradients about 1e5 times smaller.",
    ),
    Statement(
        name="theorem-7-printed", source="Theorem 7", kind=ERRATUM,
        says="Clipped SGD converges with the printed step and constants.",
        judge=_fixed(CORRECTED, "False as printed; the corrected constants hold on every random certificate.",
                     where="docs/theorems.md; tests/theory/test_certificates.py"),
    ),
    Statement(
        name="theorem-4-printed", source="Theorem 4", kind=ERRATUM,
        says="A fixed step needs at least the printed number of iterations.",
        judge=theorem_judges.lower_bound_corrected,
    ),
    Statement(
        name="fine-tuning", source="Appendix H", kind=ERRATUM,
        says="The public recipe reaches 56.5.",
        judge=_fixed(CORRECTED, "The public recipe reports 58.8, and 56.5 only after fine-tuning."),
    ),
    Statement(
        name="beyond-control", source="Figure 2(a)", kind=ADDITION, figures=_LANGUAGE_FIGURES,
        judge=judges.beyond_control,
        says="Is the growth more than a constant Hessian shows under the same steps?",
    ),
    Statement(
        name="inside-steps", source="Figure 2(a)", kind=ADDITION, figures=_LANGUAGE_FIGURES,
        judge=judges.inside_steps,
        says="Does smoothness grow with the gradient norm inside single steps?",
    ),
    Statement(
        name="equal-steps", source="Figure 2", kind=ADDITION, figures=_LANGUAGE_FIGURES,
        judge=judges.equal_steps_make_it,
        says="Where every step is clipped, do equal steps make the correlation, not the landscape?",
    ),
    Statement(
        name="calibrated", source="Figure 4", kind=ADDITION, figures=("fig4",),
        says="Do lr and max_norm that were measured before training do as well as the best by hand?",
        judge=judges.calibrated_as_good,
    ),
)  # fmt: skip
