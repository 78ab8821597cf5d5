"""Know how far to step, and how hard to clip: training under (L0, L1)-smoothness.

The public names, and nothing else. They are looked up on first use, so that ``curvestep.theory``
and ``curvestep.steps`` can be imported where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from curvestep import steps as steps, theory as theory
    from curvestep.advice.advice import advise as advise
    from curvestep.calibration.result import Calibration as Calibration
    from curvestep.calibration.search import calibrate as calibrate
    from curvestep.fit.fit import fit_smoothness as fit_smoothness
    from curvestep.optim.adamw import ClippedAdamW as ClippedAdamW
    from curvestep.optim.clip import clip as clip
    from curvestep.optim.clipped import ClippedSGD as ClippedSGD
    from curvestep.optim.normalized import NormalizedSGD as NormalizedSGD
    from curvestep.optim.scaled import ScaledSGD as ScaledSGD
    from curvestep.smoothness.estimators import (
        local_smoothness as local_smoothness,
        segment_smoothness as segment_smoothness,
    )
    from curvestep.smoothness.oracle import GradientOracle as GradientOracle
    from curvestep.smoothness.probe import SmoothnessProbe as SmoothnessProbe
    from curvestep.smoothness.replay import Replay as Replay
    from curvestep.smoothness.spectral import spectral_smoothness as spectral_smoothness
    from curvestep.smoothness.trace import Trace as Trace

__version__ = "0.1.0"

_PUBLIC = {
    "": ("steps", "theory"),
    "optim.clipped": ("ClippedSGD",),
    "optim.adamw": ("ClippedAdamW",),
    "optim.clip": ("clip",),
    "optim.normalized": ("NormalizedSGD",),
    "optim.scaled": ("ScaledSGD",),
    "smoothness.probe": ("SmoothnessProbe",),
    "smoothness.oracle": ("GradientOracle",),
    "smoothness.replay": ("Replay",),
    "smoothness.trace": ("Trace",),
    "smoothness.estimators": ("segment_smoothness", "local_smoothness"),
    "smoothness.spectral": ("spectral_smoothness",),
    "fit.fit": ("fit_smoothness",),
    "advice.advice": ("advise",),
    "calibration.search": ("calibrate",),
    "calibration.result": ("Calibration",),
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'curvestep' has no attribute {name!r}")
    home = _HOMES[name]
    value = getattr(import_module(f"curvestep.{home}"), name) if home else import_module(f"curvestep.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])
