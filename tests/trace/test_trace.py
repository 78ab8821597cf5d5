import errno
import itertools
import json
import math
import re
import resource
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import curvestep as cs
from curvestep.files import dump_row
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.schema import ESTIMATORS, FAILED, FIELDS, HEADER_FIELDS, OK
from curvestep.trace.trace import Trace
from tests.processes import CONTEXT
from tests.smoothness.loops import measured_sgd


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


def test_a_damaged_row_is_named_by_its_line_in_the_file_and_blank_lines_are_none(path):
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


def test_columns_are_views_and_cannot_be_written():
    trace = filled(steps=range(1000))
    a, b = trace.column("loss"), trace.column("loss")
    assert np.shares_memory(a, b)
    assert a.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 1.0
    before = a.copy()
    for step in range(1000, 3000):
        trace.append({"step": step, "loss": -1.0})
    np.testing.assert_array_equal(a, before)
    assert trace.column("loss")[999:1001].tolist() == [1 / 1000, -1.0]
    assert np.isnan(trace.column("grad_norm")[1000:]).all()


def test_layers_are_columns_of_their_own(path):
    with Trace(path) as trace:
        trace.append({"step": 0, "layers": {"encoder.0": {"smoothness": 2.0}, "a/b": {"smoothness": 3.0}}})
    loaded = Trace.load(path)
    assert loaded.column("layers/encoder.0/smoothness").tolist() == [2.0]
    assert loaded.column("layers/a/b/smoothness").tolist() == [3.0]
    assert loaded[0]["layers"]["a/b"] == {"smoothness": 3.0}


def test_lists_are_two_dimensional_columns(path):
    with Trace(path, header={"fractions": [0.5, 1.0]}) as trace:
        trace.append({"step": 0, "secants": [2.0, 1], "grad_norms": [math.inf, math.nan]})
        trace.append({"step": 1})
        trace.append({"step": 2, "secants": [3.0]})
    for each in (trace, Trace.load(path)):
        assert each.fractions == (0.5, 1.0)
        np.testing.assert_array_equal(each.column("secants"), [[2, 1], [np.nan, np.nan], [3, np.nan]])
        np.testing.assert_array_equal(each.column("grad_norms")[0], [np.inf, np.nan])
        assert [row["secants"] for row in each] == [[2.0, 1], None, [3.0]]
        assert each.names == ["step", "secants", "grad_norms"]


def test_a_trace_without_lists_or_fractions_has_columns_of_nan():
    trace = filled()
    assert trace.fractions == ()
    assert trace.column("secants").shape == (3, 0)
    known = Trace(header={"fractions": [0.5, 1.0]})
    known.append({"step": 0})
    assert np.isnan(known.column("secants")).tolist() == [[True, True]]
    unknown = Trace(header={"fractions": "half"})
    unknown.append({"step": 0, "secants": [1.0, 2.0, 3.0]})
    unknown.append({"step": 1, "secants": "none"})
    assert unknown.fractions == ()
    np.testing.assert_array_equal(unknown.column("secants"), [[1, 2, 3], [np.nan] * 3])


@pytest.mark.parametrize("step", [10**400, -(10**400), "7", True, None, math.nan, [1]])
def test_a_step_that_is_no_number_does_not_stop_loading(path, step):
    with Trace(path) as trace:
        trace.append({"step": 3, "loss": 1.0})
        trace.append({"step": step, "loss": 2.0})
    loaded = Trace.load(path)
    assert loaded.column("loss").tolist() == [1.0, 2.0]
    assert loaded.column("step")[0] == 3
    assert np.isnan(loaded.column("step")[1]) or step is True


def test_every_key_that_the_page_on_measuring_explains_is_in_the_schema():
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 8
    assert {name: FIELDS[name].meaning for name, _ in rows} == dict(rows)


def test_the_probe_writes_no_key_that_the_schema_does_not_know():
    model = torch.nn.Linear(3, 2)
    optimizer, probe = measured_sgd(model, lr=10.0, estimators=tuple(ESTIMATORS), layers=True)
    x = torch.randn(6, 3)
    parts = [lambda: model(x).square().mean(), lambda: model(x[:3]).square().mean()]
    for _ in range(2):  # the second asks its batch where the run began, for the first overshot
        optimizer.zero_grad()
        parts[0]().backward()
        with probe(parts[0], halves=(parts[1], parts[1])):
            optimizer.step()
    row = {key: value for row in probe.trace for key, value in row.items() if value is not None}
    absent = {"optimizer_missing", "spikes"}  # torch's SGD has a metric, and logs no spikes
    absent |= {"recent_loss", "recent_steps"}  # of `record`
    absent |= {"max_norm"}  # of a smooth rule
    known = {key: field for key, field in FIELDS.items() if key not in absent}
    assert set(row) == set(known)
    assert set(row["layers"]["weight"]) <= set(FIELDS)
    kinds = {"count": int, "number": float, "numbers": list, "flag": bool, "word": str, "group": dict}
    assert {key: type(value) for key, value in row.items()} == {
        key: kinds[field.kind] for key, field in known.items()
    }


LOGGING = {
    "ClippedSGD": lambda model: cs.ClippedSGD(model.named_parameters(), lr=0.01, max_norm=1.0),
    "clip": lambda model: cs.clip(torch.optim.AdamW(model.named_parameters(), lr=0.01), 1.0).optimizer,
}


def poisoned(model, optimizer, probe, steps):
    """Steps on noisy batches, some of them far larger."""
    sizes = {55: 100.0, 57: 100.0, 90: 1e4}
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 3, generator=generator) * sizes.get(step, 1.0)
        optimizer.zero_grad()
        probe.record(lambda x=x: model(x).square().mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("make", LOGGING.values(), ids=LOGGING)
def test_every_spike_of_the_optimizer_reaches_the_trace_once(make, tmp_path):
    path, states = tmp_path / "t.jsonl", None
    for steps in (range(60), range(60, 80), range(80, 105)):  # stopped before and after the row of two spikes
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = make(model)
        probe = SmoothnessProbe(model, every=25, trace=path).watch(optimizer)
        if states is not None:
            for part, state in zip((model, optimizer, probe), states, strict=True):
                part.load_state_dict(state)
        poisoned(model, optimizer, probe, steps)
        states = [part.state_dict() for part in (model, optimizer, probe)]
        probe.close()
    trace = Trace.load(path)
    assert [row["step"] for row in trace] == [0, 25, 50, 75, 100]
    assert [[spike["step"] for spike in row["spikes"]] for row in trace] == [[], [], [], [55, 57], [90]]
    logged = [
        {key: value for key, value in spike.items() if value is not None} for spike in optimizer.spikes()
    ]
    assert trace.spikes == logged
    assert {spike["layer"] for spike in trace.spikes} <= {"weight", "bias"}


def test_a_log_that_is_none_does_not_stop_reading():
    trace = Trace()
    for step, log in enumerate(["none", [3], [{"layer": "a"}], 7.0, None, [{"step": 9}]]):
        trace.append({"step": step, "spikes": log})
    assert trace.column("spikes").tolist() == [None] * 5 + [[{"step": 9}]]
    assert trace.spikes == [{"step": 9}]


ROW_OF_HEADER = {
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
        {"optimizer": "SGD", "optimizer_family": "sgd", "momentum": 0.0, "weight_decay": 0.01},
    ),
    "momentum": (
        lambda p: cs.ClippedSGD(p, lr=0.1, max_norm=2.0, momentum=0.9),
        {"optimizer_family": "momentum", "momentum": 0.9, "max_norm": 2.0, "norm_scope": "global"},
    ),
    "normalized": (
        lambda p: cs.NormalizedSGD(p, lr=0.1, offset=0.5),
        {"optimizer_family": "sgd", "clipping": "norm", "threshold": "offset", "max_norm": 0.5},
    ),
    "adam": (
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
        {"optimizer": "AdamW", "optimizer_family": "adam", "betas": [0.8, 0.9], "clipping": "none"},
    ),
    "clip": (
        lambda p: cs.clip(torch.optim.RMSprop(p, lr=0.1), max_norm=float("inf")).optimizer,
        {"optimizer_family": "unknown", "clipping": "norm", "max_norm": float("inf")},
    ),
    "rule": (
        lambda p: cs.ClippedSGD(p, lr=0.1, max_norm=cs.clip_rules.percentile(10)),
        {"optimizer": "ClippedSGD", "clipping": "percentile", "max_norm": None, "momentum": 0.0},
    ),
    "groups": (
        lambda p: torch.optim.SGD(
            [{"params": [next(p)], "momentum": 0.5}, {"params": p, "weight_decay": 0.3}], lr=0.1, momentum=0.9
        ),
        {"optimizer_family": "momentum", "momentum": None, "weight_decay": None, "betas": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_OF_HEADER)
def test_the_header_names_the_optimizer_and_how_it_clips(name, tmp_path):
    make, expected = ROW_OF_HEADER[name]
    model, x = torch.nn.Linear(3, 2), torch.randn(6, 3)
    optimizer = make(model.parameters())
    probe = SmoothnessProbe(model, every=1, trace=tmp_path / "t.jsonl", num_steps=7).watch(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        probe.record(lambda: model(x).square().mean()).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05  # the header has that of the start
    probe.close()
    written = Trace.load(tmp_path / "t.jsonl")
    for header in (probe.trace.header, written.header):
        assert {key: header.get(key) for key in expected} == expected
        assert (header["start_lr"], header["training_mode"], header["num_steps"]) == (0.1, True, 7)
        assert header["peak_lr"] == 0.1
        assert set(header) - set(HEADER_FIELDS) == {"format", "schema", "versions"}
    assert len(written) == len(probe.trace) == 2


def test_the_header_has_the_peak_that_a_schedule_is_set_to():
    model, x = torch.nn.Linear(3, 2), torch.randn(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    probe = SmoothnessProbe(model, every=1).watch(optimizer)
    probe.record(lambda: model(x).square().mean()).backward()
    optimizer.step()
    scheduler.step()
    assert probe.trace.header["start_lr"] == pytest.approx(0.0003)
    assert probe.trace.header["peak_lr"] == 0.003


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


def test_a_row_says_whether_it_was_clipped_and_older_rows_are_inferred():
    trace = Trace()
    trace.append({"step": 0, "grad_norm": 4.0, "coefficient": 0.5, "clipped": True})
    trace.append({"step": 1, "grad_norm": 4.0, "coefficient": 0.5, "clipped": False})
    trace.append({"step": 2, "grad_norm": 4.0, "coefficient": 0.5})
    trace.append({"step": 3, "grad_norm": 4.0, "step_norm": 1.0, "lr": 0.5})
    trace.append({"step": 4, "grad_norm": 4.0})
    np.testing.assert_array_equal(trace.clip_norm, [2.0, np.inf, 2.0, 2.0, np.nan])


def test_ok_marks_the_rows_measured_without_trouble():
    trace = Trace()
    for step, status in enumerate([OK, "nonfinite", None, FAILED + "no tensor", "zero-step"]):
        trace.append({"step": step, "status": status})
    assert trace.ok.tolist() == [True, False, True, False, False]
    assert trace.column("status")[3] == "failed: no tensor"


def test_word_in_a_number_column_does_not_turn_it_into_words():
    trace = filled()
    trace.append({"step": 3, "loss": "lost"})
    assert trace.column("loss").dtype == np.float64
    assert np.isnan(trace.column("loss")[3])
    assert trace[3]["loss"] == "lost"


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


@pytest.mark.slow
def test_loading_takes_bounded_memory_per_row(path):
    # Measured at two sizes, so that what is constant (one chunk being parsed) drops out of the difference.
    names = [name for name in FIELDS if FIELDS[name].kind == "number"]
    peaks, sizes = [], [20_000, 50_000]
    for size in sizes:
        with path.open("wb") as file:
            file.write(dump_row({"format": "curvestep-trace", "schema": 1}))
            for step in range(size):
                cells = {name: step / 7 + i for i, name in enumerate(names)}
                file.write(dump_row({"step": step, **cells, "status": "ok"}))
        tracemalloc.start()
        trace = Trace.load(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(trace) == size
        np.testing.assert_array_equal(trace.column("loss"), np.arange(size) / 7)
    # A float and its place a cell, an eighth of spare room at most, a word, and one list that moves.
    assert (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]) < (24 + 1.13 * 8) * (len(names) + 2) + 64


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
    with pytest.raises(ValueError, match=r"is a folder. Name a file in it: .*trace.jsonl"):
        Trace(tmp_path)


def test_a_column_that_is_no_longer_measured_is_still_read(tmp_path):
    path = tmp_path / "old.jsonl"
    with Trace(path) as trace:
        trace.append({"step": 0, "optimizer_spectral": 3.0, "optimizer_converged": True})
        trace.append({"step": 1})
    old = Trace.load(path)
    assert old[0]["optimizer_spectral"] == 3.0
    np.testing.assert_array_equal(old.column("optimizer_spectral"), [3.0, np.nan])
    np.testing.assert_array_equal(old.column("optimizer_converged"), [1.0, np.nan])


def test_rows_without_fractions_have_those_of_the_header():
    trace = Trace(header={"fractions": [0.5, 1.0]})
    trace.append({"step": 0})
    trace.append({"step": 1, "fractions": [0.25]})
    np.testing.assert_array_equal(trace.column("fractions"), [[0.5, 1.0], [0.25, np.nan]])


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
