"""Docstrings are written with Sphinx's roles; this lets mkdocs show their mathematics, names and options."""

import re
from typing import Any

import griffe

from curvestep.trace.schema import FIELDS, HEADER_FIELDS

_INLINE = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^([ \t]*)\.\. math::[ \t]*\n((?:\1[ \t]+.*\n?|[ \t]*\n)+)", re.MULTILINE)
_CODE = re.compile(r"^([ \t]*)\.\. code-block:: (\w+)[ \t]*\n((?:\1[ \t]+.*\n?|[ \t]*\n)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^([ \t]*)Example:$", re.MULTILINE)  # mkdocstrings knows the plural only
_NAME = re.compile(r":(?:func|class|mod|meth|attr):`~?([\w.]+)`")


def translate(text: str) -> str:
    """The docstring with its roles as Markdown."""
    text = _BLOCK.sub(lambda m: _formulas(_dedented(m[2], m[1]), m[1]), text)
    text = _CODE.sub(lambda m: f"{m[1]}```{m[2]}\n{_dedented(m[3], m[1])}\n{m[1]}```\n\n", text)
    text = _EXAMPLE.sub(r"\1Examples:", text)
    text = _INLINE.sub(lambda m: f"\\({m[1]}\\)", text)
    return _NAME.sub(lambda m: f"`{m[1].rsplit('.', 1)[-1]}`", text)


def _formulas(block: str, indent: str) -> str:
    """Each paragraph as a formula; one with ``&`` is aligned there."""
    made = []
    for formula in re.split(r"\n\s*\n", block):
        if "&" in formula and r"\begin" not in formula:
            formula = f"{indent}\\begin{{aligned}}\n{formula}\n{indent}\\end{{aligned}}"
        made.append(f"{indent}$$\n{formula}\n{indent}$$\n\n")
    return "".join(made)


def _dedented(block: str, indent: str) -> str:
    lines = block.rstrip().split("\n")
    first = next(line for line in lines if line.strip())
    extra = len(first) - len(first.lstrip())
    return "\n".join(indent + line[extra:] for line in lines).strip("\n")


class MathRoles(griffe.Extension):
    """Translates every docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = translate(obj.docstring.value)


def key_tables() -> str:
    """Every key of a row and of a header of a trace, with its unit and meaning."""
    parts = []
    for heading, table in (("A row holds", FIELDS), ("The header holds", HEADER_FIELDS)):
        parts += [f"{heading}:", "", "| key | unit | meaning |", "| --- | --- | --- |"]
        parts += [f"| `{name}` | {field.unit} | {field.meaning} |" for name, field in table.items()] + [""]
    return "\n".join(parts)


class TraceKeys(griffe.Extension):
    """Lists the keys of rows and header below the trace."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Put the tables under the docstring."""
        if cls.path == "curvestep.trace.trace.Trace" and cls.docstring is not None:
            cls.docstring.value += f"\n\n{key_tables()}\n"


class UnpackedOptions(griffe.Extension):
    """Lists what ``**options: Unpack[...]`` takes, where a class describes the options one by one."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Put the options into one signature."""
        words = func.parent.docstring if func.parent is not None else None
        for parameter in list(func.parameters):
            annotation = parameter.annotation
            if not isinstance(annotation, griffe.ExprSubscript) or annotation.canonical_name != "Unpack":
                continue
            if words is None or re.search(rf"^[ \t]+{parameter.name}: ", words.value, re.MULTILINE):
                continue
            options = func.modules_collection[annotation.slice.canonical_path]
            del func.parameters[parameter.name]
            for kind in (options, *options.mro()):
                for name, option in kind.attributes.items():
                    func.parameters[name] = griffe.Parameter(
                        name,
                        annotation=option.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default="...",
                    )
