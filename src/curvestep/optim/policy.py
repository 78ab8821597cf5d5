"""Whose norm is clipped and which steps are left out: one answer for every optimizer and for ``clip``."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch gives vector_norm and tolist no type.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from curvestep.checks import check_choice, check_positive
from curvestep.clip_rules import ClipRule, Quantity
from curvestep.optim.counters import Limit
from curvestep.optim.pieces import Pieces, pieces_of
from curvestep.parameter_names import name_of
from curvestep.tensors.kernel import View
from curvestep.tensors.vectors import global_norm, host_norm, is_readable

if TYPE_CHECKING:
    from curvestep.optim.record import StepRecord

Group: TypeAlias = dict[str, Any]  # a parameter group of torch
Made = TypeVar("Made", bound="Decision")


@dataclass(slots=True)
class Decision:
    """Gradients that are clipped together, by one norm."""

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    view: View | None = None  # where the gradients lie, if our kernel can walk through them
    pieces: Pieces | None = None  # their norms, if a rule clips each tensor or unit by itself
    index: int = 0  # of the parameter in its group, if it is clipped alone


@dataclass
class Step:
    """A step that is about to be taken: whose, by which policy, where it is counted, and what is clipped."""

    optimizer: Optimizer
    policy: Policy
    record: StepRecord
    decisions: Sequence[Decision]


def decisions_of(group: Group, norm_scope: str, make: Callable[..., Made]) -> list[Made]:
    """The parameters of a group that have a gradient, together or each for itself."""
    params: list[Tensor] = group["params"]
    grads: list[Any] = list(map(getattr, params, repeat("grad")))
    at = range(len(params))
    if type(None) in set(map(type, grads)):
        at = [i for i in at if grads[i] is not None]
        params, grads = list(map(params.__getitem__, at)), list(map(grads.__getitem__, at))
    if norm_scope == "tensor":
        return [make(group, [p], [g], index=i) for i, p, g in zip(at, params, grads, strict=True)]
    return [make(group, params, grads)] if params else []


def rule_of(group: Group) -> ClipRule | None:
    """The rule by which a group is clipped, None if it is clipped at a number."""
    bound = group.get("max_norm")
    return bound if isinstance(bound, ClipRule) else None


def check_scope(rule: ClipRule, norm_scope: str) -> None:
    """Raise if a rule that clips pieces is given norms of something else."""
    if rule.each != "norm" and norm_scope != "global":
        raise ValueError(
            f'`{rule.name}` clips each {rule.each} by itself. Leave `norm_scope` at "global", '
            f"not {norm_scope!r}."
        )


def counted_pieces(
    decisions: Sequence[Decision],
    coefficients: list[Quantity],
    fired: list[Quantity],
    as_number: Callable[[Quantity], Quantity] = float,
) -> tuple[list[Quantity], list[Quantity]]:
    """Coefficient and share of what fired of each decision, with those of its pieces where it has some."""
    for i, decision in enumerate(decisions):
        if decision.pieces is not None:
            coefficients[i], fired[i] = map(as_number, decision.pieces.counted())
    return coefficients, fired


def unscale_pieces(decisions: Sequence[Decision], factor: Quantity) -> None:
    """Take the scale of a GradScaler out of the norms of the pieces."""
    for pieces in [decision.pieces for decision in decisions if decision.pieces is not None]:
        pieces.unscale(factor)


def measure_pieces(decisions: Sequence[Decision]) -> bool:
    """Take the norms of the pieces, where a rule clips such; whether there are any."""
    has_pieces = False
    for decision in decisions:
        rule = rule_of(decision.group)
        if rule is not None and rule.each != "norm":
            decision.pieces, has_pieces = pieces_of(decision, rule), True
    return has_pieces


def is_on_host(decision: Decision) -> bool:
    """Whether the gradients are in the host's memory."""
    return decision.view is not None or all(map(getattr, decision.grads, repeat("is_cpu")))


class Policy:
    """How gradients are clipped and which steps are left out, apart from the threshold; as ``clip`` says."""

    def __init__(self, norm_scope: str, nonfinite: str, skip_above: float | str | None) -> None:
        self.norm_scope = check_choice("norm_scope", norm_scope, ("global", "group", "tensor"))
        self.nonfinite = check_choice("nonfinite", nonfinite, ("raise", "skip", "propagate"))
        self.limit = _limit(skip_above)

    @property
    def may_skip(self) -> bool:
        """Whether a step may be left out, or raise, for what its gradient is."""
        return self.nonfinite != "propagate" or self.limit.number < math.inf

    def norms(self, decisions: Sequence[Decision]) -> list[float]:
        """One norm for each decision, of tensors on the host; all the same if the scope is global."""
        if measure_pieces(decisions):  # whose scope is global
            norms = list(map(_norm_on_host, decisions))
            return [math.hypot(*norms)] * len(norms)
        if self.norm_scope == "global" and len(decisions) > 1:
            together = [grad for decision in decisions for grad in decision.grads]
            return [host_norm(together)] * len(decisions)
        return [host_norm(decision.grads, decision.view) for decision in decisions]

    def joint_norm(self, norms: list[float]) -> float:
        """Norm of the whole gradient, from the norms of what is clipped alone."""
        return norms[0] if self.norm_scope == "global" else math.hypot(*norms)

    def refuses(self, norms: list[float], groups: list[Group]) -> bool:
        """Whether to leave out a step because norms are not finite; raises where that is wanted."""
        if self.nonfinite == "propagate" or all(map(math.isfinite, norms)):
            return False
        if self.nonfinite == "raise":
            raise FloatingPointError(nonfinite_gradient(groups))
        return True


def _norm_on_host(decision: Decision) -> float:
    if decision.pieces is not None:
        return float(decision.pieces.norm)
    return host_norm(decision.grads, decision.view)


def _limit(skip_above: float | str | None) -> Limit:
    """Limit that ``skip_above`` names: a number, "10x" or "6sigma"."""
    if skip_above is None:
        return Limit(math.inf, "norm")
    if not isinstance(skip_above, str):
        return Limit(check_positive("skip_above", skip_above), "norm")
    found = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d+)?)(x|sigma)", skip_above)
    if found is None or not 1.0 < float(found[1]) < math.inf:
        raise ValueError(
            '`skip_above` must be a gradient norm, "10x" the running median or "6sigma", got '
            f"{skip_above!r}. Both numbers must be above 1."
        )
    return Limit(float(found[1]), found[2])


def may_be_pretended(optimizer: Optimizer) -> bool:
    """Whether a step with zero gradients only creates the state, as torch.distributed.checkpoint lets it."""
    return not optimizer.state and all(map(_has_zero_lr, optimizer.param_groups))


def _has_zero_lr(group: Group) -> bool:
    """Whether the learning rate is known to be zero; on a device it is not read."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and not is_readable(lr):
        return False
    return bool(lr == 0)


def as_float(loss: Tensor | float | None) -> float | None:
    """What a closure returned as a number."""
    return None if loss is None else float(loss)


def layer_norms(groups: list[Group]) -> dict[str, float]:
    """The norm of each parameter's gradient, by name; waits for a device."""
    named = [(name, p.grad) for name, p in _named(groups) if p.grad is not None]
    return {name: float(global_norm([grad])) for name, grad in named}


def clipped_norms(
    decisions: Sequence[Decision], norms: list[float], coefficients: list[float]
) -> list[float]:
    """The norm of each decision after clipping; of pieces that of all together."""
    pieces = [decision.pieces for decision in decisions]
    triples = zip(pieces, norms, coefficients, strict=True)
    return [norm * c if p is None else float(p.clipped_norm()) for p, norm, c in triples]


def _named(groups: list[Group]) -> Iterator[tuple[str, Tensor]]:
    """The parameters with their names: those given, else those of a model that is known, else numbers."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        if names is None:
            names = [name_of(p, f"parameter {i} of group {number}") for i, p in enumerate(group["params"])]
        yield from zip(names, group["params"], strict=True)


def nonfinite_gradient(groups: list[Group]) -> str:
    """Which parameter has the first gradient that is not finite, in words for an error."""
    found = "All gradients are finite, but their norm overflows."
    for name, p in _named(groups):
        # Times zero, a finite number is zero and any other is NaN; the norm itself may overflow.
        if p.grad is not None and math.isnan(global_norm([p.grad * 0])):
            found = f"The gradient of `{name}`, shape {tuple(p.shape)}, is not finite."
            break
    return (
        f'{found} Nothing was changed. Use nonfinite="skip" to leave such steps out, or "propagate" to take '
        "them."
    )
