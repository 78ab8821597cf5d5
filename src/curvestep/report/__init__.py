"""Write the page about runs: ``curvestep.report(...)``; the modules below draw results and make the page.

The module can be called like its function :func:`report`, whichever of them was imported first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curvestep.report.page import Page
    from curvestep.smoothness.probe import SmoothnessProbe
    from curvestep.trace.trace import Trace


def report(
    *runs: SmoothnessProbe | Trace | str | Path,
    output: str | Path = "report.html",
    title: str = "",
    overwrite: bool = False,
) -> Page:
    """Write one self-contained HTML page about these runs: charts, verdict, warnings (extra `report`).

    Args:
        runs: Probes; traces and their files; run folders; folders that hold any of these. At least one.
        output: The HTML file. A page written before is replaced, any other file is not.
        title: Heading of the page; default: what was found.
        overwrite: Replace ``output`` whatever it is.

    Returns:
        Where the page is (``path``), and what it says (``verdicts``, ``runs``).
    """
    from curvestep.report.page import write_page

    return write_page(runs, output, title=title, overwrite=overwrite)


class _CallableModule(ModuleType):
    """A module that :func:`report` makes callable."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallableModule
