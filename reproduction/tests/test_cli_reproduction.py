"""The commands that train, called as a user calls them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.commands import check_help, check_mistake, run

from curvestep.cli import all_commands
from curvestep_reproduction.recipe_options import NOT_OPTIONS, help_texts
from curvestep_reproduction.recipes import RECIPES, recipe_names
from curvestep_reproduction.training.run_folder import TrainedRun
from reproduction.tests.small import write_text


def start(*args, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "curvestep", *args], stdout=-1, stderr=-1, text=True, **options
    )


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def small(text, *more):
    """Fields that make the LSTM recipe train in a second."""
    sizes = (
        "--embedding 8 --hidden 10 --batch-size 4 --bptt 6 --steps 25 --eval-size 0 --probe-every 1 --quiet"
    )
    return ["ptb-lstm", "--corpus", text, *sizes.split(), *more]


def test_every_field_of_every_recipe_is_an_option_with_words(capsys):
    for recipe in RECIPES.values():
        _, out, _ = run(capsys, "train", recipe.name, "--scale", recipe.scale, "--help")
        for name in recipe.__dataclass_fields__.keys() - set(NOT_OPTIONS) | recipe.options.keys():
            assert re.search(rf"^  --{name.replace('_', '-')}\b", out, re.MULTILINE), name
        for name in recipe.__dataclass_fields__.keys() - set(NOT_OPTIONS):
            assert help_texts(type(recipe))[name]
        assert "(default: True)" not in out  # as it would be typed


def test_data_that_are_not_here_are_one_line_and_code_1(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("CURVESTEP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run(capsys, "data", "get", "ptb", "--offline")
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_data_get_says_where_the_data_are(capsys):
    if not Path(os.environ.get("CURVESTEP_DATA", "/nothing"), "ptb.train.txt.gz").exists():
        pytest.skip("no Penn Treebank in CURVESTEP_DATA")
    code, out, _ = run(capsys, "data", "get", "ptb", "--offline")
    assert code == 0
    assert out.startswith("ptb: ")


def test_a_run_without_a_folder_is_named_after_its_setting(capsys, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "train", *small(text, "--lr", "0.5", "--steps", "1"))
    assert (code, err) == (0, "")
    assert TrainedRun.load("runs/ptb-lstm-lr0.5-clip0.25").recipe.lr == 0.5


@pytest.mark.slow
def test_train_then_report_then_advise(capsys, text, tmp_path):
    folder = tmp_path / "run"
    line = small(text, "--lr", "0.5", "--max-norm", "0.1", "--folder", str(folder))
    code, out, err = run(capsys, "train", *line)
    assert (code, err) == (0, "")
    assert out.startswith("finished after 25 steps")
    recipe = TrainedRun.load(folder).recipe
    assert (recipe.lr, recipe.max_norm, recipe.steps) == (0.5, 0.1, 25)
    assert run(capsys, "report", str(folder), "--output", str(tmp_path / "page.html"))[0] == 0
    assert run(capsys, "advise", str(folder))[0] == 0
    code, out, err = run(capsys, "train", *line)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "already holds a run" in err


@pytest.mark.slow
def test_a_mistyped_corpus_does_not_take_the_folder(capsys, text, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run(capsys, "train", *small("nowhere", "--folder", str(folder)))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "The corpus nowhere does not exist" in err
    code, out, err = run(capsys, "train", *small(text, "--steps", "2", "--folder", str(folder)))
    assert (code, err) == (0, "")
    assert (TrainedRun.load(folder).recipe.corpus, out.partition(" after")[0]) == (str(text), "finished")


@pytest.mark.slow
def test_reproduce_leaves_a_report_with_claims(capsys, tmp_path):
    code, out, _ = run(capsys, "reproduce", "fig7", "--folder", str(tmp_path / "all"), "--quiet")
    assert code == 0
    assert f"report: {tmp_path / 'all' / 'report.html'}" in out
    page = (tmp_path / "all" / "report.html").read_text()
    claims = json.loads((tmp_path / "all" / "claims.json").read_text())["claims"]
    assert page.count('data-label="where"') == len(claims)
    assert {"quartic-faster", "quartic-conservative"} <= {claim["name"] for claim in claims}
    assert not any(claim["source"].startswith("Figure 2") for claim in claims)
    assert 'alt="Figure 7' in page
    assert "There is no figures/" not in page


@pytest.mark.slow
def test_sweep_trains_the_grid(capsys, text, tmp_path):
    folder = tmp_path / "sweep"
    line = small(text, "--lr", "0.5", "1", "--steps", "4", "--folder", str(folder))
    code, out, _ = run(capsys, "sweep", *line)
    assert code == 0
    assert sorted(run.recipe.lr for run in map(TrainedRun.load, folder.glob("lr=*"))) == [0.5, 1.0]
    assert {run.recipe.steps for run in map(TrainedRun.load, folder.glob("lr=*"))} == {4}
    assert f"curvestep report {folder}" in out


@pytest.mark.slow
def test_ctrl_c_ends_with_code_130_and_a_run_to_resume(text, tmp_path):
    folder = tmp_path / "run"
    process = start("train", *small(text, "--steps", "1000000", "--folder", str(folder)))
    until = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    assert out.startswith("interrupted after")
    assert (folder / "checkpoint.pt").exists()


COMMANDS = {
    name: command for name, command in all_commands().items() if name not in ("advise", "report", "fit")
}
HELPED = [
    *COMMANDS,
    *(f"{name} {recipe}" for name in ("train", "sweep", "calibrate") for recipe in recipe_names()),
]


@pytest.mark.parametrize("command", HELPED)
def test_help_fits_a_terminal_and_has_a_default_for_every_option(capsys, command):
    check_help(capsys, command, COMMANDS[command.split()[0]])


WRONG = {
    "trian": "there is no command trian. Did you mean train?",
    "train": "name a recipe first, one of ptb-lstm",
    "train ptb-lstn": "there is no recipe 'ptb-lstn'. Did you mean ptb-lstm?",
    "train ptb-lstm --pooling 2": "there is no option --pooling",
    "train ptb-awd-lstm --variable-bptt": "--variable-bptt: expected one argument",
    "train ptb-awd-lstm --scale longer": "at `scale` 'longer'. It has: laptop, epoch, paper",
    "train ptb-lstm --learning-rate 3": "there is no option --learning-rate. Did you mean --lr? See ",
    "train ptb-lstm --lr fast": "--lr: needs a number or auto, got 'fast'",
    "train ptb-lstm --batch_size x": "--batch-size: needs a whole number, got 'x'",
    "train my.py": "my.py is a script, and curvestep train serves built-in recipes: ptb-lstm",
    "calibrate ./my.py": "In your script call curvestep.calibrate or curvestep.SmoothnessProbe",
    "train ptb-lstm --fractions 2": "`fractions` must be numbers in (0, 1], got (2.0,)",
    "train ptb-lstm more": "unexpected argument: more",
    "train ptb-lstm --lr -1": "`lr` must be positive and finite, got -1.0",
    "train ptb-lstm --scale huge": "--scale: needs one of laptop, longer, epoch, paper, got 'huge'",
    "sweep ptb-lstm --fractions 0.5 1": "there is no option --fractions",
    "sweep ptb-lstm --lr 3": "give at least one field several values",
    "sweep ptb-lstm --lr 3 10 --engine slurm": "needs one of joblib, ray, got 'slurm'",
    "data fetch": "curvestep data get ptb cifar10",
    "data get mnist": "needs one of ptb, cifar10, got 'mnist'. See curvestep data get --help",
    "reproduce fig9": "needs one of fig1, fig2",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_helpful_line_and_code_2(capsys, line):
    check_mistake(capsys, line, WRONG[line])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("calibrate ptb-lstm --corpus nowhere", "The corpus nowhere does not exist"),
        ("calibrate ptb-lstm --corpus garbage", "garbage is not readable UTF-8 text"),
        ("train ptb-lstm --folder strange --resume", "strange/config.json is not a recipe of this version"),
    ],
)
def test_a_wrong_file_gets_one_helpful_line_and_code_1(capsys, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    Path("garbage").write_bytes(bytes(range(255, 127, -1)) * 9)
    Path("strange").mkdir()
    Path("strange", "config.json").write_text("{}")
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err
