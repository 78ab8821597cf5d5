"""The record of an optimizer's steps: its counters, and what its clipping rules remember.

A checkpoint keeps both, as plain numbers. A step on the host is a :class:`HostStep`, one on a device a
``device.DeviceStep``.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch gives vector_norm and tolist no type.

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import gt
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvestep.clip_rules import (
    ClipRule,
    DeviceWindow,
    Quantity,
    Seen,
    State,
    Window,
    choose,
    from_plain,
    placed,
)
from curvestep.optim._update import Part, along, update
from curvestep.optim.counters import ClipStats, HostCounters, Spike, clip_stats_of, is_clipped_before
from curvestep.optim.device import DeviceCounters
from curvestep.optim.pieces import HostPieces, Pieces
from curvestep.optim.policy import (
    Decision,
    Group,
    Step,
    clipped_norms,
    counted_pieces,
    layer_norms,
    may_be_pretended,
    rule_of,
    unscale_pieces,
)
from curvestep.tensors.kernel import Array

# Where a state dict keeps the counters: an entry of the first parameter group.
COUNTERS = "clip_stats"
MEMORIES = "clip_rules"
Saved: TypeAlias = dict[str, Any]  # what a rule remembers, as plain numbers


class HostMemory:
    """Memory of a rule on the host: floats of one norm, or arrays of several."""

    def __init__(self, rule: ClipRule, saved: Saved) -> None:
        self.rule = rule
        self._state: State = tuple(map(_on_host, saved["state"]))
        self._window = Window(rule.window, saved["norms"])

    def bound(self, norm: float, total: float) -> float:
        """The threshold for a gradient of this norm, which is remembered."""
        if not 0.0 < norm < math.inf:
            return math.inf
        if self.rule.window:
            self._window.push(norm)
        threshold, self._state = self.rule.bound(Seen(norm, total, 0.0, self._window), self._state)
        return threshold

    def bounds(self, norms: Array, total: float) -> Array:
        """A threshold for each of several norms, which are remembered."""
        thresholds, state = self.rule.bound(Seen(norms, total), self._state)
        if total < math.inf and np.count_nonzero(norms) == len(norms):
            self._state = state
            return thresholds
        is_usual = (norms > 0) & (norms < math.inf)
        self._state = tuple(np.where(is_usual, new, old) for new, old in zip(state, self._state, strict=True))
        return np.where(is_usual, thresholds, math.inf)

    def read(self) -> Saved:
        """The numbers for a checkpoint."""
        numbers = [np.asarray(n).tolist() for n in self._state]
        return {"rule": self.rule.as_plain(), "state": numbers, "norms": list(self._window.values)}


class TensorMemory:
    """Memory of a rule of one norm or of several: tensors ``like`` the norms, that change in place."""

    def __init__(self, rule: ClipRule, saved: Saved, like: Tensor) -> None:
        self.rule = rule
        self._state = tuple(placed(numbers, like).expand(like.shape).clone() for numbers in saved["state"])
        self._window = DeviceWindow.of(rule.window, saved["norms"], like)

    def bound(self, norm: Tensor, total: Quantity, keep: Quantity) -> Tensor:
        """The threshold for gradients of these norms, which are remembered where ``keep`` holds."""
        is_usual = norm.isfinite() & (norm > 0)
        is_kept = is_usual & _beside(norm, keep)
        window = self._window.pushed(norm) if self.rule.window else self._window
        threshold, state = self.rule.bound(Seen(norm, _beside(norm, total), 0.0, window), self._state)
        for old, new in zip((*self._state, *self._window), (*state, *window), strict=True):
            if old is not new:
                old.copy_(torch.where(is_kept, new, old))
        return choose(is_usual, threshold, math.inf)

    def read(self) -> Saved:
        """The numbers for a checkpoint: waits for the device."""
        numbers = [n.tolist() for n in self._state]
        return {"rule": self.rule.as_plain(), "state": numbers, "norms": self._window.read()}


Memory = TypeVar("Memory", HostMemory, TensorMemory)


class RuleMemories:
    """Memories of an optimizer's rules, by the number of a group and of what is clipped in it."""

    def __init__(self) -> None:
        self._saved: dict[str, Saved] = {}
        self._memories: dict[str, HostMemory | TensorMemory] = {}

    def bounded(
        self,
        decisions: Sequence[Decision],
        norms: list[Quantity],
        total: Quantity,
        groups: list[Group],
        keep: Quantity = True,
    ) -> list[Group]:
        """The group of each decision, with a number in place of its rule.

        Norms are floats, or device scalars; these are remembered where ``keep`` holds.
        """
        bounded: list[Group] = []
        for decision, norm in zip(decisions, norms, strict=True):
            rule = rule_of(decision.group)
            if rule is None:
                bounded.append(decision.group)
                continue
            number = list(map(id, groups)).index(id(decision.group))
            key = f"{number}.{decision.index}"
            if decision.pieces is not None:
                self._clip_pieces(key, decision, decision.pieces, total, keep)
                bound = math.inf
            elif isinstance(norm, Tensor):
                bound = self._memory(TensorMemory, key, rule, norm).bound(norm, total, keep)
            else:
                bound = self._memory(HostMemory, key, rule).bound(norm, total)
            bounded.append(decision.group | {"max_norm": bound})
        return bounded

    def _clip_pieces(
        self, key: str, decision: Decision, pieces: Pieces, total: Quantity, keep: Quantity
    ) -> None:
        """Fix the factors of the pieces; what is left to clip then is nothing."""
        rule = pieces.rule
        if not rule.start:
            pairs = zip(pieces.norms, pieces.weights, strict=True)
            pieces.clip([rule.bound(Seen(norms, total, weights), ())[0] for norms, weights in pairs])
            return
        everybody = decision.group["params"]
        bounds_of: Callable[[Quantity], Quantity]
        if isinstance(pieces, HostPieces):
            bounds_of = partial(self._memory(HostMemory, key, rule).bounds, total=total)
        else:
            of_all = pieces.norms[0].new_zeros(len(everybody))
            bounds_of = partial(self._memory(TensorMemory, key, rule, of_all).bound, total=total, keep=keep)
        if len(decision.params) == len(everybody):
            pieces.clip([bounds_of(pieces.norms[0])])
        else:  # the others have norm zero, which is not remembered
            at = [i for i, p in enumerate(everybody) if p.grad is not None]
            pieces.clip_some(bounds_of, at, len(everybody))

    def _memory(self, kind: type[Memory], key: str, rule: ClipRule, *like: Tensor) -> Memory:
        memory = self._memories.get(key)
        if not isinstance(memory, kind) or memory.rule is not rule:
            memory = self._memories[key] = kind(rule, self._saved_of(key, rule), *like)
        return memory

    def _saved_of(self, key: str, rule: ClipRule) -> Saved:
        """Memory of the rule so far; a new rule starts afresh."""
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


def _on_host(numbers: float | list[float]) -> Quantity:
    return np.array(numbers) if isinstance(numbers, list) else numbers


def _beside(norm: Tensor, number: Quantity) -> Quantity:
    """The number where the norm is."""
    return number.to(norm.device) if isinstance(number, Tensor) else number


class StepRecord:
    """Counters of an optimizer, kept where the numbers of its last step were."""

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

    def spikes(self) -> list[Spike]:
        """The last steps whose norm stood out."""
        return list(self._counters.read().spikes)

    def clip_stats(self, groups: list[Group], *, layers: bool) -> ClipStats:
        """An optimizer's ``clip_stats()``; warns once if somebody clips before it."""
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
        stats = clip_stats_of(counters)
        if layers:
            stats["layers"] = layer_norms(groups)
        return stats

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


@dataclass
class HostStep(Step):
    """A step of which every number is a float: whether to leave it out, and how it is counted."""

    norms: list[float]  # of each decision; the scale of a GradScaler is taken out
    loss: float | None  # what the closure returned

    def __post_init__(self) -> None:
        # A GradScaler's part in the step: its scale, and whether a gradient overflowed.
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        overflow: Tensor | None = getattr(self.optimizer, "found_inf", None)
        self._overflowed = overflow is not None and overflow.item() > 0
        self.unscale = 1.0
        if scale is not None:
            self.unscale = 1 / scale.item()
            self.norms = [norm * self.unscale for norm in self.norms]
            unscale_pieces(self.decisions, self.unscale)
        self.norm = self.policy.joint_norm(self.norms)
        self._counters, self._groups = self.record.on_host(), self.optimizer.param_groups
        self._is_pretended = self.norm == 0 and may_be_pretended(self.optimizer)

    def is_left_out(self) -> bool:
        """Whether the step is left out, and then counted so; raises where that is wanted."""
        counters = self._counters
        if (
            self._overflowed
            or self.policy.refuses(self.norms, self._groups)
            or counters.exceeds(self.policy.limit, self.norm, self.loss)
        ):
            if self.norm > counters.spike_bound:
                self._keep_spike(0.0)
            counters.count_skipped(self.norm)
            return True
        counters.keep_loss(self.loss)
        return False

    def bounded(self) -> list[Group]:
        """The group of each decision, with a number in place of its rule."""
        return self.record.rules.bounded(self.decisions, self.norms, self.norm, self._groups)

    def averaged_(self, parts: list[Part], group: Group) -> list[Part]:
        """Take the gradients into the momentum buffers, and go along the average."""
        return [along(part, *part.rule.averaged_(part, self.unscale), group) for part in parts]

    def average(self, decisions: Sequence[Decision]) -> None:
        """Clip by the norms of averages, in which the scale is no more."""
        self.norms, self.unscale = self.policy.norms(decisions), 1.0

    def update(self, part: Part, coefficient: float) -> None:
        """Update a part with the gradient times ``coefficient``."""
        update(part, coefficient * self.unscale)

    def look_for_spike(self, coefficients: list[float]) -> None:
        """Remember the step if it stands out, while the gradients are as they came."""
        if self.norm > self._counters.spike_bound:
            norms = clipped_norms(self.decisions, self.norms, coefficients)
            self._keep_spike(self.policy.joint_norm(norms))

    def count(self, coefficients: list[float], bounds: list[float]) -> None:
        """Count the step that was taken, with the factor on each decision and its threshold."""
        if not self._is_pretended:
            fired = list(map(gt, self.norms, bounds))
            self._counters.count(self.norm, *counted_pieces(self.decisions, coefficients, fired))

    def _keep_spike(self, clipped_norm: float) -> None:
        """Remember a step that stands out, with the parameter that has most of its gradient."""
        norms = layer_norms(self._groups)
        layer = max(norms, key=lambda name: norms[name])
        self._counters.keep_spike({
            "step": self._counters.steps + self._counters.skipped, "grad_norm": self.norm,
            "clipped_norm": clipped_norm, "loss": self.loss, "layer": layer,
            "share": (norms[layer] / self.norm) ** 2,
        })  # fmt: skip
