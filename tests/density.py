"""How much a line of the package decides: branches, ternaries, numeric constants, lines with ``Any``."""

import ast
from collections import defaultdict
from dataclasses import dataclass

BRANCHES = (
    ast.If, ast.For, ast.While, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp, ast.match_case,
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
NUMERIC = (
    ast.Constant, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context,
    ast.Call, ast.Attribute, ast.Name,
)  # fmt: skip


@dataclass
class Density:
    """Counts over some files; documentation, comments and empty lines are no code."""

    code_lines: int = 0
    branches: int = 0
    ternaries: int = 0
    any_lines: int = 0

    def add(self, source):
        """Count one file in."""
        tree, documentation = ast.parse(source), set()
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            self.branches += isinstance(node, BRANCHES)
            self.ternaries += isinstance(node, ast.IfExp)
        for number, line in enumerate(source.splitlines(), 1):
            if number not in documentation and line.strip() and not line.strip().startswith("#"):
                self.code_lines += 1
                self.any_lines += "Any" in line and "import" not in line

    @property
    def branches_per_100(self):
        return 100 * self.branches / max(self.code_lines, 1)


def numeric_constants(source):
    """Name and values of each constant of a module that is made of numbers; those of dicts and tuples too."""
    found = defaultdict(list)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        for name, number in _pairs(target, value):
            if isinstance(name, ast.Name) and name.id.lstrip("_").isupper() and _is_numeric(number):
                literals = [part for part in ast.walk(number) if isinstance(part, ast.Constant)]
                count = len(literals) if isinstance(number, (ast.Tuple, ast.List)) else 1
                found[name.id.lstrip("_")] += [ast.dump(number)] * count
    return dict(found)


def _pairs(target, value):
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return zip(target.elts, value.elts, strict=True)
    values = value.values if isinstance(value, ast.Dict) else [value]
    return [(target, one) for one in values]


def _is_numeric(node):
    parts = list(ast.walk(node))
    literals = [part.value for part in parts if isinstance(part, ast.Constant)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return (
        all(isinstance(part, NUMERIC) for part in parts)
        and bool(literals)
        and all(type(value) in (int, float) for value in literals)
        and names <= {"math", "np"}
    )
