"""The numbers of a step: norms, whether to leave it out, thresholds and counters.

They are the same for every optimizer of the package and for ``clip``. A number is a float. On a device it is
a tensor that is not read, unless the host needs it: then all of them are read at once, and are floats.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# What a checkpoint has is looked at before it is believed.

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.checks import check_choice, check_positive
from curvestep.optim.update import (
    ClipGroup,
    FloatOrTensor,
    Part,
    Settings,
    UpdateGroup,
    clip_rule_of,
    with_momentum,
)
from curvestep.tensors.vectors import global_norm, is_readable, read

if TYPE_CHECKING:
    from curvestep.clip_rules import ClipRule, Saved
    from curvestep.optim.device import DeviceCounters
    from curvestep.optim.rule_thresholds import RuleMemories
    from curvestep.optim.stats import Spike

# Steps that `recent_clipped_fraction` and the running median look back on.
RECENT_STEPS = 100
# Gradient norms that a running median needs before it can leave out a step.
FEWEST_NORMS = 10
# A norm so many standard deviations above the mean of the last ones is a spike.
SPIKE_SIGMAS = 6.0
# Steps after which the bound of a spike is computed again.
RENEWED_STEPS = 10
# Entries of the first parameter group in which a state dict keeps the counters, and what rules remember.
COUNTERS = "clip_stats"
MEMORIES = "clip_rules"


class Limit(NamedTuple):
    """Limit of a step that is taken: a norm, a multiple of the running median, deviations from the mean."""

    number: float
    unit: str  # "norm", "x" or "sigma"


class Policy:
    """How gradients are clipped and which steps are left out, apart from the threshold; as ``clip`` says."""

    def __init__(self, norm_scope: str, nonfinite: str, skip_above: float | str | None) -> None:
        self.norm_scope = check_choice("norm_scope", norm_scope, ("global", "group", "tensor"))
        self.nonfinite = check_choice("nonfinite", nonfinite, ("raise", "skip", "propagate"))
        self.limit = None if skip_above is None else _limit(skip_above)

    def check_rule(self, rule: ClipRule) -> None:
        """Raise if a rule that clips units is given norms of something else."""
        if rule.each != "norm" and self.norm_scope != "global":
            raise ValueError(
                f'`{rule.name}` clips each {rule.each} by itself. Leave `norm_scope` at "global", '
                f"not {self.norm_scope!r}."
            )


def _limit(skip_above: float | str) -> Limit:
    """Limit that ``skip_above`` names: a number, "10x" or "6sigma"."""
    if not isinstance(skip_above, str):
        return Limit(check_positive("skip_above", skip_above), "norm")
    match = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d+)?)(x|sigma)", skip_above)
    if match is None or not 1.0 < float(match[1]) < math.inf:
        raise ValueError(
            '`skip_above` must be a gradient norm, "10x" the running median or "6sigma", got '
            f"{skip_above!r}. Both numbers must be above 1."
        )
    return Limit(float(match[1]), match[2])


@dataclass
class Counters:
    """How often clipping fired and how many steps were left out: numbers that a checkpoint keeps."""

    grad_norm: float = 0.0  # of the last gradient
    coefficient: float = 1.0  # the smallest factor on the last step that was taken
    steps: int = 0  # that were taken
    clipped: float = 0.0  # sum of the shares of clip groups whose threshold was reached
    skipped: int = 0
    recent: list[float] = field(default_factory=list[float])  # the shares of the last steps taken
    # The last finite norms, those of skipped steps among them: where gradients grow for good, their median
    # follows and steps are taken again after at most 50.
    norms: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])  # the last ones that closures returned
    spike_bound: float = math.inf  # the norm above which a step is a spike
    spikes: list[Spike] = field(default_factory=list["Spike"])

    @classmethod
    def of(cls, saved: Any) -> Counters:
        """The counters that a checkpoint has; one of an older version lacks some."""
        if not isinstance(saved, Mapping):
            raise _damaged(COUNTERS, saved)
        counters = cls()
        for f in fields(cls):
            value = saved.get(f.name, getattr(counters, f.name))
            is_wrong = isinstance(value, list) != isinstance(getattr(counters, f.name), list)
            if is_wrong or not isinstance(value, (float, int, list)):
                raise _damaged(f"{COUNTERS}.{f.name}", value)
            setattr(counters, f.name, value)
        return counters

    def count(self, norm: float, coefficient: float, share: float) -> None:
        """Count a step, with its smallest coefficient and the share of clip groups that were clipped."""
        self.coefficient = coefficient
        self.steps += 1
        self.clipped += share
        self.recent.append(share)
        del self.recent[:-RECENT_STEPS]
        self._keep_norm(norm)

    def count_skipped(self, norm: float) -> None:
        """Count a step that was left out."""
        self.skipped += 1
        self._keep_norm(norm)

    def exceeds(self, limit: Limit, norm: float, loss: float | None) -> bool:
        """Whether norm or loss is above the limit; never while those before are few."""
        if limit.unit == "norm":
            return norm > limit.number
        if limit.unit == "x":
            return len(self.norms) >= FEWEST_NORMS and norm > limit.number * median(self.norms)
        is_high = loss is not None and loss > _mean_and_deviations(self.losses, limit.number)
        return is_high or norm > _mean_and_deviations(self.norms, limit.number)

    def keep_loss(self, loss: float) -> None:
        """Remember a loss, if it is finite."""
        if math.isfinite(loss):
            self.losses.append(loss)
            del self.losses[:-RECENT_STEPS]

    def keep_spike(self, spike: Spike) -> None:
        """Add a spike to the last ones."""
        self.spikes.append(spike)
        del self.spikes[:-RECENT_STEPS]

    def _keep_norm(self, norm: float) -> None:
        self.grad_norm = norm
        if math.isfinite(norm):
            self.norms.append(norm)
            del self.norms[:-RECENT_STEPS]
        if (self.steps + self.skipped) % RENEWED_STEPS == 0:
            self.spike_bound = _mean_and_deviations(self.norms, SPIKE_SIGMAS)


def _mean_and_deviations(values: list[float], sigmas: float) -> float:
    """The mean plus so many standard deviations, ``inf`` while values are few."""
    if len(values) < FEWEST_NORMS:
        return math.inf
    mean = sum(values) / len(values)
    deviations = [value - mean for value in values]
    # Products: the power of a float raises where it overflows.
    return mean + sigmas * math.sqrt(sum([d * d for d in deviations]) / len(values))


class StepRecord:
    """What an optimizer keeps of its steps: counters, and what its clipping rules remember."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.checks_double_clip = True
        self._on_device: DeviceCounters | None = None  # counts on from there where numbers are not read
        self._saved_rules: dict[str, Saved] = {}
        self._rules: RuleMemories | None = None

    @property
    def rules(self) -> RuleMemories:
        """What the rules remember."""
        if self._rules is None:
            from curvestep.optim.rule_thresholds import RuleMemories  # only a rule needs it

            self._rules = RuleMemories(self._saved_rules)
        return self._rules

    @property
    def is_on_device(self) -> bool:
        """Whether a device counts."""
        return self._on_device is not None

    def on_device(self, device: torch.device) -> DeviceCounters:
        """The counters as tensors, where they were first needed so."""
        if self._on_device is None:
            from curvestep.optim.device import DeviceCounters

            self._on_device = DeviceCounters(asdict(self.counters), device, RECENT_STEPS)
        return self._on_device

    def read(self) -> Counters:
        """The counters as they are; one wait for a device that counts."""
        if self._on_device is None:
            return self.counters
        return replace(self.counters, **self._on_device.read())

    def leave_device(self) -> None:
        """Count on in floats; those on a device are waited for."""
        self.counters = self.read()
        self._on_device = None

    def save(self, param_groups: list[Settings]) -> None:
        """Put counters and rules into the parameter groups of a checkpoint, as plain data."""
        param_groups[0][COUNTERS] = asdict(self.read())
        memories = self._saved_rules if self._rules is None else self._rules.read()
        if memories:
            param_groups[0][MEMORIES] = memories
        for settings in param_groups:
            rule = clip_rule_of(settings)
            if rule is not None:
                settings["max_norm"] = rule.as_plain()

    def load(self, param_groups: list[Settings], known: object = None) -> None:
        """Take them out of a checkpoint, which may have none; ``known`` is the optimizer's own threshold."""
        self.counters = Counters.of(param_groups[0].pop(COUNTERS, None) or {})
        self._on_device = None
        self._saved_rules = _checked_memories(param_groups[0].pop(MEMORIES, None) or {})
        self._rules = None
        for settings in param_groups:
            if isinstance(settings.get("max_norm"), Mapping):
                from curvestep.clip_rules import from_plain

                settings["max_norm"] = from_plain(settings["max_norm"], known)


def _checked_memories(saved: Any) -> dict[str, Saved]:
    """What rules remembered, if a checkpoint has it as they wrote it."""
    if not isinstance(saved, Mapping):
        raise _damaged(MEMORIES, saved)
    for memory in saved.values():
        if not isinstance(memory, Mapping) or not {"rule", "state", "norms"} <= memory.keys():
            raise _damaged(MEMORIES, memory)
    return dict(saved)


def _damaged(name: str, value: object) -> ValueError:
    return ValueError(
        f"The checkpoint is damaged: its `{name}` cannot be {value!r}. Load another, or remove the entry."
    )


class ClipStep:
    """A step that is about to be taken: its norms, whether to leave it out, its thresholds, and its count.

    Attributes:
        groups: What is clipped together, each by its norm.
        norms: The norm of each group; the scale of a GradScaler is taken out.
        norm: The norm of the whole gradient.
        unscale: One over the scale of a GradScaler.
        skip: On a device 1.0 if nothing may change and 0.0 if the step is taken, None if it surely is.
        is_spike: Whether the norm stands out from those before; not known where it is not read.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        policy: Policy,
        record: StepRecord,
        groups: Sequence[ClipGroup],
        loss: Any = None,
        *,
        has_to_read: bool,
    ) -> None:
        """Take the norms. ``has_to_read``: the caller needs floats, on a device too, which waits once."""
        self.groups = groups
        self.norms: list[FloatOrTensor]
        self.norm: FloatOrTensor
        self.unscale: FloatOrTensor = 1.0
        self.skip: Tensor | None = None
        self.is_spike = False
        self._optimizer = optimizer
        self._policy = policy
        self._record = record
        self._loss: float | None = None
        self._overflowed = False
        self._creates_state = False
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if all_on_host(groups):
            norms = host_norms(groups, policy.norm_scope)
            unscale = 1.0 if scale is None else 1 / scale.item()
            self._overflowed = overflow is not None and overflow.item() > 0
        else:
            from curvestep.optim import device

            is_guarded = policy.nonfinite != "propagate" or overflow is not None
            has_to_read = has_to_read or policy.limit is not None or is_state_init_step(optimizer)
            has_to_read = has_to_read or device.has_to_read(groups, is_guarded=is_guarded)
            device.check(optimizer, groups, has_to_read=has_to_read)
            if not has_to_read:
                measured = device.measure(groups, policy.norm_scope, scale)
                self.norms, self.norm, self.unscale = measured
                self.skip = device.skip_flag(self.norms, policy.nonfinite, overflow)
                return
            norms, unscale, self._overflowed = device.read_norms(groups, policy.norm_scope, scale, overflow)
            if record.is_on_device:
                record.leave_device()
        if unscale != 1.0:
            norms = [norm * unscale for norm in norms]
            for group in groups:
                if group.per_unit is not None:
                    group.per_unit.norms *= unscale
        self.unscale = unscale
        self.norms = [*norms]
        self.norm = norms[0] if policy.norm_scope == "global" else math.hypot(*norms)
        self.is_spike = self.norm > record.counters.spike_bound
        self._loss = None if loss is None else float(loss)
        self._creates_state = self.norm == 0 and is_state_init_step(optimizer)

    def is_left_out(self) -> bool:
        """Whether the step is left out, and then counted so; raises where that is wanted.

        Where the norms are not read the host does not know: then ``skip`` says it to the device.
        """
        norm = self.norm
        if isinstance(norm, Tensor):
            return False
        counters = self._record.counters
        nonfinite = self._policy.nonfinite
        limit = self._policy.limit
        is_refused = nonfinite != "propagate" and not all([math.isfinite(n) for n in self.norms])
        is_above = limit is not None and counters.exceeds(limit, norm, self._loss)
        if self._overflowed or is_refused or is_above:
            if is_refused and nonfinite == "raise" and not self._overflowed:
                self._raise_nonfinite()
            if self.is_spike:
                self._keep_spike(norm, 0.0)
            counters.count_skipped(norm)
            return True
        if self._loss is not None:
            counters.keep_loss(self._loss)
        return False

    def _raise_nonfinite(self) -> NoReturn:
        """Raise, and name the parameter."""
        from curvestep.optim.stats import nonfinite_gradient

        raise FloatingPointError(nonfinite_gradient(self._optimizer.param_groups))

    def resolve_thresholds(self) -> list[Settings]:
        """The settings of each group, with a number in place of its rule."""
        if all([group.clip_rule is None for group in self.groups]):
            return [group.settings if group.per_unit is None else group.clip_all() for group in self.groups]
        assert isinstance(self.norm, float)  # a step with rules is read
        norms = [float(norm) for norm in self.norms]
        return self._record.rules.resolve_thresholds(self.groups, norms, self.norm)

    def update_momentum_(self, parts: list[Part], settings: Settings) -> list[Part]:
        """Take the gradients into the momentum, unless left out; the parts with it as their direction."""
        return [with_momentum(part, self.unscale, self.skip, settings) for part in parts]

    def remeasure(self, groups: Sequence[ClipGroup]) -> None:
        """Clip by the norms of momenta, in which the scale is no more."""
        scope = self._policy.norm_scope
        if all_on_host(groups):
            self.norms = [*host_norms(groups, scope)]
        else:
            from curvestep.optim import device

            norms = device.norms_of(groups, scope)
            self.norms = [*norms]
            if isinstance(self.norm, float):
                self.norms = [float(norm[0]) for norm in read(norms)]
        self.unscale = 1.0

    def count(self, coefficients: list[FloatOrTensor], thresholds: list[float]) -> None:
        """Count the step that was taken, by the factor on each group and its threshold."""
        norm = self.norm
        reached: list[FloatOrTensor] = []
        for group_norm, threshold in zip(self.norms, thresholds, strict=True):
            reached.append(group_norm > threshold)
        if isinstance(norm, Tensor):
            self._record.on_device(norm.device).count(norm, coefficients, reached, self.skip)
            return
        num_norms = len(reached)
        for i, group in enumerate(self.groups):
            if group.per_unit is not None:
                coefficients[i], reached[i] = group.per_unit.clip_summary()
            if group.clips_tensors:
                reached[i] *= len(group.grads)
                num_norms += len(group.grads) - 1
        share = sum([float(was_reached) for was_reached in reached]) / num_norms
        if not self._creates_state:
            self._record.counters.count(norm, float(min(coefficients)), share)

    def keep_spike(self, coefficients: Sequence[FloatOrTensor]) -> None:
        """Remember a step that stands out, while the gradients are as they came."""
        clipped: list[float] = []
        for group, norm, coefficient in zip(self.groups, self.norms, coefficients, strict=True):
            if group.per_unit is None:
                clipped.append(float(norm * coefficient))
            else:
                clipped.append(group.per_unit.clipped_norm())
        is_global = self._policy.norm_scope == "global"
        self._keep_spike(float(self.norm), clipped[0] if is_global else math.hypot(*clipped))

    def _keep_spike(self, norm: float, clipped_norm: float) -> None:
        """Remember the step, with the parameter that has most of its gradient."""
        from curvestep.optim.stats import layer_norms

        norms = layer_norms(self._optimizer.param_groups)
        layer = max(norms, key=lambda name: norms[name])
        counters = self._record.counters
        counters.keep_spike({
            "step": counters.steps + counters.skipped, "grad_norm": norm, "clipped_norm": clipped_norm,
            "loss": self._loss, "layer": layer, "share": (norms[layer] / norm) ** 2,
        })  # fmt: skip


def all_on_host(groups: Sequence[ClipGroup]) -> bool:
    """Whether every number of a step is in the host's memory: none has to be waited for."""
    for group in groups:
        if isinstance(group, UpdateGroup) and isinstance(group.rule.lr, Tensor):
            return False
        if group.view is None and not all([grad.is_cpu for grad in group.grads]):
            return False
    return True


def host_norms(groups: Sequence[ClipGroup], norm_scope: str) -> list[float]:
    """The norm of each group, of tensors on the host; that of all together if the scope is global."""
    if any([group.clip_rule is not None and group.clips_units for group in groups]):
        from curvestep.optim.rule_thresholds import measure_units  # only some rules need it

        return measure_units(groups)[0]
    if norm_scope == "global" and len(groups) > 1:
        together = [grad for group in groups for grad in group.grads]
        return [global_norm(together).item()] * len(groups)
    norms: list[float] = []
    for group in groups:
        if group.clips_tensors:
            from curvestep.optim.rule_thresholds import measure_tensors

            norms.append(measure_tensors(group))
            continue
        norm = None if group.view is None else group.view.kernel.norm(group.view)
        norms.append(global_norm(group.grads).item() if norm is None else norm)
    return norms


def is_state_init_step(optimizer: Optimizer) -> bool:
    """Whether a step with zero gradients only creates the state, as torch.distributed.checkpoint lets it."""
    if optimizer.state:
        return False
    for settings in optimizer.param_groups:
        lr = settings["lr"]
        is_unknown = isinstance(lr, Tensor) and not is_readable(lr)  # on a device, where it is not read
        if is_unknown or lr != 0:
            return False
    return True
