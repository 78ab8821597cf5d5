"""A run that ended in mid-step and is resumed from its framework's checkpoint is the run left alone."""

import os
import signal

import pytest
import torch

import curvestep as cs
from tests.integrations.runs import classes, digest, started

pytestmark = pytest.mark.filterwarnings("ignore")


def lightning_run(folder, *, resume=False, end=None):
    """24 steps, calibrated and measured every 5, a checkpoint after 12; what is left."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations.test_lightning import Calibrate, Module, SmoothnessCallback, trainer_of

    class Seeded(Module):
        def on_train_batch_start(self, batch, batch_idx):
            torch.manual_seed(self.global_step)  # a checkpoint of Lightning has no random states

    measure = SmoothnessCallback(every=5, trace=str(folder / "trace.jsonl"), on_error="raise")
    calibration = Calibrate()
    saving = ModelCheckpoint(folder, filename="last")
    trainer = trainer_of(
        folder, [calibration, measure, saving, *ending(measure, end)],
        max_epochs=2, enable_checkpointing=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Seeded(optimizer="ClippedSGD", lr=0.3)
    data = torch.utils.data.DataLoader(classes(), batch_size=8)
    trainer.fit(model, data, ckpt_path=str(folder / "last.ckpt") if resume else None)
    return model, trainer.optimizers[0], calibration.calibration


def transformers_run(folder, *, resume=False, end=None):
    """10 steps, calibrated and measured every 2, a checkpoint after 5; what is left."""
    from tests.integrations.test_transformers import calibrate, trainer_of, watch

    trainer = trainer_of(folder, save_strategy="steps", save_steps=5, max_steps=10)
    measured = []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (measured.append(1), compute_loss(*args, **kwargs))[1]
    found = calibrate(trainer, resume_from_checkpoint=resume)
    assert trainer.args.max_grad_norm == found.max_norm
    assert bool(measured) is not resume  # the numbers of the checkpoint need no gradients
    callback = watch(trainer, every=2, trace=folder / "trace.jsonl", on_error="raise")
    for one in ending(callback, end, of_transformers=True):
        trainer.add_callback(one)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, trainer.optimizer, found


class Ended(Exception):
    """A run ended here."""


def stop():
    raise Ended


def kill():
    """With no chance to tidy up."""
    os.kill(os.getpid(), signal.SIGKILL)


def ending(measure, end, *, of_transformers=False):
    """A callback that ends the run once the row of its step is written."""
    if end is None:
        return []
    if of_transformers:
        from transformers import TrainerCallback as Callback
    else:
        from lightning import Callback
    step, how = end

    class Ending(Callback):
        def look(self, *_, **__):
            if any(row["step"] == step for row in measure.probe.trace):
                how()

        on_step_end = on_train_batch_end = look

    return [Ending()]


RUNS = {
    "lightning": (lightning_run, 15, [0, 5, 10, 15, 20]),
    "transformers": (transformers_run, 8, range(0, 10, 2)),
}


@pytest.fixture(params=RUNS)
def case(request, tmp_path):
    pytest.importorskip(request.param, reason=f"needs the extra `{request.param}`")
    folders = tmp_path / "whole", tmp_path / "halves"
    for folder in folders:
        folder.mkdir()
    return *RUNS[request.param], *folders


def check_halves(run, step, steps, whole, halves):
    """The run in ``halves`` has ended after this step; resumed, it is the run in ``whole``."""
    rows = list(cs.Trace.load(halves / "trace.jsonl"))
    assert [row["step"] for row in rows] == [k for k in steps if k <= step]
    (model, optimizer, found), (again, its_optimizer, kept) = run(whole), run(halves, resume=True)
    assert digest(again.state_dict()) == digest(model.state_dict())
    assert digest(its_optimizer.state_dict()) == digest(optimizer.state_dict())
    assert found is not None
    assert kept in (None, found)  # not measured again
    one, two = (list(cs.Trace.load(folder / "trace.jsonl")) for folder in (whole, halves))
    assert [row["step"] for row in two] == [row["step"] for row in one] == list(steps)
    same = "loss recent_loss recent_steps grad_norm step_norm smoothness lr coefficient batch_size eps status"
    whole_rows, resumed_rows = ([[row[name] for name in same.split()] for row in rows] for rows in (one, two))
    assert resumed_rows == whole_rows


@pytest.mark.parametrize(
    ("case", "state_kept"),
    [("lightning", True), ("transformers", True), ("transformers", False)],
    indirect=["case"],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(state_kept, case):
    run, step, *rest, halves = case
    with pytest.raises(Ended):
        run(halves, end=(step, stop))
    if not state_kept:
        (halves / "checkpoint-5" / "curvestep.json").unlink()
    check_halves(run, step, *rest, halves)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_run_goes_on_as_if_nothing_had_happened(case):
    run, step, *rest, halves = case
    code = (
        "import pathlib, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from tests.integrations import test_resume\n"
        f"folder = pathlib.Path({str(halves)!r})\n"
        f"test_resume.{run.__name__}(folder, end=({step}, test_resume.kill))"
    )
    child = started("-c", code)
    output, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL, output[-3000:]
    check_halves(run, step, *rest, halves)
