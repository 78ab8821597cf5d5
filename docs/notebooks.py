"""Run every notebook and keep its outputs: ``python docs/notebooks.py [name …]``."""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
NOTEBOOKS = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook after all of its cells ran, in a process of its own."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    return notebook


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What its cells print, numbers replaced by ``#``: the last digits are the machine's."""
    texts = [
        "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")
        for cell in notebook.cells
    ]
    return [re.sub(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", "#", text) for text in texts if text]


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        nbformat.write(executed(name), FOLDER / f"{name}.ipynb")
        print(f"{name}: run")
