import io

import pytest

from curvestep_reproduction import progress
from curvestep_reproduction.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal gets to see."""
    out = io.StringIO()
    make = progress.Console
    monkeypatch.setattr(
        progress, "Console", lambda **options: make(file=out, force_terminal=True, width=100, **options)
    )
    return out


def test_without_a_terminal_a_line_comes_each_interval_and_at_the_end(capsys, clock):
    with Progress("training", 100, start=40, interval=10) as shown:
        for done in range(41, 101):
            clock(1)
            shown.update(done, grad_norm=0.25)
        shown.update(100, grad_norm=0.25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: 50/100 grad norm 0.25, 50 s left"  # by the speed since the start, not 40
    assert lines[-1] == "training: 100/100 grad norm 0.25"
    assert len(lines) == 6


def test_a_line_in_between_puts_the_next_off(capsys, clock):
    with Progress("all runs", 8.0, unit="share", interval=30) as shown:
        clock(20)
        shown.print("[1/8] first: finished")
        clock(20)
        shown.update(1.0, "second 3/9")
        clock(20)
        shown.update(2.0, "second 6/9")
    assert capsys.readouterr().out.splitlines() == [
        "[1/8] first: finished",
        "all runs: 25 % second 6/9, 3 min left",
    ]


def test_nothing_is_shown_unless_asked_for(capsys, terminal):
    with Progress("training", 1, shown=False) as shown:
        shown.update(1)
        shown.print("line")
    assert (*capsys.readouterr(), terminal.getvalue()) == ("", "", "")


def test_in_a_terminal_there_is_a_bar_with_lines_above_it(capsys, terminal):
    with Progress("training", 20) as shown:
        shown.print("one [run] ended")
        shown.update(20, loss=1.5)
    assert capsys.readouterr().out == ""
    assert "one [run] ended" in terminal.getvalue()
    assert "loss 1.5" in terminal.getvalue()


def test_bytes_are_counted_once_their_number_is_known(capsys, clock):
    with Progress("set.tgz", unit="bytes", interval=5) as shown:
        shown.update(0)
        shown.total = 30_000_000
        clock(5)
        shown.update(10_000_000)
    assert capsys.readouterr() == ("", "set.tgz: 10/30 MB, 10 s left\n")
