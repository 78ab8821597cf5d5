"""The panel of a calibrated run: its numbers, its words, and what happens without one."""

import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("plotly")

from curvestep.lab.calibration import CALIBRATION, write_calibration
from curvestep.lab.report.calibration_chart import curve_data, curve_in_words
from curvestep.lab.report.page import write_page
from curvestep.lab.report.payload import page_data
from curvestep.lab.report.static import save_figures
from curvestep.lab.report.views import RunView, find_views
from tests.lab.report.calibrations import make_calibration
from tests.lab.report.pages import make_run


def test_chart_has_every_measured_step_and_where_they_stop_being_safe():
    cal = make_calibration()
    data = curve_data(cal)
    assert [len(batch["step"]) for batch in data["batches"]] == [len(batch.points) for batch in cal.curve]
    for shown, batch in zip(data["batches"], cal.curve, strict=True):
        assert shown["safe"] == [int(point.step <= batch.safe_step) for point in batch.points]
        assert all(
            math.isclose(k, p.kappa, rel_tol=1e-4) for k, p in zip(shown["kappa"], batch.points, strict=True)
        )
    low, high = data["interval"]
    assert low < data["safe_step"] < high
    assert data["kappa"] == cal.max_kappa


def test_what_is_not_finite_is_left_out_of_strict_json():
    cal = make_calibration()
    points = tuple(replace(p, kappa=math.inf, loss=math.nan) for p in cal.curve[0].points)
    alone = replace(cal, curve=(replace(cal.curve[0], points=points),), lr_interval=(math.nan, math.nan))
    data = curve_data(alone)
    assert data["interval"] is None
    assert set(data["batches"][0]["kappa"]) == set(data["batches"][0]["loss"]) == {None}
    assert json.dumps(data, allow_nan=False)
    assert "one batch" in curve_in_words(alone)


def test_words_name_the_safe_step_the_numbers_and_the_cost():
    cal = make_calibration()
    words = curve_in_words(cal)
    for number in (f"lr {cal.lr:.3g}", f"max_norm {cal.max_norm:.3g}", f"{cal.num_gradients} gradients"):
        assert number in words
    assert "offset" in curve_in_words(replace(cal, optimizer="NormalizedSGD"))


def test_figures_of_a_calibrated_run_have_its_curve(tmp_path):
    view = RunView(name="mea$ured", setting="by itself", calibration=make_calibration())
    written = save_figures([view], tmp_path)
    assert sorted(path.name for path in written) == ["mea_ured-calibration.png", "mea_ured-calibration.svg"]
    assert all(path.stat().st_size > 5_000 for path in written)


def test_only_a_calibrated_run_has_the_panel(tmp_path):
    make_run(tmp_path / "runs" / "by-hand", steps=60)
    write_calibration(make_run(tmp_path / "runs" / "measured", steps=60), make_calibration())
    by_hand, measured = json.loads(page_data(find_views([tmp_path / "runs"]), None))["runs"]
    assert by_hand["calibration"] is None
    assert len(measured["calibration"]["batches"]) == 3
    page = write_page([tmp_path / "runs"], tmp_path / "page.html").path.read_text()
    assert page.count('data-chart="calibration"') == 1
    assert page.count(curve_in_words(make_calibration())) == 1


def test_calibration_of_another_version_is_a_doubt_and_not_the_end(tmp_path):
    folder = make_run(tmp_path / "run", steps=60)
    (folder / CALIBRATION).write_text('{"lr": 1}')
    (view,) = find_views([folder])
    assert view.calibration is None
    assert any("not a calibration of this version" in doubt for doubt in view.doubts)
