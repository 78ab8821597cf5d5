"""A run killed in mid-step and resumed from the framework's checkpoint is the run that was left alone."""

import os
import signal
import warnings

import pytest
import torch

import curvestep as cs
from tests.integrations.runs import classes, digest, started

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def lightning_run(folder, *, resume=False, kill_at=None):
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
        folder, [calibration, measure, saving, *killer(measure, kill_at)],
        max_epochs=2, enable_checkpointing=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Seeded(optimizer="ClippedSGD", lr=0.3)
    data = torch.utils.data.DataLoader(classes(), batch_size=8)
    trainer.fit(model, data, ckpt_path=str(folder / "last.ckpt") if resume else None)
    return model, trainer.optimizers[0], calibration.calibration


def transformers_run(folder, *, resume=False, kill_at=None):
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
    for one in killer(callback, kill_at, of_transformers=True):
        trainer.add_callback(one)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, trainer.optimizer, found


def killer(measure, step, *, of_transformers=False):
    """A callback that kills the process, with no chance to tidy up, once the row of this step is written."""
    if step is None:
        return []
    if of_transformers:
        from transformers import TrainerCallback as Callback
    else:
        from lightning import Callback

    class Killer(Callback):
        def kill(self, *_, **__):
            if any(row["step"] == step for row in measure.probe.trace):
                os.kill(os.getpid(), signal.SIGKILL)

        on_step_end = on_train_batch_end = kill

    return [Killer()]


RUNS = {
    "lightning": (lightning_run, 15, [0, 5, 10, 15, 20]),
    "transformers": (transformers_run, 8, range(0, 10, 2)),
}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("framework", RUNS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(framework, tmp_path):
    pytest.importorskip(framework, reason=f"needs the extra `{framework}`")
    run, kill_at, steps = RUNS[framework]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    code = (
        "import pathlib, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from tests.integrations import test_kill\n"
        f"test_kill.{run.__name__}(pathlib.Path({str(halves)!r}), kill_at={kill_at})"
    )
    child = started("-c", code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, found = run(whole)  # beside the child
    output, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL, output[-3000:]
    rows = list(cs.Trace.load(halves / "trace.jsonl"))
    assert [row["step"] for row in rows] == [k for k in steps if k <= kill_at]
    again, its_optimizer, kept = run(halves, resume=True)
    assert digest(again.state_dict()) == digest(model.state_dict())
    assert digest(its_optimizer.state_dict()) == digest(optimizer.state_dict())
    assert found is not None
    assert kept in (None, found)  # not measured again
    one, two = (list(cs.Trace.load(folder / "trace.jsonl")) for folder in (whole, halves))
    assert [row["step"] for row in two] == [row["step"] for row in one] == list(steps)
    same = "loss grad_norm step_norm smoothness lr coefficient batch_size eps status".split()
    assert [[row[name] for name in same] for row in two] == [[row[name] for name in same] for row in one]
