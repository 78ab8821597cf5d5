"""Every template of a sentence that the package can show a user: ``python docs/sentences.py [--long]``.

A template is a string of four words or more that is no docstring; what is filled in later stands as ``{}``.
Its kind is the call around it (``ValueError``, ``Note``, ``warn``, …), or the function it stands in.
``--long`` lists only those with a sentence above the limit.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "curvestep"
FEWEST_WORDS = 4  # shorter strings are labels
MOST_WORDS = 20  # of a sentence


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


if __name__ == "__main__":
    for template in templates():
        if "--long" not in sys.argv or template.longest > MOST_WORDS:
            print(f"{template.place}\t{template.kind}\t{template.longest}\t{template.text!r}")
