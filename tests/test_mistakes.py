"""Mistakes that a newcomer makes, each made for real: what comes back says what to do."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.cli import main
from curvestep.trace.trace import Trace
from tests.models import mlp


def batches(count=24):
    """Inputs and labels that a small network learns."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(6, 3, generator=generator)
    inputs = [torch.randn(32, 6, generator=generator) for _ in range(count)]
    return [(x, (x @ teacher).argmax(1)) for x in inputs]


def network(seed=1, **options):
    torch.manual_seed(seed)
    return mlp(6, 16, 3, **options)


def loss_with(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, *, epochs=2, change=None, zero_grad=True, block=False, **options):
    """A user's loop, with the probe as the docs teach it or as a block around the step; the probe."""
    probe = cs.SmoothnessProbe(model, **{"every": 1, **options})
    if not block:
        probe.watch(optimizer)
    loss_of_batch = loss_with(model)
    for step, batch in enumerate(batches() * epochs):
        batch = change(step, batch) if change else batch
        loss_fn = lambda batch=batch: loss_of_batch(batch)  # noqa: E731
        if block:
            loss_fn().backward()
            with probe(loss_fn):
                optimizer.step()
        else:
            probe.record(loss_fn).backward()
            optimizer.step()
        if zero_grad:
            optimizer.zero_grad()
    probe.close()
    return probe


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


# ---- calls that are refused: in one line that names the argument and the way out ----


def calibrate_two_optimizers_of_the_same_parameters(model):
    both = [sgd(model), sgd(model[2])]
    cs.calibrate(model, loss_with(model), batches(), optimizer=both)


def calibrate_the_loss_of_another_model(model):
    cs.calibrate(model, loss_with(network()), batches())


def swap_arguments(model):
    cs.calibrate(model, batches(), loss_with(model))


def return_a_loss_per_sample(model):
    cs.calibrate(model, lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batches())


def return_an_item(model):
    cs.calibrate(model, lambda b: loss_with(model)(b).item(), batches())


def freeze_everything(model):
    model.requires_grad_(False)
    cs.calibrate(model, loss_with(model), batches())


def start_from_nan(model):
    nn.init.constant_(model[0].weight, math.nan)
    cs.calibrate(model, loss_with(model), batches())


REFUSED = [
    (calibrate_two_optimizers_of_the_same_parameters, ValueError, "parameters that several of them train"),
    (calibrate_the_loss_of_another_model, ValueError, "`loss_of_batch` gives no gradient of `model`"),
    (swap_arguments, TypeError, r"The order is `calibrate\(model, loss_of_batch, batches\)`"),
    (return_a_loss_per_sample, ValueError, r"`loss_of_batch` must return a scalar.* `.mean\(\)`"),
    (return_an_item, ValueError, r"not `.item\(\)`"),
    (freeze_everything, ValueError, "`model` has no parameter with `requires_grad`"),
    (start_from_nan, ValueError, "The loss at the start is nan"),
]


@pytest.mark.parametrize(("mistake", "error", "words"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_a_call_that_cannot_work_is_refused_in_a_line_that_helps(mistake, error, words):
    with pytest.raises(error, match=words) as caught:
        mistake(network())
    assert len(str(caught.value)) < 300  # no dump of optimizers or tensors


# ---- calls that work, with a warning in their result ----


def in_eval_mode(model):
    return cs.calibrate(model.eval(), loss_with(model), batches(), optimizer="AdamW")


def after_some_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_with(model)(batches()[0]).backward()
    optimizer.step()
    return cs.calibrate(model, loss_with(model), batches(), optimizer=optimizer)


@pytest.mark.parametrize(("mistake", "kind"), [(in_eval_mode, "eval-mode"), (after_some_steps, "stepped")])
def test_calibrate_prints_first_what_the_user_did_wrong(mistake, kind):
    found = mistake(network(batchnorm=True))
    notes = {warning.kind: warning.text for warning in found.warnings}
    assert next(iter(notes)) == kind
    assert notes[kind] in str(found)  # of several warnings only the first is printed


@pytest.mark.parametrize("name", ["adamw", "AdamW"])
def test_calibrate_takes_the_name_of_an_optimizer_in_any_case(name):
    model = network()
    found = cs.calibrate(model, loss_with(model), batches(), optimizer=name)
    assert found.optimizer == "AdamW"


def test_apply_leaves_the_threshold_of_the_user_alone_and_print_says_it():
    model = network()
    optimizer = cs.ClippedAdamW(model.parameters(), lr=1e-3, max_norm=1.5)
    found = cs.calibrate(model, loss_with(model), batches(), optimizer=optimizer, schedule="warmup-decay")
    found.apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == found.lr != 1e-3
    assert optimizer.param_groups[0]["max_norm"] == 1.5
    assert "max_norm 1.5" in str(found).splitlines()[0]


# ---- runs that went wrong: advise names the cause, and gives no lr where that is not it ----


def nan_in_the_data(model):
    spoil = lambda step, batch: (batch[0] * math.nan, batch[1]) if step == 15 else batch  # noqa: E731
    return train(model, sgd(model), change=spoil)


def forgotten_zero_grad(model):
    return train(model, sgd(model), zero_grad=False)


def forgotten_zero_grad_around_the_step(model):
    return train(model, sgd(model), zero_grad=False, block=True)


def trained_in_eval_mode(model):
    return train(model.eval(), sgd(model))


def too_few_rows(model):
    return train(model, sgd(model), every=20)


def labels_without_a_pattern(model):
    shuffle = lambda step, batch: (batch[0], torch.randint(3, (32,)))  # noqa: E731
    return train(model, sgd(model, lr=300.0), change=shuffle)


WENT_WRONG = [
    (nan_in_the_data, {"bad-batch"}, "look at the data"),
    (forgotten_zero_grad, {"failed-rows"}, "probe.record"),
    (forgotten_zero_grad_around_the_step, {"failed-rows"}, "gradient is not the one in `.grad`"),
    (trained_in_eval_mode, {"eval-mode"}, "Call `model.train()`"),
    (too_few_rows, {"few-rows"}, "needs 10 measured rows and has 3"),
    (labels_without_a_pattern, {"rose-far", "rose-and-stuck", "long-and-stuck", "not-finite"}, "calibrate"),
]


@pytest.mark.filterwarnings("ignore:A smoothness measurement failed", "ignore:The model is in eval mode")
@pytest.mark.parametrize(("mistake", "kinds", "words"), WENT_WRONG, ids=[r[0].__name__ for r in WENT_WRONG])
def test_advise_names_the_cause_of_a_run_that_went_wrong(mistake, kinds, words):
    advice = cs.advise(mistake(network(batchnorm=True)))  # the probe itself will do
    assert advice.kind in kinds
    assert words in advice.verdict
    assert (advice.lr is None) == (kinds == {advice.kind})
    lines = str(advice).splitlines()
    assert len(lines) <= 8
    assert len(set(lines)) == len(lines)  # a refusal says its reason once
    assert not [note for note in advice.reasons if note.text in advice.verdict]


def test_the_probe_warns_once_while_training_goes_on():
    with pytest.warns(UserWarning, match="begin every step with `zero_grad") as caught:
        forgotten_zero_grad(network(batchnorm=True))
    assert len(caught) == 1


def test_a_fit_whose_intercept_has_no_interval_says_not_identified():
    trace = Trace()
    rng = np.random.default_rng(0)
    norms = np.exp(rng.uniform(np.log(0.5), np.log(3.0), 80)).tolist()
    noise = np.exp(0.1 * rng.standard_normal(80)).tolist()
    for step, (norm, factor) in enumerate(zip(norms, noise, strict=True)):
        # Bent upwards, so that every line of the frontier begins at zero.
        row = {"grad_norm": norm, "smoothness": 13.7 * norm**1.3 * factor, "kappa": 0.1, "step_norm": 0.01}
        trace.append({"step": step, "loss": 1.0, "lr": 1e-3, **row})
    fit = cs.fit_smoothness(trace)
    assert fit.L0_interval == (0.0, 0.0)
    assert "L0 0 (not identified)" in str(fit)
    assert "[0, 0]" not in str(fit)


# ---- the command line ----


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fit_prints_the_fit_that_advise_shows_as_details(folder, capsys):
    write_trace(folder / "trace.jsonl", seed=0)
    assert main(["advise", "trace.jsonl", "--details"]) == 0
    details = capsys.readouterr().out
    assert main(["fit", "trace.jsonl"]) == 0
    fit = capsys.readouterr().out
    assert details.endswith(fit)
    assert "sharpness <= L0 + L1 * grad_norm" in fit


def test_advise_of_a_folder_has_one_line_a_setting_whatever_its_seeds(folder, capsys):
    for lr in (0.1, 0.5, 1.0):
        for seed in range(3):
            write_trace(folder / f"lr{lr}-{seed}" / "trace.jsonl", seed=seed, lr=lr)
    assert main(["advise", "."]) == 0
    first, *settings = capsys.readouterr().out.splitlines()
    assert first.startswith("TAKE lr")
    assert [line.split(":")[0].split()[:3] for line in settings] == [
        ["setting", "lr", "1"], ["setting", "lr", "0.5"], ["setting", "lr", "0.1"],
    ]  # fmt: skip
    assert all(line.endswith("3 runs") for line in settings)


def test_advise_lists_ten_of_many_settings_and_counts_the_others():
    runs = []
    for number in range(12):
        runs.append(Trace())
        for step in range(20):
            row = {"loss": 2.0 - step / 20 + number / 9, "lr": 0.1 * (1 + number), "step_norm": 0.1}
            runs[-1].append({"step": step, "grad_norm": 1.0, "smoothness": 0.5, "kappa": 0.05, **row})
    advice = cs.advise(*runs)
    listed = [note.text for note in advice.reasons if note.kind == "setting"]
    assert [text.startswith("lr ") for text in listed] == [True] * 10 + [False]
    assert listed[-1].startswith("2 other settings")
    assert len(str(advice).splitlines()) <= 8


def write_trace(path, *, seed, lr=0.5):
    """A trained run, kept from call to call: the command line only reads it."""
    known = KEPT.get((seed, lr))
    if known is None:
        model = network(seed)
        train(model, sgd(model, lr), trace=str(path))
        KEPT[seed, lr] = path.read_bytes()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(known)


KEPT = {}
