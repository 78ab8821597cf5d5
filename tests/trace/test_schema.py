"""The schema against what a probe writes, into rows and header."""

import re
from pathlib import Path

import pytest
import torch

import curvestep as cs
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.schema import ESTIMATORS, FIELDS, HEADER_FIELDS, LAYER_CURVATURE
from curvestep.trace.trace import Trace
from tests.smoothness.loops import measured_sgd


def test_the_keys_that_the_page_on_measuring_names_are_in_the_schema():
    page = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"The keys that you will read first are ([^.]*)", page)
    names = re.findall(r"`(\w+)`", line)
    assert len(names) >= 5
    assert set(names) <= set(FIELDS)


def test_the_probe_writes_no_key_that_the_schema_does_not_know():
    model = torch.nn.Linear(3, 2)
    optimizer, probe = measured_sgd(model, lr=10.0, estimators=(*ESTIMATORS, LAYER_CURVATURE), layers=True)
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
