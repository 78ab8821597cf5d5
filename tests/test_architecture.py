"""The shape of the tree: imports point one way, names stand once, no folder is crowded."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "curvestep"
MOST_MODULES = 14  # in a folder
MIRRORED = {"SmoothnessCallback", "ClipCallback"}  # the same callbacks for two frameworks

# What each room may use, folders two deep, as docs/architecture.md says. A room may always use itself; the
# helpers at the root may be used by all.
HELPERS = {"checks", "files", "notes", "optimizer_family", "parameter_names", "report.markup"}
THEORY = {"theory", *(f"theory.{n}" for n in ("problems", "inequalities", "rules", "theorems", "complexity"))}
LIBRARY = {
    "steps",
    "clip_rules",
    *THEORY,
    "report.chart",
    "report.drawing",
    "report.results",
    "tensors",
    "optim",
    "smoothness",
    "trace",
    "fit",
    "advice",
    "calibration",
    "autopsy",
}
USES = {
    "checks": set(),
    "files": set(),
    "notes": set(),
    "optimizer_family": set(),
    "parameter_names": set(),
    "steps": set(),
    "clip_rules": set(),
    "report.markup": set(),
    "report.chart": set(),
    "report.drawing": {"report.chart"},
    "report.results": {"report.chart", "report.drawing", "steps", "trace"},
    "theory.problems": set(),
    "theory.inequalities": {"theory.problems"},
    "theory.rules": {"steps", "theory.problems"},
    "theory.theorems": {"steps", "theory.problems", "theory.rules"},
    "theory.complexity": {"theory.problems", "theory.rules"},
    "theory.certificates": {"theory.problems", "theory.rules", "theory.theorems", "theory.complexity"},
    "theory": set(),
    "tensors": set(),
    "optim": {"steps", "clip_rules", "tensors"},
    "trace": {"steps", "report.results"},  # a result draws itself, when asked
    "smoothness": {"steps", "tensors", "trace"},
    "fit": {"trace", "smoothness", "report.results"},
    "advice": {"steps", "theory.theorems", "trace"},
    "autopsy": {"tensors", "smoothness"},
    "calibration": {
        "steps",
        "theory.theorems",
        "clip_rules",
        "tensors",
        "smoothness",
        "optim",
        "report.results",
    },
    "integrations": LIBRARY,
    "report": LIBRARY,
    "cli": {"report", *LIBRARY},
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
    assert [m for m in MODULES if m not in ("", "__main__") and not room_of(m)] == []


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


def test_no_public_class_name_stands_twice():
    classes = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in classes.items() if count > 1} <= MIRRORED
