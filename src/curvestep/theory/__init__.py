"""The theory of the paper as numbers; needs numpy and scipy only."""

from curvestep.theory.certificates import (
    Certificate as Certificate,
    certify as certify,
    certify_lower_bound as certify_lower_bound,
)
from curvestep.theory.complexity import (
    descend as descend,
    first_hit as first_hit,
    hitting_time as hitting_time,
    worst_case_complexity as worst_case_complexity,
)
from curvestep.theory.inequalities import (
    check_smoothness as check_smoothness,
    gradient_change_bound as gradient_change_bound,
    limsup_smoothness as limsup_smoothness,
    sample_frontier as sample_frontier,
    value_change_bound as value_change_bound,
)
from curvestep.theory.problems.base import (
    BoundedNoise as BoundedNoise,
    Problem as Problem,
    ScalarProblem as ScalarProblem,
)
from curvestep.theory.problems.deep_linear import DeepLinear as DeepLinear
from curvestep.theory.problems.polynomials import (
    Polynomial as Polynomial,
    Quadratic as Quadratic,
    Quartic as Quartic,
)
from curvestep.theory.problems.walls import (
    ExponentialWall as ExponentialWall,
    PrintedWall as PrintedWall,
    SlowValley as SlowValley,
    phi as phi,
)
from curvestep.theory.rules import (
    ClippedStep as ClippedStep,
    FixedStep as FixedStep,
    LogarithmicStep as LogarithmicStep,
    NormalizedStep as NormalizedStep,
    ShiftedClippedStep as ShiftedClippedStep,
    SmoothClippedStep as SmoothClippedStep,
    StepRule as StepRule,
)
from curvestep.theory.theorems.clipped_gd import (
    descent_constant as descent_constant,
    guaranteed_decrease as guaranteed_decrease,
    ngd_equivalence as ngd_equivalence,
    normalized_gd as normalized_gd,
    theorem3 as theorem3,
)
from curvestep.theory.theorems.clipped_sgd import (
    clipping_floor as clipping_floor,
    floor_noise as floor_noise,
    theorem7 as theorem7,
    theorem8 as theorem8,
)
from curvestep.theory.theorems.ell_smooth import (
    certify_ell as certify_ell,
    ell_decrease as ell_decrease,
    ell_smooth as ell_smooth,
    ell_step as ell_step,
)
from curvestep.theory.theorems.fixed_gd import (
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
    Guarantee as Guarantee,
)
from curvestep.theory.theorems.lemmas import (
    NoisyStep as NoisyStep,
    lemma2 as lemma2,
    lemma9 as lemma9,
    lemma11 as lemma11,
    lemma12 as lemma12,
    lemma13 as lemma13,
)
