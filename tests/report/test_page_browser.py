"""The page in real headless Chromium: drawn, quiet, offline, and moved by its controls."""

import math
import re
import shutil
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the extra `report`")
from curvestep.calibration.result import write_calibration
from curvestep.report.page import write_page
from curvestep.trace.trace import Trace
from tests.report.calibrations import make_calibration
from tests.report.pages import make_run
from tests.report.reproductions import make_reproduction

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a tab that notes what it should not do."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.tab = self.context.new_page()
        self.trouble = []
        self.tab.on("console", lambda message: self.trouble.append(message.text))
        self.tab.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.trouble.append(dialog.message), dialog.dismiss()))
        self.requests = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.url = Path(path).resolve().as_uri()
        self.tab.goto(self.url)
        self.tab.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def draw_all(self):
        self.tab.evaluate("curvestepPage.drawAll()")
        return self

    def data(self, chart):
        """What Plotly has drawn in a chart."""
        return self.tab.evaluate(f"document.querySelector('#{chart}').data")

    def layout(self, chart):
        return self.tab.evaluate(f"document.querySelector('#{chart}').layout")

    def check(self):
        """Quiet, and nothing asked for but the file itself (and images inside it)."""
        assert self.trouble == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.url]

    def close(self):
        self.check()
        self.context.close()


def drawn_charts(opened):
    """Every chart, and whether Plotly has put marks into it."""
    return opened.tab.evaluate(
        """[...document.querySelectorAll("figure[data-chart]")].map((f) =>
            [f.dataset.chart, f.querySelectorAll(".trace, .hm, .point").length > 0])"""
    )


def make_five(folder):
    for lr in (0.03, 0.1, 0.3, 0.5):
        make_run(folder / f"lr{lr}", lr=lr, steps=100)
    make_run(folder / "lost", lr=3.0, max_norm=math.inf, steps=60, every=1)


def make_twenty(folder):
    for seed in range(20):
        setting = {"lr": 0.1 * (1 + seed % 5), "max_norm": (0.5, 1.0)[seed % 2]}
        make_run(folder / f"run{seed}", **setting, steps=100, seed=seed)


CASES = {
    "reproduction": make_reproduction,
    "a single run": lambda folder: make_run(folder / "run", layers=("encoder", "decoder")),
    "a diverged run": lambda folder: make_run(folder / "run", lr=3.0, max_norm=math.inf, steps=60, every=1),
    "a run without a trace": lambda folder: make_run(folder / "run", traced=False),
    "five runs": make_five,
    "twenty runs": make_twenty,
    "a calibrated run": lambda folder: write_calibration(make_run(folder / "run"), make_calibration()),
}


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """The path of the page of a case, which is written once."""

    @cache
    def write(case):
        folder = tmp_path_factory.mktemp("case")
        CASES[case](folder)
        return write_page([folder], folder / "page.html").path

    return write


@pytest.fixture(scope="module")
def desk(chromium, page_of):
    """The page of a single run, opened once for tests that leave its tab as they found it."""
    opened = Opened(chromium, page_of("a single run"))
    yield opened.draw_all()
    opened.close()


TALLER_THAN_THEIR_BOX = """() => {
    const end = (part) => part.getBoundingClientRect().bottom;
    const plots = [...document.querySelectorAll(".js-plotly-plot")];
    return plots.filter((plot) => end(plot.querySelector(".main-svg")) > end(plot) + 1).length;
}"""
SHEETS = {"twenty runs": 3, "a single run": 4, "reproduction": 8}


@pytest.mark.parametrize("case", CASES)
def test_every_panel_is_drawn_in_silence_and_prints_on_few_sheets(chromium, page_of, case):
    opened = Opened(chromium, page_of(case))
    if case in SHEETS:
        opened.tab.emulate_media(media="print")
        assert opened.tab.evaluate(TALLER_THAN_THEIR_BOX) == 0
        assert 1 <= len(re.findall(rb"/Type\s*/Page[^s]", opened.tab.pdf(format="A4"))) <= SHEETS[case]
        opened.tab.emulate_media(media="screen")
    charts = drawn_charts(opened.draw_all())
    assert len(charts) >= 2
    assert [name for name, marks in charts if not marks] == []
    opened.close()


def test_on_paper_charts_fit_their_box_and_are_light(chromium, page_of):
    opened = Opened(chromium, page_of("a single run")).draw_all()
    opened.tab.emulate_media(color_scheme="dark")
    opened.tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    widths = """[...document.querySelectorAll('.js-plotly-plot')].filter((plot) => plot.checkVisibility())
        .map((plot) => plot.querySelector('.main-svg').getBoundingClientRect().width - plot.clientWidth)"""
    assert max(map(abs, opened.tab.evaluate(widths))) < 1
    ink = "getComputedStyle(document.querySelector('.js-plotly-plot .xtick text')).fill"
    assert opened.tab.evaluate(ink) == "rgb(27, 31, 36)"
    opened.tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert opened.tab.evaluate(ink) == "rgb(230, 237, 243)"
    opened.close()


def test_the_switch_changes_the_axes_from_the_keyboard(desk):
    assert desk.layout("run-0-scatter")["xaxis"]["type"] == "log"
    button = desk.tab.locator("figure[data-chart=run-0-scatter] [data-scale=linear]")
    button.focus()
    desk.tab.keyboard.press("Enter")
    assert desk.layout("run-0-scatter")["xaxis"]["type"] == "linear"
    assert button.get_attribute("aria-pressed") == "true"
    desk.tab.locator("figure[data-chart=run-0-scatter] [data-scale=log]").click()
    assert desk.layout("run-0-scatter")["xaxis"]["type"] == "log"
    desk.check()


def test_arrow_keys_walk_the_points_and_read_them_out(desk):
    desk.tab.locator("figure[data-chart=run-0-norm] .plot").focus()
    desk.tab.keyboard.press("ArrowRight")
    first = desk.tab.text_content("#spoken")
    assert first.startswith("gradient norm: 1, ")
    desk.tab.keyboard.press("ArrowRight")
    assert desk.tab.text_content("#spoken").startswith("gradient norm: 2, ")
    assert desk.tab.locator("figure[data-chart=run-0-norm] .hovertext").count() == 1
    desk.check()


def test_every_control_is_reached_with_the_tab_key(chromium, page_of):
    opened = Opened(chromium, page_of("a single run")).draw_all()
    controls = opened.tab.evaluate(
        "document.querySelectorAll('button, select, input, summary, .plot, a[href]').length"
    )
    seen = set()
    for _ in range(controls + 10):
        opened.tab.keyboard.press("Tab")
        seen.add(opened.tab.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    hidden = opened.tab.evaluate(
        "[...document.querySelectorAll('button, select, input, summary, .plot, a[href]')]"
        ".filter((e) => !e.checkVisibility()).length"
    )
    assert len(seen) >= controls - hidden
    opened.close()


def test_picking_runs_and_quantities_changes_the_comparison(chromium, tmp_path):
    for lr in (0.1, 0.3):
        make_run(tmp_path / f"lr={lr}", lr=lr, steps=60)
    opened = Opened(chromium, write_page([tmp_path], tmp_path / "page.html").path).draw_all()
    chart = "task-0-comparison-loss"
    assert [curve["name"] for curve in opened.data(chart)] == ["lr 0.3, clip 0.5", "lr 0.1, clip 0.5"]
    loss = opened.data(chart)[0]["y"]
    opened.tab.select_option("[data-shows]", "task-0-comparison-grad_norm")
    assert opened.data(chart)[0]["y"] != loss
    assert opened.layout(chart)["yaxis"]["type"] == "log"
    opened.tab.locator(".picks summary").click()
    opened.tab.locator("[data-pick='0']").focus()
    opened.tab.keyboard.press("Space")
    assert [curve["name"] for curve in opened.data(chart)] == ["lr 0.1, clip 0.5"]
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_sticks_out_and_no_tick_repeats(chromium, page_of, scheme):
    page, size = page_of("a single run"), {"width": 390, "height": 844}
    opened = Opened(chromium, page, viewport=size, color_scheme=scheme).draw_all()
    assert opened.tab.evaluate("document.documentElement.scrollWidth") == 390
    paper, ink = opened.tab.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light, dark = "rgb(255, 255, 255)", "rgb(15, 20, 25)"
    assert paper == (light if scheme == "light" else dark)
    assert ink != paper
    assert opened.layout("run-0-scatter")["template"]["layout"]["font"]["color"] == (
        "#1b1f24" if scheme == "light" else "#e6edf3"
    )
    for chart in ("run-0-scatter", "run-0-norm", "run-0-stability_margin"):
        for axis in "xy":
            ticks = opened.tab.locator(f"#{chart} .{axis}tick text").all_text_contents()
            assert 2 <= len(set(ticks)) == len(ticks) <= 12, (chart, axis, ticks)
    opened.close()


def test_the_code_to_copy_is_copied(chromium, tmp_path):
    with Trace(tmp_path / "trace.jsonl", header={"optimizer": "AdamW"}) as trace:
        for row in Trace.load(make_run(tmp_path / "made" / "run") / "trace.jsonl"):
            trace.append(dict(row))
    page = write_page([tmp_path / "trace.jsonl"], tmp_path / "page.html")
    opened = Opened(chromium, page.path)
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.tab.locator("[data-copy]").click()
    assert opened.tab.text_content("#spoken") == "copied"
    copied = opened.tab.evaluate("getSelection().toString()")
    assert copied.startswith("opt = torch.optim.AdamW(model.parameters(), lr=")
    opened.close()


def test_a_chart_is_saved_as_svg(chromium, page_of):
    opened = Opened(chromium, page_of("a single run")).draw_all()
    with opened.tab.expect_download() as download:
        opened.tab.locator("figure[data-chart=run-0-scatter] [data-save=svg]").click()
    assert download.value.suggested_filename == "curvestep-scatter.svg"
    assert "<svg" in Path(download.value.path()).read_text()
    opened.context.close()
