import math
import subprocess
import sys
import threading
import time

import pytest

from curvestep_reproduction.locks import lock

HOLD = """
import sys, time
from pathlib import Path
from curvestep_reproduction.locks import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_keeps_another_process_out_until_it_dies(tmp_path):
    path = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        inode = path.stat().st_ino
        with pytest.raises(TimeoutError), lock(path):
            pass
        holder.kill()
        holder.wait()
        with lock(path, patience=10.0):
            assert path.stat().st_ino == inode
    assert path.stat().st_ino == inode
    with lock(path):
        pass


@pytest.mark.parametrize("patience", [60.0, math.inf])
def test_a_lock_is_waited_for_as_long_as_patience_lasts_and_said_once(tmp_path, patience):
    path, held, waits = tmp_path / ".lock", threading.Event(), []

    def hold():
        with lock(path):
            held.set()
            time.sleep(1.2)
            held.clear()

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    with lock(path, patience=patience, on_wait=lambda: waits.append(held.is_set())):
        assert waits == [True]
        assert not held.is_set()
    other.join()
