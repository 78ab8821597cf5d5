"""The public names and their modules; ``__init__.py`` reads this file, and imports a name on first use."""

from curvestep import clip_rules as clip_rules, steps as steps
from curvestep.advice.advice import Advice as Advice, advise as advise
from curvestep.autopsy.recorder import Autopsy as Autopsy
from curvestep.calibration.calibrate import calibrate as calibrate
from curvestep.calibration.clip_direction import ClippingBias as ClippingBias, clipping_bias as clipping_bias
from curvestep.calibration.loaders import representative_batches as representative_batches
from curvestep.calibration.result import Calibration as Calibration
from curvestep.fit.fit import SmoothnessFit as SmoothnessFit, fit_smoothness as fit_smoothness
from curvestep.integrations import loggers as loggers
from curvestep.optim.adamw import ClippedAdamW as ClippedAdamW
from curvestep.optim.clip import clip as clip
from curvestep.optim.clipped import ClippedSGD as ClippedSGD
from curvestep.optim.grad_norm import clip_grad_norm_ as clip_grad_norm_
from curvestep.optim.normalized import NormalizedSGD as NormalizedSGD
from curvestep.optim.sgd import ScaledSGD as ScaledSGD
from curvestep.report import report as report
from curvestep.smoothness.determinism import (
    NonDeterministicError as NonDeterministicError,
    UntrackedParametersError as UntrackedParametersError,
)
from curvestep.smoothness.estimators import (
    critical_lr as critical_lr,
    local_smoothness as local_smoothness,
    segment_smoothness as segment_smoothness,
    spectral_smoothness as spectral_smoothness,
)
from curvestep.smoothness.oracle import GradientOracle as GradientOracle
from curvestep.smoothness.probe import SmoothnessProbe as SmoothnessProbe
from curvestep.smoothness.replay import Replay as Replay
from curvestep.trace.trace import Trace as Trace

__version__: str
