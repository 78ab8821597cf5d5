"""The record of an optimizer's steps: its counters for ``clip_stats()`` and for checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

import torch

from curvestep.optim.counters import ClipStats, HostCounters, clip_stats_of, is_clipped_before
from curvestep.optim.device import DeviceCounters

# Where a state dict keeps the counters: an entry of the first parameter group.
COUNTERS = "clip_stats"


class StepRecord:
    """Counters of an optimizer, kept where the numbers of its last step were.

    Args:
        whose: Name of the optimizer, for the warning.
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._counters: HostCounters | DeviceCounters = HostCounters()
        self._checks_norms = True

    def on_host(self) -> HostCounters:
        """The counters as floats; those of steps on a device are waited for."""
        self._counters = self._counters.read()
        return self._counters

    def on_device(self, device: torch.device) -> DeviceCounters:
        """The counters as tensors, where they were first needed so."""
        if not isinstance(self._counters, DeviceCounters):
            self._counters = DeviceCounters(self._counters, device)
        return self._counters

    def clip_stats(self) -> ClipStats:
        """What an optimizer's ``clip_stats()`` returns; warns once if somebody clips before it."""
        counters = self._counters.read()
        if self._checks_norms and is_clipped_before(counters.norms):
            self.stop_double_clip_check()
            warnings.warn(
                f"Gradients arrive at {self._whose} already clipped (several had norm "
                f"{max(counters.norms):.6g}, none a larger one), so clip_stats() is wrong. Clip once: "
                "max_grad_norm=0 in TrainingArguments (its default is 1.0), no gradient_clip_val in "
                "Lightning, no clip_grad_norm_.",
                stacklevel=3,
            )
        return clip_stats_of(counters)

    def stop_double_clip_check(self) -> None:
        """Stop checking; the user was warned."""
        self._checks_norms = False

    def save(self, param_groups: list[dict[str, Any]]) -> None:
        """Put the counters into the parameter groups of a checkpoint."""
        param_groups[0][COUNTERS] = asdict(self._counters.read())

    def load(self, param_groups: list[dict[str, Any]]) -> None:
        """Take the counters out of the parameter groups of a checkpoint, which may have none."""
        self._counters = HostCounters.of(param_groups[0].pop(COUNTERS, None) or {})
