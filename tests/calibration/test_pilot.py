"""What batches that had no part in a step say of it: noise, straight lines, plateaus."""

import math
from itertools import islice
from statistics import median

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from curvestep import calibrate
from curvestep.calibration.method import method_of
from curvestep.calibration.pilot import LEAST_FRACTION, LONGEST, MOST_FRACTION, Trial, lowest, run_pilots
from curvestep.smoothness.replay import Replay


class Noisy(nn.Module):
    """A quadratic whose batches pull to targets of their own: noise around a common one."""

    def __init__(self, distance, size=12):
        super().__init__()
        self.x = nn.Parameter(torch.full((size,), distance))

    def forward(self, target):
        return 0.5 * (self.x - target).square().sum()


def targets(noise, count=32, size=12):
    return [noise * torch.randn(size) for _ in range(count)]


OPTIMIZERS = [{}, {"momentum": 0.9}, {"optimizer": "AdamW"}, {"optimizer": "NormalizedSGD"}]


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_signal_far_above_the_noise_leaves_curvature_the_limit(options):
    model = Noisy(3.0)
    cal = calibrate(model, model, targets(0.1), **options)
    assert cal.limit == "curvature"
    assert "noise" not in str(cal)


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_start_at_the_optimum_gets_a_small_step_and_says_why(options):
    model = Noisy(0.0)
    cal = calibrate(model, model, targets(1.0), **options)
    whole = calibrate(model, model, targets(1.0)[:1], **options)
    assert cal.limit in ("noise", "unknown")
    assert cal.lr <= MOST_FRACTION * whole.lr * 1.3
    assert "noise, not curvature" in str(cal) or "cannot tell" in str(cal)
    assert cal.lr_interval[0] < cal.lr < cal.lr_interval[1]
    assert cal.num_gradients <= 40
    assert torch.equal(model.x, torch.zeros(12))


@pytest.mark.parametrize("seed", range(4))
def test_training_near_an_optimum_does_not_raise_the_loss(seed):
    torch.manual_seed(seed)
    model, batches = Noisy(0.15), targets(1.0, count=232)
    cal = calibrate(model, model, batches[:32])
    start = 0.5 * model.x.detach().square().sum().item()
    opt = torch.optim.SGD(model.parameters(), lr=cal.lr)
    ends = []
    for batch in batches[32:]:
        opt.zero_grad()
        model(batch).backward()
        opt.step()
        ends.append(0.5 * model.x.detach().square().sum().item())
    # What curvature allows, lr 1, would end at half of the squared noise: 6.
    assert sum(ends[-50:]) / 50 < max(1.5 * start, 0.4)


def test_scale_of_the_loss_does_not_matter_where_noise_is_the_limit():
    model, batches = Noisy(0.1), targets(1.0)
    cal = calibrate(model, model, batches)
    scaled = calibrate(model, lambda b: 1024.0 * model(b) - 3.0, batches)
    assert cal.limit == scaled.limit != "curvature"
    assert math.isclose(scaled.lr, cal.lr / 1024.0, rel_tol=1e-6)


def test_noise_is_found_with_losses_that_run_backward_themselves():
    model, batches = Noisy(0.0), targets(1.0)

    def loss(batch):
        found = model(batch)
        found.backward()
        return found.item()

    assert calibrate(model, loss, batches).lr == calibrate(model, model, batches).lr
    assert model.x.grad is None


def test_few_batches_never_step_and_judge_on_the_same_one():
    model = Noisy(0.0)
    for count in (2, 3):
        cal = calibrate(model, model, targets(1.0, count=count))
        assert cal.limit != "curvature" or len(cal.curve) == count


@given(a=st.floats(0.01, 3.0), b=st.floats(0.01, 3.0))
def test_lowest_point_is_that_of_the_parabola_within_its_bounds(a, b):
    found = lowest(-0.25 * a + b / 16, -a + b)
    assert math.isclose(found, min(max(a / (2 * b), LEAST_FRACTION), MOST_FRACTION), rel_tol=1e-6)


def test_loss_that_rises_everywhere_asks_for_the_smallest_fraction():
    assert lowest(1.0, 5.0) == LEAST_FRACTION


# Straight lines


class Ridge(nn.Module):
    """A straight slope along the first axis, beside which another gradient grows at once."""

    def __init__(self, growth, bend=5e-3):
        super().__init__()
        self.growth, self.bend = growth, bend
        self.x = nn.Parameter(torch.tensor([0.5, 0.0]))

    def forward(self, scale):
        along, across = self.x
        return scale * (-along + self.growth * (0.5 - along) * across + self.bend * (along - 0.5) ** 2)


def test_step_whose_loss_falls_straight_is_stretched_though_the_gradient_turns():
    # Along -g = (1, 0) the gradient across grows by `growth` per unit: kappa is 1 at a step of 1/2.
    model = Ridge(2.0)
    cal = calibrate(model, model, [1.0] * 4)
    assert math.isclose(cal.curve[0].safe_step, 0.5, rel_tol=0.01)
    assert [batch.stretch for batch in cal.curve] == [LONGEST] * 3
    assert math.isclose(cal.lr, LONGEST * median(batch.safe_step for batch in cal.curve), rel_tol=1e-9)
    assert "falls straight on" in str(cal)


@pytest.mark.parametrize("bend", [0.1, 0.14, 0.18, 0.25])
def test_stretch_goes_with_the_share_of_the_fall_at_twice_the_step(bend):
    # After a step of m the loss has fallen by m - bend * m**2; the slope is read at a quarter of 0.6 steps.
    model = Ridge(2.0, bend)
    cal = calibrate(model, model, [1.0] * 4)
    for batch in cal.curve:
        h = batch.safe_step
        share = (1 - bend * 2 * h) / (1 - bend * 0.15 * h)
        stretch = math.sqrt(2) ** min(max((share - 0.8) / 0.1, 0.0), 1.0)
        assert math.isclose(batch.stretch, stretch, rel_tol=1e-6)


def test_quadratic_is_not_stretched():
    model = Noisy(2.0)
    cal = calibrate(model, model, targets(0.1))
    assert {batch.stretch for batch in cal.curve} == {1.0}
    assert "falls straight on" not in str(cal)


# Plateaus


def sigmoids(depth):
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(16, 16), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


@pytest.mark.parametrize(("depth", "warned"), [(1, False), (6, True)])
def test_gradient_that_vanishes_on_its_way_is_named(depth, warned):
    model = sigmoids(depth)
    batches = [(torch.randn(32, 16), torch.randint(4, (32,))) for _ in range(4)]
    cal = calibrate(model, lambda b: F.cross_entropy(model(b[0]), b[1]), batches)
    assert ("A plateau is likely" in str(cal)) == warned


# Trials


@pytest.mark.parametrize("optimizer", ["ClippedSGD", "NormalizedSGD", "AdamW", "Adam"])
def test_trial_is_training_and_is_put_back(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    batches = [torch.randn(16, 3) for _ in range(6)]
    closures = [lambda b=b: (model(b) - b.sum(1, keepdim=True)).square().mean() for b in batches]
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    trial = Trial(model, method_of(optimizer, model), 10.0, closures[:4], closures[4:])
    changes, taken = trial.run([0.02] * 8)
    assert changes.mean() < 0
    assert taken == 8
    assert len(changes) == 2
    after = (*model.parameters(), *model.buffers())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_trial_of_plain_steps_is_gradient_descent_on_the_batches_in_turn():
    model, batches = Noisy(1.0), targets(0.5, count=3)
    closures = [lambda b=b: model(b) for b in batches]
    trial = Trial(model, method_of("ClippedSGD", model), math.inf, closures[:2], closures[2:])
    (change,), _ = trial.run([0.25] * 4)
    x = model.x.detach().clone()
    for step in range(4):
        x -= 0.25 * (x - batches[step % 2])
    expected = 0.5 * ((x - batches[2]).square().sum() - (model.x - batches[2]).square().sum())
    assert math.isclose(change, expected.item(), rel_tol=1e-12)


def test_forward_pass_of_a_replay_is_its_loss_without_a_graph():
    model = Noisy(1.0)
    seen = []

    def closure():
        seen.append(torch.is_grad_enabled())
        return model(torch.zeros(12))

    with Replay(model, closure) as replay:
        assert replay.loss().item() == replay.gradient().loss.item() == 6.0
    assert seen == [False, True]


def test_batches_beyond_those_measured_are_read_only_where_noise_asks_for_them():
    for distance, noise, most in ((3.0, 0.1, 3), (0.0, 1.0, 32)):
        model, stream = Noisy(distance), iter(targets(noise, count=64))
        calibrate(model, lambda b, m=model: m(b) + 1000.0, stream)
        assert 64 - len(list(islice(stream, 64))) <= most


def test_trial_ends_once_the_loss_is_clearly_lower():
    model, batches = Noisy(3.0), targets(0.1, count=8)
    closures = [lambda b=b: model(b) for b in batches]
    trial = Trial(model, method_of("ClippedSGD", model), math.inf, closures[:4], closures[4:])
    changes, taken = trial.run([0.1] * 24, look_every=8)
    assert taken == 8
    assert changes.max() < 0


def test_every_step_of_a_trial_has_its_own_dropout_mask():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    masks = []

    def closure():
        out = model[0](torch.ones(64))
        if torch.is_grad_enabled():
            masks.append(tuple(out.tolist()))
        return model[1](out).sum()

    Trial(model, method_of("SGD", model), math.inf, [closure], [closure]).run([0.1] * 5)
    assert len(set(masks)) == 5


# Pilots


@pytest.mark.parametrize(("start", "expected"), [(1.0, 1.0), (1 / 27, 1.0), (27.0, 1.0)])
def test_pilot_finds_the_best_peak_and_goes_on_where_it_is_at_an_end(start, expected):
    class Race(Trial):
        def run(self, rates, **_):
            peak = max(rates)
            return -1.0 + 0.1 * math.log(peak / expected, 3) ** 2 + np.array([-0.01, 0.01]), len(rates)

    model = Noisy(1.0)
    pilots = run_pilots(Race(model, method_of("AdamW", model), 1.0, [], []), start, 20)
    best = expected if start == 1.0 else start * (9.0 if start < 1 else 1 / 9)
    assert pilots.lr is not None
    assert math.isclose(pilots.lr, expected if start == 1.0 else best * 3 ** (1 if start < 1 else -1))
    assert pilots.num_gradients == 20 * len(pilots.rates)
    assert len(pilots.rates) == (3 if start == 1.0 else 5)


def test_pilots_that_cannot_be_told_apart_decide_nothing():
    class Race(Trial):
        def run(self, rates, **_):
            return np.array([-1.0, 1.0]) * max(rates) - 1.0, len(rates)

    model = Noisy(1.0)
    assert run_pilots(Race(model, method_of("AdamW", model), 1.0, [], []), 0.1, 20).lr is None


def test_pilot_that_diverges_counts_as_its_start():
    class Race(Trial):
        def run(self, rates, **_):
            end = -1.0 if max(rates) < 0.2 else math.nan if max(rates) < 0.4 else 7.0
            return np.array([end, end]), len(rates)

    model = Noisy(1.0)
    pilots = run_pilots(Race(model, method_of("AdamW", model), 1.0, [], []), 0.1, 20)
    assert [change for lr, change in zip(pilots.rates, pilots.changes, strict=True) if lr > 0.2] == [0.0]
    assert pilots.lr is not None
    assert pilots.lr < 0.1


@pytest.mark.parametrize("options", OPTIMIZERS[:3])
def test_pilot_moves_the_learning_rate_half_way_and_puts_everything_back(options):
    model, batches = Noisy(1.0), targets(0.1, count=28)
    plain = calibrate(model, model, batches, schedule="warmup-decay", **options)
    cal = calibrate(model, model, batches, schedule="warmup-decay", pilot=20, **options)
    method = method_of(options.get("optimizer", "SGD"), model, momentum=options.get("momentum"))
    closures = [lambda b=b: model(b) for b in batches]
    trial = Trial(model, method, plain.max_norm, closures[8:], closures[:8])
    pilots = run_pilots(trial, plain.lr, 20)
    assert pilots.lr is not None
    assert math.isclose(cal.lr, math.sqrt(plain.lr * pilots.lr), rel_tol=1e-9)
    assert all(change <= 0.0 for _, change in cal.pilot)
    assert cal.num_gradients <= 40 + 20 * len(cal.pilot)
    assert "Pilots of the whole schedule" in str(cal)
    assert torch.equal(model.x, torch.ones(12))


def test_pilot_needs_a_schedule_and_a_batch_to_judge_by():
    model = Noisy(1.0)
    with pytest.raises(ValueError, match="needs schedule='warmup-decay'"):
        calibrate(model, model, targets(0.1), pilot=50)
    with pytest.raises(ValueError, match="`pilot` is 5"):
        calibrate(model, model, targets(0.1), schedule="warmup-decay", pilot=5)
    with pytest.raises(ValueError, match="two batches at least"):
        calibrate(model, model, targets(0.1, count=1), schedule="warmup-decay", pilot=20)


# Steps that take a large share of a batch's loss


class Walls(nn.Module):
    """A quadratic beside which walls rise: the first step is long, later ones must not be."""

    def __init__(self, sharpness):
        super().__init__()
        self.sharpness = sharpness
        self.x = nn.Parameter(torch.tensor([1.0, 0.02]))

    def forward(self, target):
        along, across = self.x
        wall = self.sharpness * (1.0 - along.detach()).clamp(min=0.0)  # sharper the further it has come
        return 0.5 * (along - target).square() + 0.5 * wall * across.square()


def test_trials_take_a_third_where_the_loss_sharpens_after_the_first_step():
    torch.manual_seed(0)
    batches = [0.05 * torch.randn(()) for _ in range(32)]
    model = Walls(6.0)
    cal = calibrate(model, model, batches)
    assert "that with a third of lr did not clearly end higher" in str(cal)
    assert cal.lr <= 0.34 * calibrate(model, model, batches[:1]).lr
    assert cal.num_gradients <= 40
    assert torch.equal(model.x, torch.tensor([1.0, 0.02]))


@pytest.mark.parametrize("seed", range(12))
def test_larger_learning_rate_that_leads_by_chance_is_not_kept(seed):
    # Linear regression near its optimum: eight points fit twenty coefficients, and what they fit is noise.
    torch.manual_seed(seed)
    model = nn.Linear(20, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(1.0 + 0.13 * torch.randn(1, 20))
    inputs = [torch.randn(8, 20) for _ in range(32)]
    batches = [(x, x.sum(1, keepdim=True) + torch.randn(8, 1)) for x in inputs]
    cal = calibrate(model, lambda b: F.mse_loss(model(b[0]), b[1]), batches)
    assert cal.lr <= 0.34 * median(batch.safe_step for batch in cal.curve)


def test_trials_keep_the_learning_rate_where_the_loss_stays_as_it_is():
    # The first step ends a sharp direction with half of the loss; the others are twenty times as flat.
    model, L = Noisy(1.0, size=21), torch.tensor([1.0] + [0.05] * 20)
    batches = [0.01 * torch.randn(21) for _ in range(32)]
    cal = calibrate(model, lambda b: 0.5 * (L * (model.x - b).square()).sum(), batches)
    assert "that with a third of lr ended higher" in str(cal)
    assert math.isclose(cal.lr, median(batch.safe_step for batch in cal.curve), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("whole", "third", "fraction"),
    [
        ([-1.0, -1.1], [-2.0, -2.1], 1 / 3),
        ([-1.0, -1.1], [-0.5, -0.6], 1.0),
        ([-1.0, -1.1], [-0.9, -1.05], 1.0),
        ([-1.0, -1.1], [-0.8, -1.08], 1 / 3),
        ([0.5, 0.6], [-0.5, -0.6], 1 / 9),
        ([math.nan, -1.0], [-0.5, -0.6], 1 / 9),
        ([math.inf, math.inf], [-0.5, -0.6], 1 / 9),
        ([0.5, 0.6], [math.nan, math.nan], LEAST_FRACTION),
        ([-0.5, -0.6], [math.nan, math.nan], 1.0),
    ],
)
def test_better_of_two_trials_decides(monkeypatch, whole, third, fraction):
    ends = [np.array(third), np.array(whole)]
    monkeypatch.setattr(Trial, "run", lambda self, rates, **_: (ends.pop(), len(rates)))
    model, batches = Noisy(3.0), targets(0.3)
    cal = calibrate(model, model, batches)
    assert math.isclose(cal.lr, fraction * median(batch.safe_step for batch in cal.curve), rel_tol=1e-9)


def test_trials_that_all_rise_say_that_nothing_can_be_told():
    batches = [torch.randn(()) for _ in range(32)]

    class Single(nn.Module):
        """Every batch can be fitted whole, and no two agree."""

        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.zeros(()))

        def forward(self, target):
            return (self.x - target).square() * (1.0 + 3.0 * self.x.square())

    model = Single()
    cal = calibrate(model, model, batches)
    assert cal.limit == "unknown"
    assert "cannot tell" in str(cal)


def test_without_gradients_left_for_two_trials_the_result_says_so():
    model, batches = Noisy(3.0), targets(0.3)
    cal = calibrate(model, model, batches, max_gradients=20)
    assert "cannot tell whether lr is too large" in str(cal)
    assert cal.num_gradients <= 20


@pytest.mark.parametrize(("num_steps", "tried"), [(None, True), (240, True), (239, False)])
def test_short_training_has_no_two_trials_where_other_batches_fall_anyway(num_steps, tried):
    model, batches = Noisy(3.0), targets(0.3)
    cal = calibrate(model, model, batches, num_steps=num_steps)
    least = calibrate(model, model, batches, num_steps=1)
    assert (cal.num_gradients > least.num_gradients + 15) == tried
    assert ("trials cost more than they save" in str(cal)) == (not tried)


def test_short_training_is_tried_where_noise_may_be_the_limit():
    model, batches = Noisy(0.0), targets(1.0)
    assert calibrate(model, model, batches, num_steps=50) == calibrate(model, model, batches)
