"""Every example runs as a stranger would run it."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from curvestep import Trace
from tests.processes import run_script

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_measuring_a_training_loop_gives_a_fit_an_advice_and_a_picture(tmp_path):
    words = run_script("examples/measure_smoothness.py", tmp_path)
    assert "Does sharpness grow with the gradient norm?" in words
    assert re.search("^(NO SIGN against|RAISE|LOWER) lr", words, re.MULTILINE)
    assert len(Trace.load(tmp_path / "trace.jsonl")) == 80
    assert (tmp_path / "smoothness.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_gan_has_two_clips_of_its_own():
    words = run_script("examples/gan_two_clips.py", 30)
    assert re.findall(r"^(\w+): \d+% of (\d+) steps", words, re.M) == [("generator", "30"), ("critic", "30")]


@pytest.mark.slow
def test_a_pinn_is_clipped_at_a_percentile():
    words = run_script("examples/pinn.py", 60)
    clipped = int(re.search(r"(\d+)% clipped", words)[1])
    assert 0 < clipped < 100


@pytest.mark.slow
def test_clipping_the_gradient_of_muon_changes_nothing():
    words = run_script("examples/muon_adamw.py", 10)
    whole, clipped = re.search(r"a step of Muon: (\S+); of 1 % of the gradient: (\S+)", words).groups()
    assert whole == clipped
    assert float(re.search(r"would be (\d+) times shorter", words)[1]) > 5
    alone, together = map(float, re.search(r"parameters (\S+), of all (\S+)", words).groups())
    assert alone < 0.9 * together  # Muon's gradients would clip AdamW
    assert "of 10 steps" in words


@pytest.mark.slow
def test_late_bound_batches_are_noticed():
    words = run_script("examples/accumulate_late_bound.py", 10)
    assert "bound: 2 rows" in words
    assert "late-bound: The closure's gradient is not the one in `.grad`" in words


@pytest.mark.slow
def test_adapters_are_clipped_and_named():
    pytest.importorskip("peft", reason="needs peft")
    words = run_script("examples/lora_finetune.py", 5)
    assert "9,216 trained numbers" in words
    assert "lora_" in words.splitlines()[-1]


@pytest.mark.slow
def test_grpo_is_trained_at_four_thresholds():
    pytest.importorskip("trl", reason="needs trl")
    words = run_script("examples/grpo_clipping.py", 3, 1, 2)
    rows = re.findall(r"^\| (\S+) \| (\S+) .*\| (\d+)% \| (\S+) \|$", words, re.M)
    assert [row[0] for row in rows] == ["none", "0.1", "1.0", "zscore()"]
    clipped = {name: int(share) for name, _, share, _ in rows}
    assert clipped["none"] == 0
    assert clipped["0.1"] >= clipped["1.0"] > 0


FOLDERS = ("benchmarks", "docs", "examples", "reproduction/benchmarks")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_imports_from_the_package_is_there(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "curvestep":
            assert importlib.util.find_spec(node.module)
            try:
                module = importlib.import_module(node.module)
            except ImportError as error:
                pytest.skip(str(error))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
