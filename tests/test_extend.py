"""A change that docs/extend.md teaches touches few files; on a copy its tests and those of all code pass."""

import compileall
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

from tests.processes import run_pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src/", "reproduction/src/")
MOST_FILES = 3  # of the source, for one change
MEAN_FILES = 2.0
CHANGES = (
    "A step rule", "A clip rule", "A column of a row", "A warning", "A logger", "An estimator", "A figure",
    "A claim", "A recipe", "A theorem", "A command",
)  # fmt: skip
GUARDS = ("tests/test_docstrings.py", "tests/test_architecture.py")  # hold for all code
RECIPE_GUARD = ("reproduction/tests/test_cli_reproduction.py", "-k", "help")
LEFT_OUT = {".png", ".svg", ".xz", ".npz", ".woff2", ".ipynb"}  # large files that no test of a change reads


def patches():
    """The patch of each section of the page, and the arguments of pytest below it."""
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    found = {}
    for section in page.split("\n### ")[1:]:
        patch = re.search(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        command = re.search(r"`python -m pytest ([^`]+)`", section)
        if patch and command:
            found[section.partition("\n")[0]] = (patch.group(1), shlex.split(command.group(1)))
    return found


def source_files(patch):
    """The files of the two packages that a patch touches."""
    files = re.findall(r"^\+\+\+ (\S+)$", patch, re.MULTILINE)
    return [file for file in files if file.startswith(SOURCES)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The files of the repository, without pictures and kept runs."""
    folder = tmp_path_factory.mktemp("extend") / "tree"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git, and a checkout")
    for name in listed.split("\0"):
        source = ROOT / name
        if source.is_file() and source.suffix not in LEFT_OUT:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
    for package in SOURCES:
        compileall.compile_dir(folder / package, quiet=1)  # once for all copies
    return folder


def apply(patch, folder, *options):
    """Apply a patch to the files below a folder, as the page says."""
    return subprocess.run(
        ["git", "apply", "-p0", *options, "-"],
        input=patch,
        cwd=folder,
        text=True,
        capture_output=True,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )


def test_the_page_has_a_patch_for_every_change():
    assert tuple(patches()) == CHANGES


def test_a_change_touches_three_source_files_at_most_and_two_in_the_mean():
    counts = {name: len(source_files(patch)) for name, (patch, _) in patches().items()}
    assert 1 <= min(counts.values())
    assert max(counts.values()) <= MOST_FILES, counts
    assert fmean(counts.values()) <= MEAN_FILES, counts


def test_every_patch_fits_the_code_of_today(tree):
    for name, (patch, _) in patches().items():
        checked = apply(patch, tree, "--check")
        assert checked.returncode == 0, f"{name}: {checked.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_patch_applies_and_its_tests_pass(name, tree, tmp_path):
    patch, arguments = patches()[name]
    if any("reproduction/" in argument for argument in arguments):
        pytest.importorskip("curvestep_reproduction")
    copy = shutil.copytree(tree, tmp_path / "tree", copy_function=os.link)
    applied = apply(patch, copy)
    assert applied.returncode == 0, applied.stderr
    runs = [arguments, GUARDS]
    if name == "A recipe":
        runs.append(RECIPE_GUARD)
    for run in runs:
        tested = run_pytest(copy, *run)
        assert tested.returncode == 0, tested.stdout[-3000:]
