"""Know how far to step, and how hard to clip: training under (L0, L1)-smoothness.

Quick start. ``loss_of_batch`` is your function from a batch to a loss, ``loader`` yields the batches::

    import curvestep as cs

    cal = cs.calibrate(model, loss_of_batch, loader)             # lr and max_norm before training
    opt = cs.ClippedSGD(model.parameters(), lr=cal.lr, max_norm=cal.max_norm)
    probe = cs.SmoothnessProbe(model, trace="runs/mine/trace.jsonl").watch(opt)
    for batch in loader:
        loss = probe.record(lambda: loss_of_batch(batch))        # measures a few steps; changes nothing
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(cs.advise(probe.trace))                                # lr, max_norm, and the reasons
    cs.report(probe.trace)                                       # one page with charts (extra `report`)

Results print as words, are tables in a notebook, and have a ``plot()`` (needs matplotlib). Names are looked
up on first use: ``curvestep.theory`` and ``curvestep.steps`` can be imported where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from curvestep import clip_rules as clip_rules, loggers as loggers, steps as steps
    from curvestep.advice.advice import Advice as Advice, advise as advise
    from curvestep.autopsy.recorder import Autopsy as Autopsy
    from curvestep.calibration.calibrate import calibrate as calibrate
    from curvestep.calibration.result import Calibration as Calibration
    from curvestep.display.page import Page
    from curvestep.fit.fit import SmoothnessFit as SmoothnessFit, fit_smoothness as fit_smoothness
    from curvestep.loaders import representative_batches as representative_batches
    from curvestep.optim.adamw import ClippedAdamW as ClippedAdamW
    from curvestep.optim.clip import clip as clip
    from curvestep.optim.clipped import ClippedSGD as ClippedSGD
    from curvestep.optim.normalized import NormalizedSGD as NormalizedSGD
    from curvestep.optim.sgd import ScaledSGD as ScaledSGD
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

__version__ = "0.1.0"

_PUBLIC = {
    "calibration.calibrate": ("calibrate",),
    "calibration.result": ("Calibration",),
    "optim.clipped": ("ClippedSGD",),
    "optim.adamw": ("ClippedAdamW",),
    "optim.clip": ("clip",),
    "optim.normalized": ("NormalizedSGD",),
    "optim.sgd": ("ScaledSGD",),
    "smoothness.probe": ("SmoothnessProbe",),
    "trace.trace": ("Trace",),
    "smoothness.oracle": ("GradientOracle",),
    "loaders": ("representative_batches",),
    "smoothness.replay": ("Replay",),
    "smoothness.determinism": ("NonDeterministicError", "UntrackedParametersError"),
    "smoothness.estimators": ("segment_smoothness", "local_smoothness", "spectral_smoothness", "critical_lr"),
    "fit.fit": ("fit_smoothness", "SmoothnessFit"),
    "advice.advice": ("advise", "Advice"),
    "autopsy.recorder": ("Autopsy",),
    "": ("clip_rules", "loggers", "steps"),
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}
__all__ = [*_HOMES, "report"]  # pyright: ignore[reportUnsupportedDunderAll] (the names of the table above)
__doc__ = f"{__doc__}\n{fill('Public names: ' + ', '.join(__all__), 108)}.\n"


def report(
    *runs: str | Path | Trace, output: str | Path = "report.html", title: str = "", overwrite: bool = False
) -> Page:
    """Write one self-contained HTML page about these runs: charts, verdict, warnings (extra `report`).

    Args:
        runs: Traces; trace files; run folders; folders that hold any of these. At least one.
        output: The HTML file. A page written before is replaced, any other file is not.
        title: Heading of the page; default: what was found.
        overwrite: Replace ``output`` whatever it is.

    Returns:
        Where the page is (``path``), and what it says (``verdicts``, ``runs``).
    """
    from curvestep.checks import needs_extra

    with needs_extra("report"):
        from curvestep.display.page import write_page
    return write_page(runs, output, title=title, overwrite=overwrite)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'curvestep' has no attribute {name!r}")
    home = _HOMES[name]
    value = getattr(import_module(f"curvestep.{home}"), name) if home else import_module(f"curvestep.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
