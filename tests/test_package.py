"""What a user gets from the package: few dependencies, one version, a wheel that works."""

import ast
import pydoc
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import curvestep

ROOT = Path(__file__).parents[1]
EXTRAS = (
    "lightning lightning_fabric pytorch_lightning transformers accelerate wandb mlflow tensorboard "
    "pooch rich tyro joblib matplotlib plotly sklearn pandas ray jinja2 PIL"
).split()


def run(code, *, blocked=()):
    """Run ``code`` in a new interpreter in which the ``blocked`` packages are not installed."""
    block = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {list(blocked)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)


def test_runtime_needs_torch_numpy_and_scipy_only():
    needed = {re.split(r"[<>=!~ ;\[]", r)[0] for r in requires("curvestep") or [] if "extra ==" not in r}
    assert needed == {"torch", "numpy", "scipy"}


def test_version_stands_in_one_place():
    assert version("curvestep") == curvestep.__version__
    assert f"version: {curvestep.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_public_name_is_there():
    for name in dir(curvestep):
        assert getattr(curvestep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'ClipedSGD'"):
        _ = curvestep.ClipedSGD


def test_help_shows_a_quick_start_and_every_public_name():
    assert curvestep.__doc__ is not None
    shown = pydoc.plain(pydoc.render_doc(curvestep))
    start = shown.partition("PACKAGE CONTENTS")[0]
    assert "cs.calibrate(model, loss_of_batch, loader)" in start
    for name in curvestep.__all__:
        assert re.search(rf"\b{name}\b", start), name
    assert {"SmoothnessFit", "Advice", "Calibration", "NonDeterministicError", "report"} <= set(
        curvestep.__all__
    )


def test_type_checkers_see_the_names_that_are_looked_up():
    stub = ast.parse(Path(curvestep.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [alias.asname for alias in aliases] == [alias.name for alias in aliases]  # else they are private
    assert len(aliases) == len(set(curvestep.__all__)) > 20


@pytest.mark.slow
def test_public_names_work_without_the_extras():
    names = [n for n in dir(curvestep) if not n.startswith("__")]
    # jinja2 is blocked only for us: torch itself may use it
    blocked = [name for name in EXTRAS if name != "jinja2"]
    done = run(f"import curvestep\nfor n in {names!r}: getattr(curvestep, n)\nprint('fine')", blocked=blocked)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import curvestep as cs; call = cs.report; import curvestep.report.chart",
        "import curvestep.report.chart; import curvestep as cs; call = cs.report",
        "from curvestep import report as call; import curvestep as cs; from curvestep.report import chart",
    ],
)
def test_report_is_called_whatever_was_imported_first(imports):
    code = f"""
{imports}
import inspect
import curvestep.report.chart as chart
assert cs.report is call and chart.Chart is cs.report.chart.Chart
print(callable(call), *inspect.signature(call).parameters)
"""
    done = run(code)
    assert done.stdout == "True runs output title overwrite\n", done.stderr


@pytest.mark.parametrize(
    ("code", "package", "extra"),
    [
        ("from curvestep.report.page import write_page", "PIL", "report"),
        ("import curvestep.report.drawing", "matplotlib", "report"),
        ("import curvestep as cs; cs.loggers.mlflow()", "mlflow", "loggers"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(code, package, extra):
    done = run(code, blocked=[package])
    last = done.stderr.splitlines()[-1]
    assert package in last
    assert f"pip install -c constraints.txt '.[{extra}]'" in last


def test_steps_and_theory_work_without_torch():
    code = """
from curvestep import steps
from curvestep.theory.certificates import certify
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.theorems.clipped_gd import theorem3
guarantee = theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-4, version="sharp")
print(certify(Quartic(), guarantee, 30.0).status, steps.fixed_step(1.0, lr=0.5))
"""
    done = run(code, blocked=["torch", *EXTRAS])
    assert done.stdout == "holds 0.5\n", done.stderr


def test_documentation_is_built_without_what_the_package_needs():
    pytest.importorskip("griffe", reason="comes with the group `docs`")
    code = "from docs.math_roles import key_tables\nprint(key_tables()[:11])"
    done = run(code, blocked=["torch", "numpy", "scipy"])
    assert done.stdout == "A row holds\n", done.stderr


@pytest.mark.slow
def test_wheel_made_from_the_archive_holds_the_package_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "hatch_build.py", "src/curvestep/tensors/kernel/kernel.c"} <= packed
    assert not [
        n for n in packed if n.startswith(("docs/", ".venv/", ".github/")) or n.endswith((".so", ".pt"))
    ]
    names = zipfile.ZipFile(wheel).namelist()
    assert {"curvestep/py.typed", "curvestep/__init__.pyi"} <= set(names)
    assert all(n.startswith(("curvestep/", f"curvestep-{curvestep.__version__}.dist-info/")) for n in names)
    assert not [n for n in names if n.endswith((".npz", ".gz", ".pt"))]
    if shutil.which("cc") and sys.platform == "linux":  # then with the kernel, for this kind of machine
        assert "curvestep/tensors/kernel/kernel.so" in names
        assert not wheel.name.endswith("-any.whl")
