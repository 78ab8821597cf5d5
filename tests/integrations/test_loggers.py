"""Rows arrive in the real loggers, under one group of names, at steps that never go back."""

import importlib.util
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.fit.samples import usable_samples
from curvestep.integrations.loggers import COLUMNS, Logger
from tests.models import mlp


def train(listener, *, steps=72):
    """A run some of whose steps are clipped; its parameters and its trace."""
    torch.manual_seed(0)
    model = mlp(6, 12, 3)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.5, max_norm=0.35)
    probe = cs.SmoothnessProbe(model, every=2).watch(optimizer).listen(listener)
    for _ in range(steps):
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        optimizer.zero_grad()
        probe.record(lambda x=x, y=y: F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], probe.trace


def test_sink_hands_over_columns_and_clip_share():
    written = []
    _, trace = train(Logger(lambda numbers, step: written.append((step, numbers))))
    assert [step for step, _ in written] == trace.column("step").tolist()
    for (_, numbers), row in zip(written, trace, strict=True):
        for name in COLUMNS:
            assert numbers.get(f"curvestep/{name}") == row.get(name)
    shares = np.cumsum(trace.column("coefficient") < 1) / np.arange(1, len(trace) + 1)
    assert [numbers["curvestep/clipped_fraction"] for _, numbers in written] == pytest.approx(shares)
    assert 0 < shares[-1] < 1


def test_spikes_are_counted_where_the_optimizer_logs_them():
    written = []
    logger = Logger(lambda numbers, step: written.append(numbers))
    for step, log in enumerate([[], [{"step": 3}, {"step": 4}], None]):
        logger({"step": step, "loss": 1.0, "spikes": log})
    assert [numbers.get("curvestep/spikes") for numbers in written] == [0.0, 2.0, None]


@pytest.mark.parametrize("kind", [cs.ClippedSGD, cs.NormalizedSGD])
def test_rows_sink_and_clip_stats_call_the_same_steps_clipped(kind):
    torch.manual_seed(0)
    model, written = nn.Linear(6, 3), []
    optimizer = kind(model.parameters(), 0.05, 0.6)
    probe = cs.SmoothnessProbe(model, every=1).watch(optimizer).listen(Logger(lambda n, _: written.append(n)))
    for _ in range(40):
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        optimizer.zero_grad()
        probe.record(lambda x=x, y=y: F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    share = optimizer.clip_stats()["clipped_fraction"]
    samples = usable_samples(probe.trace)
    assert 0 < share < 1
    np.testing.assert_array_equal(samples.clipped, samples.grad_norm > 0.6)
    np.testing.assert_allclose(samples.clip_norm[samples.clipped], 0.6)
    assert (samples.clipped.mean(), written[-1]["curvestep/clipped_fraction"]) == (share, share)


def test_sink_leaves_out_what_is_not_finite_and_steps_that_go_back():
    written = []
    logger = Logger(lambda numbers, step: written.append((step, numbers)))
    logger({"step": 4, "grad_norm": math.nan, "loss": 1.0, "status": "nonfinite"})
    logger({"step": 4, "loss": 2.0})
    logger({"step": 2, "loss": 3.0})
    logger({"step": 6})
    logger({"step": 8, "loss": 4.0})
    assert written == [(4, {"curvestep/loss": 1.0}), (8, {"curvestep/loss": 4.0})]


def test_tensorboard_gets_every_row(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        parameters, trace = train(cs.loggers.tensorboard(writer))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {tag.split("/")[0] for tag in tags} == {"curvestep"}
    for name in ("grad_norm", "smoothness", "stability_margin", "clipped_fraction"):
        assert f"curvestep/{name}" in tags
    found = events.Scalars("curvestep/smoothness")
    assert [event.step for event in found] == trace.column("step").tolist()
    np.testing.assert_allclose([event.value for event in found], trace.column("smoothness"), rtol=1e-6)
    plain, _ = train(lambda row: None)
    assert all(torch.equal(a, b) for a, b in zip(plain, parameters, strict=True))


def test_wandb_has_an_axis_of_its_own():
    run = mock.Mock(step=4)
    cs.loggers.wandb(run)({"step": 7, "loss": 1.0})
    assert [call.args[0] for call in run.define_metric.call_args_list] == ["curvestep/step", "curvestep/*"]
    run.log.assert_called_once_with({"curvestep/step": 7, "curvestep/loss": 1.0}, step=4)


def test_wandb_gets_every_row_beside_what_the_loop_logs(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="curvestep")
    logged = []
    log = run.log
    monkeypatch.setattr(
        run, "log", lambda data, step=None: (logged.append((step, data)), log(data, step=step))
    )
    logger = cs.loggers.wandb(run)

    def listener(row):
        logger(row)
        if row["step"] % 4 == 0:  # the loop logs too, at its own steps
            run.log({"mine": row["loss"]}, step=row["step"])

    try:
        _, trace = train(listener)
        log({"end": 1.0}, step=1000)  # W&B writes a step down when the next one comes
        summary = dict(run.summary)
    finally:
        run.finish()
    ours = [(step, data) for step, data in logged if "mine" not in data]
    assert [data["curvestep/step"] for _, data in ours] == trace.column("step").tolist()
    steps = [step for step, _ in logged]
    assert steps == sorted(steps)  # W&B drops what goes back
    assert len({step for step, _ in ours}) == len(ours)  # no row writes over another
    assert summary["curvestep/smoothness"] == pytest.approx(trace[-1]["smoothness"])


@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")  # of MLflow's own tables
def test_mlflow_gets_every_row(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = mlflow.get_tracking_uri()
    database = importlib.util.find_spec("sqlalchemy") is not None  # mlflow-skinny comes without
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db" if database else tmp_path.as_uri())
    try:
        mlflow.set_experiment("curvestep")
        with pytest.raises(ValueError, match="no active run"):
            cs.loggers.mlflow()
        with mlflow.start_run() as run:
            logger = cs.loggers.mlflow()
            with mlflow.start_run(nested=True):  # the rows are not its own
                _, trace = train(logger, steps=12)
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "curvestep/smoothness")
    finally:
        mlflow.set_tracking_uri(uri)
    assert [m.step for m in history] == trace.column("step").tolist()
    assert [m.value for m in history] == pytest.approx(trace.column("smoothness").tolist())


def test_trackers_of_accelerate_get_every_row():
    tracking = pytest.importorskip("accelerate.tracking", reason="needs accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    class Rows(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "rows", False, None

        def __init__(self):
            super().__init__()
            self.seen = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step):
            self.seen.append((step, values))

    rows = Rows()
    accelerator = Accelerator(cpu=True, log_with=[rows])
    try:
        with pytest.raises(ValueError, match=r"no trackers.*`init_trackers` before"):
            cs.loggers.accelerate(accelerator)
        accelerator.init_trackers("mine")
        _, trace = train(cs.loggers.accelerate(accelerator), steps=12)
    finally:
        AcceleratorState._reset_state(True)
    assert [step for step, _ in rows.seen] == trace.column("step").tolist()
    assert [found["curvestep/smoothness"] for _, found in rows.seen] == trace.column("smoothness").tolist()


@pytest.mark.parametrize(
    ("logger", "words"),
    [
        (cs.loggers.tensorboard, "SummaryWriter"),
        (cs.loggers.wandb, "wandb"),
        (cs.loggers.accelerate, "Accelerator"),
    ],
)
def test_what_is_no_logger_is_refused(logger, words):
    with pytest.raises(TypeError, match=words):
        logger("runs/mine")
