"""Try the built packages as a stranger gets them: in an empty environment and an empty folder.

    python tests/support/empty_environment.py dist

First the library alone runs README's script, then the reproduction trains twelve steps and writes the page.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
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
    (desk / "script.py").write_text(script, encoding="utf-8")
    call(programs / "python", "script.py")
    call(programs / "curvestep", "--version")
    install("curvestep-reproduction")
    for command in COMMANDS:
        call(programs / "curvestep", *command.split())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        try_packages(Path(sys.argv[1]), Path(made))
