"""The comparison of Muon's and AdamW's directional sharpness at equal loss."""

import math
from pathlib import Path

import pytest
import torch

import curvestep as cs
from reproduction.benchmarks import muon_sharpness as muon

ROOT = Path(__file__).parents[3]


def rows(factor, losses=(3.0, 2.5, 2.0, 1.5, 1.2, 1.0), *, first_step=muon.WARMUP):
    """Rows whose sharpness is a factor times the loss."""
    return [
        {"step": first_step + 10 * i, "loss": loss, "sharpness": factor * loss}
        for i, loss in enumerate(losses)
    ]


def test_the_ratio_is_that_at_equal_loss_whenever_it_is_reached():
    slow = rows(4.0, [3.0 - 0.02 * i for i in range(90)])
    fast = rows(1.0, [3.0 - 0.1 * i for i in range(22)])
    ratio, parts = muon.matched_ratio(slow, fast)
    assert ratio == pytest.approx(0.25, rel=0.03)
    assert parts == muon.BINS


def test_rows_of_the_warm_up_and_losses_that_one_never_meets_do_not_count():
    early = rows(100.0, [1.1, 2.9], first_step=0)
    assert muon.matched_ratio(early + rows(4.0), rows(1.0))[0] == pytest.approx(0.25)
    few = rows(1.0, (3.0, 1.0))  # between these it has no row
    for one, other in ((few, rows(1.0)), (rows(1.0), few)):
        assert muon.matched_ratio(one, other) == (pytest.approx(1.0, rel=0.15), 2)
    assert math.isnan(muon.matched_ratio(rows(1.0, (3.0, 2.0)), rows(1.0, (1.5, 1.0)))[0])


def test_a_part_whose_median_is_not_positive_is_left_out():
    downwards = [{**row, "sharpness": -1.0} if row["loss"] > 2.4 else row for row in rows(2.0)]
    ratio, parts = muon.matched_ratio(rows(4.0), downwards)
    assert (ratio, parts) == (pytest.approx(0.5), 3)  # one more part has no row


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ((0.5, 0.8, 0.7), "holds"),
        ((0.5, 0.81, 0.7), "open"),
        ((1.25, 2, 3), "fails"),
        ((math.nan,) * 3, "open"),
    ],
)
def test_a_verdict_needs_all_seeds_beyond_the_margin(ratios, word):
    assert muon.verdict(ratios) == word


def test_sharpness_along_a_step_is_that_of_a_quadratic_on_the_layers_that_move():
    H = torch.tensor([[3.0, 1.0], [1.0, 5.0]])
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])

    def loss():
        z = torch.cat([layer.weight.flatten() for layer in model])
        return 0.5 * z @ H @ z

    with cs.Replay(model, loss) as replay:
        assert muon.sharpness_along(replay, {1: torch.tensor([[-0.3]])}) == pytest.approx(5.0)
        both = {0: torch.tensor([[0.1]]), 1: torch.tensor([[-0.1]])}
        assert muon.sharpness_along(replay, both) == pytest.approx((3.0 - 2.0 + 5.0) / 2)


def test_the_page_has_the_tables_of_the_rows():
    page = (ROOT / "docs" / "results" / "muon.md").read_text(encoding="utf-8")
    for table in muon.tables(muon.kept(ROOT / muon.FILE)).split("\n\n"):
        assert table in page


@pytest.mark.slow
@pytest.mark.parametrize("name", muon.TASKS)
def test_muon_moves_hidden_matrices_and_adamw_the_rest(name):
    torch.set_default_dtype(torch.float32)  # of the images
    model = muon.TASKS[name].start(0)
    hidden, rest = muon.optimizers_of(model, "Muon", {"Muon": 0.01, "AdamW": 1e-3})
    moved = [p for one in (hidden, rest) for group in one.param_groups for p in group["params"]]
    assert {id(p) for p in moved} == {id(p) for p in model.parameters()}
    shapes = {tuple(p.shape) for group in hidden.param_groups for p in group["params"]}
    assert shapes == ({(192, 64), (64, 64), (256, 64), (64, 256)} if "GPT" in name else {(256, 256)})
    losses, trace = muon.train(name, "Muon", 0, {"Muon": 0.01, "AdamW": 1e-3}, measured=True, steps=2)
    assert len(losses) == 2
    assert trace.ok.all()
    assert trace[0]["layer_curvature"] is not None
