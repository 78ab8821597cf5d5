"""Commands open no socket, and write nothing outside of the folder that they are given."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from curvestep import Trace

# Prints sockets that are connected or bound, and files that are opened for writing, renamed or removed.
WATCHED = """
import atexit, json, os, sys
seen = []
def watch(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"):
        seen.append([event, repr(args[1:])])
    elif event == "open" and isinstance(args[0], (str, bytes)):
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(str(args[1] or "")) & set("wax+"):
            seen.append([event, os.path.abspath(os.fsdecode(args[0]))])
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"):
        seen.append([event, os.path.abspath(os.fsdecode(args[0]))])
    elif event in ("subprocess.Popen", "os.system", "os.exec"):
        seen.append([event, repr(args[0])])
sys.addaudithook(watch)
atexit.register(lambda: print(json.dumps(seen), file=sys.stderr))
from curvestep.cli import main
sys.exit(main(sys.argv[1:]))
"""

HOSTILE = [b"PK\x03\x04" + bytes(64), b"\x1f\x8b" + bytes(64), b"\x93NUMPY", b"[" * 100_000]


def write_run(folder):
    trace = Trace(folder / "trace.jsonl", header={"optimizer": "ClippedSGD", "fractions": [0.5, 1.0]})
    for k in range(40):
        values = {"loss": 3.0 - 0.01 * k, "grad_norm": 1.0 + 0.1 * (k % 5), "smoothness": 2.0, "lr": 0.1}
        trace.append({"step": 5 * k, "step_norm": 0.1, "secants": [2.0, 2.0], **values})


def accesses(folder, *words):
    env = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        check=False,
    )
    return done.returncode, json.loads(done.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["advise", "fit", "report"])
def test_a_command_touches_nothing_outside_of_its_folder(command, tmp_path):
    write_run(tmp_path)
    code, seen = accesses(tmp_path, command, str(tmp_path / "trace.jsonl"))
    assert code == 0
    allowed = (str(tmp_path), "/dev/", "/proc/", tempfile.gettempdir() + "/torchinductor")
    outside = [entry for entry in seen if not entry[1].startswith(allowed)]
    assert outside == []


@pytest.mark.parametrize("command", ["advise", "fit", "report"])
@pytest.mark.parametrize("content", HOSTILE, ids=["zip", "gzip", "npy", "nested"])
def test_a_hostile_file_in_place_of_a_trace_is_one_line(command, content, tmp_path, capsys):
    from curvestep.cli import main

    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    code = main([command, str(path)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code != 0
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert list(tmp_path.iterdir()) == [path]
