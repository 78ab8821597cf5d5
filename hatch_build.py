"""Compile the kernel while the package is built, and fill in what depends on where the project lives.

Without a C compiler the package is pure Python. ``CURVESTEP_KERNEL`` in the environment: 0 leaves the kernel
out, 1 stops the build where it cannot be compiled.
"""

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDER = Path("src/curvestep/tensors/kernel")
# No sum of a product in one rounding: then all processors give the same bits.
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fPIC", "-shared"]
if sys.platform == "darwin":
    FLAGS += ["-undefined", "dynamic_lookup", "-mmacosx-version-min=11.0"]
# From the best build to the plainest: for several kinds of processor in one file, or for one.
EXTRAS = [["-DCLONES"], []]


class AddressHook(MetadataHookInterface):
    """What hatchling calls for the fields that pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Links to the repository, and README with its links to files there, once its address is known."""
        address = self.config["address"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme_at(address, text)}
        metadata["urls"] = urls_at(address)


def urls_at(address: str) -> dict[str, str]:
    """The links that an index shows beside the package."""
    if not address:
        return {}
    return {
        "Source": address,
        "Documentation": f"{address}/blob/HEAD/docs/index.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def readme_at(address: str, text: str) -> str:
    """README as it can be read away from its repository."""
    if not address:
        return text
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)", rf"\1({address}/raw/HEAD/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\])\((?!https?:)", rf"\1({address}/blob/HEAD/", text)


class KernelHook(BuildHookInterface):
    """What hatchling calls before it packs a wheel or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; where that works, the wheel holds the library and is for this kind of machine only."""
        wanted = os.environ.get("CURVESTEP_KERNEL")
        if self.target_name != "wheel" or wanted == "0":
            return
        root = Path(self.root)
        library = root / FOLDER / ("kernel.dylib" if sys.platform == "darwin" else "kernel.so")
        if not compiled(root / FOLDER / "kernel.c", library):
            if wanted == "1":
                raise SystemExit("curvestep: CURVESTEP_KERNEL=1 asks for the kernel, which did not compile")
            return
        build_data["artifacts"].append(f"/{library.relative_to(root).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """The machines on which the library loads; on Linux auditwheel finds the oldest glibc."""
    if sys.platform == "darwin":  # of this processor alone, though Python itself may be for two
        return f"macosx_11_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compiled(source: Path, library: Path) -> bool:
    """Whether some set of flags compiled ``source``; the library appears whole or not at all."""
    compiler = os.environ.get("CC") or "cc"
    fresh = library.with_name(f".{library.name}.{os.getpid()}")
    for extra in EXTRAS:
        command = [*compiler.split(), *FLAGS, *extra, "-o", str(fresh), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired):
            break
        if done.returncode == 0:
            fresh.replace(library)
            return True
    fresh.unlink(missing_ok=True)
    print("curvestep: no C compiler, or it failed; building without the kernel", file=sys.stderr)
    return False
