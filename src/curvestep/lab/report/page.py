"""Run folders as one HTML page that needs nothing else: no network, no server, no Python."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from plotly.offline import get_plotlyjs

import curvestep
from curvestep._files import write_atomically
from curvestep.lab.report.captions import comparison_in_words
from curvestep.lab.report.heat import heat_map
from curvestep.lab.report.payload import pack, page_data
from curvestep.lab.report.sections import claims_of, claims_verdict, gallery_of, run_sections, verdicts
from curvestep.lab.report.views import RunView, find_views


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page that was written, and what it says at the top.

    Args:
        path: The HTML file.
        verdicts: Verdict, advice, reasons and warnings, one for each task.
        runs: What the page shows, run by run.
    """

    path: Path
    verdicts: tuple[dict[str, object], ...]
    runs: tuple[RunView, ...]


def write_page(paths: Iterable[str | Path], output: str | Path = "report.html", *, title: str = "") -> Page:
    """Write one self-contained page about these runs.

    Args:
        paths: Run folders, folders that hold runs (a sweep, a reproduction), or trace files of your own loop.
        output: The HTML file; replaced if it is there.
        title: Heading of the page; default: what was found.

    Raises:
        ValueError: there is no run and no trace in ``paths``.
    """
    places = [Path(path) for path in paths]
    views = find_views(places)
    claims = claims_of(places)
    said = [*([claims_verdict(claims)] if claims else []), *verdicts(views)]
    page = render_page(views, said, places, title=title)
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode())
    return Page(path=output, verdicts=tuple(said), runs=tuple(views))


def render_page(
    views: list[RunView], said: list[dict[str, Any]], places: Sequence[Path] = (), *, title: str = ""
) -> str:
    """The page as text.

    Args:
        views: The runs to show.
        said: The verdicts at the top.
        places: Folders that may hold the claims and figures of a reproduction.
        title: Heading of the page.
    """
    heat = heat_map(views)
    claims = claims_of(places)
    environment = Environment(
        loader=PackageLoader("curvestep.lab.report", "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title or _title(views, reproduction=claims is not None),
        subtitle=_subtitle(views),
        verdicts=said,
        claims=claims,
        gallery=gallery_of(places),
        comparison=comparison_in_words(views),
        heat=heat,
        runs=run_sections(views),
        made_by=_made_by(),
        plotly=pack(get_plotlyjs()),
        data=pack(page_data(views, heat)),
        **{name: _template(environment, file) for name, file in _FILES.items()},
    )


_FILES = {"css": "page.css", "wall_js": "wall.js", "page_js": "page.js"}


def _template(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _title(views: list[RunView], *, reproduction: bool) -> str:
    if reproduction:
        return "Why gradient clipping accelerates training: a reproduction"
    return views[0].name if len(views) == 1 else f"{len(views)} runs"


def _subtitle(views: list[RunView]) -> str:
    counts: dict[str, int] = {}
    for view in views:
        counts[view.status or "measured"] = counts.get(view.status or "measured", 0) + 1
    data = dict.fromkeys(str(view.facts["data"]) for view in views if view.facts.get("data"))
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    if not views:
        return "figures and claims"
    return "; ".join([f"{len(views)} run{'s' if len(views) > 1 else ''} ({states})", *data])


def _made_by() -> str:
    names = ("torch", "numpy", "scipy", "plotly")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"Made by curvestep {curvestep.__version__}; Python {platform.python_version()}, {versions}."
