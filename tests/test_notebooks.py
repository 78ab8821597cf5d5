"""The notebooks show what their cells print."""

import pytest

pytest.importorskip("nbclient", reason="comes with the group `dev`")
import nbformat
from docs.notebooks import FOLDER, NOTEBOOKS, executed, printed


def shown_by(name):
    """What the notebook shows as it stands."""
    return printed(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel's sockets and event loop
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_shows_is_what_its_cells_print(name):
    assert shown_by(name) == printed(executed(name))


def test_there_are_three_notebooks_with_outputs():
    assert len(NOTEBOOKS) == 3
    assert all(shown_by(name) for name in NOTEBOOKS)
