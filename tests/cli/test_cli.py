"""The command line, called as a user calls it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import curvestep
from curvestep.cli import OF_REPRODUCTION, main
from curvestep.cli.commands import COMMANDS
from tests.report.pages import make_run
from tests.support.commands import check_mistake, run

ROOT = Path(__file__).parents[2]


def test_version_is_the_package_version(capsys):
    assert run(capsys, "--version") == (0, f"curvestep {curvestep.__version__}\n", "")


def test_python_dash_m_and_the_console_script_are_the_same_function():
    assert '[project.scripts]\ncurvestep = "curvestep.cli:main"\n' in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run([sys.executable, "-m", "curvestep", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"curvestep {curvestep.__version__}\n")


WRONG = {
    "raport": "there is no command raport. Did you mean report?",
    "report --outptu x": "there is no option --outptu. Did you mean --output?",
    "advise --detials": "there is no option --detials. Did you mean --details?",
    "fit t.jsonl --details": "there is no option --details",
    "report": "name a run folder or a trace file",
    "advise": "name a trace file",
    "fit": "name a trace file or a run folder",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_helpful_line_and_code_2(capsys, line):
    check_mistake(capsys, line, WRONG[line])


def test_control_characters_of_a_wrong_name_do_not_reach_the_terminal(capsys):
    code, _, err = run(capsys, "advise", "runs/\x1b[31mred")
    assert (code, "\x1b" in err, r"\u001b[31mred" in err) == (1, False, True)


def test_no_command_shows_all_commands_and_the_way_for_a_script(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "usage: curvestep" in out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert re.search("For your own training script.*cs.calibrate.*cs.SmoothnessProbe", out, re.DOTALL)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_a_terminal_without_greek_letters_still_gets_the_advice(tmp_path):
    folder = make_run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "curvestep", "advise", folder],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"max_norm" in done.stdout


def test_debug_lets_the_error_through(tmp_path):
    with pytest.raises(ValueError, match="There is no"):
        main(["advise", str(tmp_path / "nothing"), "--debug"])


def test_a_command_of_a_missing_package_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr("curvestep.cli.entry_points", lambda group: ())
    for name in OF_REPRODUCTION:
        code, out, err = run(capsys, name, "ptb-lstm")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "pip install -c constraints.txt . ./reproduction" in err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    command = [sys.executable, "-m", "curvestep", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # before a line is printed
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
