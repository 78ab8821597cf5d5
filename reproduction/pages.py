"""Pages, figures and tables of the reproduction, from kept runs: python reproduction/pages.py.

    --laptop FOLDER --commit COMMIT    first keep the runs below FOLDER that have ended, made by COMMIT
    --longer FOLDER --commit COMMIT    likewise those of ``curvestep reproduce --scale longer``
    --epoch FOLDER --commit COMMIT     likewise those of ``--scale epoch``
    --paper FOLDER --commit COMMIT     likewise those of ``--scale paper``
    --unended                          keep runs that have not ended, too, as they stand
    --unfinished FOLDER --commit COMMIT    keep those that have not ended with their checkpoints, and no more
    --put-back FOLDER                  unpack these there, to go on with them, and no more

Nothing is trained. Runs are kept without checkpoints, an archive each: those of ``laptop`` in
``docs/results/reproduction``, those of the larger scales in the package (``kept``), so that
``curvestep reproduce`` shows them beside its own. Final weights of the scale ``paper`` are kept beside their
archives, as ``.npz``. Every figure and every number is drawn from the kept runs anew: the pictures in
``docs/results/images``, the tables between ``<!-- NAME -->`` and ``<!-- /NAME -->`` in the pages, and the
claims. A run that is missing or damaged is named, the rest is drawn.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from curvestep.trace.history import final_loss
from curvestep.trace.run import write_json
from curvestep_reproduction.archives import (
    KEPT,
    UNFINISHED,
    pack_runs,
    pack_unfinished,
    put_back,
    runs_below,
    save_weights,
)
from curvestep_reproduction.claims.claims import (
    Claim,
    Spread,
    claims_tables,
    decided,
    numbers_behind,
    table,
    tally,
)
from curvestep_reproduction.claims.statements import make_claims
from curvestep_reproduction.claims.statistics import (
    as_correlation,
    clipped_share,
    correlations,
    exponent,
    spread,
)
from curvestep_reproduction.figures.legend import length_words, missing_words
from curvestep_reproduction.figures.plan import KEPT_CLAIMS, KeptRuns, Results, load_kept
from curvestep_reproduction.figures.reproduction import draw_all, make_plan
from curvestep_reproduction.training.run_folder import CHECKPOINT, TrainedRun, has_ended

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "results" / "images"
NUMBERS, CHANGES = "results/claims.md", "results/verdicts.md"


@dataclass(frozen=True)
class Page:
    """A scale of the reproduction, and the page that shows it."""

    scale: str
    name: str
    pictures: tuple[str, ...]

    @property
    def archives(self) -> Path:
        """The folder of the packed runs."""
        return DOCS / "results" / self.name if self.scale == "laptop" else KEPT / self.scale


PAGES = (
    Page(
        "laptop",
        "reproduction",
        ("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig7_growth", "fig8", "equivalence"),
    ),
    Page("longer", "longer", ("fig1", "fig2", "fig3", "fig4", "fig6", "fig8")),
    Page("epoch", "epoch", ("fig1", "fig2", "fig4", "fig5", "fig6")),
    Page("paper", "paper", ("fig3", "fig4")),
)


# Claims whose verdict is another than in the table before this one, which tested exponents less a control by
# rules of its own: what it said at laptop scale and of the longer runs, and why that changed.
CHANGED = {
    "follows-gradient": ("one row with 2(b): supported", "two claims, each with the paper's own word"),
    "less-without-clipping": ("supported", "weaker is not much less"),
    "less-at-small-lr": ("supported", "the correlation is as strong as at lr 30"),
    "momentum-none": ("cannot tell, supported", "both signs count, within a constant lr"),
    "images-clipped": ("supported, cannot tell", "two seeds"),
    "large-lr-diverges": ("contradicted", "one such lr is what the paper says"),
    "clipping-accelerates": ("supported", "the longer runs have one lr without clipping: no choice"),
    "best-validation": ("supported", "likewise"),
    "images-fastest": ("contradicted", "the claim is about 200 epochs"),
    "images-accuracy": ("cannot tell", "likewise"),
    "images-95": ("not testable", "a run takes hours, not weeks"),
    "tenth-smoothness": ("one row with the gradient norm: supported", "two claims"),
    "tenth-gradient": ("supported", "nine of ten errors must be below a tenth"),
    "quartic-conservative": (
        "contradicted",
        "the claim is conservative theory; its arithmetic is an erratum",
    ),
    "gradients-stay": ("contradicted, supported", "on the oracle, with the paper's model"),
    "about-three-times": ("supported", "the interval must hold 3"),
    "normalizing-is-clipping": ("contradicted", "the paper says: up to a factor of the step size"),
    "inside-steps": ("cannot tell, supported", "steps overshoot before the second fraction"),
}


def changes_table(claims: Iterable[Claim]) -> str:
    """Every claim whose verdict changed: from what, to what, and why."""
    rows = [
        [
            f"[{claim.source}](claims.md#{claim.name})",
            CHANGED[claim.name][0],
            claim.verdict,
            CHANGED[claim.name][1],
        ]
        for claim in claims
        if claim.name in CHANGED
    ]
    head = ["claim", "before: laptop, longer", "now", "why"]
    return table([head, ["---"] * len(head), *rows])


def runs_table(results: Results) -> str:
    """What every setting showed: means over its seeds with 90 % intervals."""
    head = [
        "setting", "seeds", "length", "training loss at end", "held out", "clipped", "rows",
        "correlation of logs", "exponent",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for setting in results.there(dict.fromkeys(run.setting for run in results.plan.runs)):
        runs = results.shown(setting)
        lost = sum(run.status["status"] == "diverged" for run in runs)
        losses = spread(runs, lambda run: final_loss(*run.column("loss")))
        cells = [
            f"`{setting}`: {runs[0].recipe.label}",
            ", ".join(str(run.recipe.seed) for run in runs),
            ", ".join(dict.fromkeys(map(length_words, runs))),
            f"{lost} of {len(runs)} diverged" if lost else str(losses),
            "" if lost else _held_out(runs),
            f"{spread(runs, clipped_share).mean:.0%}",
            *_measured_cells(runs),
        ]
        lines.append(cells)
    return table(lines)


def _measured_cells(runs: list[TrainedRun]) -> list[str]:
    """Rows, correlation and exponent of runs; empty where they were not measured or are too short."""
    try:
        z = correlations(runs)
        return [str(len(runs[0].trace)), as_correlation(z), str(spread(runs, exponent))]
    except (ValueError, FileNotFoundError):
        return ["", "", ""]


def _held_out(runs: list[TrainedRun]) -> str:
    """Perplexity on the validation text, or accuracy on the test images, at the end."""
    for split, name, unit in (("valid", "perplexity", ""), ("test", "accuracy", " %")):
        ends = [run.rows(split)[-1:] for run in runs]
        if all(ends) and all(name in end[0] for end in ends):
            return f"{name} {Spread(values=tuple(end[0][name] for end in ends))}{unit}"
    return ""


def fill(page: Path, **parts: str) -> None:
    """Replace what stands between the marks of each part in a page."""
    text = page.read_text(encoding="utf-8")
    for name, words in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not mark.search(text):
            raise ValueError(f"{page.name} has no place for {name!r}: it needs <!-- {name} --> and its end.")
        text = mark.sub(lambda found, words=words: found[1] + words + found[2], text)
    page.write_text(text, encoding="utf-8")


def load_page(page: Page, folder: Path) -> KeptRuns:
    """The kept runs of a page, with the results of what needs no training."""
    plan = make_plan(page.scale)
    if page.scale != "laptop":  # what needs no training is the same at every scale
        trained = tuple(figure for figure in plan.figures if any(figure.runs(page.scale)))
        plan = replace(plan, figures=trained)
    kept = load_kept(plan, page.archives, folder)
    for figure in plan.figures:
        figure.experiment(folder, False)
    return kept


def write_results(page: Page, kept: KeptRuns) -> None:
    """Draw the figures of a page anew and fill its tables."""
    results = kept.results
    drawn = draw_all(results, progress=False, folder=results.folder)
    for line in (*kept.damaged, *drawn.failures):
        print(line)
    for old in IMAGES.glob(f"{page.name}-*.png"):
        old.unlink()
    shown = []
    for picture in [entry for entry in drawn.entries if entry["name"] in page.pictures]:
        name = f"{page.name}-{picture['name'].replace('_', '-')}.png"
        shutil.copy(results.folder / picture["png"], IMAGES / name)
        shown.append(f"![{picture['title']}](images/{name})")
    found = f"{kept.about} {missing_words(results.plan.runs, results.runs)}".rstrip()
    runs = runs_table(results) if results.runs else ""
    fill(DOCS / "results" / f"{page.name}.md", found=found, runs=runs, figures="\n\n".join(shown))


def write_claims_pages(by_scale: dict[str, list[Claim]]) -> None:
    """The table of claims over all scales, the page with the numbers behind it, and the package's copy."""
    larger = {scale: rows for scale, rows in by_scale.items() if scale != "laptop"}
    write_json(KEPT_CLAIMS, {scale: [asdict(claim) for claim in rows] for scale, rows in larger.items()})
    claims = decided(by_scale)
    fill(DOCS / "reproduction.md", found=tally(claims), claims=claims_tables(claims, link=NUMBERS))
    fill(DOCS / NUMBERS, numbers=numbers_behind(claims).removeprefix("## Numbers behind the claims").lstrip())
    fill(DOCS / CHANGES, changed=changes_table(claims))


def main(arguments: Iterable[str] | None = None) -> None:
    """Take over runs where folders are given, then write every page whose runs are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for page in PAGES:
        parser.add_argument(f"--{page.scale}", type=Path, metavar="FOLDER")
    parser.add_argument("--unended", action="store_true", help="keep runs that have not ended, too")
    parser.add_argument("--unfinished", type=Path, metavar="FOLDER")
    parser.add_argument("--put-back", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", help="that made the runs, as in their clone's `git log`")
    given = vars(parser.parse_args(None if arguments is None else list(arguments)))
    if given["unfinished"]:
        check_commit(given, "unfinished", parser)
        print(f"kept {', '.join(pack_unfinished(given['unfinished'], UNFINISHED, commit=given['commit']))}")
        return
    if given["put_back"]:
        print(f"put back {', '.join(put_back(UNFINISHED, given['put_back']))}")
        return
    claims: dict[str, list[Claim]] = {}
    loaded: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            take_over(page, given, parser)
            kept = load_page(page, Path(folder) / page.scale)
            loaded[page.scale] = kept.results
            kept.results.at = loaded
            write_results(page, kept)
            claims[page.scale] = make_claims(kept.results, trained=page.scale != "laptop")
            print(f"{page.name}: drawn anew")
    write_claims_pages(claims)


def take_over(page: Page, given: dict[str, Any], parser: argparse.ArgumentParser) -> None:
    """Pack the runs of the folder that is given for a page, if one is."""
    if not given[page.scale]:
        return
    check_commit(given, page.scale, parser)
    folder = given[page.scale]
    packed = pack_runs(folder, page.archives, commit=given["commit"], unended=given["unended"])
    if page.scale == "paper":
        for run in runs_below(folder):
            if has_ended(run) and (run / CHECKPOINT).exists():
                save_weights(run, page.archives / f"{run.name}.npz")
    print(f"{page.name}: kept {', '.join(packed) or 'no run: none has ended'}")


def check_commit(given: dict[str, Any], option: str, parser: argparse.ArgumentParser) -> None:
    """An error of the command line unless the commit that made the runs is given."""
    if not given["commit"]:
        parser.error(f"--{option} needs --commit, the commit that made these runs")


if __name__ == "__main__":
    main()
