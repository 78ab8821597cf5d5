"""The record of an optimizer's steps: its counters, and what its clipping rules remember.

A checkpoint keeps both, as plain numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from curvestep.clip_rules import ClipRule, DeviceWindow, Seen, State, Window, choose, from_plain, placed
from curvestep.optim.counters import ClipStats, HostCounters, clip_stats_of, is_clipped_before
from curvestep.optim.device import DeviceCounters
from curvestep.optim.pieces import Pieces
from curvestep.optim.policy import Decision, Group, rule_of

# Where a state dict keeps the counters: an entry of the first parameter group.
COUNTERS = "clip_stats"
MEMORIES = "clip_rules"
Saved: TypeAlias = dict[str, Any]  # what a rule remembers, as plain numbers


class HostMemory:
    """What a rule remembers of one norm, as floats.

    Args:
        rule: The rule.
        saved: What it remembered before.
    """

    def __init__(self, rule: ClipRule, saved: Saved) -> None:
        self.rule = rule
        self._state: State = tuple(saved["state"])
        self._window = Window(rule.window, saved["norms"])

    def bound(self, norm: float, total: float) -> float:
        """The threshold for a gradient of this norm, which is remembered."""
        if not 0.0 < norm < math.inf:
            return math.inf
        if self.rule.window:
            self._window.push(norm)
        threshold, self._state = self.rule.bound(Seen(norm, total, 0.0, self._window), self._state)
        return threshold

    def read(self) -> Saved:
        """The numbers for a checkpoint."""
        return {"rule": self.rule.as_plain(), "state": list(self._state), "norms": list(self._window.values)}


class TensorMemory:
    """What a rule remembers of one norm or of several, as tensors that change in place.

    Args:
        rule: The rule.
        saved: What it remembered before.
        like: The norms: dtype, device and shape of what is remembered.
    """

    def __init__(self, rule: ClipRule, saved: Saved, like: Tensor) -> None:
        self.rule = rule
        self._state = tuple(placed(numbers, like).expand(like.shape).clone() for numbers in saved["state"])
        self._window = DeviceWindow.of(rule.window, saved["norms"], like)

    def bound(self, norm: Tensor, total: Any, keep: Tensor | bool = True, weight: Any = 0.0) -> Tensor:
        """The threshold for gradients of these norms, which are remembered where ``keep`` holds."""
        is_usual = norm.isfinite() & (norm > 0)
        window = self._window.pushed(norm) if self.rule.window else self._window
        threshold, state = self.rule.bound(Seen(norm, total, weight, window), self._state)
        for old, new in zip((*self._state, *self._window), (*state, *window), strict=True):
            if old is not new:
                old.copy_(torch.where(is_usual & keep, new, old))
        return choose(is_usual, threshold, math.inf)

    def read(self) -> Saved:
        """The numbers for a checkpoint: waits for the device."""
        return {
            "rule": self.rule.as_plain(),
            "state": [numbers.tolist() for numbers in self._state],
            "norms": self._window.read(),
        }


class RuleMemories:
    """What the rules of an optimizer remember, by the number of a group and of what is clipped in it."""

    def __init__(self) -> None:
        self._saved: dict[str, Saved] = {}
        self._memories: dict[str, HostMemory | TensorMemory] = {}

    def bounded(
        self, decisions: Sequence[Decision], norms: list[float], total: float, groups: list[Group]
    ) -> list[Group]:
        """The group of each decision with a number in place of its rule; all numbers are floats."""
        if not _have_rules(decisions):
            return [decision.group for decision in decisions]
        bounds: list[float] = []
        for key, decision, norm in zip(_keys(decisions, groups), decisions, norms, strict=True):
            rule = rule_of(decision.group)
            if decision.pieces is not None:
                bounds.append(self._clip_pieces(key, decision, decision.pieces, total, True))
            elif rule is not None:
                bounds.append(self._on_host(key, rule).bound(norm, total))
            else:
                bounds.append(decision.group["max_norm"])
        return _with_bounds(decisions, bounds)

    def bounded_on_device(
        self,
        decisions: Sequence[Decision],
        norms: list[Tensor],
        total: Tensor,
        keep: Tensor,
        groups: list[Group],
    ) -> list[Group]:
        """The same where numbers are tensors; norms are remembered where ``keep`` holds."""
        if not _have_rules(decisions):
            return [decision.group for decision in decisions]
        bounds: list[Any] = []
        for key, decision, norm in zip(_keys(decisions, groups), decisions, norms, strict=True):
            rule, there = rule_of(decision.group), keep.to(norm.device)
            if decision.pieces is not None:
                bounds.append(self._clip_pieces(key, decision, decision.pieces, total.to(norm.device), there))
            elif rule is not None:
                memory = self._on_device(key, rule, norm)
                bounds.append(memory.bound(norm, total.to(norm.device), there))
            else:
                bounds.append(decision.group["max_norm"])
        return _with_bounds(decisions, bounds)

    def _clip_pieces(
        self, key: str, decision: Decision, pieces: Pieces, total: Any, keep: Tensor | bool
    ) -> float:
        """Fix the factors of the pieces; what is left to clip then is nothing."""
        rule = pieces.rule
        if not rule.start:
            seen = [Seen(*of_each) for of_each in zip(pieces.norms, repeat(total), pieces.weights)]
            pieces.clip([rule.bound(one, ())[0] for one in seen])
            return math.inf
        (norms,) = pieces.norms
        everybody = decision.group["params"]
        memory = self._on_device(key, rule, norms.new_zeros(len(everybody)))
        if len(norms) == len(everybody):
            pieces.clip([memory.bound(norms, total, keep)])
            return math.inf
        # Parameters without a gradient have norm zero, which is not remembered.
        at = [i for i, p in enumerate(everybody) if p.grad is not None]
        there = torch.tensor(at, device="cpu").to(norms.device, non_blocking=True)
        of_all = norms.new_zeros(len(everybody)).index_copy(0, there, norms)
        pieces.clip([memory.bound(of_all, total, keep).index_select(0, there)])
        return math.inf

    def _on_host(self, key: str, rule: ClipRule) -> HostMemory:
        memory = self._memories.get(key)
        if not isinstance(memory, HostMemory) or memory.rule != rule:
            memory = self._memories[key] = HostMemory(rule, self._saved_of(key, rule))
        return memory

    def _on_device(self, key: str, rule: ClipRule, like: Tensor) -> TensorMemory:
        memory = self._memories.get(key)
        if not isinstance(memory, TensorMemory) or memory.rule != rule:
            memory = self._memories[key] = TensorMemory(rule, self._saved_of(key, rule), like)
        return memory

    def _saved_of(self, key: str, rule: ClipRule) -> Saved:
        """What the rule remembers so far; a rule that is new starts afresh."""
        saved = self.read().get(key)
        if saved is None or saved["rule"] != rule.as_plain():
            return {"rule": rule.as_plain(), "state": list(rule.start), "norms": []}
        return saved

    def read(self) -> dict[str, Saved]:
        """All that is remembered, for a checkpoint."""
        return self._saved | {key: memory.read() for key, memory in self._memories.items()}

    def load(self, saved: dict[str, Saved]) -> None:
        """Remember what a checkpoint has."""
        self._saved, self._memories = saved, {}


def _have_rules(decisions: Sequence[Decision]) -> bool:
    return any([rule_of(decision.group) is not None for decision in decisions])


def _with_bounds(decisions: Sequence[Decision], bounds: Sequence[Any]) -> list[Group]:
    return [d.group | {"max_norm": bound} for d, bound in zip(decisions, bounds, strict=True)]


def _keys(decisions: Sequence[Decision], groups: list[Group]) -> Iterator[str]:
    """Number of the group, and of the parameter if it is clipped alone."""
    for decision in decisions:
        number = next(i for i, group in enumerate(groups) if group is decision.group)
        yield f"{number}.{decision.index}"


class StepRecord:
    """Counters of an optimizer, kept where the numbers of its last step were.

    Args:
        whose: Name of the optimizer, for the warning.
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._counters: HostCounters | DeviceCounters = HostCounters()
        self._checks_norms = True
        self.rules = RuleMemories()

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

    def save(self, param_groups: list[Group]) -> None:
        """Put counters and rules into the parameter groups of a checkpoint, as plain data."""
        param_groups[0][COUNTERS] = asdict(self._counters.read())
        if memories := self.rules.read():
            param_groups[0][MEMORIES] = memories
        for group in param_groups:
            rule = rule_of(group)
            if rule is not None:
                group["max_norm"] = rule.as_plain()

    def load(self, param_groups: list[Group], known: object = None) -> None:
        """Take them out of a checkpoint, which may have none; ``known`` is the optimizer's own threshold."""
        self._counters = HostCounters.of(param_groups[0].pop(COUNTERS, None) or {})
        self.rules.load(param_groups[0].pop(MEMORIES, None) or {})
        for group in param_groups:
            if isinstance(group.get("max_norm"), Mapping):
                group["max_norm"] = from_plain(group["max_norm"], known)
