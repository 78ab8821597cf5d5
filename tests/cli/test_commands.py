"""The library's commands: advise, fit and report, their results and their one-line errors."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from curvestep.advice.advice import advise
from curvestep.cli.commands import COMMANDS
from curvestep.fit.fit import fit_smoothness
from curvestep.trace.trace import Trace
from tests.report.pages import make_run
from tests.support.commands import check_help, run

needs_report = pytest.mark.skipif(
    not all(find_spec(name) for name in ("plotly", "PIL")), reason="needs the extra `report`"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_and_gives_every_default(capsys, command):
    check_help(capsys, command, COMMANDS[command])


TRACE_ROW = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "smoothness": 2.0, "step_norm": 0.1, "lr": 0.1}
WRONG_FILES = {
    "advise empty": "empty is empty: no trace was written to it",
    "advise garbage": "garbage is not a curvestep trace: its first line is no header",
    "advise rows": "rows is not a curvestep trace: its first line is no trace header",
    "advise folder": "There is neither a run folder nor a trace in folder",
    "advise broken": "broken/config.json is not JSON",
}
WRONG_PAGES = {
    "report nothing": "There is no nothing",  # and not that report.html is in the way
    "report one": "report.html is there already and is no page of curvestep",
    "report one -o rows": "rows is there already and is no page of curvestep. Choose another `output`",
    "report one --output folder": "must be an HTML file, got the folder folder. Try folder/report.html",
    "report one --output one/page.html": "one is a file, and a folder is needed",
}


@pytest.fixture
def wrong_files(tmp_path, monkeypatch):
    """A folder with all that is not a trace or a run."""
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("garbage").write_bytes(bytes(range(255, 127, -1)) * 9)
    Path("report.html").write_text("mine")
    Path("rows").write_text(json.dumps(TRACE_ROW) + "\n")
    Path("folder").mkdir()
    Path("broken").mkdir()
    Path("broken", "config.json").write_text('{"name": "ptb-l')
    with Trace("one") as trace:
        trace.append({**TRACE_ROW, "status": "ok"})
    return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def check_one_line_and_files_stay(capsys, files, line, words):
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err
    assert "Errno" not in err
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize("line", WRONG_FILES)
def test_a_wrong_file_gets_one_helpful_line_and_stays(capsys, wrong_files, line):
    check_one_line_and_files_stay(capsys, wrong_files, line, WRONG_FILES[line])


@needs_report
@pytest.mark.parametrize("line", WRONG_PAGES)
def test_a_page_that_cannot_be_written_gets_one_line_and_files_stay(capsys, wrong_files, line):
    check_one_line_and_files_stay(capsys, wrong_files, line, WRONG_PAGES[line])


FEW = [("one", "it needs 10 measured rows and has 1."), ("none", "no step was measured.")]


@pytest.mark.parametrize(("name", "words"), FEW)
def test_advice_on_few_rows_says_that_they_are_few(capsys, wrong_files, name, words):
    Trace("none").close()
    code, out, err = run(capsys, "advise", name)
    assert (code, err) == (1, "")
    assert out.startswith(f"CANNOT TELL: {words}")


@needs_report
@pytest.mark.parametrize(("name", "words"), FEW)
def test_a_page_about_few_rows_is_written(capsys, wrong_files, name, words):
    Trace("none").close()
    code, out, err = run(capsys, "report", name, "--output", "page.html")
    assert (code, err) == (0, "")
    assert "report: page.html" in out
    assert Path("page.html").exists()


@needs_report
def test_control_characters_of_names_do_not_reach_the_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Trace("\x1b[2J.jsonl") as trace:
        trace.append({"step": 1, "grad_norm": 1.0})
    code, out, err = run(capsys, "report", "\x1b[2J.jsonl", "-o", "\x1b[31m.html")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert r"report: \u001b[31m.html" in out


@needs_report
@pytest.mark.slow
def test_report_and_advise_find_the_same_runs_in_a_folder(capsys, tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / "all" / "deep" / f"seed{seed}", seed=seed)
    make_run(tmp_path / "all" / "other", batch_size=40)
    make_run(tmp_path / "all" / "bare", traced=False, steps=20)
    trace = tmp_path / "all" / "mine.jsonl"
    trace.write_bytes((tmp_path / "all" / "other" / "trace.jsonl").read_bytes())
    code, out, err = run(capsys, "advise", str(tmp_path / "all"), "--json")
    assert (code, err) == (0, "")
    tasks = json.loads(out)["tasks"]
    assert [entry["task"] for entry in tasks] == ["walls, batch 20", "walls, batch 40", "walls"]
    assert all("fit" not in entry["advice"] for entry in tasks)
    code, out, err = run(capsys, "report", str(tmp_path / "all"), "-o", str(tmp_path / "p.html"))
    assert (code, err) == (0, "")
    verdicts = [line.partition(": ")[2] for line in out.splitlines()[:-1]]
    assert verdicts == [entry["advice"]["verdict"] for entry in tasks]
    code, out, _ = run(capsys, "advise", str(tmp_path / "all"))
    assert "batch 20, 2 runs\n" in out
    assert ", 1 run\n" in out
    code, out, err = run(capsys, "advise", str(tmp_path / "all" / "bare"))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "nothing was measured. Train with a probe." in err


def test_advise_prints_fit_and_advice_or_the_same_as_json(capsys, tmp_path):
    folder = make_run(tmp_path / "run")
    expected = advise(Trace.load(folder / "trace.jsonl"))
    code, out, _ = run(capsys, "advise", str(folder))
    assert (code, out.strip()) == (0, str(expected))
    code, out, _ = run(capsys, "advise", str(folder), "--details")
    assert expected.details() in out
    assert str(fit_smoothness(Trace.load(folder / "trace.jsonl"))) in out
    code, out, _ = run(capsys, "advise", str(folder / "trace.jsonl"), "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["lr"], found["max_norm"]) == (expected.lr, expected.max_norm)


def test_advice_that_is_refused_says_why_with_code_1(capsys, tmp_path):
    with Trace(tmp_path / "silent.jsonl") as trace:
        for step in range(12):  # neither lr nor the length of the step
            trace.append({"step": step, "grad_norm": 1.0 + step, "smoothness": 2.0 + step})
    code, out, _ = run(capsys, "advise", str(trace.path))
    assert code == 1
    assert out.startswith("CANNOT TELL: no step was measured.")
    code, out, _ = run(capsys, "advise", str(trace.path), "--json")
    assert code == 1
    assert json.loads(out)["lr"] is None


@needs_report
@pytest.mark.slow
def test_report_writes_the_page_and_prints_the_verdict(capsys, tmp_path):
    folder, page = make_run(tmp_path / "run"), tmp_path / "deep" / "page.html"
    code, out, _ = run(capsys, "report", str(folder), "--output", str(page))
    assert code == 0
    assert advise(Trace.load(folder / "trace.jsonl")).verdict in out
    assert page.stat().st_size > 1e6


def test_fit_prints_the_fit_in_words_and_as_json(capsys, tmp_path):
    folder = make_run(tmp_path / "run")
    expected = fit_smoothness(Trace.load(folder / "trace.jsonl"))
    assert run(capsys, "fit", str(folder)) == (0, f"{expected}\n", "")
    code, out, _ = run(capsys, "fit", str(folder), "--json")
    found = json.loads(out)
    assert (code, found["L0"], found["L1"]) == (0, expected.L0, expected.L1)
    assert "action" not in found
    make_run(tmp_path / "other", lr=0.1)
    code, out, _ = run(capsys, "fit", str(tmp_path), "--json")
    assert len(json.loads(out)["fits"]) == 2
    code, out, _ = run(capsys, "fit", str(tmp_path))
    assert out.count("trace.jsonl\n") == 2


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{}":
            raise ModuleNotFoundError("No module", name=name)
sys.meta_path.insert(0, Block())
from curvestep.cli import main
sys.exit(main(["report", "runs"]))
"""


@needs_report
@pytest.mark.slow
@pytest.mark.parametrize("package", ["plotly", "jinja2", "PIL"])
def test_report_without_its_extra_says_what_to_install(package):
    code = BLOCKED.format(package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"the extra `report`: {package} is not installed" in done.stderr
    assert "pip install -c constraints.txt '.[report]'" in done.stderr
