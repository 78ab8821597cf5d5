"""Pages of the site that are made from the code while it is built (`hooks` in mkdocs.yml).

A page for each part of the API, every command's help, every key of a row, every error and warning.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from curvestep.cli import all_commands, main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from docs.math_roles import key_tables  # noqa: E402
from docs.sentences import templates  # noqa: E402

REPRODUCTION = "curvestep_reproduction"
# A line for each page of the API: its title, and what it describes, without the name of the package.
API_PAGES = """\
Optimizers
  ClippedSGD: optim.clipped.ClippedSGD
  ClippedAdamW: optim.adamw.ClippedAdamW
  NormalizedSGD: optim.normalized.NormalizedSGD
  ScaledSGD: optim.sgd.ScaledSGD
  clip: optim.clip.clip optim.clip.Clipping optim.stats.ClipStats optim.stats.Spike
  clip_grad_norm_: optim.grad_norm.clip_grad_norm_
  clip_rules: clip_rules
  steps: steps
Before and after training
  calibrate: calibration.calibrate.calibrate calibration.result.Calibration
  advise: advice.advice.advise advice.advice.Advice
  fit_smoothness: fit.fit.fit_smoothness fit.fit.SmoothnessFit
  report: report.report report.page.Page
Measuring
  SmoothnessProbe: smoothness.probe.SmoothnessProbe
  Trace: trace.trace.Trace trace.step_gains.StepGains
  GradientOracle: smoothness.oracle.GradientOracle calibration.loaders.representative_batches
  Replay: smoothness.replay.Replay
  errors: smoothness.determinism.NonDeterministicError smoothness.determinism.UntrackedParametersError
  segment_smoothness: smoothness.estimators.segment_smoothness
  local_smoothness: smoothness.estimators.local_smoothness
  spectral_smoothness: smoothness.estimators.spectral_smoothness
  critical_lr: smoothness.estimators.critical_lr
  clipping_bias: calibration.clip_direction.clipping_bias calibration.clip_direction.ClippingBias
  Autopsy: autopsy.recorder.Autopsy autopsy.explanation.Explanation
  loggers: integrations.loggers
Frameworks
  Lightning: integrations.lightning integrations.reporting.StepMeasurement
  Transformers: integrations.transformers
Theory
  theory: theory.inequalities theory.complexity theory.certificates theory.rules
  theory.problems: theory.problems.*
  theory.theorems: theory.theorems.*
Reproduction
  experiments: recipes.get_recipe training.loop.train training.sweep.sweep figures.reproduction.reproduce training.auto.calibrate_recipe
"""  # noqa: E501


def _described(words: str, package: str) -> tuple[str, ...]:
    """The full names of what a page describes; a star stands for every module of a folder."""
    found: list[str] = []
    for word in words.split():
        if word.endswith(".*"):
            folder = ROOT / "src" / package / word.removesuffix(".*").replace(".", "/")
            modules = sorted(path.stem for path in folder.glob("[a-z]*.py"))
            found += [f"{package}.{word.removesuffix('*')}{module}" for module in modules]
        else:
            found.append(f"{package}.{word}")
    return tuple(found)


def api() -> dict[str, dict[str, tuple[str, ...]]]:
    """Titles of pages and what they describe, by group."""
    groups: dict[str, dict[str, tuple[str, ...]]] = {}
    group = ""
    for line in API_PAGES.splitlines():
        if not line.startswith(" "):
            group = line
            groups[group] = {}
            continue
        title, _, words = line.strip().partition(": ")
        package = REPRODUCTION if group == "Reproduction" else "curvestep"
        groups[group][title] = _described(words, package)
    return groups


def api_file(title: str) -> str:
    """The page of this title; lower case, since a file system may not tell cases apart."""
    return f"api/{title.lower()}.md"


def api_page(title: str, described: tuple[str, ...]) -> str:
    """A page that mkdocstrings fills from docstrings."""
    return f"# {title}\n\n" + "\n\n".join(f"::: {path}" for path in described) + "\n"


def api_index() -> str:
    """The list of all pages of the API."""
    words = (
        "Import the library by `import curvestep as cs`. "
        "Names are then `cs.name`, except for frameworks, theory and experiments."
    )
    lines = ["# API", "", words, ""]
    for group, pages in api().items():
        lines += [f"## {group}", ""]
        for title, described in pages.items():
            others = [path.rpartition(".")[2] for path in described]
            names = ", ".join(f"`{name}`" for name in others if name != title)
            lines.append(
                f"- [`{title}`]({api_file(title).removeprefix('api/')})" + (f": {names}" if names else "")
            )
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """What ``--help`` prints, of the program and of every command."""
    os.environ["COLUMNS"] = "80"
    words = (
        "`advise`, `report` and `fit` belong to the library. The others come with `curvestep-reproduction`."
    )
    parts = ["# Command line", "", words, ""]
    for name in ("", *all_commands()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main([name, "--help"] if name else ["--help"])
        parts += [f"## curvestep {name}".rstrip(), "", "```", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(parts)


def row_schema() -> str:
    """Every key of a row and of a header."""
    words = (
        "A row describes one step, from $x$ to $x + d$, on one batch whose gradient is $g$. "
        "A key that was not measured is absent from the row, and `trace.column(name)` has NaN there. "
        "The [glossary](glossary.md) explains the words."
    )
    return f"# Row schema\n\n{words}\n\n{key_tables()}\n"


def troubleshooting() -> str:
    """Every error and warning with its cure."""
    words = (
        "Search this page for a part of the message; `{}` stands for what is filled in. "
        "The left column says what was found, the right one what to do. "
        "Where the right column is empty, the message names the value that is needed. "
        "The page on [trust](trust.md#a-warning-and-what-to-do) explains the warnings of `fit_smoothness`."
    )
    lines = ["# Errors and warnings", "", words, ""]
    found: dict[str, list[str]] = {}
    for template in templates():
        if template.is_message:
            room = template.place.partition("/")[0].partition(".py")[0]
            statement, cure = template.parts
            found.setdefault(room, []).append(f"| {_cell(statement)} | {_cell(cure)} |")
    for room, rows in sorted(found.items()):
        lines += [f"## {room}", "", "| message | what to do |", "| --- | --- |", *dict.fromkeys(rows), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text in a cell of a table."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
    return text.replace("$", "&#36;").replace("_", "\\_") if "`" not in text else text.replace("$", "&#36;")


def pages() -> dict[str, str]:
    """Every generated page by its path."""
    made = {
        "api/index.md": api_index(),
        "command_line.md": command_line(),
        "row_schema.md": row_schema(),
        "troubleshooting.md": troubleshooting(),
    }
    listed = {title: described for group in api().values() for title, described in group.items()}
    return {**made, **{api_file(title): api_page(title, described) for title, described in listed.items()}}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation, where it says ``API: api``."""
    listed = [{group: [{title: api_file(title)} for title in titles]} for group, titles in api().items()]
    assert isinstance(config.nav, list)
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    place = next(number for number, part in enumerate(reference) if part == {"API": "api"})
    reference[place] = {"API": ["api/index.md", *listed]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
