"""Runs and results that the tests of several modules look at."""

import math
from dataclasses import replace

import pytest

import curvestep as cs
from curvestep.report.charts import comparison, run_charts
from curvestep.report.views import find_views
from tests.report.calibrations import make_calibration
from tests.report.pages import make_run


@pytest.fixture(scope="session")
def views(tmp_path_factory):
    """Two seeds of a setting, and a run that diverged."""
    folder = tmp_path_factory.mktemp("charts")
    for seed in (0, 1):
        make_run(folder / f"seed{seed}", seed=seed, layers=("encoder", "decoder"), steps=100)
    make_run(folder / "wild", lr=3.0, max_norm=math.inf, steps=60)
    return find_views([folder])


@pytest.fixture(scope="session")
def charts(views):
    """Every kind of chart, but that of what happens inside single steps."""
    calibrated = replace(views[0], calibration=make_calibration())
    return [*run_charts(calibrated), *comparison(views)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a run of two layers."""
    return make_run(tmp_path_factory.mktemp("report") / "run", layers=("encoder", "decoder"))


@pytest.fixture(scope="session")
def trace(folder):
    """The trace of that run."""
    return cs.Trace.load(folder / "trace.jsonl")


@pytest.fixture(scope="session")
def shown(trace):
    """One of each kind of result."""
    fit = cs.fit_smoothness(trace)
    return {"trace": trace, "fit": fit, "advice": cs.advise(fit), "calibration": make_calibration()}
