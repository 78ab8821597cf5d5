"""What a newcomer's trial found wrong: small trainings, whose answers were false."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import SmoothnessProbe, UntrackedParametersError, advise
from tests.advice.test_settings import one_cycle, sgd, trained


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("lr", [3e-4, 1e-3, 3e-3])
def test_lr_that_is_far_too_low_under_batch_norm_is_raised(lr):
    # The best is about 0.1: no sign was found at 30 and 100 times less.
    probe = trained(sgd(lr), steps=300, scheduler=one_cycle, norm=nn.BatchNorm1d)
    advice = advise(probe)
    assert advice.action == "raise"
    assert 3 * lr <= advice.lr <= 10 * lr


def random_labels(make, lr, steps=300):
    torch.manual_seed(9)
    x = torch.randn(3200, 20)
    y = torch.randint(5, (3200,))
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = make(model.parameters(), lr=lr)
    probe = SmoothnessProbe(model).watch(optimizer)
    for _ in range(steps):
        rows = torch.randint(3200, (32,))
        optimizer.zero_grad()
        probe.record(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows])).backward()
        optimizer.step()
    return probe


@pytest.mark.parametrize(("make", "lr"), [(torch.optim.AdamW, 0.01), (torch.optim.SGD, 0.05)])
def test_random_labels_are_stuck_and_not_raised(make, lr):
    advice = advise(random_labels(make, lr))
    assert (advice.action, advice.kind, advice.lr) == ("stuck", "no-progress", None)


def bandit(lr, steps=200):
    """A policy on four arms by REINFORCE with a baseline, the probe, and its reward in the end."""
    torch.manual_seed(0)
    best = torch.randn(8, 4)
    policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    probe = SmoothnessProbe(policy).watch(optimizer)
    reward = torch.zeros(1)
    for _ in range(steps):
        x = torch.randn(64, 8)
        with torch.no_grad():
            arm = torch.distributions.Categorical(logits=policy(x)).sample()
        reward = (arm == (x @ best).argmax(1)).float()
        gain = reward - reward.mean()

        def loss(x=x, arm=arm, gain=gain):
            return -(gain * F.log_softmax(policy(x), 1).gather(1, arm[:, None])[:, 0]).mean()

        optimizer.zero_grad()
        probe.record(loss).backward()
        optimizer.step()
    return probe, reward.mean().item()


@pytest.mark.parametrize("lr", [0.01, 0.03])
def test_a_policy_that_learns_is_not_stuck(lr):
    probe, reward = bandit(lr)
    assert reward > 0.6  # of 0.25 at first
    assert advise(probe).action not in ("stuck", "raise", "diverged")
    told = advise(probe, progress=False, metric={"reward": [reward]})
    assert told.action == "no sign"
    assert told.reasons[0].kind == "metric"


@pytest.mark.parametrize("lr", [5.0, 0.3])
def test_a_run_and_its_restart_are_no_two_settings(lr, tmp_path):
    for name, seed in (("i.jsonl", 0), ("i-2.jsonl", 1)):
        trace = trained(lambda p: torch.optim.AdamW(p, lr=lr), seed=seed, norm=nn.BatchNorm1d).trace
        copy = type(trace)(tmp_path / name, header=trace.header)
        for row in trace:
            copy.append({key: value for key, value in row.items() if value is not None})
        copy.close()
    assert advise(tmp_path).action != "take"


def gan_step(generator, critic, optimizer, probe):
    """The generator's step of the usual loop: its loss reaches the critic's parameters, too."""
    noise = torch.randn(16, 4)
    optimizer.zero_grad()
    probe.record(lambda: F.softplus(-critic(generator(noise))).mean()).backward()
    optimizer.step()


def test_the_usual_gan_loop_is_told_to_freeze_the_critic_and_then_runs():
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    probe = SmoothnessProbe(generator, every=1).watch(optimizer)
    with pytest.raises(UntrackedParametersError, match=r"freeze them .* `other\.requires_grad_\(False\)`"):
        gan_step(generator, critic, optimizer, probe)
    critic.requires_grad_(False)
    gan_step(generator, critic, optimizer, probe)
    assert [row["status"] for row in probe.trace] == ["ok"]
