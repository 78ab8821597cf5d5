"""The page without a browser: its parts, what is packed into it, and what it refuses."""

import base64
import gzip
import html
import io
import json
import math
import re

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
from PIL import Image

from curvestep.advice.advice import advise
from curvestep.calibration.result import write_calibration
from curvestep.fit.fit import fit_samples, fit_smoothness
from curvestep.report import page_words
from curvestep.report.page import write_page
from curvestep.report.views import find_views
from curvestep.trace.run import read_json
from curvestep.trace.trace import Trace
from tests.report.calibrations import make_calibration
from tests.report.pages import make_run, write_status
from tests.report.reproductions import made_up_claim, make_reproduction, write_claims

HOSTILE = "<img src=x onerror=alert(1)>"


def packed(path):
    """The charts inside a page, unpacked as the browser does."""
    text = re.search(r'id="data-packed">([^<]*)<', path.read_text()).group(1)
    return json.loads(gzip.decompress(base64.b64decode(text)))["charts"]


@pytest.fixture(scope="module")
def single(folder):
    return folder, write_page([folder], folder.parent / "page.html")


def test_the_page_opens_with_the_verdict_of_the_trace(single):
    folder, page = single
    advice = advise(Trace.load(folder / "trace.jsonl"))
    text = html.unescape(page.path.read_text())
    assert f'<span class="badge">{advice.action.upper()}</span>' in text
    assert advice.verdict.removeprefix(advice.action.upper()) in text
    assert text.index('id="run-0-loss"') < text.index('<section id="runs"')  # beside the verdict
    assert text.count('id="run-0-loss"') == 1
    assert f"{advice.lr:.3g}</dd>" in text
    for word in ("Gradient norm", "Stability margin", "Sharpness"):
        assert f'<abbr title="{page_words.GLOSSARY[word.lower()]}">{word}</abbr>' in text
        assert f"<dt>{word.lower()}</dt><dd>{page_words.GLOSSARY[word.lower()]}</dd>" in text
    assert "<dt>elasticity</dt>" not in text  # which this page does not use
    plain = re.sub(r"</?abbr[^>]*>", "", text)
    assert all((note.text in plain) == (note.kind != "loss") for note in advice.reasons)
    assert all(
        str(warning) in plain for warning in fit_smoothness(Trace.load(folder / "trace.jsonl")).warnings
    )


def test_the_page_says_how_many_spikes_there_were_and_where_the_last_was(tmp_path, single):
    assert "Spikes:" not in single[1].path.read_text()
    with Trace(tmp_path / "t.jsonl") as trace:
        trace.append({"step": 50, "grad_norm": 1.0, "loss": 1.0, "spikes": []})
        trace.append({"step": 75, "spikes": [{"step": 55, "layer": "a"}, {"step": 57, "layer": HOSTILE}]})
    text = write_page([tmp_path / "t.jsonl"], tmp_path / "page.html").path.read_text()
    assert f"Spikes: 2. The last is at step 57, most of it in {HOSTILE}." in html.unescape(text)
    assert HOSTILE not in text


def test_packed_numbers_are_the_trace_to_five_digits(single):
    folder, page = single
    trace, charts = Trace.load(folder / "trace.jsonl"), packed(page.path)
    (points,) = charts["run-0-scatter"]["data"]  # no line: the test within steps cannot tell
    np.testing.assert_allclose(points["x"], trace.column("grad_norm"), rtol=5e-5)
    np.testing.assert_allclose(points["y"], trace.column("smoothness"), rtol=5e-5)
    said = np.array([trace.column(name) for name in ("step", "loss", "lr")]).T
    np.testing.assert_allclose(points["customdata"], said, rtol=5e-5)
    layers = {one["name"]: one["y"] for one in charts["run-0-layers"]["data"]}
    assert list(layers) == ["decoder", "encoder"]
    smoothness = trace.column("smoothness")
    running = np.append(smoothness[0], (smoothness[1:] + smoothness[:-1]) / 2)  # a twentieth of 40 rows
    np.testing.assert_allclose(layers["decoder"], 2 * running, rtol=5e-5)


def test_each_trace_is_fitted_once(tmp_path, monkeypatch):
    fitted = []

    def count(samples, **options):
        fitted.append(samples)
        return fit_samples(samples, **options)

    monkeypatch.setattr("curvestep.fit.fit.fit_samples", count)
    for seed in range(2):
        make_run(tmp_path / "runs" / f"run{seed}", seed=seed, lr=0.1 * (seed + 1))
    write_page([tmp_path / "runs"], tmp_path / "all.html")
    assert len(fitted) == 2


def test_every_chart_has_words_for_a_screen_reader(single):
    text = single[1].path.read_text()
    described = re.findall(r'role="img" aria-labelledby="([\w-]+)" aria-describedby="([\w-]+)"', text)
    assert len(described) == 5
    for title, words in described:
        assert f'id="{title}"' in text
        assert len(re.search(rf'<figcaption id="{words}">(.*?)</figcaption>', text).group(1)) > 30


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
    assert text.count("<script") == 3


def test_control_characters_of_names_are_made_visible(tmp_path):
    names = ("run\u202etxt", "bell\x07")
    for seed, name in enumerate(names):
        make_run(tmp_path / "runs" / name, seed=seed, layers=("a\u2066b",), steps=40)
    page = write_page([tmp_path / "runs"], tmp_path / "page.html", title="all\u200b of it")
    text = page.path.read_text() + json.dumps(packed(page.path), ensure_ascii=False)
    assert not re.search("[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u202a-\u202e\u2066-\u2069]", text)
    for shown in ("run\\u202etxt", "bell\\u0007", "all\\u200b of it"):
        assert shown in text


def test_a_diverged_run_and_one_without_a_trace_say_so(tmp_path):
    diverged = make_run(tmp_path / "diverged", lr=3.0, max_norm=math.inf, steps=60)
    bare = make_run(tmp_path / "bare", traced=False)
    text = html.unescape(write_page([diverged], tmp_path / "page.html").path.read_text())
    assert "Diverged at step" in text
    assert '<span class="badge">DIVERGED</span> lr 3, no clip: the loss passed 3 times the first one' in text
    text = html.unescape(write_page([bare], tmp_path / "bare.html").path.read_text())
    assert [note.kind for note in find_views([bare])[0].notes] == ["not-measured"]
    assert 'data-chart="run-0-loss"' in text
    assert 'data-chart="run-0-scatter"' not in text


def test_a_trace_file_alone_makes_a_page(single, tmp_path):
    (tmp_path / "mine.jsonl").write_bytes((single[0] / "trace.jsonl").read_bytes())
    page = write_page([tmp_path / "mine.jsonl"], tmp_path / "page.html")
    assert page.runs[0].setting == "lr 0.3, clip 0.5"
    assert page.runs[0].max_norm == pytest.approx(0.5)  # read off the clipped steps
    assert not page.runs[0].held_out
    assert len(packed(page.path)["run-0-loss"]["data"][0]["x"]) == 40


def test_validation_calibration_and_optimizer_of_ones_own_loop_are_shown(tmp_path):
    made = make_run(tmp_path / "made")
    own = tmp_path / "own"
    own.mkdir()
    with Trace(own / "trace.jsonl", header={"model": "Net", "optimizer": "SGD, momentum 0"}) as trace:
        for row in Trace.load(made / "trace.jsonl"):
            trace.append(dict(row))
    rows = (("valid", 0.75), ("test", 9.0), ("train", 3.0))
    lines = [f'{{"step": 100, "split": "{split}", "loss": {loss}}}\n' for split, loss in rows]
    (own / "metrics.jsonl").write_text("".join(lines))
    write_calibration(own, make_calibration())
    page = write_page([own], tmp_path / "page.html")
    text = html.unescape(page.path.read_text())
    assert page.runs[0].held_out["loss"].tolist() == [0.75]
    assert text.count(page_words.calibration(page.runs[0])) == 1
    assert "<td>SGD, momentum 0</td>" in text
    assert "run-0-calibration" in packed(page.path)
    (own / "metrics.jsonl").write_text("".join(lines[1:]))
    assert find_views([own])[0].held_out["loss"].tolist() == [9.0]


def test_tasks_are_compared_one_at_a_time(tmp_path):
    for lr in (0.1, 0.3):
        make_run(tmp_path / f"small{lr}", lr=lr, steps=40)
        make_run(tmp_path / f"large{lr}", lr=lr, steps=40, hidden=300)
    page = write_page([tmp_path], tmp_path / "page.html")
    assert len({said["title"] for said in page.verdicts}) == len(page.verdicts) == 2  # told apart by name
    charts = packed(page.path)
    for task in (0, 1):
        assert len(charts[f"task-{task}-comparison-loss"]["data"]) == 2


def test_the_best_run_shows_its_charts_in_a_row_and_all_else_is_folded(single, tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"run{seed}", seed=seed, steps=40)
    page = write_page([tmp_path], tmp_path / "page.html")
    best = min(range(2), key=lambda number: page.runs[number].final_loss)
    for text, number, folded in ((single[1].path.read_text(), 0, 1), (page.path.read_text(), best, 2)):
        assert text.count('<details class="run">') == folded
        top = text[: text.index('<section id="runs"')]
        for kind in ("norm", "stability_margin", "scatter"):
            assert text.count(f'id="run-{number}-{kind}"') == top.count(f'id="run-{number}-{kind}"') == 1


@pytest.mark.slow
def test_a_reproduction_shows_its_claims_and_figures(tmp_path):
    make_reproduction(tmp_path)
    page = write_page([tmp_path], tmp_path / "page.html")
    text = page.path.read_text()
    assert "clipping &lt;helps&gt;" in text
    assert '<span class="badge supported">reproduced</span>' in text
    assert text.count('<img src="data:image/webp;base64,') == len(list((tmp_path / "figures").glob("*.png")))
    # What was found, the claims, the figures; what the runs advise comes after them.
    order = [
        text.index(f'<section id="{name}"') for name in ("verdict", "claims", "figures", "advice", "runs")
    ]
    assert order == sorted(order)
    assert "learning rate</dt>" not in text[: order[3]]
    assert page.path.stat().st_size < 3_000_000


def test_figures_have_the_titles_and_captions_that_the_reproduction_wrote(tmp_path):
    write_claims([made_up_claim()], tmp_path, data=[])
    Image.new("RGB", (8, 8), "red").save(tmp_path / "fig1.png")
    entries = [
        {"png": "fig1.png", "title": "Figure 1: <first>", "caption": "What it shows."},
        {"png": "fig2.png", "title": "Figure 2", "caption": "Lost."},
    ]
    (tmp_path / "figures.json").write_text(json.dumps({"figures": entries}))
    text = write_page([tmp_path], tmp_path / "page.html").path.read_text()
    (shown,) = re.findall(r'<img src="data:image/webp;base64,([^"]*)" alt="([^"]*)"', text)
    assert Image.open(io.BytesIO(base64.b64decode(shown[0]))).convert("RGB").getpixel((4, 4)) == (255, 0, 0)
    assert shown[1] == "Figure 1: &lt;first&gt;. What it shows."
    assert "There is no fig2.png." in text


def test_a_reproduction_of_the_synthetic_figure_needs_no_run(tmp_path):
    write_claims([made_up_claim()], tmp_path, data=[])
    page = write_page([tmp_path], tmp_path / "page.html")
    assert page.runs == ()
    text = page.path.read_text()
    assert '<section id="claims"' in text
    assert '<section id="runs"' not in text
    assert "<h1>A reproduction</h1>" in text


def test_claims_without_headings_are_shown_under_their_kinds(tmp_path):
    (tmp_path / "claims.json").write_text(json.dumps({"claims": [made_up_claim()]}))
    text = write_page([tmp_path], tmp_path / "page.html").path.read_text()
    assert "<h3>paper</h3>" in text
    assert '<span class="badge ">reproduced</span>' in text


def test_nothing_is_left_out_in_silence(tmp_path):
    for number in range(7):
        make_run(tmp_path / f"bad{number}", lr=3.0, max_norm=math.inf, steps=60, seed=number)
    make_run(tmp_path / "good")
    page = write_page([tmp_path], tmp_path / "page.html")
    warnings = page.verdicts[0]["warnings"]
    assert sum("the loss passed 3 times the first one" in warning for warning in warnings) == 7
    text = html.unescape(page.path.read_text())
    assert all(warning in text for warning in warnings)


def test_a_run_that_is_still_training_makes_a_page(tmp_path):
    folder = make_run(tmp_path / "run", steps=90, status="running")
    write_status(folder, **{**read_json(folder / "status.json"), "step": 0})  # it is written now and then
    page = write_page([folder], tmp_path / "page.html")
    assert (page.runs[0].ending, page.runs[0].step) == ("running", 90)
    assert "90 steps" in page.verdicts[0]["verdict"]
    assert "90 steps" in page.path.read_text()
    make_run(tmp_path / "other", steps=90)
    both = write_page([tmp_path], tmp_path / "both.html")
    assert sum("90 steps" in warning for warning in both.verdicts[0]["warnings"]) == 1
