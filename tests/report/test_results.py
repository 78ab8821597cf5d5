"""Results at a prompt and in a notebook: a short line, a table, a figure with the page's own chart data."""

import ast
import math
import pydoc
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
import curvestep as cs
from curvestep.report import results
from curvestep.report.charts import run_charts
from curvestep.report.markup import html_table
from curvestep.report.views import find_views
from tests.report.calibrations import make_calibration
from tests.report.pages import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("display") / "run", steps=200)


@pytest.fixture(scope="module")
def trace(folder):
    return cs.Trace.load(folder / "trace.jsonl")


@pytest.fixture(scope="module")
def shown(trace):
    """One of each kind of result."""
    fit = cs.fit_smoothness(trace)
    return {"trace": trace, "fit": fit, "advice": cs.advise(fit), "calibration": make_calibration()}


def test_a_result_at_a_prompt_is_one_short_line_with_its_numbers(shown):
    for result in shown.values():
        assert "\n" not in repr(result)
        assert len(repr(result)) < 150
    assert (
        repr(shown["fit"]) == f"<SmoothnessFit: L0 {shown['fit'].L0:.4g}, L1 {shown['fit'].L1:.4g}, 40 rows>"
    )
    assert repr(shown["advice"]) == f"<Advice: {shown['advice'].verdict}>"
    assert f"lr {shown['calibration'].lr:.3g}" in repr(shown["calibration"])
    assert repr(cs.Advice(action="keep", kind="no-sign", verdict="why " * 90)).endswith("why …>")


def test_a_notebook_shows_a_table_with_everything_that_is_printed(shown):
    for name, result in shown.items():
        page = result._repr_html_()
        assert re.fullmatch(r"<p>.*</p>(<table>(<tr>.*</tr>)+</table>)?(<ul>.*</ul>)?", page, re.DOTALL), name
        for warning in getattr(result, "warnings", ()):
            assert str(warning).partition(" ")[0] in page
    assert f"{shown['calibration'].arms[1].gain:.4g}" in shown["calibration"]._repr_html_()
    assert "<th>grad_norm</th>" in shown["trace"]._repr_html_()
    assert cs.Trace()._repr_html_().startswith("<p>Trace: 0 rows</p>")


def test_names_in_a_table_are_text():
    assert html_table("nothing to set", []) == "<p>nothing to set</p>"
    assert html_table("<b>", [("\x1b", "<i>")], ["&"]) == (
        "<p>&lt;b&gt;</p><table><tr><th>\\u001b</th><td>&lt;i&gt;</td></tr></table><ul><li>&amp;</li></ul>"
    )


def test_every_result_has_a_figure_that_a_notebook_shows(shown):
    for name, panels in (("trace", 4), ("fit", 1), ("calibration", 1)):
        figure = shown[name].plot()
        titles = [panel.get_title() for panel in figure.axes if panel.get_title()]
        assert len(titles) == panels, (name, titles)
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_plot_shows_what_the_page_shows(folder, shown):
    (view,) = find_views([folder])
    page = {chart.kind: chart for chart in run_charts(view)}
    (scatter,) = results.fit_charts(shown["fit"])
    for ours, theirs in zip(scatter.series, page["scatter"].series, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(ours.y, theirs.y)
    edge = results.trace_charts(shown["trace"])[-1]
    np.testing.assert_array_equal(edge.series[0].y, page["edge"].series[0].y)


@pytest.mark.parametrize(
    ("limit", "name", "edges"), [(2.0, "lr·sharpness/2", [0.3, 0.6]), (38.0, "lr·sharpness/38", [1, 2])]
)
def test_the_edge_is_the_optimizers_own(limit, name, edges):
    with cs.Trace() as trace:
        for step in (0, 1):
            row = {"step": step, "lr": 0.1, "step_norm": 0.1, "grad_norm": 1.0, "optimizer_limit": limit}
            sharp = {"smoothness": 6.0 * (step + 1), "optimizer_smoothness": 380.0 * (step + 1)}
            trace.append(row | sharp)
    chart = results.edge(results.columns_of(trace))
    assert chart.series[0].name == chart.y.label == name
    np.testing.assert_allclose(chart.series[0].y, edges)
    assert chart.series[-1].name == "edge of stability"


def test_what_cannot_be_plotted_says_why():
    with pytest.raises(ValueError, match="none of the 0 rows was measured"):
        cs.Trace().plot()


def test_a_line_marks_the_threshold_only_where_there_is_one():
    assert results.common_threshold(np.array([0.5, 0.5, math.inf, math.nan])) == 0.5
    assert results.common_threshold(np.array([0.5, 0.7])) == math.inf
    assert results.common_threshold(np.array([math.inf])) == math.inf


def test_report_writes_a_page_of_a_trace_in_memory(trace, tmp_path):
    ours = cs.Trace(header={"model": "mine"})
    for row in trace:
        ours.append(row)
    page = cs.report(ours, output=tmp_path / "page.html", title="From a notebook")
    assert repr(page) == f"<Page: 1 runs, {str(tmp_path / 'page.html')!r}>"
    text = page.path.read_text(encoding="utf-8")
    assert "<h1>From a notebook</h1>" in text
    assert page.runs[0].name == "mine"
    assert page.verdicts[0]["verdict"] == cs.advise(trace).verdict


def test_report_replaces_an_earlier_page_and_no_other_file(folder, tmp_path):
    output = tmp_path / "page.html"
    output.write_text("mine")
    with pytest.raises(ValueError, match="is there already and is no page of curvestep"):
        cs.report(folder, output=output)
    assert output.read_text() == "mine"
    cs.report(folder, output=output, overwrite=True)
    cs.report(folder / "trace.jsonl", output=output)
    with pytest.raises(ValueError, match="must be an HTML file, got the folder"):
        cs.report(folder, output=tmp_path)


def test_help_shows_a_quick_start_and_every_public_name():
    assert cs.__doc__ is not None
    shown = pydoc.plain(pydoc.render_doc(cs))
    start = shown.partition("PACKAGE CONTENTS")[0]
    assert "cs.calibrate(model, loss_of_batch, loader)" in start
    for name in cs.__all__:
        assert re.search(rf"\b{name}\b", start), name
    assert {"SmoothnessFit", "Advice", "Calibration", "NonDeterministicError", "report"} <= set(cs.__all__)


def test_type_checkers_see_the_names_that_are_looked_up():
    stub = ast.parse(Path(cs.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [alias.asname for alias in aliases] == [alias.name for alias in aliases]  # else they are private
    assert len(aliases) == len(set(cs.__all__)) > 20
