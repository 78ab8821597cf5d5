"""Counters of the host and of a device count alike."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from curvestep.optim.counters import FEWEST_NORMS, RECENT_STEPS, HostCounters, Limit, is_clipped_before
from curvestep.optim.device import DeviceCounters


def counted(num_steps):
    """Steps with rising norms, every seventh left out for a norm that is not finite."""
    host, device = HostCounters(), DeviceCounters(HostCounters(), torch.device("cpu"))
    one = torch.ones(())
    for k in range(num_steps):
        skipped = k % 7 == 6
        norm, fired = math.inf if skipped else 1.0 + k, k % 3 == 0
        if skipped:
            host.count_skipped(norm)
        else:
            host.count(norm, [1 / norm], [fired])
        numbers = torch.tensor([norm, 1 / norm, float(fired), float(skipped)])
        norm, coefficient, fired, skip = numbers.unbind()
        device.count(norm, [coefficient], [fired], skip, one)
    return host, device


@pytest.mark.parametrize("num_steps", [0, 5, 7, RECENT_STEPS + 30])  # of seven the last is left out
def test_counters_of_host_and_device_hold_the_same_numbers_in_order(num_steps):
    host, device = counted(num_steps)
    assert replace(device.read(), spike_bound=host.spike_bound) == host
    assert host.norms == sorted(host.norms)
    assert len(host.norms) <= RECENT_STEPS
    assert math.inf not in host.norms


@pytest.mark.parametrize("unit", ["x", "sigma"])
@pytest.mark.parametrize(("num_steps", "is_above"), [(FEWEST_NORMS, False), (FEWEST_NORMS + 1, True)])
def test_limits_of_host_and_device_need_ten_finite_norms(num_steps, is_above, unit):
    host, device = counted(num_steps)  # the seventh is not finite
    assert host.exceeds(Limit(10.0, unit), 1e6, None) == is_above
    assert bool(device.exceeds(Limit(10.0, unit), torch.tensor(1e6))) == is_above


def test_spikes_are_the_last_and_above_what_the_last_tenth_step_says():
    assert counted(19)[0].spike_bound == math.inf  # there were nine norms when it was last looked at
    for num_steps in (20, 23):
        host, _ = counted(num_steps)
        first = host.norms[:18]  # of twenty steps, without the seventh and the fourteenth
        assert host.spike_bound == pytest.approx(np.mean(first) + 6 * np.std(first))
    for step in range(RECENT_STEPS + 5):
        host.keep_spike({"step": step})
    assert [spike["step"] for spike in host.spikes] == list(range(5, RECENT_STEPS + 5))


@pytest.mark.parametrize("sigmas", [1.5, 3.0])
def test_deviations_are_those_of_numpy_on_host_and_device(sigmas):
    host, device = counted(60)
    bound = np.mean(host.norms) + sigmas * np.std(host.norms)
    for norm in (bound * (1 - 1e-12), bound * (1 + 1e-12)):
        assert host.exceeds(Limit(sigmas, "sigma"), norm, None) == (norm > bound)
        there = torch.tensor(norm, dtype=torch.float64)
        assert bool(device.exceeds(Limit(sigmas, "sigma"), there)) == (norm > bound)


def test_three_equal_norms_are_not_yet_somebody_else_who_clips():
    norms = [1.0 - 1e-7, 0.3, 1.0, 0.5, 1.0 - 2e-7]  # neither rising nor falling
    assert not is_clipped_before(norms)
    assert is_clipped_before([*norms, 1.0 - 1.5e-7])
