"""Whatever goes wrong in a measurement, the training step is as it would have been without it."""

import errno
import math
from collections import UserList

import pytest
import torch

from curvestep.smoothness.determinism import NonDeterministicError
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.trace import Trace
from tests.models import classifier
from tests.smoothness.loops import block_steps, measured_sgd, recorded_steps, watched_sgd


def net():
    torch.manual_seed(0)
    return classifier(dropout=0.5)


class Flaky:
    """A closure that works when training calls it and fails in the replays of some steps."""

    def __init__(self, loss_fn, failure):
        self.loss_fn, self.failure, self.armed = loss_fn, failure, False

    def __call__(self):
        loss = self.loss_fn()
        return self.failure(loss) if self.armed else loss


def no_such_batch(loss):
    raise KeyError("no such batch\nand more")


FAILURES = {
    "raises": (no_such_batch, "failed: KeyError: 'no such batch"),
    "no tensor": (lambda loss: "loss", "failed: TypeError: `closure` must return a scalar tensor, the loss"),
    "nothing": (lambda loss: None, "failed: TypeError"),
    "vector": (lambda loss: loss * torch.ones(3), "failed: ValueError: `closure` must return a scalar"),
    "no gradient": (lambda loss: loss.detach(), "failed: ValueError: `closure` gives no gradient"),
    "nan": (lambda loss: loss * float("nan"), "nonfinite"),
    "inf": (lambda loss: loss * float("inf"), "nonfinite"),
}


def run(failure=None, *, on_error="mark", trace=None, at=2):
    model, loss_fn = net()
    closure = Flaky(loss_fn, failure)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    probe = SmoothnessProbe(model, every=1, on_error=on_error)
    if trace is not None:
        probe.trace = trace
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = closure()
        loss.backward()
        closure.armed = failure is not None and step == at
        try:
            with probe(closure):
                optimizer.step()
        finally:
            closure.armed = False
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state(), probe


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("at", [0, 2])  # in the self-test, and later
@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
def test_failed_measurement_is_marked_and_training_goes_on_unchanged(name, at):
    failure, status = FAILURES[name]
    plain, marked = run(), run(failure, at=at)
    assert plain[0] == marked[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], marked[1], strict=True))
    assert torch.equal(plain[2], marked[2])
    rows = list(marked[3].trace)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[at]["status"].startswith(status)
    assert "\n" not in rows[at]["status"]
    assert all(row["status"] == "ok" for row in rows if row["step"] != at)
    assert rows[at]["smoothness"] is None or not math.isfinite(rows[at]["smoothness"])


def test_first_failure_warns_and_later_ones_do_not():
    with pytest.warns(UserWarning, match=r"failed at step 2.*Training continues") as caught:
        run(no_such_batch)
    assert len(caught) == 1


def test_failure_stops_the_run_after_the_step_if_asked():
    model, loss_fn = net()
    closure = Flaky(loss_fn, no_such_batch)
    optimizer, probe = measured_sgd(model, every=2, on_error="raise")
    block_steps(probe, optimizer, closure, 4)  # the first two measured steps are tested before they are taken
    optimizer.zero_grad()
    closure().backward()
    expected = [(p - 0.1 * p.grad).detach() for p in model.parameters()]
    closure.armed = True
    with pytest.raises(KeyError, match="no such batch"), probe(closure):
        optimizer.step()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e)
    assert probe.trace[-1]["status"].startswith("failed")


def test_exception_of_the_block_itself_passes_through():
    model, loss_fn = net()
    probe = SmoothnessProbe(model, every=1)
    loss_fn().backward()
    with pytest.raises(ZeroDivisionError), probe(loss_fn):
        raise ZeroDivisionError
    assert len(probe.trace) == 0


def test_closure_that_steps_the_optimizer_is_undone_and_marked():
    model, loss_fn = net()
    optimizer, probe = measured_sgd(model)

    def stepping():
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        return loss.item()

    loss_fn().backward()
    expected = [(p - 0.1 * p.grad).detach() for p in model.parameters()]
    with pytest.warns(UserWarning, match="changes parameters in place"), probe(stepping):
        optimizer.step()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e)


def test_a_replay_that_moves_the_parameters_at_a_later_row_is_undone():
    def run(at):
        model, loss_fn = net()
        optimizer, probe = watched_sgd(model)
        for step in range(4):
            moves = UserList([False, step == at] + [False] * 8)  # which no replay puts back

            def moving_loss(moves=moves):
                loss = loss_fn()
                if moves.pop(0):
                    with torch.no_grad():
                        model[0].weight.add_(1.0)
                return loss

            recorded_steps(probe, optimizer, moving_loss)
        return probe, [p.detach().clone() for p in model.parameters()]

    _, plain = run(at=None)
    with pytest.warns(UserWarning, match="changes parameters in place"):
        probe, weights = run(at=2)
    assert all(map(torch.equal, weights, plain))
    assert probe.trace.ok.tolist() == [True, True, False, True]


def test_gradient_that_is_not_finite_does_not_count_as_the_self_test():
    model, loss_fn = net()
    probe = SmoothnessProbe(model, every=1)
    (loss_fn() * float("nan")).backward()
    with probe(lambda: loss_fn() * float("nan")):
        pass
    model.zero_grad()
    loss_fn().backward()
    with pytest.raises(NonDeterministicError, match="2 times the closure's"), probe(lambda: loss_fn() / 2):
        pass


def steps(probe, model, loss_fn, count=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block_steps(probe, optimizer, loss_fn, count)


def test_closed_probe_measures_nothing_and_lets_training_go_on(tmp_path):
    model, loss_fn = net()
    probe = SmoothnessProbe(model, every=1, trace=tmp_path / "trace.jsonl")
    steps(probe, model, loss_fn)
    probe.close()
    before = [p.detach().clone() for p in model.parameters()]
    steps(probe, model, loss_fn)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(probe.trace) == 2


def test_parameters_unfrozen_later_need_a_new_probe(tmp_path):
    model, loss_fn = net()
    model[3].requires_grad_(False)
    probe = SmoothnessProbe(model, every=1, trace=tmp_path / "trace.jsonl")
    steps(probe, model, loss_fn)
    model[3].requires_grad_(True)
    with pytest.warns(UserWarning, match="Make a new probe"):
        steps(probe, model, loss_fn, 1)
    probe.close()
    with pytest.warns(UserWarning, match="header differs in: num_parameters"):
        after = SmoothnessProbe(model, every=1, trace=probe.trace.path)
    after.load_state_dict(probe.state_dict())
    steps(after, model, loss_fn)
    assert after.trace.column("step").tolist() == [0, 1, 2, 3, 4]
    assert after.trace.ok.tolist() == [True, True, False, True, True]


def test_run_resumed_from_before_its_first_row_may_measure_its_rows_again(tmp_path):
    model, loss_fn = net()
    first = SmoothnessProbe(model, every=1, trace=tmp_path / "trace.jsonl")
    saved = first.state_dict()
    steps(first, model, loss_fn)
    first.close()
    second = SmoothnessProbe(model, every=1, trace=first.trace.path)
    second.load_state_dict(saved)
    steps(second, model, loss_fn, 3)
    assert second.trace.column("step").tolist() == [0, 1, 2]


def test_run_resumed_from_an_older_checkpoint_keeps_its_new_rows(tmp_path):
    (model, loss_fn), path = net(), tmp_path / "trace.jsonl"
    first = SmoothnessProbe(model, every=1, trace=path)
    steps(first, model, loss_fn, 2)
    saved = first.state_dict()
    steps(first, model, loss_fn, 3)
    dead = [row["loss_after"] for row in first.trace][2:]
    first.close()
    second = SmoothnessProbe(model, every=1, trace=path)
    second.load_state_dict(saved)
    assert second.trace.column("step").tolist() == [0, 1]
    steps(second, model, loss_fn, 2)
    second.close()
    kept = Trace.load(path)
    assert kept.column("step").tolist() == [0, 1, 2, 3]
    assert kept.column("loss_after").tolist() == second.trace.column("loss_after").tolist()
    assert kept[2]["loss_after"] != dead[0]  # a new timeline: the model had gone on


def test_existing_file_is_replaced_or_left_alone_as_asked(tmp_path):
    (model, loss_fn), path = net(), tmp_path / "trace.jsonl"
    for if_exists, name, count in (
        ("resume", "trace.jsonl", 2), ("new", "trace-2.jsonl", 3),
        ("new", "trace-3.jsonl", 1), ("overwrite", "trace.jsonl", 4),
    ):  # fmt: skip
        probe = SmoothnessProbe(model, every=1, trace=path, if_exists=if_exists)
        assert probe.trace.path == tmp_path / name
        steps(probe, model, loss_fn, count)
        probe.close()
    lengths = {file.name: len(Trace.load(file)) for file in tmp_path.iterdir()}
    assert lengths == {"trace.jsonl": 4, "trace-2.jsonl": 3, "trace-3.jsonl": 1}
    with pytest.raises(ValueError, match="`if_exists` must be one of"):
        SmoothnessProbe(model, trace=path, if_exists="append")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not a curvestep trace"):
        SmoothnessProbe(model, trace=tmp_path / "notes.txt", if_exists="overwrite")
    assert (tmp_path / "notes.txt").read_text() == "mine"


class FullDisk(Trace):
    """Every second write fails."""

    def append(self, row):
        super().append(row)
        if row["step"] % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return True


def test_full_disk_warns_once_keeps_the_rows_and_harms_nothing():
    plain = run()
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        full = run(trace=FullDisk())
    assert len(caught) == 1
    assert plain[0] == full[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], full[1], strict=True))
    assert len(full[3].trace) == 5


def test_full_disk_stops_the_run_if_asked():
    with pytest.raises(OSError, match="No space left"):
        run(trace=FullDisk(), on_error="raise")


def test_a_failed_row_of_an_oracle_has_no_loss_of_another_batch():
    model, _ = classifier()
    x = torch.randn(4, 6)
    oracle = GradientOracle(lambda batch: model(batch).square().mean(), [x])
    probe = SmoothnessProbe(model, every=1, oracle=oracle)
    with pytest.warns(UserWarning, match="`.grad` is empty"), probe(lambda: model(x).sum(), loss=5.0):
        pass
    assert probe.trace[0]["status"].startswith("failed")
    assert probe.trace[0]["loss"] is None
