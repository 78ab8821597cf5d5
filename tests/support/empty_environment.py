"""Try the built packages as a stranger gets them: in an empty environment and an empty folder.

    python tests/support/empty_environment.py dist

First the library alone runs README's script, advises and fits. What needs more has to say how to get it.
Then the reproduction trains twelve steps and writes the page.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
KEEP_TRACE = """
with cs.Trace("trace.jsonl", header=probe.trace.header) as trace:
    for row in probe.trace:
        trace.append(dict(row))
"""
ALONE = ["--version", "advise trace.jsonl", "fit trace.jsonl"]
# What the library alone does not have, and how its one line says to get it.
MISSING = {"report trace.jsonl": "'.[report]'", "train ptb-lstm": ". ./reproduction"}
COMMANDS = [
    "train ptb-lstm --corpus topics --steps 12 --probe-every 1 --folder run --offline --quiet",
    "advise run/trace.jsonl",
    "report run",
    "reproduce --help",
]


def try_packages(dist: Path, folder: Path) -> None:
    """Install the packages in ``dist`` one after the other and use them; the first failure ends it."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    desk = folder / "desk"
    desk.mkdir()
    # Nothing of the checkout may be found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command: str | Path) -> None:
        print("+", *command, flush=True)
        subprocess.run(command, cwd=desk, env=environment, check=True)

    def install(package: str) -> None:
        pip = (programs / "python", "-m", "pip", "install", "--quiet")
        # From the folder alone, so that no index can replace it; then what it needs.
        call(*pip, "--no-index", "--no-deps", "--find-links", dist.resolve(), package)
        call(*pip, package)

    install("curvestep")
    (script,) = re.findall(
        r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (desk / "script.py").write_text(script + KEEP_TRACE, encoding="utf-8")
    call(programs / "python", "script.py")
    for command in ALONE:
        call(programs / "curvestep", *command.split())
    for command, way_out in MISSING.items():
        print("+ curvestep", command, flush=True)
        done = subprocess.run(
            [programs / "curvestep", *command.split()],
            cwd=desk,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0, done
        assert done.stderr.count("\n") == 1, done
        assert way_out in done.stderr, done
    install("curvestep-reproduction")
    for command in COMMANDS:
        call(programs / "curvestep", *command.split())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        try_packages(Path(sys.argv[1]), Path(made))
