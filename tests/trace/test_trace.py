import errno
import itertools
import json
import math
import resource
import tracemalloc
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from curvestep.files import dump_row
from curvestep.trace.schema import FIELDS, OK
from curvestep.trace.trace import Trace
from tests.processes import CONTEXT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.jsonl"


def filled(path=None, steps=range(3), **extra):
    trace = Trace(path)
    for step in steps:
        trace.append({"step": step, "loss": 1.0 / (step + 1), "grad_norm": 0.5, "status": OK, **extra})
    return trace


def strict_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "crc32"} for row in rows]


values = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.booleans(),
    st.text().filter(lambda s: s not in ("NaN", "Infinity", "-Infinity")),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
)
names = st.text(min_size=1).filter(lambda s: s not in ("step", "crc32") and "/" not in s)  # a checksum: ours
rows_of_anything = st.lists(
    st.dictionaries(names, st.one_of(values, st.dictionaries(names, values, min_size=1))), max_size=6
)


def same(a, b):
    if isinstance(a, dict):
        keys = {k for k in a if a[k] is not None} | {k for k in b if b[k] is not None}
        return all(same(a.get(k), b.get(k)) for k in keys)
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict) or isinstance(b, dict):
        return same(a or {}, b or {})
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def without_none(value):
    if isinstance(value, dict):
        return {k: w for k, v in value.items() if (w := without_none(v)) is not None and w != {}}
    return value


@settings(max_examples=25)
@given(rows=rows_of_anything)
def test_any_row_comes_back_from_memory_and_from_disk(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with Trace(path) as trace:
        for step, row in enumerate(rows):
            assert trace.append({"step": step, **row})
    strict_lines(path)
    loaded = Trace.load(path)
    for step, row in enumerate(rows):
        for kept in (trace[step], loaded[step]):
            assert same(without_none(kept), without_none({"step": step, **row}))


def test_missing_and_measured_nan_are_told_apart(path):
    with Trace(path) as trace:
        trace.append({"step": 0, "loss": math.nan, "kappa": None, "smoothness": -math.inf})
    row = Trace.load(path)[0]
    assert math.isnan(row["loss"])
    assert row["kappa"] is None
    assert row["smoothness"] == -math.inf
    assert np.isnan(Trace.load(path).column("kappa")).all()
    assert strict_lines(path)[1] == {"step": 0, "loss": "NaN", "smoothness": "-Infinity"}


def test_header_says_schema_versions_and_what_was_measured(tmp_path):
    Trace(tmp_path / "t.jsonl", header={"model": "lstm", "fractions": [0.5, 1.0]}).close()
    header = strict_lines(tmp_path / "t.jsonl")[0]
    assert header["schema"] == 1
    assert {"curvestep", "torch", "numpy", "scipy", "python"} <= set(header["versions"])
    assert (header["model"], header["fractions"]) == ("lstm", [0.5, 1.0])
    assert Trace.load(tmp_path / "t.jsonl").header == header


def test_rows_under_earlier_keys_are_read_and_resumed_under_todays(path):
    with Trace(path) as trace:
        trace.append({"step": 0, "edge": 0.5, "loss": 2.0})
        trace.append({"step": 1, "edge": "mine", "stability_margin": 0.75})  # then it is the caller's own
    assert "edge" not in FIELDS
    loaded = Trace.load(path)
    with Trace(path) as resumed:
        resumed.append({"step": 2, "stability_margin": 1.0})
        for trace in (loaded, resumed, Trace.load(path)):
            np.testing.assert_array_equal(trace.column("stability_margin")[:2], [0.5, 0.75])
            assert trace[0]["stability_margin"] == 0.5
            assert trace[0]["loss"] == 2.0
            assert "edge" not in trace[0]
            assert trace[1]["edge"] == "mine"
        resumed.cut(2)
    assert strict_lines(path)[1] == {"step": 0, "stability_margin": 0.5, "loss": 2.0}


def test_a_damaged_row_is_named_by_its_line_among_blank_ones(path):
    with Trace(path) as trace:
        for step in range(2):
            trace.append({"step": step})
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"\n" + first.replace(b'"step": 0', b'"step": 7') + second)
    with pytest.warns(UserWarning, match="skipped line 3"):
        assert list(Trace.load(path).column("step")) == [1]


def test_each_row_is_on_disk_as_soon_as_it_is_appended(tmp_path):
    trace = Trace(tmp_path / "deep" / "folder" / "t.jsonl")
    for step in range(3):
        trace.append({"step": step})
        assert len(strict_lines(trace.path)) == step + 2


def test_numpy_and_torch_scalars_are_numbers():
    trace = Trace()
    trace.append({"step": np.int64(3), "loss": torch.tensor(2.5), "grad_norm": np.float32(0.5)})
    assert (trace[0]["step"], trace[0]["loss"], trace[0]["grad_norm"]) == (3, 2.5, 0.5)
    assert type(trace[0]["step"]) is int


def test_no_flipped_bit_changes_what_is_read_in_silence(path):
    filled(path, smoothness=0.25).close()
    whole, right = path.read_bytes(), list(Trace.load(path))
    for position in range(0, len(whole), 3):
        for bit in range(position // 3 % 3, 8, 3):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            with warnings.catch_warnings(record=True) as named:
                warnings.simplefilter("always")
                try:
                    rows = list(Trace.load(path))
                except ValueError:
                    continue
            assert named or rows == right, (position, bit)


@pytest.mark.parametrize("cut", range(1, 100, 7))
def test_continuing_a_torn_file_cuts_the_tear_and_loses_no_row(path, cut):
    filled(path).close()
    torn = path.read_bytes()[:-cut]
    path.write_bytes(torn)
    complete = torn.count(b"\n") - 1
    if torn.endswith(b"}"):  # only the newline is gone: the row is whole
        complete += 1
        trace = Trace(path)
    elif torn.endswith(b"\n"):
        trace = Trace(path)
    else:
        with pytest.warns(UserWarning, match="cut short"):
            trace = Trace(path)
    assert len(trace) == complete
    trace.append({"step": 7})
    assert [row["step"] for row in strict_lines(path)[1:]] == [*range(complete), 7]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"step,loss\n1,2\n", "not a curvestep trace"),
        (b'{"step": 1}\n', "not a curvestep trace"),
        (b"\x89PNG\r\n", "not a curvestep trace"),
        (b'{"format": "curvestep-trace", "schema": 2}\n', "Install a newer curvestep"),
    ],
)
def test_file_that_is_no_trace_is_refused_in_one_line(path, content, match):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as error:
        Trace.load(path)
    assert "\n" not in str(error.value)
    if content:
        with pytest.raises(ValueError, match=match):
            Trace(path)
        assert path.read_bytes() == content


def test_continuing_a_file_does_not_double_rows(path):
    filled(path, steps=range(0, 50, 5)).close()
    resumed = filled(path, steps=range(30, 70, 5))
    assert list(resumed.column("step")) == list(range(0, 70, 5))
    assert list(Trace.load(path).column("step")) == list(range(0, 70, 5))


def test_row_between_others_is_new_but_a_second_one_is_not():
    trace = filled(steps=[0, 10])
    assert trace.append({"step": 5})
    assert not trace.append({"step": 5})
    assert trace.append({"loss": 1.0})  # rows without a step are never duplicates
    assert trace.append({"loss": 1.0})
    assert len(trace) == 5


@pytest.mark.parametrize("num", [63, 64, 65, 200])
def test_rows_come_back_by_place_and_in_order_from_every_block(num):
    trace = filled(steps=range(num))
    assert [row["step"] for row in trace] == list(range(num))
    assert [trace[place]["step"] for place in (0, num // 2, num - 1, -1)] == [0, num // 2, num - 1, num - 1]
    for row in trace:  # rows that come meanwhile are not in the loop
        trace.append({"step": num + row["step"]})
    assert len(trace) == 2 * num


def test_full_disk_keeps_the_row_and_writes_it_later(path):
    trace = filled(path)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # room for a part of a row only
        with pytest.raises(OSError, match="large"):
            trace.append({"step": 3, "loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(trace) == 4
    assert path.stat().st_size == size
    trace.append({"step": 4})
    assert list(Trace.load(path).column("step")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("step", [10**400, -(10**400), "7", True, None, math.nan, [1]])
def test_a_step_that_is_no_number_does_not_stop_loading(path, step):
    with Trace(path) as trace:
        trace.append({"step": 3, "loss": 1.0})
        trace.append({"step": step, "loss": 2.0})
    loaded = Trace.load(path)
    assert loaded.column("loss").tolist() == [1.0, 2.0]
    assert loaded.column("step")[0] == 3
    assert np.isnan(loaded.column("step")[1]) or step is True


def test_facts_are_added_to_a_header_once_and_replace_nothing(tmp_path):
    with Trace(tmp_path / "t.jsonl", header={"model": "mine"}) as trace:
        trace.describe({"model": "other", "optimizer": "SGD", "betas": None})
        trace.append({"step": 0})
        trace.describe({"optimizer": "Adam"})  # too late: the first row is written
        trace.append({"step": 1})
    for each in (trace, Trace.load(tmp_path / "t.jsonl")):
        assert (each.header["model"], each.header["optimizer"]) == ("mine", "SGD")
        assert "betas" not in each.header
        assert each.column("step").tolist() == [0, 1]


def test_a_header_that_cannot_be_rewritten_leaves_the_file_as_it_was(path, monkeypatch):
    def full(*args):
        raise OSError("disk full")

    trace = Trace(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="disk full"):
            trace.describe({"optimizer": "SGD"})
    trace.append({"step": 0})
    assert len(Trace.load(path)) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_unknown_column_and_value_without_json_are_refused_with_a_way_out():
    trace = filled()
    with pytest.raises(KeyError, match="it has: step, loss"):
        trace.column("sharpness")
    with pytest.raises(TypeError, match="not JSON serializable"):
        trace.append({"step": 9, "loss": 3.0, "model": object()})
    trace.append({"step": 9})
    assert trace[-1]["loss"] is None
    trace.close()
    with pytest.raises(ValueError, match="closed"):
        trace.append({"step": 10})
    with pytest.raises(IndexError, match="there is no row"):
        trace[4]


def test_rows_take_a_third_of_their_text_and_columns_a_float_a_cell(path):
    # Measured at two sizes, so that what is constant (one block being parsed) drops out of the difference.
    names = [name for name in FIELDS if FIELDS[name].kind == "number"]
    peaks, sizes = [], [2_000, 6_000]
    for size in sizes:
        with path.open("wb") as file:
            file.write(dump_row({"format": "curvestep-trace", "schema": 1}))
            for step in range(size):
                cells = {name: step / 7 + i for i, name in enumerate(names)}
                file.write(dump_row({"step": step, **cells, "status": "ok"}))
        tracemalloc.start()
        trace = Trace.load(path)
        assert trace.column("loss")[-1] == pytest.approx((size - 1) / 7)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    per_row = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    assert per_row < path.stat().st_size / sizes[1] / 3 + 8 * (len(names) + 4)


def test_cut_drops_the_rows_from_a_step_on_in_memory_and_on_disk(tmp_path):
    path = tmp_path / "trace.jsonl"
    with Trace(path, header={"model": "mine"}) as trace:
        for step in (0, 5, 20, 10, 15):
            trace.append({"step": step, "loss": float(step), "layers": {"a": {"loss": 1.0}}})
        trace.append({"note": "a row without a step"})
        assert trace.cut(15) == 2  # the row of this step, too
        assert trace.column("step")[:3].tolist() == [0, 5, 10]
        assert trace.cut(15) == 0
        assert trace.append({"step": 15, "loss": -1.0})
        assert not trace.append({"step": 10})
    read = Trace.load(path)
    assert read.header["model"] == "mine"
    assert [row["loss"] for row in read] == [0.0, 5.0, 10.0, None, -1.0]
    memory = Trace()
    memory.append({"step": 3})
    assert len(memory.column("step")) == 1
    assert memory.cut(0) == 1
    assert len(memory.column("step")) == 0  # not what was read before
    assert len(memory) == 0


def test_a_folder_in_place_of_a_trace_is_told_what_to_name(tmp_path):
    with pytest.raises(ValueError, match="Name a file in it"):
        Trace(tmp_path)


# Two writers of one file

ACTIONS = {
    "describe": lambda trace, name: trace.describe({"model": name}),
    "append": lambda trace, name: trace.append({"step": len(trace), "writer": name}),
    "cut": lambda trace, name: trace.cut(0),
}


@pytest.mark.parametrize("actions", list(itertools.product(ACTIONS, repeat=2)), ids="-".join)
@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aaabbb"))), ids="".join)
def test_of_two_traces_of_a_file_one_writes_and_the_other_is_told(order, actions, path):
    traces = {"a": Trace(path), "b": Trace(path)}
    todo = {name: [*actions, "append"] for name in traces}
    written = []
    refused = set()
    for name in order:
        action = todo[name].pop(0)
        try:
            ACTIONS[action](traces[name], name)
        except OSError as error:
            refused.add((name, error.errno))
            continue
        if action == "append":
            written.append(name)
        if action == "cut":
            written = [writer for writer in written if writer != name]
    rows = [row["writer"] for row in Trace.load(path)]
    assert rows == written
    assert len(set(rows)) == 1
    assert refused == {(name, errno.EBUSY) for name in traces if name not in rows}


def write_at_the_same_time(folder, name, if_exists, rounds, barrier, results):
    """In each round open the same trace as the others and write five rows; files stay open until all did."""
    for number in range(rounds):
        written = []
        error = None
        barrier.wait(60)
        try:
            trace = Trace(folder / f"{number}.jsonl", if_exists=if_exists)
            trace.describe({"model": name})
            for step in range(5):
                trace.append({"step": step, "writer": name})
                written.append((trace.path.name, name))
        except OSError as caught:
            error = caught.errno
        results.put((number, written, error))
        barrier.wait(60)


@pytest.mark.parametrize("if_exists", ["resume", "new", "overwrite"])
def test_no_row_is_lost_by_processes_that_start_together(if_exists, tmp_path):
    rounds = 20
    barrier = CONTEXT.Barrier(3)
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(
            target=write_at_the_same_time, args=(tmp_path, name, if_exists, rounds, barrier, results)
        )
        for name in "abc"
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(3 * rounds)]
    for process in processes:
        process.join()
    in_files = [(file.name, row["writer"]) for file in tmp_path.iterdir() for row in Trace.load(file)]
    assert sorted(in_files) == sorted(row for _, written, _ in found for row in written)
    assert all(error == (None if written else errno.EBUSY) for _, written, error in found)
    num_winners = 3 if if_exists == "new" else 1
    winners = Counter(number for number, written, _ in found if written)
    assert winners == dict.fromkeys(range(rounds), num_winners)
