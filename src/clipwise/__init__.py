"""Know how hard to clip: training under (L0, L1)-smoothness.

The public names, and nothing else. They are looked up on first use, so that ``clipwise.theory``
and ``clipwise.steps`` can be imported where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipwise import steps as steps, theory as theory
    from clipwise.optim import ClippedSGD as ClippedSGD, NormalizedSGD as NormalizedSGD
    from clipwise.smoothness.advice import advise as advise
    from clipwise.smoothness.calibrate import Calibration as Calibration, calibrate as calibrate
    from clipwise.smoothness.estimators import (
        local_smoothness as local_smoothness,
        segment_smoothness as segment_smoothness,
    )
    from clipwise.smoothness.fit import fit_smoothness as fit_smoothness
    from clipwise.smoothness.oracle import GradientOracle as GradientOracle
    from clipwise.smoothness.probe import SmoothnessProbe as SmoothnessProbe
    from clipwise.smoothness.replay import Replay as Replay
    from clipwise.smoothness.spectral import spectral_smoothness as spectral_smoothness
    from clipwise.smoothness.trace import Trace as Trace

__version__ = "0.1.0"

_HOMES = {
    "ClippedSGD": "optim",
    "NormalizedSGD": "optim",
    "GradientOracle": "smoothness.oracle",
    "SmoothnessProbe": "smoothness.probe",
    "Replay": "smoothness.replay",
    "Trace": "smoothness.trace",
    "fit_smoothness": "smoothness.fit",
    "advise": "smoothness.advice",
    "segment_smoothness": "smoothness.estimators",
    "local_smoothness": "smoothness.estimators",
    "spectral_smoothness": "smoothness.spectral",
    "Calibration": "smoothness.calibration",
    "calibrate": "smoothness.calibrate",
    "steps": "",
    "theory": "",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clipwise' has no attribute {name!r}")
    home = _HOMES[name]
    value = getattr(import_module(f"clipwise.{home}"), name) if home else import_module(f"clipwise.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])
