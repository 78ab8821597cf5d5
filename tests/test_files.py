import errno
import math
import warnings

import pytest
from hypothesis import given, strategies as st

from curvestep import files
from curvestep.files import RowFile, dump_json, dump_row, load_json, read_rows, write_atomically

words = st.text().filter(lambda s: s not in ("NaN", "Infinity", "-Infinity"))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), words)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=8
)


@given(value=json_values)
def test_any_value_comes_back_from_strict_json(value):
    text = dump_json(value)
    assert text.isascii()
    assert load_json(text) == value


def test_nan_comes_back_and_bare_constants_are_refused():
    assert math.isnan(load_json(dump_json(math.nan)))
    with pytest.raises(ValueError, match="NaN is not JSON"):
        load_json('{"loss": NaN}')


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")

    def fail(file):
        file.write(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.replace_atomically(path, fail)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_parts_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    write_atomically(tmp_path / "checkpoint.pt", "whole")
    for name in (".checkpoint.pt.01ab.part", ".status.json.02cd.part", "mine.part", ".lock"):
        (tmp_path / name).touch()
    files.remove_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint.pt", "mine.part"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def rows_in(path, **options):
    with path.open("rb") as file:
        return list(read_rows(file, path, **options))


def test_rows_come_back_in_order(path):
    rows = [{"step": step, "loss": math.inf if step == 3 else 1.0 / (step + 1)} for step in range(5000)]
    file = RowFile(path)
    for row in rows:
        file.append(row)
    assert rows_in(path) == rows


def test_of_two_writers_in_a_process_the_one_that_is_behind_gets_an_error(path):
    first = RowFile(path)
    first.append({"step": 0})
    second = RowFile(path)
    second.append({"step": 1})
    with pytest.raises(OSError, match="give each its own file") as error:
        first.append({"step": 2})
    assert error.value.errno == errno.EBUSY
    second.append({"step": 3})
    assert [row["step"] for row in rows_in(path)] == [0, 1, 3]


def test_a_writer_of_a_deleted_file_gets_an_error(path):
    file = RowFile(path)
    path.unlink()
    with pytest.raises(OSError, match="replaced or deleted"):
        file.append({"step": 0})


def test_a_file_that_is_moved_is_written_on(path):
    file = RowFile(path)
    path.rename(path.with_name("moved.jsonl"))
    file.append({"step": 0})
    assert rows_in(path.with_name("moved.jsonl")) == [{"step": 0}]


@pytest.mark.parametrize("kept", [b"", b'{"step": 0}', b'{"step": 0}\n'])
def test_rows_go_on_after_the_end_on_any_system(path, monkeypatch, kept):
    monkeypatch.delattr("os.pread", raising=False)  # Windows has none
    path.write_bytes(kept + b"abandoned")
    RowFile(path, end=len(kept)).append({})
    assert path.read_bytes() == kept + b"\n" * (kept[-1:] == b"}") + b"{}\n"


def test_a_damaged_row_is_skipped_or_refused_and_its_line_named(path):
    lines = [dump_row({"split": "train", "step": step}) for step in range(3)]
    path.write_bytes(b"".join([lines[0], b"\x00\xff\n", lines[2]]))
    with pytest.warns(UserWarning, match="skipped line 2, it is no JSON object"):
        assert [row["step"] for row in rows_in(path)] == [0, 2]
    path.write_bytes(b"".join(lines).replace(b'"step": 1', b'"step": 9'))
    with pytest.warns(UserWarning, match=r"line 2.*checksum.*`crc32`"):
        assert [row["step"] for row in rows_in(path)] == [0, 2]
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2.*checksum"):
        rows_in(path, skip_damaged=False)


def test_a_torn_last_row_is_left_out_either_way(path):
    path.write_bytes(dump_row({"step": 0}) + dump_row({"step": 1})[:-5])
    for skip in (True, False):
        with pytest.warns(UserWarning, match="line 2, the last write was cut short"):
            assert rows_in(path, skip_damaged=skip) == [{"step": 0}]


def test_checksums_are_no_part_of_a_row_and_missing_ones_are_counted(path):
    path.write_bytes(dump_row({"step": 0}) + b'{"step": 1}\n{"step": 2}\n')
    with pytest.warns(UserWarning, match="2 rows have no checksum") as remarks:
        assert rows_in(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert len(remarks) == 1
    path.write_bytes(dump_row({}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rows_in(path) == [{}]
