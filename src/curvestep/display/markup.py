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
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        f"\\u{ord(char):04x}" if unicodedata.category(char) in hidden and char not in "\n\t" else char
        for char in text
    )


def plain(text: str) -> str:
    """Text for a reader of HTML that shows it as it is."""
    return html.escape(visible(text), quote=False)


def html_table(title: str, rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """What a notebook shows of a result: a sentence, a table whose first column names things, a list.

    Example:
        >>> html_table("two < three", [("lr", "0.1")])
        '<p>two &lt; three</p><table><tr><th>lr</th><td>0.1</td></tr></table>'
    """
    table = "".join(
        f"<tr><th>{plain(name)}</th>{''.join(f'<td>{plain(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    items = "".join(f"<li>{plain(note)}</li>" for note in notes)
    parts = f"<table>{table}</table>" * bool(table), f"<ul>{items}</ul>" * bool(items)
    return f"<p>{plain(title)}</p>" + "".join(parts)
