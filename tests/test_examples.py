"""Every example runs as a stranger would run it."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from curvestep import Trace

ROOT = Path(__file__).parent.parent


def run_script(script, *arguments):
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", ROOT / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    ).stdout


@pytest.mark.slow
def test_measuring_a_training_loop_gives_a_fit_an_advice_and_a_picture(tmp_path):
    words = run_script("examples/measure_smoothness.py", tmp_path)
    assert "Does sharpness grow with the gradient norm?" in words
    assert re.search("^(KEEP|RAISE|LOWER) lr", words, re.MULTILINE)
    assert len(Trace.load(tmp_path / "trace.jsonl")) == 80
    assert (tmp_path / "smoothness.png").stat().st_size > 10_000


@pytest.mark.slow
def test_pictures_of_the_page_on_trust_are_drawn(tmp_path):
    run_script("docs/trust_figures.py", tmp_path)
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(images/([\w-]+\.png)\)", page)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(shown)
    assert len(shown) == 9


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
