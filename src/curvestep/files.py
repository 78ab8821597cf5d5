r"""Files that survive crashes and damage: atomic replacement, append-only rows, strict JSON.

NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in the JSON mapping
of Protocol Buffers. A row is one line, a JSON object whose last key ``crc32`` is the checksum of the bytes
before it: a flipped bit is found when the row is read.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import sys
import threading
import uuid
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, TypeGuard

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

Row = dict[str, Any]  # what JSON knows, by name

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES = {str(value): name for name, value in _FLOATS.items()}
_KEY = "crc32"
_BLOCK = 64  # rows that are compressed together in memory
_DAMAGED = f"it does not match its checksum: damaged, or edited without removing `{_KEY}`"
_TAIL = f', "{_KEY}": "'.encode()
_TAIL_LENGTH = len(_TAIL) + len('01234567"}')
_PART = ".part"  # suffix of a file that is being written
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)  # no O_APPEND: a failed write is cut off
_WRITING = threading.RLock()  # writers of one process take turns: the lock of a file is that of the process


def replace_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a new file beside ``path``, flush it to the disk, and rename it to ``path``.

    A reader sees the old file or the new one, never a part; a write that fails leaves the old one.
    """
    beside = _beside(path)
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """A new name in the same folder for a file that is being written."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PART}")


def remove_parts(folder: Path) -> None:
    """Delete the unfinished files of killed writers; for a folder in which nobody else writes now."""
    for path in folder.glob(f".*{_PART}"):
        path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace ``path`` by ``data``; text is written as UTF-8."""
    if isinstance(data, str):
        data = data.encode()
    replace_atomically(path, lambda file: file.write(data))


def dump_json(value: object, *, indent: int | None = None) -> str:
    r"""``value`` as strict JSON, ASCII only; what is not finite becomes a string, a dataclass an object.

    Example:
        >>> dump_json({"max_norm": float("inf"), "losses": (2.0, float("nan"))})
        '{"max_norm": "Infinity", "losses": [2.0, "NaN"]}'
    """
    return json.dumps(_to_strict(value), indent=indent, allow_nan=False)


def load_json(text: str | bytes) -> Any:
    """The value that :func:`dump_json` wrote; ``ValueError`` if ``text`` is not strict JSON.

    Example:
        >>> load_json('{"max_norm": "Infinity"}')
        {'max_norm': inf}
    """
    try:
        return _from_strict(json.loads(text, parse_constant=_refuse))
    except RecursionError:
        raise ValueError("its lists or objects are nested too deep") from None


def add_checksum(values: Mapping[str, object]) -> Row:
    """The values and, as their last key ``crc32``, the checksum of the others.

    Example:
        >>> add_checksum({"step": 3})
        {'step': 3, 'crc32': '08b1f3bf'}
    """
    return {**values, _KEY: _sum_of(values)}


def take_checksum(values: Row) -> Row:
    """The values without their checksum, if they have one; ``ValueError`` if it is that of others."""
    others = {name: value for name, value in values.items() if name != _KEY}
    checksum = _sum_of(others)
    if values.get(_KEY, checksum) != checksum:
        raise ValueError(_DAMAGED)
    return others


def _sum_of(values: Mapping[str, object]) -> str:
    return f"{zlib.crc32(dump_json(values).encode()):08x}"


def dump_row(row: Mapping[str, object]) -> bytes:
    r"""One row as a line of strict JSON with a checksum.

    Example:
        >>> dump_row({"step": 3, "loss": float("nan")})
        b'{"step": 3, "loss": "NaN", "crc32": "ccffd7a7"}\n'
    """
    body = dump_json(row).encode()[:-1]
    if not row:
        return b"{}\n"
    return body + _tail_of(body) + b"\n"


def _tail_of(body: bytes) -> bytes:
    """The end of a row: the checksum of all before it."""
    return b'%b%08x"}' % (_TAIL, zlib.crc32(body))


def load_row(line: bytes) -> tuple[Row, bool]:
    """The row in a line, and whether it had a checksum; ``ValueError`` says what is wrong with the line."""
    row = None
    with suppress(ValueError):  # UnicodeDecodeError is one
        row = load_json(line)
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object" if line.endswith(b"\n") else "the last write was cut short")
    line = line.rstrip(b"\r\n")
    body = line[:-_TAIL_LENGTH]
    tail = line[-_TAIL_LENGTH:]
    summed = tail.startswith(_TAIL)
    if summed and tail != _tail_of(body):
        raise ValueError(_DAMAGED)
    row.pop(_KEY, None)
    return row, summed


def read_rows(file: BinaryIO, path: Path, *, skip_damaged: bool = True) -> Iterator[Row]:
    """The rows from here to the end of ``file``, as :func:`read_lines` finds them."""
    for _, row in read_lines(file, path, skip_damaged=skip_damaged):
        yield row


def read_lines(
    file: BinaryIO, path: Path, *, first_line: int = 1, skip_damaged: bool = True
) -> Iterator[tuple[bytes, Row]]:
    """The lines from here to the end of ``file`` that hold a row, each with its row.

    A torn last line is left out with a warning, and so is a damaged line if ``skip_damaged``; else it raises
    ``ValueError``. Rows without a checksum are read, with one warning for all of them.
    """
    unsummed = 0
    for number, line in enumerate(file, first_line):
        if not line.strip():
            continue
        try:
            row, summed = load_row(line)
        except ValueError as error:
            if not skip_damaged and line.endswith(b"\n"):
                raise ValueError(f"{path}: line {number} is no row, {error}.") from None
            warnings.warn(f"{path}: skipped line {number}, {error}.", stacklevel=2)
            continue
        unsummed += not summed
        yield line, row
    if unsummed:
        warnings.warn(
            f"{path}: {unsummed} rows have no checksum (written by hand?), so damage to them is not noticed.",
            stacklevel=2,
        )


def end_of_last_row(file: BinaryIO) -> int:
    """Where to append: the length of the file without a torn or damaged last line."""
    end = 0
    last = b""
    start_of_last = 0
    file.seek(0)
    for line in file:
        if line.strip():
            last = line
            start_of_last = end
        end += len(line)
    try:
        load_row(last)
    except ValueError:
        return start_of_last
    return end


class PackedRows:
    """Rows in memory as the lines of JSON that a file holds; full blocks are compressed, to about a quarter.

    Example:
        >>> rows = PackedRows()
        >>> for step in range(100):
        ...     rows.append(b'{"step": %d}' % step)
        >>> len(rows), rows[70], next(rows.lines())
        (100, {'step': 70}, b'{"step": 0}')
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._recent: list[bytes] = []  # less than a block

    def append(self, line: bytes) -> None:
        """Add a row by its line, with or without the end of the line."""
        self._recent.append(line.rstrip(b"\n"))
        if len(self._recent) == _BLOCK:
            self._blocks.append(zlib.compress(b"\n".join(self._recent), level=1))
            self._recent = []

    def __len__(self) -> int:
        return _BLOCK * len(self._blocks) + len(self._recent)

    def __getitem__(self, index: int) -> Row:
        block, place = divmod(index, _BLOCK)
        row, _ = load_row(self._lines_of(block)[place])
        return row

    def __iter__(self) -> Iterator[Row]:
        for line in self.lines():
            row, _ = load_row(line)
            yield row

    def lines(self) -> Iterator[bytes]:
        """Every line, without its end."""
        for block in range(len(self._blocks) + 1):
            yield from self._lines_of(block)

    def _lines_of(self, block: int) -> list[bytes]:
        if block == len(self._blocks):
            return self._recent
        return zlib.decompress(self._blocks[block]).split(b"\n")


class RowFile:
    """File that grows by whole rows: a write that fails leaves it as it was, a second writer is an error.

    Each row goes to the operating system at once, so a killed process loses nothing. The file is locked
    against other processes until it is closed or the process dies. In one process the first object that
    writes goes on; another one that was opened before finds the file changed. The descriptor is closed when
    the object dies.

    Args:
        path: The file; created if need be.
        end: Where to go on; what follows is cut off. Default: the end of the file.

    Raises:
        OSError: With ``errno.EBUSY``, if somebody else writes to the file. Opening and writing check it.
    """

    close: Callable[[], object]

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        self.path = path
        with _WRITING:
            self._open()
            if end is not None:
                self.cut(end)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._end == 0

    def reader(self) -> BinaryIO:
        """The file from its start, for reading; closing what comes back does not close the file.

        Another descriptor would not do: closing that one would release the lock.
        """
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return os.fdopen(self._descriptor, "rb", closefd=False)

    def cut(self, end: int) -> None:
        """Cut off what follows ``end``, and go on there."""
        os.ftruncate(self._descriptor, end)
        self._go_to(end)

    def _go_to(self, end: int) -> None:
        self._end = end
        # Not os.pread, which Windows lacks. Reading the last byte also goes to the end.
        os.lseek(self._descriptor, max(0, end - 1), os.SEEK_SET)
        self._ends_in_line = os.read(self._descriptor, 1) not in (b"", b"\n")

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row."""
        self.write(dump_row(row))

    def write(self, line: bytes) -> None:
        """Append a line as it is; on ``OSError`` (a full disk) cut off what was written of it and raise."""
        with _WRITING:
            self._check_alone()
            if self._ends_in_line:
                line = b"\n" + line
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                os.ftruncate(self._descriptor, self._end)
                raise
            self._end += written
            self._ends_in_line = False

    def replace(self, content: bytes) -> None:
        """Replace the file by one with this content, and go on after it; an error leaves it as it was."""
        with _WRITING:
            self._check_alone()
            if fcntl is None:
                self._replace_closed(content)
                return
            beside = _beside(self.path)
            descriptor = os.open(beside, _FLAGS | os.O_EXCL, 0o644)
            try:
                self._lock(descriptor)  # before the file has its name, by which others find it
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(content)
                os.fsync(descriptor)
                beside.replace(self.path)
            except BaseException:
                os.close(descriptor)
                beside.unlink(missing_ok=True)
                raise
            self.close()
            self._use(descriptor)

    def _replace_closed(self, content: bytes) -> None:
        """The same on Windows, which cannot replace a file that is open."""
        self.close()
        try:
            write_atomically(self.path, content)
        finally:
            self._open()

    def _open(self) -> None:
        """Open and lock the file, and go to its end."""
        descriptor = os.open(self.path, _FLAGS, 0o644)
        try:
            self._lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if self._is_deleted(os.fstat(descriptor)):  # by one that replaced it before it was locked here
            os.close(descriptor)
            self._open()
        else:
            self._use(descriptor)

    def _use(self, descriptor: int) -> None:
        """Go on at the end of this open file."""
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self._go_to(os.fstat(descriptor).st_size)

    def _check_alone(self) -> None:
        """Lock the file again, and raise an error if it is not as this object left it."""
        self._lock(self._descriptor)  # another descriptor of this process may have released it
        now = os.fstat(self._descriptor)
        if self._is_deleted(now):
            raise self._in_use("the file was replaced or deleted")
        if now.st_size != self._end:
            raise self._in_use(
                f"the file has {now.st_size} bytes, not the {self._end} that were written here"
            )

    def _is_deleted(self, now: os.stat_result) -> bool:
        """Whether the open file is no longer in its folder."""
        if now.st_nlink > 0:
            return False
        try:
            return not os.path.samestat(now, self.path.stat())  # some network drives count no links
        except FileNotFoundError:
            return True

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            return
        try:
            # A lock of the process, which no child inherits: workers that outlive a killed run hold nothing.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._in_use("the file is locked") from None
            # Any other error says that this file system has no locks.

    def _in_use(self, fact: str) -> OSError:
        message = f"{fact}. Another trace or process writes to it: give each its own file"
        return OSError(errno.EBUSY, message, str(self.path))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def is_exact(value: object) -> TypeGuard[float]:
    """Whether a value is a number that float64 holds as it is."""
    return type(value) is float or (type(value) is int and value.bit_length() <= sys.float_info.mant_dig)


def _to_strict(value: object) -> object:
    if isinstance(value, float):
        return _NAMES.get(str(value), value)
    if isinstance(value, Mapping):
        return {str(key): _to_strict(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_strict(v) for v in value]
    if dataclasses.is_dataclass(value):
        shown = [item.name for item in dataclasses.fields(value) if item.repr]  # the result, not its source
        return {name: _to_strict(getattr(value, name)) for name in shown}
    return value


def _from_strict(value: object) -> object:
    if isinstance(value, dict):
        for key, v in value.items():
            value[key] = _from_strict(v)
    elif isinstance(value, list):
        return [_from_strict(v) for v in value]
    elif isinstance(value, str):
        return _FLOATS.get(value, value)
    return value
