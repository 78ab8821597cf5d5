import json
import math
import signal
import time

import numpy as np
import pytest
import torch

from curvestep.trace.run import find_runs
from curvestep_reproduction.data.corpus import load_corpus
from curvestep_reproduction.recipes import get_recipe, with_fields
from curvestep_reproduction.tasks import make_task
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import TrainedRun, locked
from curvestep_reproduction.training.session import load_checkpoint
from reproduction.tests.small import assert_same_rows, interrupt_at, small_images, small_language, write_text

quiet = {"progress": False}


def test_a_run_leaves_its_folder(tmp_path):
    recipe = small_language(tmp_path, eval_every=10)
    result = train(recipe, tmp_path / "run", **quiet)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        ".lock", "checkpoint.pt", "config.json", "metrics.jsonl", "status.json", "trace.jsonl",
    ]  # fmt: skip
    assert (result.status, result.step) == ("finished", 20)
    run = TrainedRun.load(tmp_path / "run")
    assert run.recipe == recipe
    steps, losses = run.column("loss")
    assert steps.tolist() == list(range(1, 21))
    assert losses[-5:].mean() < losses[0]
    assert run.column("loss", "valid")[0].tolist() == [10, 20]
    assert run.column("loss", "test")[0].tolist() == [20]
    assert result.train_loss == losses[-1]  # a twentieth of 20 steps
    assert result == run.result == train(recipe, tmp_path / "run", resume=True, **quiet)
    assert [found.folder for found in find_runs(tmp_path)] == [run.folder]


def test_all_optimizers_see_the_same_start_and_the_same_batches(tmp_path):
    one = make_task(small_language(tmp_path, lr=3.0))
    other = make_task(small_language(tmp_path, lr=0.1, max_norm=math.inf, momentum=0.9))
    torch.testing.assert_close([*one.build().parameters()], [*other.build().parameters()], rtol=0, atol=0)
    for step in (0, 7, 300):
        torch.testing.assert_close(one.batch(step), other.batch(step), rtol=0, atol=0)
    images = make_task(small_images(lr=3.0)), make_task(small_images(max_norm=0.5))
    torch.testing.assert_close(images[0].batch(13), images[1].batch(13), rtol=0, atol=0)


def test_the_loop_is_clipped_sgd_written_out(tmp_path):
    recipe = small_language(tmp_path, precision="64-true", lr=2.0, max_norm=0.3, steps=12, lr_drops=(0.5,))
    train(recipe, tmp_path / "run", **quiet)
    task = make_task(recipe)
    model, state, losses, norms = task.build(), None, [], []
    for step in range(12):
        loss, state = task.loss(model, task.batch(step), state)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        lr = 2.0 if step < 6 else 0.2
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= lr * min(1.0, 0.3 / norm) * g
        losses.append(loss.item())
        norms.append(norm)
    run = TrainedRun.load(tmp_path / "run")
    np.testing.assert_allclose(run.column("loss")[1], losses, rtol=1e-10)
    np.testing.assert_allclose(run.column("grad_norm")[1], norms, rtol=1e-10)
    np.testing.assert_allclose(
        run.column("coefficient")[1], np.minimum(1.0, 0.3 / np.array(norms)), rtol=1e-10
    )


def test_the_probe_changes_nothing_in_a_run(tmp_path):
    probed = small_language(tmp_path, dropout=0.3, probe_every=2)
    train(probed, tmp_path / "probed", **quiet)
    train(with_fields(probed, probe_every=0), tmp_path / "plain", **quiet)
    with_probe, without = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("probed", "plain"))
    assert with_probe == without
    assert not (tmp_path / "plain" / "trace.jsonl").exists()


def test_measurements_begin_where_the_recipe_says(tmp_path):
    train(small_language(tmp_path, steps=12, probe_every=3, probe_from=5), tmp_path / "run", **quiet)
    assert [row["step"] for row in TrainedRun.load(tmp_path / "run").trace] == [5, 8, 11]


def test_the_hidden_state_starts_over_with_each_pass(tmp_path):
    task = make_task(small_language(tmp_path))
    per_epoch = math.ceil((len(task.streams) - 1) / 6)
    assert [step for step in range(3 * per_epoch) if task.starts_over(step)] == [0, per_epoch, 2 * per_epoch]


def test_one_pass_shows_every_word_once(tmp_path):
    for variable in (False, True):
        task = make_task(small_language(tmp_path, variable_bptt=variable, bptt=12))
        per_epoch = next(step for step in range(1, 10_000) if task.starts_over(step))
        words = torch.cat([task.batch(step)[1] for step in range(per_epoch)])
        torch.testing.assert_close(words, task.streams[1:], rtol=0, atol=0)
        epochs = make_task(small_language(tmp_path, variable_bptt=variable, bptt=12, epochs=1)).num_steps()
        assert epochs == per_epoch


def test_variable_lengths_scale_the_learning_rate(tmp_path):
    torch.set_default_dtype(torch.float32)  # as in the run: the float type decides how lengths are drawn
    recipe = small_language(tmp_path, variable_bptt=True, bptt=12, lr=1.0)
    train(recipe, tmp_path / "run", **quiet)
    task = make_task(recipe)
    _, lrs = TrainedRun.load(tmp_path / "run").column("lr")
    lengths = [len(task.batch(step)[0]) for step in range(20)]
    np.testing.assert_allclose(lrs, np.array(lengths) / 12)
    assert len(set(lengths)) > 3


def test_an_epoch_of_images_shows_whole_batches_in_a_new_order():
    task = make_task(small_images(batch_size=16, epochs=2))
    assert task.num_steps() == 10
    classes = [torch.cat([task.batch(step)[1] for step in range(5 * e, 5 * e + 5)]) for e in (0, 1)]
    assert torch.bincount(classes[0]).tolist() == [8] * 10  # the first 80 of the set, balanced
    assert not torch.equal(classes[0], classes[1])
    assert not torch.equal(task.batch(0)[0], task._ready(task.x[task._epochs.at(0)]))  # cropped, flipped


@pytest.mark.parametrize(
    ("share", "sizes"), [(0.5, [32, 8]), (0.1, [10]), (0.8, [32, 32, 6]), (1.0, [32, 32, 16])]
)
def test_a_share_of_the_images_is_the_same_on_any_number_of_processes(share, sizes):
    recipe = small_images(batch_size=32)
    alone = make_task(recipe).oracle_batches(share)
    assert [len(y) for _, y in alone] == sizes
    classes = torch.cat([y for _, y in alone])
    assert int(torch.bincount(classes, minlength=10).max() - torch.bincount(classes, minlength=10).min()) <= 1
    parts = [make_task(recipe, rank=rank, world_size=2).oracle_batches(share) for rank in (0, 1)]
    assert [len(y) for _, y in parts[0]] == [len(y) for _, y in parts[1]] == [size // 2 for size in sizes]
    together = [
        tuple(torch.cat(pair) for pair in zip(*both, strict=True)) for both in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_a_run_that_blows_up_ends_as_diverged_with_its_rows(tmp_path):
    recipe = small_language(tmp_path, lr=500.0, max_norm=math.inf, steps=50)
    result = train(recipe, tmp_path / "run", **quiet)
    assert result.status == "diverged"
    assert result.step < 50
    assert math.isnan(result.train_loss)
    assert "times the first one" in result.message or "not finite" in result.message
    steps, losses = TrainedRun.load(tmp_path / "run").column("loss")
    assert steps.tolist() == list(range(1, result.step + 1))
    assert not losses[-1] <= 3 * losses[0]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert train(recipe, tmp_path / "run", resume=True, **quiet) == result


def test_a_nan_loss_ends_as_diverged(tmp_path):
    # The first step leaves float32, whatever the start.
    recipe = small_language(tmp_path, lr=3e38, max_norm=math.inf, steps=50, diverged_above=math.inf)
    result = train(recipe, tmp_path / "run", **quiet)
    assert result.status == "diverged"
    assert "not finite" in result.message


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    recipe = small_language(tmp_path)
    train(recipe, tmp_path / "run", **quiet)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="Resume it, or choose another"):
        train(recipe, tmp_path / "run", **quiet)
    with pytest.raises(ValueError, match=r"a run of another recipe \(lr 1.0 → 2.0\)"):
        train(with_fields(recipe, lr=2.0), tmp_path / "run", resume=True, **quiet)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"no config.json"):
        train(small_language(tmp_path / "data"), tmp_path, resume=True, **quiet)
    (tmp_path / "config.json").write_text('{"mine": true}')
    with pytest.raises(ValueError, match=r"config.json is not a recipe"):
        train(small_language(tmp_path / "data"), tmp_path, resume=True, **quiet)
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"precious"


def test_a_folder_that_another_process_trains_in_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("curvestep_reproduction.training.run_folder.PATIENCE", 0.2)
    recipe = small_language(tmp_path)
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="Another process is training in"):
        train(recipe, tmp_path / "run", resume=True, **quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_run_that_fails_says_how_far_it_was(tmp_path, monkeypatch):
    recipe = small_language(tmp_path)
    task = make_task(recipe)
    batch = type(task).batch

    def batch_until(self, step):
        if step == 13:
            raise RuntimeError("the disk\nis gone")
        return batch(self, step)

    monkeypatch.setattr(type(task), "batch", batch_until)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="is gone"):
        train(recipe, tmp_path / "run", **quiet)
    status = TrainedRun.load(tmp_path / "run").status
    assert (status["status"], status["step"], status["message"]) == ("failed", 13, "RuntimeError: is gone")
    assert 0 < status["seconds"] < time.monotonic() - start
    assert status["num_parameters"] > 0
    monkeypatch.undo()
    result = train(recipe, tmp_path / "run", resume=True, **quiet)
    assert (result.status, result.step, result.message) == ("finished", 20, "")
    assert result.seconds > status["seconds"]


def test_a_run_reads_and_fits_its_trace_once(tmp_path):
    train(small_language(tmp_path, steps=30, probe_every=1), tmp_path / "run", **quiet)
    run = TrainedRun.load(tmp_path / "run")
    assert run.fit is run.fit
    assert run.trace is run.trace
    assert run.metrics is run.metrics
    assert run.fit.num_points == int(run.trace.ok.sum())


def test_a_folder_below_a_file_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train(small_images(), tmp_path / "file" / "run", **quiet)


@pytest.mark.parametrize(
    ("batch_size", "arguments", "words"),
    [
        (4, {"devices": 0}, "`devices` must be a whole number of at least 1"),
        (4, {"devices": 10_000}, "`devices` must be at most the .* cores"),
        (3, {"devices": 2}, "`batch_size`.* 2, got 3"),
        (4, {"threads": 0}, "`threads` must be"),
        (4, {"checkpoint_seconds": -1.0}, "`checkpoint_seconds` must be"),
    ],
)
def test_impossible_arguments_are_named_and_leave_nothing(tmp_path, batch_size, arguments, words):
    with pytest.raises(ValueError, match=words):
        train(small_language(tmp_path, batch_size=batch_size), tmp_path / "run", **quiet, **arguments)
    assert not (tmp_path / "run").exists()


def test_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with pytest.raises(ValueError, match="use `devices`, not torchrun"):
        train(small_language(tmp_path), tmp_path / "run", **quiet)
    assert not (tmp_path / "run").exists()


def test_the_callers_float_type_random_state_and_threads_come_back(tmp_path):
    before = torch.get_rng_state()
    train(small_language(tmp_path, steps=2), tmp_path / "run", threads=2, **quiet)
    assert torch.get_default_dtype() == torch.float64
    assert torch.get_num_threads() == 1
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


def rows_of(folder):
    run = TrainedRun.load(folder)
    return {split: run.column("loss", split)[0].tolist() for split in ("train", "valid", "test")}


def test_evaluations_come_at_their_steps_whatever_the_steps_of_the_rows(tmp_path):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=2, probe_every=0)
    train(recipe, tmp_path / "run", **quiet)
    assert rows_of(tmp_path / "run") == {
        "train": [2, 3, 4, 6, 8, 9, 10, 12],
        "valid": [3, 6, 9, 12],
        "test": [12],
    }


def test_held_out_data_are_evaluated_in_part_and_wholly_at_the_end(tmp_path):
    recipe = small_language(tmp_path, steps=8, eval_every=4, probe_every=0)
    train(recipe, tmp_path / "whole", **quiet)
    train(with_fields(recipe, eval_part=0.25), tmp_path / "part", **quiet)
    whole, part = TrainedRun.load(tmp_path / "whole"), TrainedRun.load(tmp_path / "part")
    assert part.rows("valid") == whole.rows("valid")[-1:]
    assert part.rows("test") == whole.rows("test")
    assert part.column("loss", "valid-part")[0].tolist() == [4, 8]
    size = math.ceil(0.25 * len(load_corpus(recipe.corpus).valid))
    fewer = train(with_fields(recipe, eval_size=size), tmp_path / "fewer", **quiet)
    assert part.rows("valid-part")[-1]["loss"] == fewer.metrics["valid"]["loss"]
    assert part.rows() == whole.rows()


def test_mixed_precision_measures_in_float32_and_resumes_bit_for_bit(tmp_path):
    recipe = small_images(precision="bf16-mixed", steps=6, eval_every=3, probe_data=0.1)
    train(recipe, tmp_path / "whole", **quiet)
    interrupt_at(3, recipe, tmp_path / "stopped")
    train(recipe, tmp_path / "stopped", resume=True, **quiet)
    assert_same_rows(tmp_path / "stopped", tmp_path / "whole")
    train(with_fields(recipe, precision="32-true"), tmp_path / "float32", **quiet)
    mixed, plain = TrainedRun.load(tmp_path / "whole"), TrainedRun.load(tmp_path / "float32")
    assert mixed.trace[0]["eps"] == plain.trace[0]["eps"] < 1e-6
    # The first measurement of both starts from the same parameters: equal in float32, not in bfloat16.
    assert mixed.trace[0]["grad_norm"] == plain.trace[0]["grad_norm"]
    losses = [run.column("loss")[1][0] for run in (mixed, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_row_is_the_mean_loss_since_the_row_before(tmp_path):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=2, probe_every=0, precision="64-true")
    result = train(recipe, tmp_path / "run", **quiet)
    each = train(with_fields(recipe, log_every=1), tmp_path / "each", **quiet)
    steps, means = TrainedRun.load(tmp_path / "run").column("loss")
    _, losses = TrainedRun.load(tmp_path / "each").column("loss")
    spans = np.split(losses, steps[:-1])
    np.testing.assert_allclose(means, [span.mean() for span in spans], rtol=1e-12)
    assert (result.train_loss, each.train_loss) == (means[-1], losses[-1])  # a twentieth of 12 steps


@pytest.mark.parametrize(("step", "kind"), [(3, signal.SIGINT), (8, signal.SIGTERM)])
def test_a_run_stopped_by_a_signal_between_two_rows_goes_on_bit_for_bit(tmp_path, step, kind):
    recipe = small_language(tmp_path, steps=12, eval_every=3, log_every=4, dropout=0.3)
    train(recipe, tmp_path / "whole", **quiet)
    interrupt_at(step, recipe, tmp_path / "stopped", kind)
    assert load_checkpoint(tmp_path / "stopped" / "checkpoint.pt")["step"] == step
    train(recipe, tmp_path / "stopped", resume=True, **quiet)
    assert_same_rows(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_killed_before_its_last_status_ends_as_it_did(tmp_path):
    recipe = small_language(tmp_path, lr=20.0, max_norm=5.0, eval_every=5, steps=30)
    result = train(recipe, tmp_path / "run", **quiet)
    assert rows_of(tmp_path / "run")["test"] == [result.step]
    assert result.metrics.keys() == {"valid", "test"}

    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "status.json").unlink()
    again = train(recipe, tmp_path / "run", resume=True, **quiet)
    assert (again.status, again.message, again.step) == (result.status, result.message, result.step)
    assert (again.metrics, again.train_loss) == (result.metrics, result.train_loss)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ptb-lstm", "ptb-awd-lstm", "cifar-resnet20"])
def test_paper_scale_takes_two_steps(tmp_path, name):
    fields = {"images": "digits", "batch_size": 16, "eval_size": 16}
    if "ptb" in name:
        fields = {"corpus": write_text(tmp_path / "text.txt", lines=200), "batch_size": 4, "eval_size": 100}
    recipe = get_recipe(name, "paper", steps=2, eval_every=1, log_every=1, probe_data=0, **fields)
    assert train(recipe, tmp_path / "run", **quiet).status == "finished"
    assert len(TrainedRun.load(tmp_path / "run").rows("train")) == 2


@pytest.mark.slow
def test_the_probe_on_a_share_of_the_data_measures_that_share(tmp_path):
    recipe = small_language(tmp_path, probe_data=0.5, steps=6, probe_every=2, precision="64-true")
    train(recipe, tmp_path / "run", **quiet)
    trace = TrainedRun.load(tmp_path / "run").trace
    assert trace.column("step").tolist() == [0, 2, 4]
    task = make_task(recipe)
    model, state, total, words = task.build(), None, 0.0, 0
    for batch in task.oracle_batches(0.5):
        loss, state = task.loss(model, batch, state)
        total, words = total + loss * batch[1].numel(), words + batch[1].numel()
    grads = torch.autograd.grad(total / words, list(model.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    torch.testing.assert_close(torch.tensor(trace.column("grad_norm")[0]), norm)
    assert abs(words / (task.streams.numel() - 4) - 0.5) < 0.02
