"""``curvestep.report``: the page about runs, once the packages of its extra are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from curvestep.checks import needs_extra

if TYPE_CHECKING:
    from curvestep.display.page import Page
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
    with needs_extra("report"):
        from curvestep.display.page import write_page
    return write_page(runs, output, title=title, overwrite=overwrite)
