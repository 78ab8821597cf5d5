"""What the reproduction takes from the library: public names, the trace, the charts and the page."""

import ast
from pathlib import Path

import curvestep

ROOT = Path(__file__).parents[1]
# Benchmarks of the library's own rooms are left out: they are here because of the models and the data.
FILES = [path for path in sorted(ROOT.rglob("*.py")) if not {"tests", "benchmarks"} & {*path.parts}]
# Beside the names of the package itself: rooms that are made to be used from outside, and two helpers.
ROOMS = ("trace", "report", "steps", "theory", "cli", "checks", "files")
RESULT_FILE = {"read_calibration", "write_calibration"}  # of curvestep.calibration.result


def imports_of(path):
    """Module and name of each import from the library; those for type checkers count too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "curvestep":
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("curvestep."):
                    yield alias.name, ""


def is_public(module, name):
    if any(part.startswith("_") for part in (*module.split("."), name)):
        return False
    if module == "curvestep":
        return name in curvestep.__all__
    room = module.split(".")[1]
    return room in ROOMS or (module == "curvestep.calibration.result" and name in RESULT_FILE)


def test_the_reproduction_imports_public_names_alone():
    private = []
    for path in FILES:
        private += [(path.name, *found) for found in imports_of(path) if not is_public(*found)]
    assert private == []
