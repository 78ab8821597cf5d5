"""A probe measures when it should, and changes nothing."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.trace import Trace
from tests.models import classifier, mlp
from tests.smoothness.loops import MODELS, OPTIMIZERS, assert_same_run, block_steps, measured_sgd, train


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_probed_and_unprobed_runs_are_bit_identical(name, optimizer):
    plain = train(name, OPTIMIZERS[optimizer])
    estimators = {"smoothness": 1, "local_smoothness": 4, "spectral_smoothness": 20}
    make_probe = partial(SmoothnessProbe, every=3, estimators=estimators, layers=True)
    probed = train(name, OPTIMIZERS[optimizer], make_probe=make_probe)
    assert_same_run(plain, probed)
    trace = probed[3].trace
    assert len(trace) == 17
    assert trace.ok.all(), list(trace.column("status"))
    assert (trace.column("smoothness") > 0).all()


def test_resumed_probe_measures_what_an_uninterrupted_one_does(tmp_path):
    def run(path, stop):
        torch.manual_seed(0)
        model, loss_fn = classifier(dropout=0.5)
        optimizer, probe = measured_sgd(model, every=3, trace=path)
        for step in range(11):
            if step == stop:
                saved = probe.state_dict()
                probe.close()
                probe = SmoothnessProbe(model, every=3, trace=path)
                probe.load_state_dict(saved)
            block_steps(probe, optimizer, loss_fn)
        probe.close()
        return [dict(row) for row in Trace.load(path)]

    assert run(tmp_path / "whole.jsonl", stop=None) == run(tmp_path / "parts.jsonl", stop=5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler has warnings of its own
@pytest.mark.parametrize("kind", ["wrapped", "in place"])
def test_compiled_model_with_dropout_is_measured_exactly(kind):
    plain = mlp(dropout=0.5)
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    if kind == "in place":
        plain.compile(backend="aot_eager")
    model = plain if kind == "in place" else torch.compile(plain, backend="aot_eager")
    optimizer, probe = measured_sgd(model)
    # The first measurement compares the replayed masks with training's.
    block_steps(probe, optimizer, lambda: F.cross_entropy(model(x), y), 3)
    assert probe.trace.ok.all()


def test_model_with_a_probe_can_be_copied_and_saved():
    model, loss_fn = classifier()
    probe = SmoothnessProbe(model, every=1)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        other(torch.randn(2, 6))
    block_steps(probe, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    assert probe.trace.ok.all()
    assert probe.trace[0]["batch_size"] == 5  # neither of them is watched


def test_closed_probe_leaves_no_hook_behind():
    model, _ = classifier()
    before = len(model._forward_pre_hooks)
    probe = SmoothnessProbe(model)
    probe.close()
    assert len(model._forward_pre_hooks) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "`every`"),
        ({"fractions": (0.5, 2.0)}, "`fractions`"),
        ({"fractions": 0.5}, "`fractions` must be several numbers"),
        ({"oracle": lambda: None}, "`oracle` must be a GradientOracle, got function"),
        ({"estimators": ("secant",)}, "`estimators` must be one of 'smoothness'"),
        ({"max_overhead": -0.1}, "`max_overhead`"),
        ({"on_error": "ignore"}, "`on_error`"),
        ({"model": nn.ReLU()}, "nothing to measure"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        SmoothnessProbe(**({"model": nn.Linear(1, 1)} | arguments))
