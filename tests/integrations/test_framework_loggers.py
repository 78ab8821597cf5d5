"""What both callbacks send arrives in TensorBoard, W&B and MLflow, through what a framework has for them."""

import importlib.util
import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.integrations.runs import classes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMES = ("grad_norm", "clipped_fraction", "coefficient")  # of both callbacks


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    database = importlib.util.find_spec("sqlalchemy") is not None  # mlflow-skinny comes without
    store = f"sqlite:///{tmp_path}/mlflow.db" if database else (tmp_path / "mlruns").as_uri()
    settings = {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path),
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": store, "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard"),
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def kept(callback_class):
    """A ClipCallback that keeps the numbers it sends, and these."""
    rows = []

    class Kept(callback_class):
        def _numbers(self):
            numbers = super()._numbers()
            rows.append({name.removeprefix("curvestep/"): value for name, value in numbers.items()})
            return numbers

    return Kept(layers=1), rows


def lightning_run(folder, kind, *, measures):
    """Rows of 12 steps, from every fourth, with the loggers of Lightning."""
    from lightning.pytorch import loggers

    from curvestep.integrations.lightning import ClipCallback
    from tests.integrations.test_lightning import Module, SmoothnessCallback, trainer_of

    logger = {
        "tensorboard": lambda: loggers.TensorBoardLogger(folder, name="tensorboard"),
        "wandb": lambda: loggers.WandbLogger(save_dir=folder, offline=True, project="curvestep"),
        "mlflow": lambda: loggers.MLFlowLogger("curvestep", tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
    }[kind]()
    callback, rows = kept(ClipCallback)
    if measures:
        callback = SmoothnessCallback(every=4, on_error="raise")
    data = torch.utils.data.DataLoader(classes(), batch_size=8)
    interval = 1 if measures else 4
    trainer_of(folder, [callback], logger=logger, log_every_n_steps=interval).fit(
        Module(optimizer="ClippedAdamW"), data
    )
    if measures:
        return list(callback.probe.trace), "curvestep/"
    return [{"step": step, **row} for step, row in zip((3, 7, 11), rows, strict=True)], "curvestep/"


def transformers_run(folder, kind, *, measures):
    """Rows of 8 steps, from every third or fourth, with what ``report_to`` names."""
    from curvestep.integrations.transformers import ClipCallback
    from tests.integrations.test_transformers import trainer_of, watch

    trainer = trainer_of(folder, optimizer="ClippedSGD", max_grad_norm=0.0, report_to=kind, logging_steps=3)
    callback, rows = kept(ClipCallback)
    if measures:
        callback = watch(trainer, every=4, on_error="raise")
    else:
        trainer.add_callback(callback)
    trainer.train()
    # The Trainer writes "train/" before every name, except in MLflow.
    prefix = "curvestep/" if kind == "mlflow" else "train/curvestep/"
    if measures:
        return list(callback.probe.trace), prefix
    return [{"step": step, **row} for step, row in zip((3, 6), rows, strict=True)], prefix


RUNS = [(run, measures) for run in (lightning_run, transformers_run) for measures in (True, False)]


@pytest.fixture(params=RUNS, ids=lambda p: f"{p[0].__name__}-{'smoothness' if p[1] else 'clip'}")
def run(request):
    function, measures = request.param
    name = function.__name__.removesuffix("_run")
    pytest.importorskip(name, reason=f"needs the extra `{name}`")
    return partial(function, measures=measures)


def assert_same(found, rows):
    """``found`` has the steps and values of each name; the rows, what the callback has of them."""
    for name in NAMES:
        steps, values = zip(*found[name], strict=True)
        assert list(steps) == [row["step"] for row in rows]
        if name in rows[0]:
            assert list(values) == pytest.approx([row[name] for row in rows])
        else:
            assert all(0 < value <= 1 for value in values)  # the share of clipped steps


def test_tensorboard(run, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows, prefix = run(tmp_path, "tensorboard")
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert_same({n: [(e.step, e.value) for e in events.Scalars(prefix + n)] for n in NAMES}, rows)


def test_wandb(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    logged, log = [], wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, data, *a, **k: (logged.append(data), log(self, data, *a, **k))
    )
    try:
        rows, prefix = run(tmp_path, "wandb")
        assert wandb.run is not None
        summary, file = dict(wandb.run.summary), Path(wandb.run.settings.sync_file)
    finally:
        wandb.finish()
    axis = "trainer/global_step" if run.func is lightning_run else "train/global_step"
    ours = [data for data in logged if prefix + NAMES[0] in data]
    assert_same({n: [(data[axis], data[prefix + n]) for data in ours] for n in NAMES}, rows)
    assert summary[prefix + NAMES[0]] == pytest.approx(rows[-1][NAMES[0]])  # W&B took it
    assert file.stat().st_size > 0  # in the folder of the first run of this process


def test_mlflow(run, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    uri = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(os.environ["MLFLOW_TRACKING_URI"])
    try:
        rows, prefix = run(tmp_path, "mlflow")
        client = mlflow.MlflowClient()
        (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        histories = {n: client.get_metric_history(found.info.run_id, prefix + n) for n in NAMES}
    finally:
        mlflow.set_tracking_uri(uri)
    assert_same({n: [(m.step, m.value) for m in history] for n, history in histories.items()}, rows)
