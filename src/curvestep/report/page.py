"""Run folders as one HTML page that needs nothing else: no network, no server, no Python."""

from __future__ import annotations

import base64
import gzip
import io
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import curvestep
from curvestep.checks import needs_extra
from curvestep.files import write_atomically
from curvestep.fit.fit import SmoothnessFit
from curvestep.report import page_words
from curvestep.report.chart import Chart
from curvestep.report.charts import TEMPLATE, comparison, run_charts, to_plotly
from curvestep.report.markup import visible
from curvestep.report.views import RunView, Task, find_views, fit_run, tasks_of
from curvestep.trace.run import Fields, Run, read_json
from curvestep.trace.sources import CLAIMS, Place, place_of

with needs_extra("report"):
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup
    from PIL import Image
    from plotly.offline import get_plotlyjs

FIGURES = "figures.json"  # a reproduction's figures with their titles and captions
GENERATOR = '<meta name="generator" content="curvestep">'  # tells our pages from other files


@dataclass(frozen=True, kw_only=True, repr=False)
class Page:
    """The page that was written, and what it says at the top.

    Args:
        path: The HTML file.
        verdicts: Verdict, advice, reasons and warnings: of a reproduction's claims, then one for each task.
        runs: What the page shows, run by run, the best of a task first.
    """

    path: Path
    verdicts: tuple[Fields, ...]
    runs: tuple[RunView, ...]

    def __repr__(self) -> str:
        return f"<Page: {len(self.runs)} runs, {str(self.path)!r}>"


def write_page(
    paths: Iterable[Place],
    output: str | Path = "report.html",
    *,
    title: str = "",
    overwrite: bool = False,
    fit: Callable[[Run], SmoothnessFit] = fit_run,
) -> Page:
    """Write one self-contained page about these runs.

    Args:
        paths: Run folders, folders that hold runs (a sweep, a reproduction), trace files of your own loop,
            probes or traces. Beside a ``trace.jsonl`` of your own, ``calibration.json`` and the rows of
            ``metrics.jsonl`` with ``"split": "valid"`` are shown too.
        output: The HTML file. A page written before is replaced, any other file is not.
        title: Heading of the page; default: what was found.
        overwrite: Replace ``output`` whatever it is.
        fit: Fits the trace of a run, or knows its fit already.

    Raises:
        ValueError: there is no run and no trace in ``paths``, or ``output`` is a file to keep.
    """
    sources = list(paths)
    places = [place_of(source) for source in sources]
    output = Path(output)
    views = find_views(sources, fit=fit)
    _check_output(output, overwrite=overwrite)
    tasks = tasks_of(views)
    verdicts = [page_words.verdict(task, title=task.name if len(tasks) > 1 else "") for task in tasks]
    claims = claims_of(places)
    if not title and claims:
        title = claims["title"]
    heading = title or page_words.page_title(views, places)
    page = _rendered(tasks, verdicts, claims, figures_of(places), heading)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode())
    if claims:
        verdicts.insert(0, {"title": "", "verdict": claims["found"], "warnings": []})
    runs = tuple(view for task in tasks for view in task.runs)
    return Page(path=output, verdicts=tuple(verdicts), runs=runs)


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to write over a folder, or unasked over anything but a page of ours."""
    if output.is_dir():
        raise ValueError(
            f"`output` must be an HTML file, got the folder {output}. Try {output / 'report.html'}."
        )
    if not overwrite and output.exists() and GENERATOR.encode() not in output.read_bytes()[:2000]:
        raise ValueError(
            f"{output} is there already and is no page of curvestep. Choose another `output` "
            "(-o other.html), or delete it."
        )


def _rendered(
    tasks: Sequence[Task], verdicts: list[Fields], claims: Fields | None, figures: list[Fields], title: str
) -> str:
    """The page as text."""
    views = [view for task in tasks for view in task.runs]
    runs = []
    for number, view in enumerate(views):
        charts = {f"run-{number}-{chart.kind}": chart for chart in run_charts(view)}
        runs.append({"view": view, "charts": charts})
    compared = _comparisons(tasks)
    drawn: dict[str, Chart] = {}  # by the id of their place in the page
    for part in (*runs, *compared):
        drawn |= part["charts"]
    specs = {"template": TEMPLATE, "charts": {key: to_plotly(chart) for key, chart in drawn.items()}}
    environment = Environment(
        loader=PackageLoader("curvestep.report", "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible_text,
    )
    used: set[str] = set()  # words that the page explains; their list stands at its end

    def with_glossary(text: str) -> Markup:
        used.update(page_words.explained_in(text))
        return page_words.with_glossary(text)

    environment.filters["with_glossary"] = with_glossary
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy", "scipy", "plotly"))
    return environment.get_template("page.html.j2").render(
        title=title,
        generator=Markup(GENERATOR),
        subtitle=page_words.subtitle(views),
        verdicts=verdicts,
        claims=claims,
        figures=figures,
        compared=compared,
        runs=runs,
        shown=_shown_first(runs, len(tasks) == 1 and claims is None),
        page_words=page_words,
        used=used,
        setup=page_words.setup(views),
        made_by=f"Made by curvestep {curvestep.__version__}; Python {platform.python_version()}, {versions}.",
        plotly=pack(get_plotlyjs()),
        data=pack(json.dumps(specs, allow_nan=False, separators=(",", ":"))),
    )


def _shown_first(runs: Sequence[Fields], alone: bool) -> Fields:
    """Charts of the best run of the only task, for the top of the page, taken out of those further down."""
    if not alone:
        return {}
    best = runs[0]["view"]
    charts = runs[0]["charts"]
    row = {key: chart for key, chart in charts.items() if chart.place == "row"}
    beside = {}
    if len(runs) == 1:  # where there are several, their comparison stands there
        beside = {key: chart for key, chart in charts.items() if chart.place == "verdict"}
    for key in (*row, *beside):
        del charts[key]
    return {"name": best.name, "setting": best.setting, "row": row, "beside": beside}


def _comparisons(tasks: Sequence[Task]) -> list[Fields]:
    """The charts of tasks with several runs, and the names of their settings."""
    compared: list[Fields] = []
    for number, task in enumerate(tasks):
        charts = {f"task-{number}-{chart.kind}": chart for chart in comparison(task.runs)}
        if charts:
            first, *_ = charts.values()
            compared.append({"name": task.name, "charts": charts, "series": first.series})
    return compared


def _visible_text(value: object) -> object:
    """Text with control characters shown; markup and all else as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return value


def pack(text: str) -> str:
    """Text, compressed and in base64; the browser unpacks it with ``DecompressionStream``."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def claims_of(paths: Sequence[Path]) -> Fields | None:
    """The claims of the first reproduction among ``paths``, and what was found in a few sentences."""
    files = [path / CLAIMS for path in paths if (path / CLAIMS).is_file()]
    if not files:
        return None
    saved = read_json(files[0])
    notes = [f"Data: {source}." for source in saved.get("data", ())]
    picture = saved.get("picture")
    return {
        "picture": _picture(files[0].parent, picture) if picture else None,
        "title": str(saved.get("title", "")),
        "parts": page_words.claim_parts(saved),
        "notes": [*notes, *saved.get("notes", ())],
        "found": str(saved.get("found", "")),
    }


def figures_of(paths: Sequence[Path]) -> list[Fields]:
    """The figures that the reproductions among ``paths`` drew, as images; a missing one says so."""
    pictures = []
    for path in paths:
        if (path / FIGURES).is_file():
            pictures += [_picture(path, about) for about in read_json(path / FIGURES).get("figures", ())]
    return pictures


def _picture(folder: Path, about: Fields) -> Fields:
    file = folder / str(about.get("png"))
    title = str(about.get("title", file.stem))
    if not file.is_file():
        return {"title": title, "caption": f"There is no {about.get('png')}.", "image": ""}
    return {"title": title, "caption": str(about.get("caption", "")), "image": _image(file)}


def _image(file: Path) -> str:
    """The picture in few colours, for the source of an image."""
    with Image.open(file) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE).convert("RGB")
    packed = io.BytesIO()
    few.save(packed, "WEBP", lossless=True)
    return f"data:image/webp;base64,{base64.b64encode(packed.getvalue()).decode()}"
