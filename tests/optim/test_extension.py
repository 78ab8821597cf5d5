"""An optimizer of a user's own, as the guides teach it, is told the same by every part of the package."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.advice.outcome import outcome_of
from curvestep.report import page_words
from curvestep.report.views import find_views, tasks_of

ROOT = Path(__file__).parents[2]


def code_of(page):
    """What the first Python blocks of a page define."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
        if "RootSGD" in names:
            break
    return names


def run(make, tmp_path):
    """Forty measured steps whose gradient norms fall from above the optimizer's threshold to below it."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    x, y = torch.randn(40, 16, 6), torch.randn(40, 16, 1)
    optimizer = make(model.parameters())
    probe = cs.SmoothnessProbe(model, every=1, trace=tmp_path / "trace.jsonl").watch(optimizer)
    for k in range(40):
        optimizer.zero_grad()
        loss = probe.record(lambda k=k: 0.3 * (model(x[k]) - 3.0 - y[k]).square().mean())
        loss.backward()
        optimizer.step()
    return optimizer, probe.trace


OPTIMIZERS = {
    "RootSGD": lambda params: code_of("docs/extend.md")["RootSGD"](params, lr=0.1, scale=0.8),
    "RootSGD with momentum": lambda params: code_of("docs/extend.md")["RootSGD"](
        params, lr=0.02, scale=0.8, momentum=0.9
    ),
    "NormalizedSGD": lambda params: cs.NormalizedSGD(params, lr=0.3, offset=0.8),
    "NormalizedSGD with momentum": lambda params: cs.NormalizedSGD(params, lr=0.02, offset=0.8, momentum=0.9),
    "ClippedSGD": lambda params: cs.ClippedSGD(params, lr=0.1, max_norm=0.8),
    "clip": lambda params: cs.clip(torch.optim.SGD(params, lr=0.1), 0.8).optimizer,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_share_of_clipped_steps_is_one_number_everywhere(name, tmp_path):
    optimizer, trace = run(OPTIMIZERS[name], tmp_path)
    share = optimizer.clip_stats()["clipped_fraction"]
    assert 0.1 < share < 0.9
    told = outcome_of(trace)
    assert trace.column("clipped").mean() == pytest.approx(share)
    assert torch.tensor(trace.clip_norm).isfinite().double().mean().item() == pytest.approx(share)
    assert told.clipped == pytest.approx(share)
    assert told.max_norm == pytest.approx(0.8, rel=1e-4)
    said = cs.advise(trace).details()
    assert f"{share:.0%}" in said
    assert "0.8" in said
    (view,) = find_views([tmp_path / "trace.jsonl"])
    assert view.clipped_fraction == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "line"), [("RootSGD", "opt = RootSGD("), ("NormalizedSGD", "opt = cs.NormalizedSGD(")]
)
def test_the_page_gives_a_smooth_rule_its_own_threshold(name, line, tmp_path):
    run(OPTIMIZERS[name], tmp_path)
    (task,) = tasks_of(find_views([tmp_path / "trace.jsonl"]))
    code = page_words.verdict(task)["code"]
    assert code.startswith(line)
    assert {"RootSGD": "scale=0.8", "NormalizedSGD": "offset=0.8"}[name] in code
    assert "clip(" not in code


def test_momentum_of_normalized_descent_is_that_of_any_descent(tmp_path):
    _, trace = run(OPTIMIZERS["NormalizedSGD with momentum"], tmp_path)
    assert trace.header["optimizer_family"] == "momentum"


def test_calibration_gives_an_own_rule_a_threshold_of_its_own():
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    batches = [torch.randn(16, 6) for _ in range(30)]
    kind = code_of("docs/extend.md")["RootSGD"]
    found = cs.calibrate(model, lambda x: (model(x) - 3.0).square().mean(), batches, optimizer=kind)
    optimizer = kind(model.parameters(), lr=1.0, scale=0.8)
    assert found.threshold == "scale"
    with pytest.warns(UserWarning, match="scale"):  # it has one of its own
        found.apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == found.lr


def test_the_optimizer_of_the_guide_follows_its_formula():
    names = code_of("docs/extend.md")
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    opt = names["RootSGD"]([p], lr=1.0, scale=1.0, momentum=0.9)
    opt.step()
    torch.testing.assert_close(p.detach(), -p.grad / 6**0.5)
    assert opt.clip_stats()["coefficient"] == pytest.approx(6**-0.5)
    with pytest.raises(ValueError, match="`scale` must be positive"):
        names["RootSGD"]([p], lr=1.0, scale=0.0)
