"""Every sentence that a user can see: ``python docs/sentences.py [--long | --draw SEED]``.

A template is a string of the library of four words or more that is no docstring; what is filled in later
stands as ``{}``. Its kind is the call around it (``ValueError``, ``Note``, ``warn``, …), or the function it
stands in. Sentences of README and docs follow. Else all go to ``docs/sentences.txt``; ``--long`` prints
templates with a sentence above the limit, ``--draw SEED`` forty templates and twenty sentences of the docs.
"""

import ast
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "curvestep"
LIST = ROOT / "docs" / "sentences.txt"
FEWEST_WORDS = 4  # shorter strings are labels
MOST_WORDS = 20  # of a sentence
# What a cure begins with, in an error or a warning.
IMPERATIVES = frozenset(
    "Add Ask Average Believe Calibrate Call Choose Clip Compute Delete Divide Draw Drop Fit Gather Give Hand "
    "Install Leave Let Load Look Lower Make Measure Move Multiply Name Open Pass Probe Put Raise Read Record "
    "Reduce Return Run Set Shard Skip Start Take Train Try Unpack Use Wrap Write".split()
)
NO_MESSAGES = {
    "Field",
    "Assumption",
    "Estimator",
    "Axis",
    "Chart",
    "flag",
    "option",
    "positional",
    "AssertionError",
}


@dataclass(frozen=True)
class Template:
    """A string for users, where it stands, and its kind."""

    place: str
    kind: str
    text: str

    @property
    def longest(self) -> int:
        """Words of its longest sentence; code between backquotes is one word."""
        plain = re.sub(r"`[^`]*`|\{\}(?:[\w.,()·/^-]*\{\})*", "x", self.text)
        return max(len(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+|\n", plain))

    @property
    def is_message(self) -> bool:
        """Whether it is an error or a warning, rather than a part of a result."""
        if self.kind in NO_MESSAGES or self.place.startswith(
            ("report/", "cli/", "advice/", "autopsy/explanation")
        ):
            return False
        return self.kind.endswith("Error") or self.text.endswith((".", "?"))

    @property
    def parts(self) -> tuple[str, str]:
        """What was found, and what to do about it; the latter may be empty."""
        sentences = re.split(r"(?<=[.!?])\s+", self.text)
        for number, sentence in enumerate(sentences):
            if number and (sentence.split()[0] in IMPERATIVES or sentence.endswith("?")):
                return " ".join(sentences[:number]), " ".join(sentences[number:])
        return self.text, ""


def text_of(node: ast.AST) -> str:
    """The text of a string, of an f-string or of a sum of both; nothing of other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


class _Collector(ast.NodeVisitor):
    """Templates of one module, each with its kind."""

    def __init__(self, path: Path) -> None:
        self.path, self.kinds, self.found = path, ["module"], list[Template]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node.name, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node)

    def visit_Call(self, node: ast.Call) -> None:
        self._inside(ast.unparse(node.func).rpartition(".")[2], node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        text = text_of(node)
        if len(text.split()) >= FEWEST_WORDS:
            place = f"{self.path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            self.found.append(Template(place, self.kinds[-1], text))
        elif not text:
            super().generic_visit(node)

    def _inside(self, kind: str, node: ast.AST) -> None:
        self.kinds.append(kind)
        super().generic_visit(node)
        self.kinds.pop()


def templates() -> Iterator[Template]:
    """All templates of the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        collector = _Collector(path)
        collector.visit(ast.parse(path.read_text(encoding="utf-8")))
        yield from collector.found


def page_sentences() -> Iterator[Template]:
    """The sentences of README and the hand-written pages, without code, tables and targets of links."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"(?ms)^ *```.*?^ *```|<!--.*?-->|\$\$.*?\$\$", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"(?m)^(\||#|!\[|>).*$", "", text)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s", text):
            for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", " ".join(paragraph.split())):
                if len(sentence.split()) >= FEWEST_WORDS:
                    yield Template(path.name, "docs", sentence)


def listed() -> str:
    """All of them, one a line: place, kind, text."""
    found = [*templates(), *page_sentences()]
    lines = [f"{one.place.partition(':')[0]}\t{one.kind}\t{one.text!r}" for one in found]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def drawn(seed: int, num_templates: int = 40, num_docs: int = 20) -> list[str]:
    """A draw from the list as it was written."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    docs = [line for line in lines if line.split("\t")[1] == "docs"]
    others = [line for line in lines if line.split("\t")[1] != "docs"]
    rng = random.Random(seed)
    return rng.sample(others, num_templates) + rng.sample(docs, num_docs)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--long"]:
            for template in templates():
                if template.longest > MOST_WORDS:
                    print(f"{template.place}\t{template.kind}\t{template.longest}\t{template.text!r}")
        case ["--draw", seed]:
            print("\n".join(drawn(int(seed))))
        case _:
            LIST.write_text(listed(), encoding="utf-8")
