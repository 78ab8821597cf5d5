"""The words and tables of the page, as plain values for its template."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curvestep.advice.advice import Advice, advise
from curvestep.lab.report import captions as words
from curvestep.lab.report.calibration_chart import curve_in_words
from curvestep.lab.report.views import CLAIMS, RunView
from curvestep.lab.run.folder import read_json

_MOST_NOTES = 4  # of what is missing, at the top; each run says it in full
_MOST_PICTURES = 2_500_000  # bytes of figures that go into a page


def verdicts(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """One verdict for each task, from all of its traces together."""
    tasks: dict[str, list[RunView]] = {}
    for view in views:
        tasks.setdefault(str(view.fields.get("name", view.name)), []).append(view)
    return [_verdict(name if len(tasks) > 1 else "", task) for name, task in tasks.items()]


def _verdict(title: str, task: Sequence[RunView]) -> dict[str, Any]:
    # Runs are compared as far as all of them go: the few rows of one that diverged would cut that short.
    steady = [view for view in task if view.status != "diverged"] or task
    traces = [view.trace for view in steady if view.trace is not None and len(view.trace)]
    advice = advise(*traces) if traces else None
    missing = [
        f"{view.name}: {doubt}" if len(task) > 1 else doubt
        for view in task
        for doubt in (_divergence(view) if view.status == "diverged" and len(task) > 1 else view.doubts)
    ]
    if advice is None or advice.refused:
        said = _without_advice(task, advice)
        notes = [
            words for words in missing if words not in said and not words.startswith("Nothing was measured")
        ]
        return {"title": title, "verdict": said, "warnings": tuple(notes[:_MOST_NOTES])}
    fitted = task[0].warnings if len(task) == 1 else ()
    return {
        "title": title,
        "verdict": advice.verdict,
        "advice": advice_in_words(advice),
        "reasons": advice.reasons,
        "warnings": (*_once((*fitted, *advice.warnings)), *missing[:_MOST_NOTES]),
    }


def _without_advice(task: Sequence[RunView], advice: Advice | None) -> str:
    """What to do where nothing can be advised."""
    if all(view.status == "diverged" for view in task):
        ends = "; ".join(f"{view.setting}: {_reason(view)}" for view in task)
        return (
            f"Diverged ({ends}). Clip at a smaller max_norm or lower lr; calibrate measures both beforehand."
        )
    if advice is None:
        return (
            "No advice: nothing was measured. Train with a probe (--probe-every 5), and make the page again."
        )
    return advice.verdict


def _divergence(view: RunView) -> tuple[str]:
    """What the few rows of a run that diverged say at the top: nothing but that."""
    return (f"diverged with {view.setting}; {_reason(view)}.",)


def _reason(view: RunView) -> str:
    return str(view.facts.get("message", "no reason is on record"))


def _once(warnings: Sequence[str]) -> tuple[str, ...]:
    """The warnings, of each kind (the words before the colon) the first: fit and advice often agree."""
    return tuple({words.partition(":")[0]: words for words in reversed(warnings)}.values())[::-1]


def advice_in_words(advice: Advice) -> dict[str, str]:
    """The numbers of the advice, rounded for reading."""
    clipped = advice.clipped_fraction
    following = advice.next_setting or {}
    return {
        "lr": _number(advice.lr),
        "lr_interval": _interval(advice.lr_interval),
        "max_norm": _number(advice.max_norm),
        "max_norm_interval": _interval(advice.max_norm_interval),
        "step_cap": _number(advice.step_cap),
        "step_cap_interval": _interval(advice.step_cap_interval),
        "clipped": "unknown" if clipped is None else f"{clipped:.0%}",
        "next": ", ".join(
            "no clipping" if math.isinf(value) else f"{name} {value:.3g}" for name, value in following.items()
        ),
    }


def run_sections(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """What the template shows of each run."""
    return [_run(index, view) for index, view in enumerate(views)]


def _run(index: int, view: RunView) -> dict[str, Any]:
    charts = [
        _chart("norm", "Gradient norm", words.norm_in_words(view)),
        _chart(
            "loss", "Loss", words.loss_in_words(view), switch="log" if view.status == "diverged" else "linear"
        ),
    ]
    if len(view.measured.get("step", ())):
        scatter = _chart(
            "scatter", "Smoothness against gradient norm", words.scatter_in_words(view), switch="log"
        )
        charts = [
            scatter,
            *charts,
            _chart("edge", "lr·L/2 and the edge of stability", words.edge_in_words(view)),
        ]
    if view.layers:
        charts.append(_chart("layers", "Smoothness by layer", words.layers_in_words(view)))
    if view.calibration is not None:
        charts.append(
            _chart("calibration", "Where the step stops being safe", curve_in_words(view.calibration))
        )
    return {
        "index": index,
        "name": view.name,
        "setting": view.setting,
        "status": view.status,
        "badge": view.status if view.status in ("finished", "diverged", "failed") else "",
        "words": words.run_in_words(view),
        "verdict": view.advice.verdict if view.advice else "",
        "warnings": view.warnings,
        "doubts": view.doubts,
        "fit": str(view.fit) if view.fit else "",
        "charts": charts,
        "setup": _setup(view),
    }


def _chart(kind: str, title: str, summary: str, *, switch: str = "") -> dict[str, Any]:
    return {"kind": kind, "title": title, "summary": summary, "switch": switch}


def _setup(view: RunView) -> list[tuple[str, str]]:
    header = {key: value for key, value in view.header.items() if key not in ("format", "schema")}
    found = {**view.fields, **view.facts, **header}
    return [(key.replace("_", " "), v if isinstance(v, str) else json.dumps(v)) for key, v in found.items()]


def claims_of(paths: Sequence[Path]) -> dict[str, Any] | None:
    """The table of claims of the first reproduction among ``paths``."""
    for path in paths:
        if (path / CLAIMS).is_file():
            found = read_json(path / CLAIMS)
            notes = [f"Data: {source}." for source in found.get("data", ())]
            return {"rows": found.get("claims", ()), "notes": [*notes, *found.get("notes", ())]}
    return None


def claims_verdict(claims: dict[str, Any]) -> dict[str, Any]:
    """How many of the claims are supported, in a sentence."""
    said = [str(row.get("verdict")) for row in claims["rows"]]
    counts = ", ".join(f"{said.count(verdict)} {verdict}" for verdict in dict.fromkeys(said))
    return {
        "title": "",
        "verdict": f"Of {len(said)} claim{'s' * (len(said) > 1)} tested: {counts}.",
        "warnings": (),
    }


def gallery_of(paths: Sequence[Path]) -> list[dict[str, str]]:
    """The figures of the reproductions among ``paths``, as many as a page can carry."""
    pictures, room = [], _MOST_PICTURES
    for path in paths:
        if not (path / CLAIMS).is_file():
            continue
        for file in sorted(
            [*path.glob("figures/*.png"), *path.glob("synthetic/*.png")], key=lambda f: f.name
        ):
            content = file.read_bytes()
            room -= len(content) * 4 // 3
            if room > 0:
                pictures.append({"data": base64.b64encode(content).decode(), "words": _title(file)})
    return pictures


# What the figures of the paper show, and those that the paper lacks.
_TITLES = {
    "fig1": "smoothness against gradient norm along training, language model",
    "fig2": "smoothness against gradient norm, language model, three settings",
    "fig3": "smoothness against gradient norm, ResNet20, three settings",
    "fig4": "training and held-out loss, and accuracy, with and without clipping",
    "fig4_sweep": "final training loss of ResNet20 over learning rate and threshold",
    "fig5": "smoothness against gradient norm on linear axes, and over a longer run",
    "fig6": "gradient norm and smoothness from a tenth of the data against all of it",
    "fig7": "gradient descent and clipped gradient descent on x⁴",
    "fig7_growth": "iterations against the largest gradient norm, with the bounds",
    "fig7_jittered": "the same comparison over many starting points",
    "fig7_table": "theory against experiment: printed, corrected, measured",
    "fig8": "gradient descent against clipped gradient descent on the two-layer LSTM",
}


def _title(file: Path) -> str:
    number = file.stem.removeprefix("fig").partition("_")[0]
    words = _TITLES.get(file.stem, file.stem)
    return f"Figure {number}: {words}" if file.stem.startswith("fig") else words


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "unknown"
    return "no clipping" if math.isinf(value) else f"{value:.3g}"


def _interval(interval: tuple[float, float] | None) -> str:
    if interval is None or not all(map(math.isfinite, interval)):
        return ""
    return f"{interval[0]:.3g} to {interval[1]:.3g}"
