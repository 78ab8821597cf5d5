"""Loops of Accelerate and Fabric: two added lines leave them as they are; the examples run."""

import re
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F

import curvestep as cs
from tests.integrations.runs import ROOT, TORCHRUN, classes, network, printed_by, state_of

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.finfo(torch.bfloat16).eps


def optimizer_of(name, model):
    if name == "ClippedSGD":
        return cs.ClippedSGD(model.parameters(), lr=0.2, max_norm=0.3)
    return torch.optim.AdamW(model.parameters(), lr=0.2)


def forget_accelerator():
    """One process has one Accelerator's settings."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerate_run(probed, parts, precision, name):
    accelerate = pytest.importorskip("accelerate", reason="needs the extra `transformers`")
    forget_accelerator()
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=parts, mixed_precision=precision
    )
    model = network()
    loader = torch.utils.data.DataLoader(classes(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(name, model), loader)
    probe = cs.SmoothnessProbe(model, every=2, on_error="raise").watch(optimizer) if probed else None
    for x, y in loader:
        with accelerator.accumulate(model):

            def loss_fn(x=x, y=y):
                return F.cross_entropy(model(x), y)

            loss = loss_fn() if probe is None else probe.record(loss_fn)
            accelerator.backward(loss)
            if accelerator.sync_gradients and name == "AdamW":
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return state_of(accelerator.unwrap_model(model), optimizer), probe


@pytest.mark.parametrize(
    ("parts", "precision", "name"),
    [(1, "no", "AdamW"), (3, "bf16", "AdamW"), (3, "no", "ClippedSGD"), (1, "bf16", "ClippedSGD")],
)
def test_an_accelerate_loop_stays_as_it_is(parts, precision, name):
    plain, _ = accelerate_run(False, parts, precision, name)
    probed, probe = accelerate_run(True, parts, precision, name)
    assert probed == plain
    check_rows(
        probe, steps=range(0, 12 // parts, 2), size=8 * parts, eps=BF16 if precision == "bf16" else 2**-23
    )


def check_rows(probe, *, steps, size, eps):
    assert [row["step"] for row in probe.trace] == list(steps)
    for row in probe.trace:
        assert row["status"] == "ok"
        assert row["batch_size"] == size
        assert row["eps"] == pytest.approx(eps)
        assert row["lr"] == pytest.approx(0.2)
        expected = min(1.0, 0.3 / row["grad_norm"])
        assert row["coefficient"] == pytest.approx(expected, rel=1e-4 if eps < 1e-4 else 2e-2)


def fabric_run(probed, precision, name):
    fabric_of = pytest.importorskip("lightning_fabric", reason="comes with the reproduction").Fabric
    torch.manual_seed(0)
    fabric = fabric_of(accelerator="cpu", devices=1, precision=precision)
    model = network()
    model, optimizer = fabric.setup(model, optimizer_of(name, model))
    probe = None
    if probed:
        probe = cs.SmoothnessProbe(model, every=2, on_error="raise", backward=fabric.backward).watch(
            optimizer
        )
    for x, y in torch.utils.data.DataLoader(classes(), batch_size=8, shuffle=True):

        def loss_fn(x=x, y=y):
            return F.cross_entropy(model(x), y)

        loss = loss_fn() if probe is None else probe.record(loss_fn)
        fabric.backward(loss)
        if name == "AdamW":
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer), probe


@pytest.mark.parametrize("name", ["AdamW", "ClippedSGD"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fabric_loop_stays_as_it_is(precision, name):
    plain, _ = fabric_run(False, precision, name)
    probed, probe = fabric_run(True, precision, name)
    assert probed == plain
    check_rows(probe, steps=range(0, 12, 2), size=8, eps=BF16 if "bf16" in precision else 2**-23)


EXAMPLES = {
    "accelerate_loop": ("4 rows; ", "accelerate"),
    "amp_loop": ("step 30: lr 0.0015, coefficient 0.", "torch"),
    "fabric_loop": ("4 rows; ", "lightning_fabric"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_example_runs_as_its_first_lines_say(name, tmp_path, monkeypatch, capsys):
    words, package = EXAMPLES[name]
    pytest.importorskip(package, reason=f"needs {package}")
    if name == "accelerate_loop":
        forget_accelerator()
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(words)
    page = (ROOT / "docs/loops.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"`python examples/{name}\.py` \| `(.*)` \|", page)
    # Another processor may round otherwise, and clip a step more or less.
    numbers = [[float(number) for number in re.findall(r"[\d.]+", text)] for text in (last, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1)
    assert [row["status"] for row in cs.Trace.load(tmp_path / "trace.jsonl")] == ["ok"] * 4


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_for_several_processes_runs_as_its_first_lines_say(tmp_path):
    script = tmp_path / "script.py"
    example = str(ROOT / "examples/torchrun_ddp.py")
    # torch's threads now and then abort a process at its end, without a probe too.
    script.write_text(f"import os, runpy\nrunpy.run_path({example!r})\nos._exit(0)\n")
    words = ("-W", "error::UserWarning", *TORCHRUN, script, tmp_path)
    assert "4 rows of 32 samples on 2 ranks" in printed_by(*words)
    assert [row["status"] for row in cs.Trace.load(tmp_path / "trace.jsonl")] == ["ok"] * 4
