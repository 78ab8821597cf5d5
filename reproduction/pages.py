"""Pages, figures and tables of the reproduction, from kept runs: python reproduction/pages.py.

    --keep FOLDER --commit COMMIT    first keep the planned runs below FOLDER that have ended, made by COMMIT
    --unended                        keep those that have not ended, too, as they stand
    --unfinished FOLDER --commit COMMIT    keep those that have not ended with their checkpoints, and no more
    --put-back FOLDER                  unpack these there, to go on with them, and no more
    --check                            write nothing: judge every claim anew and name the pages that disagree

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
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from curvestep.files import dump_json, load_json
from curvestep.report.drawing import save
from curvestep.trace.history import final_loss
from curvestep.trace.run import read_json, write_json
from curvestep_reproduction.archives import (
    KEPT,
    SUFFIX,
    UNFINISHED,
    damage_of,
    pack_runs,
    pack_unfinished,
    put_back,
    runs_below,
    save_weights,
)
from curvestep_reproduction.claims.claims import (
    PAPER,
    PAPERS_CLAIM,
    Claim,
    Spread,
    central_findings,
    claims_tables,
    decided,
    numbers_behind,
    table,
    tally,
    what_decided,
)
from curvestep_reproduction.claims.errata import errata_list
from curvestep_reproduction.claims.statements import STATEMENTS, make_claims
from curvestep_reproduction.claims.statistics import (
    as_correlation,
    clipped_share,
    correlations,
    exponent,
    spread,
)
from curvestep_reproduction.figures.grid import claims_grid
from curvestep_reproduction.figures.legend import UNCLIPPED, length_words, missing_words
from curvestep_reproduction.figures.plan import KEPT_CLAIMS, KeptRuns, Results, load_kept
from curvestep_reproduction.figures.reproduction import draw_all, make_plan
from curvestep_reproduction.training.run_folder import CHECKPOINT, TrainedRun, has_ended

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "results" / "images"
NUMBERS = "results/claims.md"
CHANGES = "results/verdicts.md"
ERRATA_PAGE = "results/errata.md"
README = "../reproduction/README.md"
# Settings in the table of runs of docs/results/rule.md, in their order: A decides, B is run as time allows.
RULES_RUNS = {
    "A": {
        "paper": (
            "cifar-momentum",
            "cifar-lr5clip0.25",
            "cifar-momentum-float32",
            "cifar-lr5clip0.25-float32",
        ),
        "epoch": ("lm-lr30clip0.25", "lm-lr2clip0.25", *UNCLIPPED),
        "longer": ("lm-lr10clip0.25", "cifar-momentum", "cifar-lr5clip0.25", "cifar-lr1"),
        "laptop": ("lm-calibrated",),
    },
    "B": {"epoch": ("lm-share0.1", "lm-share1", "lm-long"), "paper": ("cifar-lr1",)},
}


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
        ("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "theorems", "fig8", "equivalence"),
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
    "theorem-4": ("an erratum, not counted", "its functions leave the class that it names"),
    "theorem-7": ("an erratum, not counted", "the printed step does not descend from every start"),
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
    for setting in results.settings_with_runs(dict.fromkeys(run.setting for run in results.plan.runs)):
        runs = results.runs_to_draw(setting)
        lost = sum(run.status["status"] == "diverged" for run in runs)
        losses = spread(runs, lambda run: final_loss(*run.column("loss")))
        cells = [
            f"`{setting}`: {runs[0].recipe.label}",
            ", ".join(str(run.recipe.seed) for run in runs),
            ", ".join(dict.fromkeys(length_words(run) for run in runs)),
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


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """The text of a page with other words between the marks of each part."""
    text = page.read_text(encoding="utf-8")
    for name, words in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not mark.search(text):
            raise ValueError(f"{page.name} has no place for {name!r}: it needs <!-- {name} --> and its end.")
        text = mark.sub(lambda found, words=words: found[1] + words + found[2], text)
    return text


def fill(page: Path, **parts: str) -> None:
    """Replace what stands between the marks of each part in a page."""
    page.write_text(filled(page, parts), encoding="utf-8")


def disagreeing(page: Path, **parts: str) -> list[str]:
    """A line for each part of a page that says something else than these words."""
    text = page.read_text(encoding="utf-8")
    differ = [name for name, words in parts.items() if filled(page, {name: words}) != text]
    return [
        f"{page.resolve().relative_to(DOCS.parent)}: `{name}` disagrees with the kept runs" for name in differ
    ]


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


def tables_of(kept: KeptRuns) -> dict[str, str]:
    """What a page of results says of its runs, by the names of its parts."""
    results = kept.results
    found = f"{kept.about} {missing_words(results.plan.runs, results.runs)}".rstrip()
    return {"found": found, "runs": runs_table(results) if results.runs else ""}


def draw_pictures(page: Page, kept: KeptRuns) -> str:
    """Draw the figures of a page anew into its images; the lines that show them."""
    results = kept.results
    drawn = draw_all(results, progress=False, folder=results.folder)
    for line in drawn.failures:
        print(line)
    for old in IMAGES.glob(f"{page.name}-*"):
        old.unlink()
    shown = []
    for picture in [entry for entry in drawn.entries if entry["name"] in page.pictures]:
        name = f"{page.name}-{picture['name']}"
        shutil.copy(results.folder / picture["svg"], IMAGES / f"{name}.svg")
        shown.append(f"![{picture['title']}](images/{name}.svg)")
    return "\n\n".join(shown)


def claims_parts(
    by_scale: Mapping[str, Sequence[Claim]], kept: Mapping[str, KeptRuns]
) -> dict[str, dict[str, str]]:
    """What the pages about claims say, by page and part."""
    claims = decided(by_scale)
    numbers = numbers_behind(claims).removeprefix("## Numbers behind the claims").lstrip()
    return {
        "reproduction.md": {
            "found": tally(claims),
            "summary": " ".join([PAPERS_CLAIM, *central_findings(claims)]),
            "claims": claims_tables(claims, link=NUMBERS),
        },
        "report.md": {
            "found": f"{tally(claims)} {what_decided(claims)}",
            "results": results_table(claims),
            "compute": compute_table(kept),
        },
        NUMBERS: {"numbers": numbers},
        CHANGES: {"changed": changes_table(claims)},
        ERRATA_PAGE: {"errata": errata_list()},
        README: {"missing": missing_table(kept)},
    }


def results_table(claims: Sequence[Claim]) -> str:
    """Every claim of the paper, what was found, and the command that makes its runs anew, for the report."""
    head = ["claim", "what decides it shows", "verdict", "the nearest other scale shows", "command"]
    lines = [head, ["---"] * len(head)]
    figures = {statement.name: statement.figures for statement in STATEMENTS}
    for claim in claims:
        if claim.kind != PAPER:
            continue
        command = " ".join(["curvestep reproduce", *figures[claim.name]])
        if claim.scale:
            command += f" --scale {claim.scale}"
        verdict = f"{claim.verdict}, one seed" if claim.note == "one seed" else claim.verdict
        nearest = [f"`{scale}`: {sentence}" for scale, sentence in claim.beside.items()][-1:]
        source = f"[{claim.source}]({NUMBERS}#{claim.name})"
        lines.append([source, claim.sentence, verdict, "".join(nearest), f"`{command}`"])
    return table(lines)


def compute_table(kept: Mapping[str, KeptRuns]) -> str:
    """Runs and core-hours of every scale: kept, as measured, and planned, as estimated."""
    lines = [["scale", "kept runs", "core-hours, measured", "planned runs", "core-hours, estimated"]]
    lines.append(["---"] * len(lines[0]))
    for scale, found in kept.items():
        runs = found.results.runs
        planned = found.results.plan.runs
        measured = sum(run.status["seconds"] for run in runs) / 3600
        estimated = sum(run.cost for run in planned) / 3600
        lines.append([f"`{scale}`", str(len(runs)), f"{measured:.1f}", str(len(planned)), f"{estimated:.3g}"])
    return table(lines)


def missing_table(kept: Mapping[str, KeptRuns]) -> str:
    """Runs of the rule that are not kept yet, a row a list and scale, with core-hours and the command."""
    head = ["list", "core-hours", "command"]
    lines = [head, ["---"] * len(head)]
    for letter, by_scale in RULES_RUNS.items():
        for scale, settings in by_scale.items():
            results = kept[scale].results
            there = {run.folder.name for run in results.runs}
            planned = [run for setting in settings for run in results.plan.of(setting)]
            runs = [run for run in planned if run.name not in there]
            if runs:
                hours = sum(run.cost for run in runs) / 3600
                names = " ".join(run.name for run in runs)
                lines.append(
                    [letter, f"{hours:.2g}", f"`curvestep reproduce --scale {scale} --only {names}`"]
                )
    return table(lines)


def larger(by_scale: Mapping[str, Sequence[Claim]]) -> dict[str, list[dict[str, Any]]]:
    """The claims of the scales that the package keeps runs of, as plain values."""
    return {scale: [asdict(claim) for claim in rows] for scale, rows in by_scale.items() if scale != "laptop"}


def write_claims_pages(by_scale: Mapping[str, Sequence[Claim]], kept: Mapping[str, KeptRuns]) -> None:
    """The table of claims over all scales, the pages about them, and the package's copy."""
    write_json(KEPT_CLAIMS, larger(by_scale))
    for name, parts in claims_parts(by_scale, kept).items():
        fill(DOCS / name, **parts)
    with tempfile.TemporaryDirectory() as folder:
        _, svg = save(claims_grid(by_scale), Path(folder) / "claims")
        shutil.copy(svg, IMAGES / "claims.svg")


def main(arguments: Iterable[str] | None = None) -> int:
    """Keep the runs of a folder if one is given, then write every page, or with ``--check`` compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--unended", action="store_true", help="keep runs that have not ended, too")
    parser.add_argument("--unfinished", type=Path, metavar="FOLDER")
    parser.add_argument("--put-back", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="write nothing; name pages that disagree")
    parser.add_argument("--commit", help="that made the runs, as in their clone's `git log`")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if (given.keep or given.unfinished) and not given.commit:
        parser.error("--commit is needed, the commit that made these runs")
    if given.unfinished:
        print(f"kept {', '.join(pack_unfinished(given.unfinished, UNFINISHED, commit=given.commit))}")
        return 0
    if given.put_back:
        print(f"put back {', '.join(put_back(UNFINISHED, given.put_back))}")
        return 0
    if given.keep:
        packed = keep(given.keep, commit=given.commit, unended=given.unended)
        print(f"kept {', '.join(packed) or 'no run: none of the plan has ended'}")
    claims: dict[str, list[Claim]] = {}
    loaded: dict[str, Results] = {}
    kept: dict[str, KeptRuns] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            found = load_page(page, Path(folder) / page.scale)
            kept[page.scale] = found
            loaded[page.scale] = found.results
            found.results.at = loaded
            claims[page.scale] = make_claims(found.results, trained=page.scale != "laptop")
            file = DOCS / "results" / f"{page.name}.md"
            lines += found.damaged
            if given.check:
                lines += disagreeing(file, **tables_of(found))
            else:
                fill(file, **tables_of(found), figures=draw_pictures(page, found))
                print(f"{page.name}: drawn anew")
    if given.check:
        lines += pages_that_disagree(claims, kept)
        print("\n".join([tally(decided(claims)), *(lines or ["Every page agrees with its kept runs."])]))
        return int(bool(lines))
    write_claims_pages(claims, kept)
    for line in lines:
        print(line)
    return 0


def pages_that_disagree(by_scale: Mapping[str, Sequence[Claim]], kept: Mapping[str, KeptRuns]) -> list[str]:
    """A line for each part of the pages about claims, or the package's copy, that is not as judged now."""
    lines = []
    for name, parts in claims_parts(by_scale, kept).items():
        lines += disagreeing(DOCS / name, **parts)
    if read_json(KEPT_CLAIMS) != load_json(dump_json(larger(by_scale))):
        lines.append(f"{KEPT_CLAIMS.name} of the package disagrees with the kept runs")
    return lines


def keep(folder: Path, *, commit: str, unended: bool = False) -> list[str]:
    """Pack the runs below a folder, each with those of its scale; their names. Runs of no plan are left.

    A damaged run is named and left, too.
    """
    by_scale: dict[str, list[Path]] = {}
    for run in runs_below(folder):
        damage = damage_of(run)
        if damage:
            print(f"{run.name} is damaged and is not kept: {damage}")
            continue
        by_scale.setdefault(TrainedRun.load(run).recipe.scale, []).append(run)
    packed = []
    for page in PAGES:
        planned = {run.name for run in make_plan(page.scale).runs}
        runs = [run for run in by_scale.get(page.scale, []) if run.name in planned]
        packed += pack_runs(runs, page.archives, commit=commit, unended=unended)
        for run in runs:
            if has_ended(run):  # nothing is left to go on with
                (UNFINISHED / f"{run.name}{SUFFIX}").unlink(missing_ok=True)
        if page.scale == "paper":
            for run in runs:
                if has_ended(run) and (run / CHECKPOINT).exists():
                    save_weights(run, page.archives / f"{run.name}.npz")
    return packed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"pages.py: {error}")
