"""README and docs: every Python block runs, every command named there exists, the site builds strictly."""

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from docs.check_site import WIDTHS, dead_links, pixels_beyond
from docs.outputs import PAGES as PAGES_WITH_OUTPUT, calibration_in, with_outputs

import curvestep
from curvestep.cli import all_commands
from tests.support.pages import DOCS, ROOT, blocks, run, stage

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
REPRODUCTION_OPTIONS = [
    f"reproduction/src/curvestep_reproduction/{name}.py" for name in ("cli", "recipe_options")
]
# Pages whose blocks are run, and their output checked, by a test of their own.
ELSEWHERE = {
    "measure.md": "smoothness/test_measure_page.py",
    "theorems.md": "theory/test_docs.py",
    **dict.fromkeys(
        ("lightning.md", "transformers.md", "loops.md", "clip_questions.md"), "integrations/test_pages.py"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in ELSEWHERE and blocks(p, "python")], ids=lambda page: page.stem
)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    run(page, **stage())


def test_every_test_that_the_page_of_faults_names_is_there():
    page = (ROOT / "tests/FAULTS.md").read_text()
    named = re.findall(r"`((?:reproduction/)?tests/[a-z_/]+\.py)::(\w+)`", page)
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES_WITH_OUTPUT)
def test_what_a_page_shows_is_what_its_blocks_print(name):
    shown = (DOCS / name).read_text(encoding="utf-8")
    torch.set_default_dtype(torch.float32)
    printed = with_outputs(shown)
    # The last digits are the machine's; words, lines and the size of numbers are not.
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
    assert number.sub("#", shown) == number.sub("#", printed)
    ours, theirs = ([float(found) for found in number.findall(text)] for text in (shown, printed))
    assert ours == pytest.approx(theirs, rel=0.1, abs=0.1)


def test_the_page_of_calibrate_shows_what_the_readme_script_prints():
    assert calibration_in("calibrate.md") == calibration_in("../README.md")


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_pages_are_run_by_their_own_tests(page):
    assert page in (ROOT / "tests" / ELSEWHERE[page]).read_text()


def commands():
    """Every command line in a fenced block or between backquotes, with the page it stands on."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"^```diff\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # not there yet
        fenced = [
            line
            for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
            for line in block.splitlines()
        ]
        for line in [*fenced, *re.findall(r"`([^`\n]+)`", text)]:
            words = line.partition("#")[0].removeprefix("$ ").split()
            if words[:1] in (["curvestep"], ["make"]) or (words[:1] == ["python"] and len(words) > 1):
                yield page.name, words


def test_every_command_in_the_docs_exists():
    pytest.importorskip("curvestep_reproduction")  # pages name its commands too
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for page, (program, *rest) in commands():
        seen += 1
        if program == "make":
            assert set(word for word in rest if "=" not in word) <= targets, (page, rest)
        elif program == "python" and not rest[0].startswith("-"):
            assert (ROOT / rest[0]).is_file(), (page, rest)
        elif program == "curvestep" and rest:
            assert rest[0] in {*all_commands(), "--version", "--help"}, (page, rest)
    assert seen >= 10


def test_every_option_in_the_docs_exists():
    recipes = pytest.importorskip("curvestep_reproduction.recipes").RECIPES
    files = ("src/curvestep/cli/commands.py", *REPRODUCTION_OPTIONS)
    source = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    fields = {name for recipe in recipes.values() for name in recipe.__dataclass_fields__}
    known = {f"--{name.replace('_', '-')}" for name in fields}
    known |= {"--help", "--version", "--debug", *re.findall(r'"(--[a-z-]+)[ "]', source)}
    for page, (program, *rest) in commands():
        if program == "curvestep":
            assert {word for word in rest if word.startswith("--")} <= known, (page, rest)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation, built with every warning an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly(site):
    assert "clip_stats" in (site / "api" / "clippedsgd.html").read_text()
    for page in ("troubleshooting", "row_schema", "command_line", "api/theory.theorems"):
        assert (site / f"{page}.html").stat().st_size > 20_000, page


@pytest.mark.slow
def test_no_link_of_the_site_is_dead_and_no_page_an_orphan(site):
    assert dead_links(site) == []


@pytest.mark.slow
def test_the_list_of_the_api_has_every_public_name(site):
    listed = re.sub(r"<[^>]+>", " ", (site / "api" / "index.html").read_text())
    assert [name for name in curvestep.__all__ if not re.search(rf"\b{name}\b", listed)] == []


def test_every_page_is_in_the_navigation_once():
    nav = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    made = {"command_line.md", "troubleshooting.md", "row_schema.md"}
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert sorted(nav) == sorted(pages | made)


def test_the_tutorial_is_the_script_of_the_readme_in_parts():
    def code(page):
        lines = "\n".join(blocks(ROOT / page, "python")).splitlines()
        return [line for line in lines if line.strip()]

    assert code("docs/tutorial.md") == code("README.md")


ALL_DRAWN = "[...document.querySelectorAll('.arithmatex')].every(formula => formula.querySelector('.katex'))"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="no chromium on the path: apt-get install chromium")
def test_pages_ask_no_other_server_draw_formulas_and_do_not_scroll_sideways(site):
    playwright = pytest.importorskip("playwright.sync_api")
    handler = functools.partial(QuietHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, playwright.sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        tab = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        trouble, formulas = [], 0
        tab.on(
            "request", lambda request: request.url.startswith((home, "data:")) or trouble.append(request.url)
        )
        tab.on("pageerror", lambda error: trouble.append(str(error)))
        for page in sorted(site.rglob("*.html")):
            tab.goto(home + page.relative_to(site).as_posix(), wait_until="load", timeout=120_000)
            tab.wait_for_function(ALL_DRAWN, timeout=120_000)  # some time after the page has come
            assert tab.locator(".katex-error").count() == 0, page
            formulas += tab.locator(".arithmatex").count()
            trouble += [f"{page} at {width}" for width in WIDTHS if pixels_beyond(tab, width)]
        server.shutdown()
    assert trouble == []
    assert formulas > 100


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files, and says nothing about it."""

    def log_message(self, format, *args):
        pass


def test_no_page_asks_for_a_number_that_has_not_come():
    for page in PAGES:
        assert not re.search(r"TODO|FIXME|TBD|\b[A-Z]{4,}_TABLE\b", page.read_text(encoding="utf-8")), page


def test_no_wrapped_line_begins_with_a_number_that_markdown_makes_a_list_of():
    for page in PAGES:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text(encoding="utf-8"))
        number = 0
        for line in text.splitlines():
            if found := re.match(r"\s*(\d+)\.\s", line):
                assert int(found[1]) in (1, number + 1), f"{page.name}: {line}"
                number = int(found[1])
