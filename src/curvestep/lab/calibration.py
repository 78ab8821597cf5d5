"""The calibration of a run, as a file of its folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from curvestep.calibration.bracket import Point
from curvestep.calibration.result import BatchCurve, Calibration
from curvestep.lab.run.folder import read_json, write_json

CALIBRATION = "calibration.json"


def write_calibration(folder: str | Path, found: Calibration) -> Path:
    """Keep ``found`` in the run folder, made if it is not there; the file."""
    path = Path(folder) / CALIBRATION
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(found))
    return path


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration that a run folder keeps; None if its numbers were given by hand."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    values = read_json(path)
    try:
        curve = tuple(_batch(batch) for batch in values.pop("curve"))
        low, high = map(float, values.pop("lr_interval"))
        warnings = tuple(values.pop("warnings"))
        return Calibration(**values, lr_interval=(low, high), curve=curve, warnings=warnings)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None


def _batch(values: dict[str, Any]) -> BatchCurve:
    points = tuple(Point(**point) for point in values["points"])
    return BatchCurve(**{**values, "points": points})
