"""The paper's theorems as functions: recipe, bound and assumptions, printed, corrected and sharp."""

from curvestep.theory.theorems.clipped_gd import (
    StepEquivalence as StepEquivalence,
    descent_constant as descent_constant,
    guaranteed_decrease as guaranteed_decrease,
    ngd_equivalence as ngd_equivalence,
    normalized_gd as normalized_gd,
    theorem3 as theorem3,
)
from curvestep.theory.theorems.clipped_sgd import (
    ClippingVerdict as ClippingVerdict,
    noise_term as noise_term,
    theorem7 as theorem7,
    theorem8 as theorem8,
    when_clipping_wins as when_clipping_wins,
)
from curvestep.theory.theorems.fixed_gd import (
    LowerBoundPair as LowerBoundPair,
    assumption4 as assumption4,
    gradient_bound as gradient_bound,
    lower_bound_pair as lower_bound_pair,
    remark5 as remark5,
    theorem4 as theorem4,
    theorem6 as theorem6,
    wall_height as wall_height,
)
from curvestep.theory.theorems.guarantee import (
    Assumption as Assumption,
    AssumptionError as AssumptionError,
    Bound as Bound,
    Guarantee as Guarantee,
)
from curvestep.theory.theorems.lemmas import (
    GradientBound as GradientBound,
    Inequality as Inequality,
    NoisyStep as NoisyStep,
    lemma2 as lemma2,
    lemma9 as lemma9,
    lemma11 as lemma11,
    lemma12 as lemma12,
    lemma13 as lemma13,
)
