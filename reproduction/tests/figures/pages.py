"""The script that writes the pages of the reproduction, which is no part of the package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def load_script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("reproduction_figures", ROOT / "reproduction" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass asks for it
    spec.loader.exec_module(module)
    return module


reproduction_figures = load_script()
