"""Pages, figures and tables of the reproduction, from kept runs: python docs/reproduction_figures.py.

    --laptop FOLDER    first take over the runs that ``curvestep reproduce`` left in FOLDER
    --longer FOLDER    likewise those of ``curvestep reproduce --scale longer``, as far as they have ended

Nothing is trained. The runs are kept without their checkpoints in ``docs/results/<page>/runs.tar.xz``, from
which every figure and every number is drawn anew: the pictures in ``docs/results/images``, the tables between
``<!-- NAME -->`` and ``<!-- /NAME -->`` in the pages, the claims beside the runs as ``claims.json``, and the
longer ones in the package, so that ``curvestep reproduce`` can print them beside its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from curvestep.lab.paper.claims import Claim, Spread, claims_table
from curvestep.lab.paper.fig1_scatter import clipped_share, control_exponents, elasticity, exponent, spread
from curvestep.lab.paper.plan import Plan, Results
from curvestep.lab.paper.reproduction import LONGER_CLAIMS, draw_all, make_claims, make_plan
from curvestep.lab.report.captions import findings
from curvestep.lab.run.folder import CONFIG, METRICS, STATUS, TRACE, Run, has_ended, read_json, write_json

DOCS = Path(__file__).parent
KEPT = (CONFIG, STATUS, METRICS, TRACE, "calibration.json")
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Page:
    """A scale of the reproduction, and the page that shows it."""

    scale: str
    name: str
    pictures: tuple[str, ...]

    @property
    def archive(self) -> Path:
        """The runs, packed."""
        return DOCS / "results" / self.name / "runs.tar.xz"

    @property
    def claims(self) -> Path:
        """The claims that were judged from them."""
        return self.archive.with_name("claims.json")


PAGES = (
    Page(
        "laptop",
        "reproduction",
        ("fig2", "fig3", "fig4", "fig6", "fig7_growth", "fig8", "equivalence"),
    ),
    Page("longer", "longer", ("fig2", "fig3", "fig4", "fig6", "fig8")),
)


def pack(folder: Path, archive: Path) -> list[str]:
    """Keep the runs below ``folder`` that have ended, without checkpoints; their names."""
    ended = sorted(path.parent for path in (folder / "runs").glob(f"*/*/{CONFIG}") if has_ended(path.parent))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in (run / name for run in ended for name in KEPT):
            if path.exists():
                about = packed.gettarinfo(path, str(path.relative_to(folder / "runs")))
                # The same runs give the same bytes, whoever packs them.
                about.mtime, about.uid, about.gid, about.uname, about.gname = 0, 0, 0, "", ""
                with path.open("rb") as content:
                    packed.addfile(about, content)
    return [run.name for run in ended]


def unpack(page: Page, folder: Path) -> tuple[Results, Plan]:
    """The kept runs of a page in ``folder``, and the whole plan, of which some runs may be missing."""
    with tarfile.open(page.archive) as packed:
        packed.extractall(folder / "runs", filter="data")
    plan = make_plan(page.scale)
    if page.scale != "laptop":  # what needs no training is the same at every scale
        plan = replace(plan, figures=tuple(figure for figure in plan.figures if not figure.experiment))
    places = {path.parent.name: path.parent.parent.name for path in (folder / "runs").glob(f"*/*/{CONFIG}")}
    found = tuple(replace(run, place=places[run.name]) for run in plan.runs if run.name in places)
    return Results(replace(plan, runs=found), folder), plan


def judged(results: Results, plan: Plan) -> list[Claim]:
    """Every claim of the plan; while runs are missing, one without any of its own is "not run yet"."""
    found = {(claim.figure, claim.paper): claim for claim in make_claims(results)}
    if len(results.plan.runs) == len(plan.runs):
        return list(found.values())
    planned = make_claims(Results(plan, results.folder / "nothing"))
    return [
        found.get((claim.figure, claim.paper), replace(claim, measured="", verdict=NOT_RUN, settle=""))
        for claim in planned
    ]


def runs_table(results: Results) -> str:
    """What every setting showed: means over its seeds with 90 % intervals."""
    head = [
        "setting", "seeds", "steps", "training loss at end", "held out", "clipped", "rows", "exponent",
        "its control", "elasticity", "minutes a run",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for setting in dict.fromkeys(run.setting for run in results.plan.runs):
        runs = results.of(setting)
        lost = sum(run.status["status"] == "diverged" for run in runs)
        ends = [run.status["step"] for run in runs]
        steps = " to ".join(str(step) for step in sorted({min(ends), max(ends)}))
        cells = [
            f"`{setting}`: {runs[0].recipe.label}" + f" ({lost} diverged)" * bool(lost),
            ", ".join(str(run.recipe.seed) for run in runs),
            steps,
            str(Spread(values=tuple(float(run.status["train_loss"]) for run in runs))) if not lost else "",
            _held_out(runs) if not lost else "",
            f"{spread(runs, clipped_share).mean:.0%}",
        ]
        measured = ["", "", "", ""]
        with suppress(ValueError, FileNotFoundError):  # too few rows, or a run that was not to be measured
            measured = [str(len(runs[0].trace)), str(spread(runs, exponent)), "", ""]
            measured[2] = str(control_exponents(runs))
            measured[3] = str(spread(runs, elasticity))
        minutes = f"{sum(run.status['seconds'] for run in runs) / len(runs) / 60:.1f}"
        lines.append([*cells, *measured, minutes])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _held_out(runs: list[Run]) -> str:
    """Perplexity on the validation text, or accuracy on the test images, at the end."""
    for split, name, unit in (("valid", "perplexity", ""), ("test", "accuracy", " %")):
        ends = [run.rows(split)[-1:] for run in runs]
        if all(ends) and all(name in end[0] for end in ends):
            return f"{name} {Spread(values=tuple(end[0][name] for end in ends))}{unit}"
    return ""


def filled(text: str, parts: dict[str, str]) -> str:
    """``text`` with what stands between the marks of each part replaced."""
    for name, words in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not mark.search(text):
            raise ValueError(f"The page has no place for {name!r}: it needs <!-- {name} --> and its end.")
        text = mark.sub(lambda found, words=words: found[1] + words + found[2], text)
    return text


def write_results(page: Page) -> None:
    """Draw the figures of a page anew, judge its claims, and put both into it."""
    with tempfile.TemporaryDirectory() as folder:
        results, plan = unpack(page, Path(folder))
        for figure in results.plan.figures:
            if figure.experiment:
                figure.experiment(results.folder, False)
        (results.folder / "figures").mkdir()
        _, undrawn = draw_all(results, progress=False)
        for line in undrawn:
            print(line)
        images, shown = DOCS / "results" / "images", []
        for old in images.glob(f"{page.name}-*.png"):
            old.unlink()
        for picture in read_json(results.folder / "figures.json")["figures"]:
            if picture["name"] in page.pictures:
                name = f"{page.name}-{picture['name'].replace('_', '-')}.png"
                shutil.copy(results.folder / picture["png"], images / name)
                shown.append(f"![{picture['title']}](images/{name})\n\n{picture['caption']}")
        claims = judged(results, plan)
        there = {run.name for run in results.plan.runs}
        missing = [run.name for run in plan.runs if run.name not in there]
        note = f"{len(there)} of {len(plan.runs)} runs."
        if missing:
            note += f" Not run yet: {', '.join(sorted(missing))}."
        kept = {"notes": [note], "claims": [asdict(claim) for claim in claims]}
        write_json(page.claims, kept)
        if page.scale == "longer":
            write_json(LONGER_CLAIMS, kept)
        hours = sum(run.status["seconds"] for run in results.runs) / 3600
        found = f"{note} {hours:.1f} hours of training, one core each.\n\n{findings(kept['claims'])}"
        file = DOCS / "results" / f"{page.name}.md"
        parts = {"found": found, "runs": runs_table(results), "claims": claims_table(claims)}
        parts["figures"] = "\n\n".join(shown)
        file.write_text(filled(file.read_text(encoding="utf-8"), parts), encoding="utf-8")


def comparison() -> str:
    """Claim by claim: the paper, the laptop, the longer runs."""
    laptop, longer = (
        {(one["figure"], one["paper"]): one for one in read_json(page.claims)["claims"]} for page in PAGES
    )
    lines = [["figure", "the paper says", "laptop", "longer runs"], ["---"] * 4]
    for key in dict.fromkeys([*laptop, *longer]):
        lines.append([*key, *(_said(found.get(key)) for found in (laptop, longer))])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _said(claim: dict[str, str] | None) -> str:
    """The verdict, and the number that decided it."""
    if claim is None:
        return "not in the plan"
    decided = claim["measured"].partition("; ")[0]
    return f"**{claim['verdict']}**" + (f": {decided}" if decided else "")


def main(arguments: Iterable[str] | None = None) -> None:
    """Take over runs where folders are given, then write every page whose runs are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for page in PAGES:
        parser.add_argument(f"--{page.scale}", type=Path, metavar="FOLDER")
    given = vars(parser.parse_args(None if arguments is None else list(arguments)))
    for page in PAGES:
        if given[page.scale]:
            print(f"{page.name}: packed {len(pack(given[page.scale], page.archive))} runs")
        if page.archive.exists():
            write_results(page)
            print(f"{page.name}: drawn anew")
    if all(page.claims.exists() for page in PAGES):
        overview = DOCS / "reproduction.md"
        overview.write_text(
            filled(overview.read_text(encoding="utf-8"), {"claims": comparison()}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
