"""Numbers that stand in several places, each with the one place it comes from: ``python docs/facts.py``.

A fact is a number of the code, and the words around it. Wherever these words stand, in README, docs,
docstrings or help, the number has to be that of the code. ``python docs/facts.py`` prints every place.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from curvestep import clip_rules
from curvestep.fit import control, diagnostics, fit, within
from curvestep.smoothness import schedule

ROOT = Path(__file__).parents[1]
PLACES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
)
FOLDERS = ("docs/**/*.md", "src/**/*.py", "reproduction/src/**/*.py", "reproduction/*.md")
WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
SHARED_BLOCKS = ("max-norm",)  # of docs/tables.py, on several pages
NUMBER = rf"(\d[\d,]*\d(?:\.\d+)?|\d(?:\.\d+)?|{'|'.join(WORDS)})"


@dataclass(frozen=True)
class Fact:
    """A number and the words that it stands in: regular expressions in which ``#`` is the number."""

    name: str
    value: float
    words: tuple[str, ...]
    fewest: int = 2  # places where it has to stand

    def places(self, texts: Mapping[str, str]) -> Iterator[tuple[str, re.Match[str]]]:
        """Every page and match."""
        for page, text in texts.items():
            for words in self.words:
                pattern = words.replace("#", NUMBER).replace(" ", r"[\s>*#]+(?:\"\s+f?\")?")
                yield from ((page, match) for match in re.finditer(pattern, text, re.MULTILINE))


def default(function: object, name: str) -> float:
    """The default of a parameter."""
    assert callable(function)
    return float(inspect.signature(function).parameters[name].default)


def pinned(package: str, page: str, sign: str) -> float:
    """Major and minor version of a package in a file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"{package}{sign}(\d+\.\d+)", text)
    assert found is not None, (package, page)
    return float(found[1])


_REPLICATES = control._REPLICATES  # pyright: ignore[reportPrivateUsage]
_WINDOWS = diagnostics._WINDOWS  # pyright: ignore[reportPrivateUsage]
_BETA = 0.9  # of Adam and of momentum, as the docs say beside the limits

FACTS = (
    Fact("gradients of a row", 2 + len(schedule.short_fractions([])), ("measured step costs # gradients",)),
    Fact("share of measuring", 100 * schedule.COST_SHARE,
        ("(?:then|takes?|later rows take|most) # % of the gradients",)),
    Fact("first rows", schedule.FIRST_ROWS, ("first # rows come", "# rows early", "# rows soon")),
    Fact("spacing of the first rows", schedule.SPACING, ("rows come # steps apart",)),
    Fact("oldest Python", pinned("python = \">", "pyproject.toml", "="),
        ("Python # or later", r"python = \">=#")),
    Fact("oldest torch", pinned("torch", "pyproject.toml", ">="),
        ("torch # or later; numpy", r"with #\.0 \|", "torch>=#", r"torch==#\.0 numpy")),
    Fact("torch of the tests", pinned("torch", "constraints.txt", "=="),
        (r"\| torch \| #\.0", r"torch==#\.0$")),
    Fact("deviations of zscore", default(clip_rules.zscore, "z"),
        ("more than # standard deviations above their",), 1),
    Fact("ratio of ema", default(clip_rules.ema, "ratio"), ("above # times its own",), 1),
    Fact("share of weight_ratio", 100 * default(clip_rules.weight_ratio, "ratio"), ("unit above # % of",), 1),
    Fact("percentile", default(clip_rules.percentile, "p"), ("the #th percentile of past",), 1),
    Fact("window of percentile", default(clip_rules.percentile, "window"), ("keeps the last # norms",), 1),
    Fact("quadratics of the control", _REPLICATES, ("on # random quadratics",), 1),
    Fact("saturated control", fit.SATURATED, ("control that reaches #",)),
    Fact("error of a size", within.MOST_SIZE_ERROR, ("error is at most #",), 1),
    Fact("parts of a run", _WINDOWS, ("with # parts of the run",), 1),
    Fact("limit of Adam", 2 * (1 + _BETA) / (1 - _BETA), (r"for Adam \(# at 0\.9\)", "for SGD, # for Adam")),
    Fact("limit of momentum", 2 * (1 + _BETA), (r"momentum \(# at 0\.9\)",), 1),
    Fact("patches of extend.md", 11, ("each of # changes", "has # patches", "^# patches")),
    Fact("largest model of calibrate", 17,
        ("(?:has|cost`,) # million parameters",), 1),
    Fact("steps that clip_stats counts as recent", 100, ("over the last # steps", "of the last # steps")),
    Fact("core-hours of scale epoch", 30,
        (r"its first epoch \| none \| #", "LSTM, # core-hours; paper", "in about # core-hours; or")),
)  # fmt: skip


def texts() -> dict[str, str]:
    """Every text in which a fact may stand, by its path."""
    paths = [ROOT / name for name in PLACES]
    paths += [path for pattern in FOLDERS for path in sorted(ROOT.glob(pattern))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def number(text: str) -> float:
    """The number that digits or a word stand for."""
    return float(WORDS.index(text)) if text in WORDS else float(text.replace(",", "").rstrip("."))


def problems(found: Mapping[str, str]) -> list[str]:
    """Places with another number than the code's, and facts that stand in too few places."""
    trouble = []
    for fact in FACTS:
        places = list(fact.places(found))
        trouble += [
            f"{page}: {match[0]!r}, and {fact.name} is {fact.value:g}"
            for page, match in places
            if abs(number(match[1]) - fact.value) > 1e-9 * fact.value
        ]
        if len(places) < fact.fewest:
            trouble.append(f"{fact.name} stands in {len(places)} places, not in {fact.fewest} or more")
    return trouble + [f"{name} is not the same on every page" for name, n in blocks(found).items() if n > 1]


def blocks(found: Mapping[str, str]) -> dict[str, int]:
    """How many forms there are of each marked block, and of what README's script prints."""
    forms: dict[str, set[str]] = {}
    for text in found.values():
        for name in SHARED_BLOCKS:
            found_here = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
            forms.setdefault(name, set()).update(found_here)
    printed = re.findall(r"^```text\n(.*?)^```", found["docs/tutorial.md"], re.DOTALL | re.MULTILINE)
    forms["what README's script prints"] = {"".join(printed)}
    forms["what README's script prints"] |= set(
        re.findall(r"^```text\n(.*?)^```", found["README.md"], re.DOTALL | re.MULTILINE)
    )
    return {name: len(contents) for name, contents in forms.items()}


if __name__ == "__main__":
    everything = texts()
    for one in FACTS:
        for where, match in one.places(everything):
            print(f"{one.name}\t{match[1]}\t{where}\t{' '.join(match[0].split())}")
    print("\n".join(problems(everything)), file=sys.stderr)
