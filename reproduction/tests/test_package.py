"""What is released of the reproduction: the version of the library, a wheel that holds the package alone."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import curvestep

FOLDER = Path(__file__).parents[1]


def test_version_is_that_of_the_library_and_needs_it():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == curvestep.__version__
    assert f"curvestep[report]=={curvestep.__version__}" in project["dependencies"]


@pytest.mark.slow
def test_wheel_from_the_archive_holds_package_runs_and_licence(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(tmp_path), str(FOLDER)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    about = f"curvestep_reproduction-{curvestep.__version__}.dist-info/"
    assert all(name.startswith(("curvestep_reproduction/", about)) for name in names)
    assert f"{about}licenses/LICENSE" in names
    assert any(name.startswith("curvestep_reproduction/kept/") for name in names)
    assert not [name for name in names if name.endswith((".npz", ".pt"))]
