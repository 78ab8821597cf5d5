"""The page on the theorems: every Python block runs as it is and prints what stands under it."""

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "theorems.md"
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_every_python_block_has_its_output():
    assert len(BLOCKS) == PAGE.read_text(encoding="utf-8").count("```python") >= 9


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_prints_what_stands_under_it(index):
    code, expected = BLOCKS[index]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{PAGE.name}, block {index}", "exec"), {"__name__": "__main__"})
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed.getvalue(), flags), printed.getvalue()
