"""Charts of a trace, a fit and a calibration as data: the numbers that they show."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

import curvestep as cs
from curvestep.fit.within import Within
from curvestep.report import page_words, results
from curvestep.report.charts import run_charts, to_plotly
from curvestep.report.results import SHOWN_ROWS, thinned, within
from curvestep.report.views import RunView, find_views
from curvestep.trace.trace import Trace
from tests.report.calibrations import make_calibration


def test_long_series_keep_their_first_and_last_row():
    rows = thinned(np.arange(100_001))
    assert (len(rows), rows[0], rows[-1]) == (SHOWN_ROWS, 0, 100_000)
    assert np.ptp(np.diff(rows)) <= 1


def test_the_scatter_holds_points_line_and_frontier(views):
    cannot_tell = results.scatter(views[0].measured, views[0].fit)
    assert len(cannot_tell.series) == 1
    fit = replace(views[0].fit, within=Within(level=0.9, elasticity=1.0, p_value=0.01))
    points, line, frontier = results.scatter(views[0].measured, fit).series
    np.testing.assert_allclose(line.y, fit.L0 + fit.L1 * line.x)
    # Between the 60 drawn points the concave frontier is a little above its chord.
    assert (np.interp(points.x, frontier.x, frontier.y) >= 0.99 * points.y).all()
    assert list(points.extra) == ["step", "loss", "lr"]
    assert (points.shade == points.extra["step"]).all()


def test_what_happens_within_steps_is_shown_with_its_interval(tmp_path, views):
    # f = eˣ, whose Hessian is its gradient: inside every step, long or short, both change alike.
    with Trace(tmp_path / "trace.jsonl", header={"fractions": [0.5, 1.0], "dtype": "float64"}) as trace:
        for step, x in enumerate(np.linspace(3, 1, 40)):
            length = 0.2 + 0.05 * (step % 5)
            start, ends = math.exp(x), np.exp(x - np.array([length / 2, length]))
            secants = ((start - ends) / [length / 2, length]).tolist()
            row = {"step": step, "loss": start, "step_norm": length, "grad_norm": start}
            trace.append(row | {"grad_norms": ends.tolist(), "secants": secants, "smoothness": max(secants)})
    (view,) = find_views([tmp_path])
    assert view.fit.within.elasticity == pytest.approx(1.0, abs=1e-3)
    points, slope, level = within(view.fit).series
    np.testing.assert_allclose(points.y, points.x, rtol=1e-3)
    np.testing.assert_allclose(slope.y, view.fit.within.elasticity * slope.x)
    assert set(level.y) == {0.0}
    assert page_words.within(view) == str(view.fit.within) != ""
    assert within(views[0].fit) is None  # one fraction a step says nothing of this
    assert page_words.within(views[0]) == ""


def calibration_chart(cal):
    """The one chart of a run that has a calibration and nothing else."""
    (chart,) = run_charts(RunView(name="run", setting="lr 1", calibration=cal))
    return chart


def test_chart_has_every_trial_and_the_choice():
    cal = make_calibration(budget=48)
    chart = calibration_chart(cal)
    trials, chosen = chart.series
    made = [trial for trial in cal.trials if math.isfinite(trial.gain)]
    assert len(made) >= 2
    assert trials.x.tolist() == [trial.lr for trial in made]
    assert trials.y.tolist() == [trial.gain for trial in made]
    assert np.subtract(*trials.band[::-1]).tolist() == pytest.approx([2 * trial.error for trial in made])
    assert set(chosen.x) == {cal.lr}
    assert chart.x.log


def test_broken_trials_are_left_out_and_longer_ones_have_their_line():
    cal = make_calibration(budget=48)
    broken = replace(cal.trials[-1], gain=-math.inf)
    longer = tuple(replace(trial, num_steps=32) for trial in cal.trials)
    odd = replace(cal, trials=(*cal.trials[:-1], broken, *longer))
    chart = calibration_chart(odd)
    assert [series.name for series in chart.series[:2]] == ["16 steps", "32 steps"]
    assert len(chart.series[0].x) == len(cal.trials) - 1
    assert json.dumps(to_plotly(chart), allow_nan=False)


def test_a_plot_shows_what_the_page_shows(folder, shown):
    (view,) = find_views([folder])
    page = {chart.kind: chart for chart in run_charts(view)}
    (scatter,) = results.fit_charts(shown["fit"])
    for ours, theirs in zip(scatter.series, page["scatter"].series, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(ours.y, theirs.y)
    margin = results.trace_charts(shown["trace"])[-1]
    np.testing.assert_array_equal(margin.series[0].y, page["stability_margin"].series[0].y)


@pytest.mark.parametrize(
    ("limit", "name", "margins"), [(2.0, "lr·sharpness/2", [0.3, 0.6]), (38.0, "lr·sharpness/38", [1, 2])]
)
def test_the_stability_margin_is_the_optimizers_own(limit, name, margins):
    with cs.Trace() as trace:
        for step in (0, 1):
            row = {"step": step, "lr": 0.1, "step_norm": 0.1, "grad_norm": 1.0, "optimizer_limit": limit}
            sharp = {"smoothness": 6.0 * (step + 1), "optimizer_smoothness": 380.0 * (step + 1)}
            trace.append(row | sharp)
    chart = results.stability_margin(results.columns_of(trace))
    assert chart.series[0].name == chart.y.label == name
    np.testing.assert_allclose(chart.series[0].y, margins)
    assert chart.series[-1].name == "edge of stability"


def test_a_plot_without_matplotlib_names_the_extra(shown, monkeypatch):
    monkeypatch.delitem(sys.modules, "curvestep.report.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("trace", "fit", "calibration"):
        with pytest.raises(ImportError, match="the extra `report`"):
            shown[name].plot()


def test_what_cannot_be_plotted_says_why():
    with pytest.raises(ValueError, match="none of the 0 rows was measured"):
        cs.Trace().plot()


def test_a_line_marks_the_threshold_only_where_there_is_one():
    assert results.common_threshold(np.array([0.5, 0.5, math.inf, math.nan])) == 0.5
    assert results.common_threshold(np.array([0.5, 0.7])) == math.inf
    assert results.common_threshold(np.array([math.inf])) == math.inf
