"""The page without a browser: what it says, what is packed into it, and what it refuses."""

import base64
import dataclasses
import gzip
import html
import json
import math
import re

import numpy as np
import pytest

from curvestep.advice.advice import advise
from curvestep.fit.fit import fit_smoothness
from curvestep.lab.paper.claims import Claim, write_claims
from curvestep.lab.report.heat import heat_map
from curvestep.lab.report.page import render_page, write_page
from curvestep.lab.report.sections import verdicts
from curvestep.lab.report.static import save_figures
from curvestep.lab.report.views import MOST_ROWS, find_views, thinned
from curvestep.smoothness.trace import Trace
from tests.lab.report.pages import make_run

HOSTILE = "<img src=x onerror=alert(1)>"


def packed(path):
    """The numbers inside a page, unpacked as the browser does."""
    text = re.search(r'id="data-packed">([^<]*)<', path.read_text()).group(1)
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("single") / "run", layers=("encoder", "decoder"))
    return folder, write_page([folder], folder.parent / "page.html")


def test_the_page_opens_with_the_verdict_of_the_trace(single):
    folder, page = single
    advice = advise(Trace.load(folder / "trace.jsonl"))
    text = html.unescape(page.path.read_text())
    assert advice.verdict in text
    for number in (advice.lr, advice.max_norm, advice.step_cap):
        assert f"<dd>{number:.3g}<small>" in text
    assert f"<dd>{advice.clipped_fraction:.0%}</dd>" in text
    assert all(warning in text for warning in fit_smoothness(Trace.load(folder / "trace.jsonl")).warnings)


def test_packed_numbers_are_the_trace_to_five_digits(single):
    folder, page = single
    trace, data = Trace.load(folder / "trace.jsonl"), packed(page.path)["runs"][0]
    for name in ("step", "loss", "grad_norm", "smoothness", "lr"):
        np.testing.assert_allclose(data["measured"][name], trace.column(name), rtol=5e-5)
    assert data["measured"]["clipped"] == [int(c < 1) for c in trace.column("coefficient")]
    assert data["layers"]["names"] == ["encoder", "decoder"]
    fit = fit_smoothness(trace)
    np.testing.assert_allclose(data["line"], [fit.L0, fit.L1], rtol=5e-5)


def test_the_frontier_of_the_page_lies_above_every_point(single):
    data = packed(single[1].path)["runs"][0]
    g, bound = np.array(data["frontier"]).T
    points = np.interp(data["measured"]["grad_norm"], g, bound)
    # Between the 60 drawn points the concave frontier is a little above its chord.
    assert (points >= 0.99 * np.array(data["measured"]["smoothness"])).all()


def test_every_chart_has_words_for_a_screen_reader(single):
    text = single[1].path.read_text()
    described = re.findall(r'role="img" aria-labelledby="([\w-]+)" aria-describedby="([\w-]+)"', text)
    assert len(described) == 5 + 3
    for title, words in described:
        assert f'id="{title}"' in text
        assert len(re.search(rf'<figcaption id="{words}">([^<]*)<', text).group(1)) > 30


def test_the_page_asks_for_nothing_from_outside(single):
    text = single[1].path.read_text()
    assert not re.findall(r'(?:src|href|action)="(?!data:|#)[^"]*"', text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_same_runs_give_the_same_page(single, tmp_path):
    again = write_page([single[0]], tmp_path / "again.html")
    assert again.path.read_bytes() == single[1].path.read_bytes()


def test_names_from_files_are_text(tmp_path):
    folder = make_run(
        tmp_path / "runs" / HOSTILE, corpus="</script><script>alert(2)</script>", layers=("<b>&amp;",)
    )
    text = write_page([folder], tmp_path / "page.html", title="</title><script>").path.read_text()
    assert HOSTILE not in text
    assert "<script>alert" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert text.count("<script") == 4


def test_a_diverged_run_and_one_without_a_trace_say_so(tmp_path):
    diverged = make_run(tmp_path / "diverged", lr=3.0, max_norm=math.inf, steps=60)
    bare = make_run(tmp_path / "bare", traced=False)
    text = html.unescape(write_page([diverged], tmp_path / "page.html").path.read_text())
    assert "Diverged at step" in text
    assert "Diverged (lr 3, no clip: the loss passed 3 times the first one" in text
    assert "calibrate measures both beforehand" in text
    text = html.unescape(write_page([bare], tmp_path / "page.html").path.read_text())
    assert "Nothing was measured: the run has no trace." in text
    assert 'data-chart="loss"' in text
    assert 'data-chart="scatter"' not in text


def test_a_trace_file_alone_makes_a_page(single, tmp_path):
    page = write_page([single[0] / "trace.jsonl"], tmp_path / "page.html")
    assert page.runs[0].setting == "a trace of your own loop"
    assert page.runs[0].max_norm == pytest.approx(0.5)  # read off the clipped steps
    assert packed(page.path)["runs"][0]["train"]["step"] == []


def test_a_torn_trace_is_shown_with_a_note(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"step": 999, "lo')
    assert "torn" in " ".join(find_views([folder])[0].doubts) or "line" in " ".join(
        find_views([folder])[0].doubts
    )


@pytest.mark.slow
def test_a_sweep_has_a_heat_map_with_the_best_and_the_diverged(tmp_path):
    for lr in (0.1, 1.0):
        for max_norm in (0.5, math.inf):
            make_run(tmp_path / f"{lr}-{max_norm}", lr=lr, max_norm=max_norm, steps=60)
    views = find_views([tmp_path])
    heat = heat_map(views)
    assert {heat.rows, heat.columns} == {"lr", "max_norm"}
    losses = {view.setting: view.final_loss for view in views}
    best = min(v for v in losses.values() if math.isfinite(v))
    assert np.nanmin(heat.losses) == pytest.approx(best)
    assert sorted(note for row in heat.notes for note in row) == ["", "", "", "diverged"]
    page = write_page([tmp_path], tmp_path / "page.html")
    assert packed(page.path)["heat"]["columns"] == heat.columns
    assert "Runs on shared axes" in page.path.read_text()


def test_runs_that_vary_in_one_field_have_no_heat_map(tmp_path):
    for lr in (0.1, 0.2):
        make_run(tmp_path / str(lr), lr=lr, steps=20)
    assert heat_map(find_views([tmp_path])) is None


@pytest.mark.slow
def test_a_reproduction_shows_its_claims_and_figures(tmp_path):
    make_run(tmp_path / "runs" / "lm", steps=60)
    save_figures(find_views([tmp_path]), tmp_path / "figures")
    claim = Claim(figure="fig4", paper="clipping <helps>", measured="ratio 2", verdict="supported")
    write_claims([claim], tmp_path, data=["walls"], notes=["Scale: laptop."])
    text = write_page([tmp_path], tmp_path / "page.html").path.read_text()
    assert "clipping &lt;helps&gt;" in text
    assert '<span class="badge supported">supported</span>' in text
    assert text.count("data:image/png;base64,") == len(list((tmp_path / "figures").glob("*.png")))


def test_a_reproduction_of_the_synthetic_figure_needs_no_run(tmp_path):
    write_claims([Claim(figure="fig7", paper="p", measured="m", verdict="supported")], tmp_path, data=[])
    page = write_page([tmp_path], tmp_path / "page.html")
    assert page.runs == ()
    assert page.verdicts[0]["verdict"] == "Of 1 claim tested: 1 supported."
    assert 'id="claims"' in page.path.read_text()
    assert 'id="runs"' not in page.path.read_text()


@pytest.mark.slow
def test_twenty_runs_of_two_thousand_rows_stay_below_six_megabytes(tmp_path):
    (view,) = find_views([make_run(tmp_path / "run", steps=2000, every=1)])
    assert len(view.measured["step"]) == len(view.train["step"]) == 2000
    rng = np.random.default_rng(0)

    def another(columns):  # other digits, so that they do not compress better than those of other runs
        names = [name for name in columns if name not in ("step", "clipped")]
        return {**columns, **{name: columns[name] * rng.uniform(0.5, 2, 2000) for name in names}}

    views = [
        dataclasses.replace(view, name=f"run{i}", measured=another(view.measured), train=another(view.train))
        for i in range(20)
    ]
    assert len(render_page(views, verdicts([view])).encode()) < 6_000_000


def test_long_series_keep_their_first_and_last_row():
    rows = thinned(np.arange(100_001))
    assert (len(rows), rows[0], rows[-1]) == (MOST_ROWS, 0, 100_000)
    assert np.ptp(np.diff(rows)) <= 1


def test_bad_paths_are_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"There is no .*nothing"):
        write_page([tmp_path / "nothing"], tmp_path / "page.html")
    with pytest.raises(ValueError, match="neither a run folder nor a trace"):
        write_page([tmp_path], tmp_path / "page.html")
    with pytest.raises(ValueError, match="at least one run folder"):
        write_page([], tmp_path / "page.html")
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="not a curvestep trace"):
        write_page([tmp_path / "notes.txt"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_static_figures_of_hostile_names_stay_in_their_folder(tmp_path):
    folder = make_run(tmp_path / "runs" / "$a_{b" / "x y", steps=60)
    written = save_figures(find_views([folder, folder]), tmp_path / "figures")
    assert {path.parent for path in written} == {tmp_path / "figures"}
    assert all(path.stat().st_size > 1000 for path in written)


def test_runs_are_listed_by_number_and_a_lone_trace_by_its_folder(tmp_path):
    for number in (10, 2, 1):
        make_run(tmp_path / f"run{number}", steps=20)
    assert [view.name for view in find_views([tmp_path])] == ["run1", "run2", "run10"]
    assert [view.name for view in find_views([tmp_path / "run2" / "trace.jsonl"])] == ["run2"]


def test_fit_and_advice_do_not_warn_twice_of_the_same(tmp_path):
    said = write_page([make_run(tmp_path / "run")], tmp_path / "page.html").verdicts[0]
    kinds = [words.partition(":")[0] for words in said["warnings"]]
    assert "Few points" in kinds
    assert len(kinds) == len(set(kinds))


def test_a_diverged_run_among_others_is_named_with_its_reason(tmp_path):
    make_run(tmp_path / "bad", lr=3.0, max_norm=math.inf, steps=60)
    make_run(tmp_path / "good")
    warnings = write_page([tmp_path], tmp_path / "page.html").verdicts[0]["warnings"]
    assert "bad: diverged with lr 3, no clip; the loss passed 3 times the first one at step 2." in warnings
    assert not any("usable rows" in words for words in warnings)
