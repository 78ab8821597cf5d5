"""At which steps a run writes rows, evaluates and ends, and that a resumed one does the same."""

import numpy as np
import pytest

from curvestep.lab.recipes import with_fields
from curvestep.lab.run.folder import Run
from curvestep.lab.run.loop import train
from tests.lab.small import interrupt_at, small_language


def rows_of(folder):
    run = Run.load(folder)
    return {split: run.column("loss", split)[0].tolist() for split in ("train", "valid", "test")}


def test_evaluations_come_at_their_steps_whatever_the_steps_of_the_rows(tmp_path):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=2, probe_every=0)
    train(recipe, tmp_path / "run", progress=False)
    assert rows_of(tmp_path / "run") == {
        "train": [2, 3, 4, 6, 8, 9, 10, 12],
        "valid": [3, 6, 9, 12],
        "test": [12],
    }


def test_a_row_is_the_mean_loss_since_the_row_before(tmp_path):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=2, probe_every=0, precision="64-true")
    result = train(recipe, tmp_path / "run", progress=False)
    each = train(with_fields(recipe, log_every=1), tmp_path / "each", progress=False)
    steps, means = Run.load(tmp_path / "run").column("loss")
    _, losses = Run.load(tmp_path / "each").column("loss")
    spans = np.split(losses, steps[:-1])
    np.testing.assert_allclose(means, [span.mean() for span in spans], rtol=1e-12)
    assert (result.train_loss, each.train_loss) == (means[-1], losses[-1])  # a twentieth of 12 steps


@pytest.mark.parametrize("step", [3, 8])
def test_a_run_stopped_between_two_rows_evaluates_at_the_same_steps(tmp_path, step):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=4, dropout=0.3)
    train(recipe, tmp_path / "whole", progress=False)
    interrupt_at(step, recipe, tmp_path / "stopped")
    train(recipe, tmp_path / "stopped", resume=True, progress=False)
    for name in ("metrics.jsonl", "trace.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_killed_between_its_last_checkpoint_and_its_status_ends_as_it_did(tmp_path):
    recipe = small_language(tmp_path, lr=20.0, max_norm=5.0, eval_every=5, steps=30)
    result = train(recipe, tmp_path / "run", progress=False)
    assert rows_of(tmp_path / "run")["test"] == [result.step]
    assert result.metrics.keys() == {"valid", "test"}

    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "status.json").unlink()
    again = train(recipe, tmp_path / "run", resume=True, progress=False)
    assert (again.status, again.message, again.step) == (result.status, result.message, result.step)
    assert (again.metrics, again.train_loss) == (result.metrics, result.train_loss)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
