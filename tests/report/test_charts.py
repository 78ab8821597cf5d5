"""Charts as data: what they hold, and that both renderers draw all of it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
from plotly import graph_objects

from curvestep.report import page_words
from curvestep.report.chart import BOLD, THIN, Axis, Chart, Series
from curvestep.report.charts import (
    TEMPLATE,
    comparison,
    rounded,
    run_charts,
    to_plotly,
)
from curvestep.report.drawing import figure_of
from curvestep.report.results import within
from curvestep.report.views import RunView, find_views, seeds_by_setting, tasks_of
from curvestep.trace.trace import Trace
from tests.report.calibrations import make_calibration
from tests.report.pages import make_run


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    folder = tmp_path_factory.mktemp("charts")
    for seed in (0, 1):
        make_run(folder / f"seed{seed}", seed=seed, layers=("encoder", "decoder"), steps=100)
    make_run(folder / "wild", lr=3.0, max_norm=math.inf, steps=60)
    return find_views([folder])


@pytest.fixture(scope="module")
def charts(views):
    calibrated = replace(views[0], calibration=make_calibration())
    return [*run_charts(calibrated), *comparison(views)]


def coloured(value):
    """The chart with the style sheet's variables as colours, as the page's script puts them in."""
    if isinstance(value, str) and value.startswith("var(--"):
        return "Viridis" if value == "var(--shades)" else "#123456"
    if isinstance(value, dict):
        return {key: coloured(item) for key, item in value.items()}
    return [coloured(item) for item in value] if isinstance(value, list) else value


def test_every_kind_of_chart_is_there(charts):
    kinds = {chart.kind.partition("-")[0] for chart in charts}
    assert kinds == {"scatter", "norm", "loss", "edge", "layers", "comparison", "calibration"}
    assert all(len(chart.words) > 30 and chart.title for chart in charts)


def test_plotly_accepts_every_chart_in_both_scales(charts):
    for chart in charts:
        drawn = coloured(to_plotly(chart))
        json.dumps(drawn, allow_nan=False)
        for scale in ({}, *drawn.get("scales", {}).values()):
            layout = {**drawn["layout"], **scale, "template": coloured(TEMPLATE)}
            graph_objects.Figure(data=drawn["data"], layout=layout)  # raises where a name or value is unknown


def test_both_renderers_draw_the_same_curves(charts):
    for chart in charts:
        if any(series.shade is not None for series in chart.series):
            continue
        traces = [t for t in to_plotly(chart)["data"] if t.get("hoverinfo") != "skip"]
        panel = figure_of([chart]).axes[0]
        lines = [line for line in panel.lines if not str(line.get_label()).startswith("_")]
        assert [trace["name"] for trace in traces] == [str(line.get_label()) for line in lines], chart.kind
        for trace, line in zip(traces, lines, strict=True):
            shown = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
            drawn = [(x, y) for x, y in zip(*line.get_data(), strict=True) if math.isfinite(y)]
            np.testing.assert_allclose(shown, drawn, rtol=1e-4)


def test_the_scatter_holds_points_line_and_frontier(views):
    chart = next(chart for chart in run_charts(views[0]) if chart.kind == "scatter")
    points, line, frontier = chart.series
    fit = views[0].fit
    np.testing.assert_allclose(line.y, fit.L0 + fit.L1 * line.x)
    # Between the 60 drawn points the concave frontier is a little above its chord.
    assert (np.interp(points.x, frontier.x, frontier.y) >= 0.99 * points.y).all()
    assert list(points.extra) == ["step", "loss", "lr"]
    assert (points.shade == points.extra["step"]).all()


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
    assert comparison(views)[0].words.endswith(" 1 diverged.")
    low, high = comparison(views)[0].y.range
    # The one that diverged does not press the others flat: it ends where it leaves the chart.
    assert wild.y[-1] == high < np.nanmax(views[-1].rows["loss"])
    assert low < seeds.y.min() < seeds.y.max() < high


def test_the_best_setting_is_bold_and_a_lost_one_red_with_a_cross(views):
    best, wild = comparison(views)[0].series
    assert (best.weight, wild.weight) == (BOLD, 1.0)
    assert (best.diverged, wild.diverged, wild.colour) == (False, True, "bad")
    alone = [run_charts(view)[0].series[0] for view in views]
    assert [(one.diverged, one.colour) for one in alone] == [(False, 0), (False, 0), (True, "bad")]
    drawn = to_plotly(comparison(views)[0])["data"]
    (cross,) = [one for one in drawn if one.get("marker", {}).get("symbol") == "x"]
    assert (cross["x"], cross["y"]) == tuple(map(rounded, wild.last))
    assert cross["legendgroup"] == "1"
    assert drawn[-2]["line"]["color"] == "var(--bad)"
    panel = figure_of(comparison(views)[:1]).axes[0]
    assert panel.lines[-1].get_marker() == "x"
    assert panel.lines[0].get_linewidth() == 2 * panel.lines[1].get_linewidth()


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
    legend = figure_of(comparison(task.runs)[:1]).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [one.entry for one in series if one.entry]
    few = comparison(task.runs[:6] + task.runs[-1:])[0].series
    assert [one.entry for one in few] == [one.name for one in few]


def test_the_best_setting_is_that_with_the_lowest_mean_of_its_seeds(views):
    fields = [{**views[0].fields, "lr": lr, "seed": seed} for lr in (1.0, 2.0) for seed in (0, 1)]
    losses = (1.0, 4.0, 2.0, 2.1)
    runs = [
        replace(views[0], fields=own, setting=f"lr {own['lr']}", final_loss=loss, trace=None, task="one")
        for own, loss in zip(fields, losses, strict=True)
    ]
    assert [run.final_loss for run in tasks_of(runs)[0].runs] == [2.0, 2.1, 1.0, 4.0]
    lost = [replace(run, status="diverged") if run.final_loss == 2.1 else run for run in runs]
    assert [run.final_loss for run in tasks_of(lost)[0].runs] == [1.0, 4.0, 2.0, 2.1]


def test_traces_of_ones_own_are_named_by_lr_and_threshold(views):
    own = [replace(views[0], fields={}, setting="lr 0.3, clip 0.5", name=name) for name in "ab"]
    assert list(seeds_by_setting(own[:1])) == ["lr 0.3, clip 0.5"]
    assert list(seeds_by_setting(own)) == ["lr 0.3, clip 0.5, run a", "lr 0.3, clip 0.5, run b"]


def test_runs_of_other_lengths_are_settings_of_their_own(views):
    short = replace(views[0], fields={**views[0].fields, "steps": 7, "probe_every": 3})
    found = seeds_by_setting([*views, short])
    steps = views[0].fields["steps"]
    names = f"lr 0.3, clip 0.5, steps {steps}", "lr 0.3, clip 0.5, steps 7"
    assert {name: len(runs) for name, runs in found.items()} == {names[0]: 2, "lr 3, no clip": 1, names[1]: 1}
    dropped = [replace(views[0], fields={**views[0].fields, "lr_drops": at}) for at in ([0.5], [0.5, 0.75])]
    names = ("lr 0.3, clip 0.5, lr drops 0.5", "lr 0.3, clip 0.5, lr drops 0.5+0.75")
    assert tuple(seeds_by_setting(dropped)) == names


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
    assert chart.words.endswith("largest in c (5) and smallest in a (1).")
    assert (chart.x.log, chart.y.log) == (False, True)


def test_of_many_layers_the_sharpest_are_named_and_the_others_grey(tmp_path):
    chart = layers_of(tmp_path, *[{f"l{n}": float(n) for n in range(9)}] * 600)
    assert [one.entry for one in chart.series] == ["l8", "l7", "l6", "l5", "l4", "4 others", "", "", ""]
    assert [one.colour for one in chart.series] == [0, 1, 2, 3, 4, *["pale"] * 4]
    assert [one.name for one in chart.series[5:]] == ["l3", "l2", "l1", "l0"]
    assert [len(one.x) for one in chart.series] == [500] * 9
    assert [one.weight for one in chart.series] == [1.0] * 5 + [THIN] * 4
    assert chart.words.endswith("The sharpest have names, the others are grey.")


def test_a_layer_without_sharpness_is_drawn_among_others_and_one_without_a_number_is_not(tmp_path):
    rows = {"a": 0.0, "b": 1.0, "c": math.nan, "d": math.nan}, {"a": 0.0, "b": 3.0, "c": math.nan, "d": 2.0}
    chart = layers_of(tmp_path, *rows)
    assert sorted(one.name for one in chart.series) == ["a", "b", "d"]
    figure_of([chart]).canvas.draw()
    (tmp_path / "lost").mkdir()
    assert layers_of(tmp_path / "lost", {"a": math.nan}) is None


def test_names_are_text_for_both_renderers():
    name = "a<b>&$x_{$\u202e\x07"
    chart = Chart(
        kind="loss", title=name, words="", x=Axis(label=name), y=Axis(label="y", log=True),
        series=(Series(name=name, x=np.arange(3.0), y=np.arange(3.0) + 1),),
    )  # fmt: skip
    assert to_plotly(chart)["data"][0]["name"] == "a&lt;b&gt;&amp;$x_{$\\u202e\\u0007"
    figure = figure_of([chart], title=name)
    figure.canvas.draw()
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == r"a<b>&\$x_{\$\u202e\u0007"


@pytest.mark.parametrize(
    ("ends", "ticks"), [((0.7, 0.9), None), ((0.5, 4), "D2"), ((0.02, 1), "D2"), ((1e-3, 1e5), None)]
)
def test_log_axes_show_1_2_and_5_over_a_few_decades_and_whole_numbers(ends, ticks):
    curve = Series("", np.arange(2.0), np.array(ends))
    axis = to_plotly(Chart("test", "", Axis("x"), Axis("y", log=True), (curve,)))["layout"]["yaxis"]
    assert (axis["dtick"], axis["tickformat"]) == (ticks, "~g")


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
    cal = make_calibration()
    chart = calibration_chart(cal)
    trials, chosen = chart.series
    assert trials.x.tolist() == [arm.lr for arm in cal.arms]
    assert trials.y.tolist() == [arm.gain for arm in cal.arms]
    assert np.subtract(*trials.band[::-1]).tolist() == pytest.approx([2 * arm.error for arm in cal.arms])
    assert set(chosen.x) == {cal.lr}
    assert chart.x.log
    for said in (f"lr {cal.lr:.3g}", cal.confidence, f"{cal.num_gradients} gradients"):
        assert said in chart.words


def test_trial_that_broke_is_left_out_and_doubled_ones_have_a_line_of_their_own():
    cal = make_calibration()
    broken = replace(cal.arms[-1], gain=-math.inf)
    longer = tuple(replace(arm, num_steps=32) for arm in cal.arms)
    odd = replace(cal, arms=(*cal.arms[:-1], broken, *longer))
    chart = calibration_chart(odd)
    assert [series.name for series in chart.series[:2]] == ["16 steps", "32 steps"]
    assert len(chart.series[0].x) == len(cal.arms) - 1
    assert json.dumps(to_plotly(chart), allow_nan=False)
    assert "32 steps" in chart.words


@pytest.mark.parametrize(("optimizer", "threshold"), [
    ("ClippedSGD", "max_norm"), ("NormalizedSGD", "offset"), ("AdamW", "max_norm"), ("RMSprop", "")
])  # fmt: skip
def test_figure_names_the_threshold_of_this_optimizer(optimizer, threshold):
    words = make_calibration(optimizer=optimizer).plot().get_supxlabel()
    assert [name for name in ("max_norm", "offset") if name in words] == [threshold] * bool(threshold)


def test_marks_of_a_series_are_as_asked_or_there_for_a_lonely_point():
    steps = np.arange(3.0)
    plain = Series("", steps, steps, mark="triangle")
    lonely = Series("", steps, np.array([1.0, np.nan, np.nan]))
    line = Series("", steps, steps, dash="dash")
    drawn = to_plotly(Chart("test", "", Axis("x"), Axis("y"), (plain, lonely, line)))["data"]
    assert [one["line"]["dash"] for one in drawn] == ["solid", "solid", "dash"]
    assert drawn[0]["marker"]["symbol"] == "triangle-up"
    assert drawn[1]["marker"]["symbol"] == "circle"
    assert [one["mode"] for one in drawn[1:]] == ["lines+markers", "lines"]


def test_the_caption_of_the_edge_counts_the_steps_above_it():
    measured = dict.fromkeys(("lr", "grad_norm", "step_norm"), np.ones(4))
    measured |= {"smoothness": np.array([1.0, 3.0, 4.0, 6.0]), "step": np.arange(4.0)}
    view = RunView(name="run", setting="lr 1", measured=measured)
    words = page_words.edge(view)
    assert words.startswith("The stability margin is 1.75 in the median and goes from 0.5 to 3; 75% of")
    assert words.endswith("It is lr times sharpness over 2.")
