"""The shape of the tree: imports point one way, names stand once, folders are small, tests mirror modules."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "curvestep"
LABORATORY = ROOT / "reproduction" / "src" / "curvestep_reproduction"
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


# Modules without a test file of their own name, and the file that tests them, with the reason.
TESTED_IN = {
    # Sentences: whoever says them is tested for their kinds.
    "advice/advice_words.py": "advice/test_advice.py",
    "advice/log_facts.py": "advice/test_training_log.py",
    "advice/log_words.py": "advice/test_training_log.py",
    "calibration/calibration_words.py": "calibration/test_ladder.py",
    "fit/fit_words.py": "fit/test_fit.py",
    # What a step is made of: one contract and one parity suite hold every optimizer to it, on every path.
    "optim/clipped.py": "optim/test_contract.py",
    "optim/normalized.py": "optim/test_contract.py",
    "optim/scaled.py": "optim/test_contract.py",
    "optim/sgd.py": "optim/test_equivalence.py",
    "optim/update.py": "optim/test_equivalence.py",
    "optim/rule_thresholds.py": "test_clip_rules.py",
    # A function whose parts have files: its refusals, its trials and what it leaves unchanged.
    "calibration/calibrate.py": "calibration/test_unchanged.py",
    "calibration/loaders.py": "calibration/test_refusals.py",
    "calibration/lr_schedules.py": "calibration/test_method.py",
    "calibration/result.py": "calibration/test_method.py",
    # Half of a callback: seen where a framework calls it.
    "integrations/reporting.py": "integrations/test_lightning.py",
    "integrations/step_norms.py": "integrations/test_clip_callback.py",
    "parameter_names.py": "integrations/test_clip_callback.py",
    # Plain data, seen in what is made of it.
    "report/chart.py": "report/test_charts.py",
    # Runs on several processes only, which are started once for each room.
    "tensors/distributed.py": "optim/test_distributed.py",
}
TESTED_IN_LABORATORY = {
    # A rule and its statistics are tested by the verdicts that they give.
    "claims/judges.py": "claims/test_statements.py",
    "claims/statistics.py": "claims/test_statements.py",
    # What a command or a recipe says of itself.
    "cli.py": "test_cli_reproduction.py",
    "recipe_options.py": "test_cli_reproduction.py",
    "recipe_fields.py": "test_recipes.py",
    "cost.py": "test_recipes.py",
    # Two data sets with the same ways to come by them.
    "data/corpus.py": "data/test_data.py",
    "data/images.py": "data/test_data.py",
    # Figures are drawn from the same made-up runs.
    "figures/fig1_scatter.py": "figures/test_figures.py",
    "figures/fig4_curves.py": "figures/test_figures.py",
    "figures/fig6_data_fraction.py": "figures/test_figures.py",
    "figures/fig8_lstm_gd.py": "figures/test_figures.py",
    "figures/grid.py": "figures/test_figures.py",
    "figures/layout.py": "figures/test_figures.py",
    "figures/fig7_synthetic.py": "figures/test_synthetic.py",
    "figures/legend.py": "figures/test_reproduction.py",
    "figures/plan.py": "figures/test_reproduction.py",
    # The folder and the session of a run are those of the loop, and of what resumes it.
    "training/run_folder.py": "training/test_loop.py",
    "training/session.py": "training/test_checkpoint.py",
}


@pytest.mark.parametrize(
    ("package", "tests", "tested_in"),
    [
        (PACKAGE, ROOT / "tests", TESTED_IN),
        (LABORATORY, ROOT / "reproduction" / "tests", TESTED_IN_LABORATORY),
    ],
    ids=["library", "laboratory"],
)
def test_every_module_has_a_test_file_or_a_reason(package, tests, tested_in):
    modules = [path.relative_to(package) for path in package.rglob("*.py") if not path.stem.startswith("__")]
    without = [path for path in modules if not (tests / path.parent / f"test_{path.name}").exists()]
    assert {path.as_posix() for path in without} == tested_in.keys()
    assert [file for file in tested_in.values() if not (tests / file).exists()] == []
