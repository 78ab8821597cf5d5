"""Runs as archives: those that have ended without their checkpoint, unfinished ones with it, weights alone.

``kept/<scale>`` beside this file has an archive a run: its folder without its checkpoint, and ``origin.json``
with the commit that made it. ``kept/unfinished`` has runs to be gone on with.
"""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvestep.files import dump_json, write_atomically
from curvestep.trace.run import CONFIG, METRICS, STATUS, TRACE, read_json
from curvestep_reproduction.training.run_folder import CHECKPOINT, TrainedRun, has_ended

KEPT = Path(__file__).parent / "kept"
UNFINISHED = KEPT / "unfinished"
ORIGIN = "origin.json"
UNKNOWN = "an earlier commit"  # of runs that were packed before the commit was noted
RUN_FILES = (CONFIG, STATUS, METRICS, TRACE, "calibration.json")
SUFFIX = ".tar.xz"


def pack_runs(runs: Iterable[Path], target: Path, *, commit: str, unended: bool = False) -> list[str]:
    """Pack run folders into ``target``, an archive each; their names.

    Runs that have not ended are left out, or with ``unended`` packed as they stand, to their last whole row.
    """
    packed = [run for run in runs if unended or has_ended(run)]
    for run in packed:
        _pack(run, target, RUN_FILES, commit)
    return [run.name for run in packed]


def pack_unfinished(folder: Path, target: Path, *, commit: str) -> list[str]:
    """Pack every run below ``folder`` that has not ended, with its checkpoint: to go on elsewhere."""
    runs = [run for run in runs_below(folder) if (run / CHECKPOINT).exists() and not has_ended(run)]
    for run in runs:
        # The checkpoint first: rows that are written meanwhile are cut off when the run goes on.
        _pack(run, target, (CHECKPOINT, *RUN_FILES), commit)
    return [run.name for run in runs]


def put_back(source: Path, folder: Path) -> list[str]:
    """Unpack the unfinished runs in ``source`` into ``folder``; their names. A run that is there stays."""
    names = []
    for archive in sorted(source.glob(f"*{SUFFIX}")):
        name = archive.name.removesuffix(SUFFIX)
        if (folder / name).exists():
            raise ValueError(f"{folder / name} is there already. Move it away, or choose another folder.")
        damage = unpack(archive, folder)
        if damage:
            raise ValueError(damage)
        names.append(name)
    return names


def runs_below(folder: Path) -> list[Path]:
    """The run folders below ``folder``, by path."""
    return sorted(path.parent for path in folder.rglob(CONFIG))


def _pack(run: Path, target: Path, files: Sequence[str], commit: str) -> None:
    """Replace the archive of a run; the same files are the same bytes each time."""
    # In this order: rows that are written meanwhile may be more than the status counts, not fewer.
    contents = {name: (run / name).read_bytes() for name in files if (run / name).exists()}
    for rows in contents.keys() & {METRICS, TRACE}:
        contents[rows] = contents[rows][: contents[rows].rfind(b"\n") + 1]
    contents[ORIGIN] = (dump_json({"commit": commit}) + "\n").encode()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", preset=9) as packed:
        for name, content in contents.items():
            about = tarfile.TarInfo(f"{run.name}/{name}")  # no time, no owner
            about.size = len(content)
            packed.addfile(about, io.BytesIO(content))
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / f"{run.name}{SUFFIX}", archive.getvalue())


def unpack_all(source: Path, runs: Path) -> Iterator[str]:
    """Unpack the archives of ``source`` into ``runs``; a line for each archive or run that is damaged."""
    for archive in sorted(source.glob(f"*{SUFFIX}")):
        damage = unpack(archive, runs)
        if damage:
            yield damage
    for run in runs_below(runs):
        damage = damage_of(run)
        if damage:
            shutil.rmtree(run)
            yield f"{run.name} is damaged: {damage}"


def unpack(archive: Path, runs: Path) -> str:
    """Unpack one archive; where it breaks off, what is wrong, and the run that was cut is taken away."""
    last = Path()
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                last = (runs / member.name).parent
                packed.extract(member, runs, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        if last != Path():
            shutil.rmtree(last, ignore_errors=True)
        return f"{archive.name} is damaged: {error}"
    return ""


def damage_of(folder: Path) -> str:
    """What is wrong with a run that cannot be read to its end; empty if nothing is."""
    try:
        run = TrainedRun.load(folder)
        _ = run.metrics
        if run.trace_path.exists():
            _ = run.trace
    except ValueError as error:
        return str(error)
    return run.lost_rows


def commit_of(folder: Path) -> str:
    """The commit that made a kept run."""
    file = folder / ORIGIN
    return str(read_json(file).get("commit", UNKNOWN)) if file.exists() else UNKNOWN


def save_weights(run: Path, path: Path) -> None:
    """Write parameters and buffers of a run's checkpoint as ``.npz``, by their names in the model."""
    state = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=True)["model"]
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_atomically(path, packed.getvalue())


def load_weights(path: Path) -> dict[str, Tensor]:
    """What :func:`save_weights` wrote, for ``model.load_state_dict``."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
