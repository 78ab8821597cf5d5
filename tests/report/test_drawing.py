"""Figures by matplotlib: they show what the page shows, in a notebook too."""

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")
from curvestep.report.chart import Axis, Chart, Series
from curvestep.report.charts import comparison, to_plotly
from curvestep.report.drawing import figure_of
from tests.report.calibrations import make_calibration


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


def test_a_run_that_diverged_ends_in_a_cross_and_the_best_is_bold(views):
    best, other, cross = figure_of(comparison(views)[:1]).axes[0].lines
    assert cross.get_marker() == "x"
    assert best.get_linewidth() == 2 * other.get_linewidth()


@pytest.mark.parametrize(("optimizer", "threshold"), [
    ("ClippedSGD", "max_norm"), ("NormalizedSGD", "offset"), ("AdamW", "max_norm"), ("RMSprop", "")
])  # fmt: skip
def test_figure_names_the_threshold_of_this_optimizer(optimizer, threshold):
    found = make_calibration(optimizer=optimizer)
    if threshold:  # trials may leave the step without one
        found = replace(found, max_norm=0.5)
    words = found.plot().get_supxlabel()
    assert [name for name in ("max_norm", "offset") if name in words] == [threshold] * bool(threshold)


def test_every_result_has_a_figure_that_a_notebook_shows(shown):
    for name, panels in (("trace", 4), ("fit", 1), ("calibration", 1)):
        figure = shown[name].plot()
        titles = [panel.get_title() for panel in figure.axes if panel.get_title()]
        assert len(titles) == panels, (name, titles)
        assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("ends", [(0.62, 1.3), (0.22, 0.57), (0.9, 1.1), (1.0, 3.9), (0.05, 2.0)])
def test_a_log_axis_has_two_ticks_or_more_even_in_a_part_of_a_decade(ends):
    chart = Chart("c", "t", Axis("x", log=True), Axis("y"), (Series("", np.array(ends), np.ones(2)),))
    (axis,) = figure_of([chart]).axes
    axis.set_xlim(*ends)
    shown = [tick for tick in axis.get_xticks() if ends[0] <= tick <= ends[1]]
    assert 2 <= len(shown) <= 9
    assert np.allclose([float(f"{tick:.1g}") for tick in shown], shown)
