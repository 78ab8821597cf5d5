"""Write what the Python blocks of a page print below each block: ``python docs/outputs.py [page …]``."""

import contextlib
import io
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("tutorial.md", "../README.md")  # pages whose blocks stand by themselves
BLOCK = re.compile(r"(^```python\n(.*?)^```\n)(\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
CALIBRATION = re.compile(r"^\w+ with warm-up and decay: peak lr .*?cal\.plot\(\)$", re.DOTALL | re.MULTILINE)


def with_outputs(text: str) -> str:
    """The page with the output of each of its Python blocks, run in order in one namespace."""
    namespace = {"__name__": "page"}

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[2], "page", "exec"), namespace)
        shown = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
        return match[1] + (f"\n```text\n{shown}\n```\n" if shown else "")

    return BLOCK.sub(run, text)


def calibration_in(name: str) -> str:
    """What ``print(cal)`` shows on a page."""
    return CALIBRATION.findall((DOCS / name).read_text(encoding="utf-8"))[0]


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        page = DOCS / name
        page.write_text(with_outputs(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "calibrate.md"  # shows what the README's script prints
    shown = page.read_text(encoding="utf-8")
    printed = shown.replace(calibration_in("calibrate.md"), calibration_in("../README.md"))
    page.write_text(printed, encoding="utf-8")
