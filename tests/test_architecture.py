"""The shape of the tree: imports point one way, names stand once, no folder is crowded, no line is dense.

The limits are ratchets: lower them when the tree falls below, never raise them.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.density import Density, numeric_constants

PACKAGE = Path(__file__).parents[1] / "src" / "curvestep"
MOST_MODULES = 12
MOST_LINES = 26_574
MOST_LINES_A_FILE = 490
MOST_BRANCHES = 3_119
MOST_TERNARIES = 237
MOST_ANY = 144
MOST_CONSTANTS = 89  # outside the lab
MOST_BRANCHES_PER_100 = 24
MOST_WITH_ONE_IMPORTER = 19  # modules that one other imports
MIRRORED = {"SmoothnessCallback"}  # the same callback for two frameworks

# What each room may use, folders two deep, as docs/architecture.md says. A room may always use itself; the
# helpers at the root may be used by all.
HELPERS = {"_checks", "_files", "_kernel", "notes", "optimizer_family"}
THEORY = {"theory", *(f"theory.{n}" for n in ("problems", "inequalities", "rules", "theorems", "complexity"))}
LIBRARY = {
    "steps",
    "clip_rules",
    "bracket",
    *THEORY,
    "display",
    "vectors",
    "distributed",
    "optim",
    "smoothness",
    "fit",
    "advice",
    "calibration",
    "autopsy",
    "loaders",
}
LAB = {
    "lab.recipe_fields",
    "lab.recipes",
    "lab.progress",
    "lab.jobs",
    "lab.data",
    "lab.models",
    "lab.tasks",
    "lab.cost",
}
USES = {
    "_checks": set(),
    "_files": set(),
    "_kernel": set(),
    "notes": set(),
    "optimizer_family": set(),
    "steps": set(),
    "clip_rules": set(),
    "bracket": {"vectors"},
    "display": {"steps"},
    "theory.problems": set(),
    "theory.inequalities": {"theory.problems"},
    "theory.rules": {"steps", "theory.problems"},
    "theory.theorems": {"steps", "theory.problems", "theory.rules"},
    "theory.complexity": {"theory.problems", "theory.rules"},
    "theory.certificates": {"theory.problems", "theory.rules", "theory.theorems", "theory.complexity"},
    "theory": set(),
    "vectors": {"distributed"},
    "distributed": set(),
    "optim": {"steps", "clip_rules", "vectors", "distributed"},
    "smoothness": {"steps", "bracket", "display", "vectors", "distributed", "lr_schedules"},
    "fit": {"steps", "display", "theory.inequalities", "smoothness"},
    "advice": {"bracket", "display", "theory.theorems", "smoothness", "fit"},
    "autopsy": {"vectors", "distributed", "smoothness"},
    "calibration": {
        "clip_rules",
        "bracket",
        "display",
        "vectors",
        "distributed",
        "smoothness",
        "optim",
        "lr_schedules",
        "loaders",
        "notes",
        "optimizer_family",
    },
    "lr_schedules": set(),
    "loaders": {"distributed", "smoothness"},
    "integrations": {"loggers", *LIBRARY},
    "loggers": LIBRARY,
    "lab.recipe_fields": {"steps"},
    "lab.recipes": {"lab.recipe_fields"},
    "lab.progress": set(),
    "lab.jobs": {"lab.progress"},
    "lab.data": {"lab.progress"},
    "lab.models": set(),
    "lab.tasks": {"lab.recipes", "lab.progress", "lab.data", "lab.models", *LIBRARY},
    "lab.cost": {"lab.recipes", "lab.models", "lab.tasks"},
    "lab.run": {*LAB, *LIBRARY},
    "lab.report": {*LAB, "lab.run", *LIBRARY},
    "lab.grid": {*LAB, "lab.run", *LIBRARY},
    "lab.paper": {*LAB, "lab.run", "lab.report", "lab.grid", *LIBRARY},
    "cli": {*LAB, "lab", "lab.run", "lab.report", "lab.grid", "lab.paper", *LIBRARY},
}


def module_of(path):
    """The dotted name below the package; of an ``__init__`` that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path):
    """Modules of the package that a file imports, inside functions too; not those for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    names = {name.removeprefix("curvestep.") for name in found if name.startswith("curvestep.")}
    return {name for name in names if name in MODULES} - {module_of(path)}


IMPORTS = {module: imports_of(path) for module, path in MODULES.items()}


def room_of(module):
    """The longest prefix that has a line in ``USES``."""
    parts = module.split(".")
    names = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    return next((name for name in names if name in USES), "")


def test_every_module_has_a_room():
    assert [m for m in MODULES if m not in ("", "__main__", "lab") and not room_of(m)] == []


@pytest.mark.parametrize("module", [m for m in MODULES if room_of(m)])
def test_imports_point_one_way(module):
    room = room_of(module)
    used = {room_of(name) or name for name in IMPORTS[module]} - {room} - HELPERS
    if MODULES[module].name == "__init__.py":  # it shows what lies below it
        used = {name for name in used if not name.startswith(f"{module}.")}
    assert used <= USES[room]


def test_there_is_no_import_cycle():
    # A package whose ``__init__`` shows its modules is imported with each of them: that is no cycle.
    edges = {m: {n for n in IMPORTS[m] if not m.startswith(f"{n}.")} for m in MODULES}
    finished, path = set(), []

    def visit(module):
        assert module not in path, " > ".join([*path, module])
        if module not in finished:
            path.append(module)
            for name in sorted(edges[module]):
                visit(name)
            finished.add(path.pop())

    for module in edges:
        visit(module)


def test_no_module_name_stands_twice():
    names = Counter(p.stem for p in MODULES.values() if p.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_is_crowded():
    folders = Counter(p.parent for p in MODULES.values() if p.name not in ("__init__.py", "__main__.py"))
    assert {str(folder): count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_few_modules_have_one_importer():
    shown = {module for module, path in MODULES.items() if path.name in ("__init__.py", "__main__.py")}
    importers = Counter(name for module in MODULES if module not in shown for name in IMPORTS[module] - shown)
    lonely = sorted(module for module, count in importers.items() if count == 1)
    assert len(lonely) <= MOST_WITH_ONE_IMPORTER, lonely


def source_of(module):
    return MODULES[module].read_text(encoding="utf-8")


def density_of(modules):
    total = Density()
    for module in modules:
        total.add(source_of(module))
    return total


def test_the_tree_is_small_and_plain():
    whole = density_of(MODULES)
    assert sum(len(source_of(module).splitlines()) for module in MODULES) <= MOST_LINES
    assert whole.branches <= MOST_BRANCHES
    assert whole.ternaries <= MOST_TERNARIES
    assert whole.any_lines <= MOST_ANY


def test_no_file_is_long():
    lengths = {module: len(source_of(module).splitlines()) for module in MODULES}
    assert {module: length for module, length in lengths.items() if length > MOST_LINES_A_FILE} == {}


def test_no_folder_is_dense():
    folders = defaultdict(list)
    for module, path in MODULES.items():
        folders[path.parent.relative_to(PACKAGE).as_posix()].append(module)
    dense = {folder: density_of(modules).branches_per_100 for folder, modules in folders.items()}
    assert {folder: found for folder, found in dense.items() if found > MOST_BRANCHES_PER_100} == {}


def test_vectors_stays_plain():
    assert density_of(["vectors"]).branches_per_100 < 29


def test_numeric_constants_are_few_and_a_name_has_one_value():
    values, count = defaultdict(set), 0
    for module in MODULES:
        for name, numbers in numeric_constants(source_of(module)).items():
            values[name].add(tuple(numbers))
            if not module.startswith("lab"):
                count += len(numbers)
    assert count <= MOST_CONSTANTS
    assert sorted(name for name, found in values.items() if len(found) > 1) == []


def test_no_public_class_name_stands_twice():
    classes = Counter(
        node.name
        for module in MODULES
        for node in ast.parse(source_of(module)).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in classes.items() if count > 1} <= MIRRORED
