"""The command line, called as a user calls it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import curvestep
from curvestep.advice.advice import advise
from curvestep.cli import main
from curvestep.cli.commands import COMMANDS
from curvestep.cli.options import NOT_OPTIONS, help_texts
from curvestep.fit.fit import fit_smoothness
from curvestep.lab.recipes import RECIPES, recipe_names
from curvestep.lab.run.folder import Run
from curvestep.smoothness.trace import Trace
from tests.lab.report.pages import make_run
from tests.lab.small import write_text

ROOT = Path(__file__).parents[2]


def run(capsys, *args):
    """Exit code, standard output and standard error of one command."""
    code = main(args)
    said = capsys.readouterr()
    return code, said.out, said.err


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


def test_version_is_the_package_version(capsys):
    assert run(capsys, "--version") == (0, f"curvestep {curvestep.__version__}\n", "")


def test_python_dash_m_and_the_console_script_are_the_same_function():
    assert '[project.scripts]\ncurvestep = "curvestep.cli:main"\n' in (ROOT / "pyproject.toml").read_text()
    done = subprocess.run([sys.executable, "-m", "curvestep", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"curvestep {curvestep.__version__}\n")


HELPED = [
    *COMMANDS,
    *(f"{name} {recipe}" for name in ("train", "sweep", "calibrate") for recipe in recipe_names()),
]


@pytest.mark.parametrize("command", HELPED)
def test_help_fits_a_terminal_with_an_example_and_a_default_for_every_option(capsys, command):
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert f"Example: curvestep {command}" in out
    words = COMMANDS[command.split()[0]].words
    assert f"\n{words[0].upper()}{words[1:]}.\n" in out
    options = re.split(r"\n *(?=--[a-z])", out)[1:]
    assert options
    for option in options:
        words = " ".join(option.split())
        assert re.search(r"\(default: .*\)", words), option
        # Besides its name, its choices and its default, every option says in words what it is.
        said = re.sub(r"\{.*?\}|--[a-z-]+|\(default.*", "", words)
        assert len(re.findall(r"[a-z]{2,}", said)) >= 2, option


def test_every_field_of_every_recipe_is_an_option_with_words(capsys):
    for recipe in RECIPES.values():
        _, out, _ = run(capsys, "train", recipe.name, "--scale", recipe.scale, "--help")
        for name in recipe.__dataclass_fields__.keys() - set(NOT_OPTIONS):
            assert re.search(rf"^  --{name.replace('_', '-')}\b", out, re.MULTILINE), name
            assert help_texts(type(recipe))[name]
        assert "(default: True)" not in out  # as it would be typed


WRONG = {
    "trian": "there is no command trian. Did you mean train?",
    "train": "name a recipe first, one of ptb-lstm",
    "train ptb-lstn": "there is no recipe 'ptb-lstn'. Did you mean ptb-lstm?",
    "train ptb-lstm --max-nrom 1": "there is no option --max-nrom. Did you mean --max-norm?",
    "train ptb-lstm --pooling 2": "there is no option --pooling",
    "train ptb-awd-lstm --varible-bptt false": "Did you mean --variable-bptt?",
    "train ptb-awd-lstm --variable-bptt": "--variable-bptt: expected one argument",
    "train ptb-awd-lstm --scale longer": "at `scale` 'longer'. It has: laptop, epoch, paper",
    "train ptb-lstm --learning-rate 3": "there is no option --learning-rate. Did you mean --lr? See ",
    "train ptb-lstm --lr fast": "--lr: needs a number or auto, got 'fast'",
    "train ptb-lstm --batch_size x": "--batch-size: needs a whole number, got 'x'",
    "train ptb-lstm --steps 2.5": "--steps: needs a whole number, got '2.5'",
    "train my.py": "my.py is a script, and curvestep train serves built-in recipes: ptb-lstm",
    "calibrate ./my.py": "In your script call curvestep.calibrate or curvestep.SmoothnessProbe",
    "train ptb-lstm --fractions 2": "`fractions` must be numbers in (0, 1], got (2.0,)",
    "train ptb-lstm --fractions": "`fractions` must be numbers in (0, 1], got none",
    "train ptb-lstm --model resnet20": "--model: needs one of lstm, awd-lstm, got 'resnet20'",
    "train ptb-lstm more": "unexpected argument: more",
    "sweep ptb-lstm --lr 1 x": "--lr: needs a number, got 'x'",
    "train ptb-lstm --lr -1": "`lr` must be positive and finite, got -1.0",
    "train ptb-lstm --scale huge": "--scale: needs one of laptop, longer, epoch, paper, got 'huge'",
    "train ptb-lstm --lr": "--lr: expected one argument",
    "train --flder x ptb-lstm": "name a recipe first",
    "sweep ptb-lstm --variable-bptt yes": "--variable-bptt: needs one of true, false, got 'yes'",
    "sweep ptb-lstm --fractions 0.5 1": "there is no option --fractions",
    "calibrate ptb-lstm --lr auto": "--lr: needs a number, got 'auto'",
    "sweep ptb-lstm --lr 3": "give at least one field several values",
    "sweep ptb-lstm --lr 3 10 --engine slurm": "needs one of joblib, ray, got 'slurm'",
    "report": "name a run folder or a trace file",
    "reproduce --out x": "there is no option --out. Did you mean --folder?",
    "advise": "name a trace file or a run folder",
    "fit": "name a trace file or a run folder",
    "data fetch": "curvestep data get ptb cifar10",
    "data get mnist": "needs one of ptb, cifar10, got 'mnist'. See curvestep data get --help",
    "reproduce fig9": "needs one of fig1, fig2",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_helpful_line_and_code_2(capsys, line):
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert WRONG[line].lower() in err.lower()
    assert ": argument " not in err  # argparse's own words
    assert err.startswith("curvestep")
    assert len(err.partition("Options:")[0]) < 300  # the list of valid ones is as long as it is


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "advise", "runs/\x1b[31mred")
    assert (code, "\x1b" in err, r"\u001b[31mred" in err) == (1, False, True)
    with Trace("\x1b[2J.jsonl") as trace:
        trace.append({"step": 1, "grad_norm": 1.0})
    code, out, err = run(capsys, "report", "\x1b[2J.jsonl", "-o", "\x1b[31m.html")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert r"report: \u001b[31m.html" in out


def test_no_command_shows_the_commands_and_the_way_for_ones_own_script_with_code_2(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "usage: curvestep" in out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert re.search("For your own training script.*cs.calibrate.*cs.SmoothnessProbe", out, re.DOTALL)
    assert max(map(len, out.splitlines())) <= 80


TRACE_ROW = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "smoothness": 2.0, "step_norm": 0.1, "lr": 0.1}
WRONG_FILES = {
    "report nothing": "There is no nothing",  # and not that report.html is in the way
    "report one": "report.html is there already and is no page of curvestep",
    "advise empty": "empty is empty: no trace was written to it",
    "advise garbage": "garbage is not a curvestep trace: its first line is no header",
    "advise rows": "rows is not a curvestep trace: its first line is no trace header",
    "advise folder": "There is neither a run folder nor a trace in folder",
    "advise broken": "broken/config.json is not JSON",
    "report one -o rows": "rows is there already and is no page of curvestep. Choose another `output`",
    "report one --output folder": "must be an HTML file, got the folder folder. Try folder/report.html",
    "report one --output one/page.html": "one is a file, and a folder is needed",
    "report strange": "strange/config.json is not a recipe of this version",
    "calibrate ptb-lstm --corpus nowhere": "The corpus nowhere does not exist",
    "calibrate ptb-lstm --corpus garbage": "garbage is not readable UTF-8 text",
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
    for name, config in (("broken", '{"name": "ptb-l'), ("strange", "{}")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)
    with Trace("one") as trace:
        trace.append({**TRACE_ROW, "status": "ok"})
    return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("line", WRONG_FILES)
def test_a_wrong_file_gets_one_helpful_line_and_code_1_and_stays(capsys, wrong_files, line):
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert WRONG_FILES[line] in err
    assert "Errno" not in err
    assert {path: path.read_bytes() for path in wrong_files} == wrong_files


@pytest.mark.parametrize(
    ("name", "words"), [("one", "it needs 10 measured rows and has 1."), ("none", "no step was measured.")]
)
def test_a_trace_of_few_rows_gets_a_page_and_what_can_be_said(capsys, wrong_files, name, words):
    Trace("none").close()
    code, out, err = run(capsys, "advise", name)
    assert (code, err) == (1, "")
    assert out.startswith(f"CANNOT TELL: {words}")
    code, out, err = run(capsys, "report", name, "--output", "page.html")
    assert (code, err) == (0, "")
    assert "report: page.html" in out
    assert Path("page.html").exists()


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
    assert [entry["task"].partition(", ")[0] for entry in tasks] == ["ptb-lstm", "ptb-lstm", "walls"]
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


def test_advise_prints_fit_and_advice_and_the_same_numbers_as_json(capsys, tmp_path):
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


@pytest.mark.slow
def test_report_writes_the_page_and_prints_the_verdict(capsys, tmp_path):
    folder, page = make_run(tmp_path / "run"), tmp_path / "deep" / "page.html"
    code, out, _ = run(capsys, "report", str(folder), "--output", str(page))
    assert code == 0
    assert advise(Trace.load(folder / "trace.jsonl")).verdict in out
    assert page.stat().st_size > 1e6


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
    assert Run.load("runs/ptb-lstm-lr0.5-clip0.25").recipe.lr == 0.5


@pytest.mark.slow
def test_train_then_report_then_advise(capsys, text, tmp_path):
    folder = tmp_path / "run"
    line = small(text, "--lr", "0.5", "--max-norm", "0.1", "--folder", str(folder))
    code, out, err = run(capsys, "train", *line)
    assert (code, err) == (0, "")
    assert out.startswith("finished after 25 steps")
    recipe = Run.load(folder).recipe
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
    assert (Run.load(folder).recipe.corpus, out.partition(" after")[0]) == (str(text), "finished")


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
    assert sorted(run.recipe.lr for run in map(Run.load, folder.glob("lr=*"))) == [0.5, 1.0]
    assert {run.recipe.steps for run in map(Run.load, folder.glob("lr=*"))} == {4}
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


BLOCKED = """
import sys
blocked = {blocked!r}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from curvestep.cli import main
sys.exit(main({args!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocked", "args"),
    [
        (("rich",), ["train", "ptb-lstm"]),
        (("rich",), ["data", "get", "ptb", "--offline"]),
        (("lightning_fabric",), ["train", "ptb-lstm"]),
        (("plotly",), ["report", "runs"]),
    ],
)
def test_without_the_lab_extra_it_says_what_to_install(blocked, args):
    code = BLOCKED.format(blocked=blocked, args=args)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "pip install -c constraints.txt '.[lab]'" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    command = [sys.executable, "-m", "curvestep", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # before a line is printed
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
