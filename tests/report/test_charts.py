"""Charts of runs and of their comparison as data, and as plotly takes them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from curvestep.report.chart import THIN
from curvestep.report.charts import TEMPLATE, comparison, of_column, run_charts, to_plotly
from curvestep.report.views import find_views, tasks_of
from curvestep.trace.trace import Trace


def coloured(value):
    """The chart with the style sheet's variables as colours, as the page's script puts them in."""
    if isinstance(value, str) and value.startswith("var(--"):
        return "Viridis" if value == "var(--shades)" else "#123456"
    if isinstance(value, dict):
        return {key: coloured(item) for key, item in value.items()}
    return [coloured(item) for item in value] if isinstance(value, list) else value


def test_every_kind_of_chart_is_there(charts):
    kinds = {chart.kind.partition("-")[0] for chart in charts}
    assert kinds == {"scatter", "norm", "loss", "stability_margin", "layers", "comparison", "calibration"}
    assert all(len(chart.words) > 30 and chart.title for chart in charts)


def test_a_column_has_a_chart_where_it_was_measured(views):
    entry = of_column("step_norm", "Step length", log=True)
    chart = entry.draw(views[0])
    np.testing.assert_array_equal(chart.series[0].y, views[0].measured["step_norm"])
    low, high, median = (f(chart.series[0].y) for f in (np.min, np.max, np.median))
    assert all(f"{number:.3g}" in entry.words(views[0]) for number in (low, high, median))
    assert of_column("noise", "Noise").draw(views[0]) is None
    assert entry.draw(replace(views[0], measured={})) is None


def test_plotly_accepts_every_chart_in_both_scales(charts):
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs the extra `report`")
    for chart in charts:
        drawn = coloured(to_plotly(chart))
        json.dumps(drawn, allow_nan=False)
        for scale in ({}, *drawn.get("scales", {}).values()):
            layout = {**drawn["layout"], **scale, "template": coloured(TEMPLATE)}
            graph_objects.Figure(data=drawn["data"], layout=layout)  # raises where a name or value is unknown


def test_a_comparison_is_the_mean_over_seeds_with_their_range(views):
    seeds, wild = comparison(views)[0].series
    assert (seeds.name, wild.name) == ("lr 0.3, clip 0.5", "lr 3, no clip")
    low, high = seeds.band
    assert (low <= seeds.y).all()
    assert (seeds.y <= high).all()
    assert (low < high).any()
    assert wild.band is None
    last = [view.rows["loss"][-5:].mean() for view in views[:2]]  # a twentieth of 100 rows
    assert seeds.y[-1] == pytest.approx(np.mean(last))
    low, high = comparison(views)[0].y.range
    # The one that diverged does not press the others flat: it ends where it leaves the chart.
    assert wild.y[-1] == high < np.nanmax(views[-1].rows["loss"])
    assert low < seeds.y.min() < seeds.y.max() < high


def test_of_many_settings_the_best_are_named_and_the_others_counted(views):
    order = (3, 8, 1, 0, 9, 5, 12, 2, 4, 11, 7, 6, 10)  # by loss; the last three diverge
    own = {"fields": {}, "trace": None, "fit": None, "advice": None, "status": ""}
    runs = [replace(views[0], **own, name=str(n), setting=f"lr {n}", final_loss=n) for n in order]
    runs = [replace(run, status="diverged") if run.final_loss > 9 else run for run in runs]
    (task,) = tasks_of(runs)
    *calm, _, _, _ = task.runs
    assert [run.setting for run in calm] == [f"lr {n}" for n in range(10)]
    series = comparison(task.runs)[0].series
    assert [one.entry for one in series] == [
        *(f"lr {n}" for n in range(5)),
        "5 others",
        *[""] * 4,
        "3 diverged",
        "",
        "",
    ]
    assert [one.colour for one in series] == [0, 1, 2, 3, 4, *["pale"] * 5, *["bad"] * 3]
    drawn = to_plotly(comparison(task.runs)[0])["data"]
    assert [one["name"] for one in drawn if one.get("showlegend", True)] == [
        one.entry for one in series if one.entry
    ]
    assert [one["name"] for one in drawn if one.get("hoverinfo") != "skip"] == [one.name for one in series]
    few = comparison(task.runs[:6] + task.runs[-1:])[0].series
    assert [one.entry for one in few] == [one.name for one in few]


def layers_of(folder, *rows):
    """The chart of layers of a trace with these rows of sharpness by layer, None without one."""
    with Trace(folder / "trace.jsonl") as trace:
        for step, row in enumerate(rows):
            layers = {name: {"smoothness": value} for name, value in row.items()}
            trace.append({"step": step, "grad_norm": 1.0, "loss": 1.0, "layers": layers})
    return next((chart for chart in run_charts(find_views([folder])[0]) if chart.kind == "layers"), None)


def test_a_curve_of_each_layer_shows_the_sharpest_first(tmp_path):
    # By the first row b would be the sharpest, by the last, the mean or the largest a.
    rows = {"a": 1.0, "b": 3.0, "c": 2.0}, {"a": 1.0, "b": 80.0, "c": 5.0}, {"a": 90.0, "b": 3.0, "c": 5.0}
    chart = layers_of(tmp_path, *rows)
    assert {one.name: one.y.tolist() for one in chart.series} == {
        "c": [2.0, 5.0, 5.0], "b": [3.0, 80.0, 3.0], "a": [1.0, 1.0, 90.0]
    }  # fmt: skip
    assert [one.name for one in chart.series] == ["c", "b", "a"]
    assert [one.x.tolist() for one in chart.series] == [[0.0, 1.0, 2.0]] * 3
    assert (chart.x.log, chart.y.log) == (False, True)


def test_of_many_layers_the_sharpest_are_named_and_the_others_grey(tmp_path):
    chart = layers_of(tmp_path, *[{f"l{n}": float(n) for n in range(9)}] * 600)
    assert [one.entry for one in chart.series] == ["l8", "l7", "l6", "l5", "l4", "4 others", "", "", ""]
    assert [one.colour for one in chart.series] == [0, 1, 2, 3, 4, *["pale"] * 4]
    assert [one.name for one in chart.series[5:]] == ["l3", "l2", "l1", "l0"]
    assert [len(one.x) for one in chart.series] == [500] * 9
    assert [one.weight for one in chart.series] == [1.0] * 5 + [THIN] * 4


def test_a_layer_is_drawn_unless_it_has_no_number(tmp_path):
    rows = {"a": 0.0, "b": 1.0, "c": math.nan, "d": math.nan}, {"a": 0.0, "b": 3.0, "c": math.nan, "d": 2.0}
    chart = layers_of(tmp_path, *rows)
    assert sorted(one.name for one in chart.series) == ["a", "b", "d"]
    (tmp_path / "lost").mkdir()
    assert layers_of(tmp_path / "lost", {"a": math.nan}) is None
