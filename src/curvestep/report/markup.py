"""Text for terminals, notebooks and the page: nothing hidden in it, and no markup but our own."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence


def visible(text: str) -> str:
    r"""Text with control characters as escapes: none of them can hide or turn around what stands beside it.

    Example:
        >>> print(visible("run\u202egpj.exe"), visible("a\x1b[31m"))
        run\u202egpj.exe a\u001b[31m
    """
    return text.translate({ord(char): _visible(char) for char in set(text)})


def _visible(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char
    return f"\\u{ord(char):04x}"


def plain(text: str) -> str:
    """Text for a reader of HTML that shows it as it is."""
    return html.escape(visible(text), quote=False)


def html_table(title: str, rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A result for a notebook: a sentence, a table whose first column names things, a list.

    Example:
        >>> html_table("two < three", [("lr", "0.1")])
        '<p>two &lt; three</p><table><tr><th>lr</th><td>0.1</td></tr></table>'
    """
    parts = [f"<p>{plain(title)}</p>"]
    lines = [f"<tr><th>{plain(name)}</th>{_html_cells('td', cells)}</tr>" for name, *cells in rows]
    if table := "".join(lines):
        parts.append(f"<table>{table}</table>")
    if items := _html_cells("li", notes):
        parts.append(f"<ul>{items}</ul>")
    return "".join(parts)


def _html_cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{plain(text)}</{tag}>" for text in texts)
