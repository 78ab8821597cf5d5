"""Norm clipping inside the steps of any optimizer, by a hook."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import chain
from operator import gt
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep._checks import check_choice, check_positive
from curvestep.clip_rules import ClipRule, Quantity
from curvestep.distributed import local
from curvestep.optim._update import Number
from curvestep.optim.counters import ClipStats, Spike
from curvestep.optim.device import counts_on_device, device_norms, joint_norm_on_device, read_norms
from curvestep.optim.pieces import Pieces
from curvestep.optim.policy import (
    Decision,
    Group,
    Policy,
    check_scope,
    clipped_norms,
    counted_pieces,
    decisions_of,
    is_on_host,
    may_be_pretended,
    numbers_of_scaler,
    spike_of,
    unscale_pieces,
)
from curvestep.optim.record import StepRecord
from curvestep.optimizer_family import check_optimizer, is_muon_group
from curvestep.steps import clipped_step
from curvestep.vectors import global_norm, is_readable, joint

Norm = TypeVar("Norm", float, Tensor)


def clip(
    optimizer: Optimizer,
    max_norm: float | ClipRule,
    *,
    what: str = "gradient",
    norm_scope: str = "global",
    nonfinite: str = "raise",
    skip_above: float | str | None = None,
) -> Clipping | UpdateClipping:
    r"""Clip the norm of the gradient inside every step of ``optimizer``, and count how often that happens.

    For optimizers that do not clip by themselves; :class:`ClippedSGD` and :class:`ClippedAdamW` do, faster
    and without a write to ``.grad``. A hook multiplies ``.grad`` by :math:`\min\{1, \gamma/\lVert g \rVert\}`
    when the step begins: after gradient accumulation and after a ``GradScaler`` has unscaled, so there is no
    order to keep. Where a step is given a closure, what the closure computed is clipped. The optimizer gets a
    method ``clip_stats()``, and its state dict carries the counters and the threshold.

    Args:
        optimizer: A torch optimizer, or what Accelerate or Lightning wrapped one in. Groups that Muon steps
            are left out of the norm, and said.
        max_norm: Norm :math:`\gamma` at which clipping starts, ``inf`` to count only, or a rule of
            :mod:`curvestep.clip_rules`. It becomes the entry
            ``max_norm`` of each parameter group that has none; change it there.
        what: ``"gradient"``, or ``"update"``: then ``max_norm`` is the largest root mean square of a tensor's
            update in units of its learning rate, and a copy of the parameters is held while a step lasts.
            ``ClippedAdamW(update_rms=...)`` needs none.
        norm_scope: Whose norm is clipped: of all parameters (``"global"``), of each ``"group"``, or of each
            ``"tensor"``.
        nonfinite: What to do when the gradient is not finite. ``"raise"`` names the parameter and changes
            nothing, ``"skip"`` leaves the step out and counts it, ``"propagate"`` takes it. Under a
            ``GradScaler`` such steps are the scaler's: it leaves them out.
        skip_above: Leave out a step whose gradient norm is larger than this: a number, or a multiple of the
            running median such as ``"10x"``, or standard deviations above the mean such as ``"6sigma"``; the
            last also of a closure's loss.

    Returns:
        A handle with ``clip_stats()`` and ``remove()``.

    Note:
        A step is left out by hiding ``.grad`` while it lasts, which every optimizer of torch takes for
        "nothing to do". On an accelerator the norm is read, which waits for it, unless ``nonfinite`` is
        ``"propagate"`` and ``skip_above`` is None. ``copy.deepcopy`` and ``pickle`` leave all hooks of an
        optimizer behind, this one too.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = torch.optim.SGD([w], lr=0.5)
        >>> handle = clip(opt, max_norm=1.0)
        >>> (0.5 * w**2).sum().backward()  # the gradient is w, of norm 5
        >>> opt.step()
        >>> w.data
        tensor([2.7000, 3.6000])
        >>> handle.clip_stats()["coefficient"], handle.clip_stats()["grad_norm"]
        (0.2, 5.0)
    """
    if check_choice("what", what, ("gradient", "update")) == "gradient":
        return Clipping(optimizer, max_norm, norm_scope, nonfinite, skip_above)
    if skip_above is not None or norm_scope != "global":
        raise ValueError(
            '`norm_scope` and `skip_above` are for gradients: leave them out with what="update".'
        )
    return UpdateClipping(optimizer, max_norm)


class Clipping:
    """Handle of the clipping that :func:`clip` added to an optimizer.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        max_norm: float | ClipRule,
        norm_scope: str,
        nonfinite: str,
        skip_above: float | str | None,
    ) -> None:
        inner = check_optimizer(optimizer)  # a wrapper calls the step of the one inside it
        if hasattr(inner, "clip_stats"):
            raise ValueError(
                f"`optimizer`, a {type(inner).__name__}, clips already. Set `max_norm` of its groups, or "
                "`remove()` the first `clip`."
            )
        if isinstance(max_norm, ClipRule):
            check_scope(max_norm, norm_scope)
        else:
            clipped_step(0.0, lr=1.0, max_norm=max_norm)  # which checks it
        self.optimizer: Any = inner
        self._max_norm = math.inf if _warn_of_muon(inner) else max_norm
        self._policy = Policy(norm_scope, nonfinite, skip_above)
        self._record = StepRecord(type(inner).__name__)
        self._loss: float | None = None  # of the closure that is being stepped by
        self._hidden: list[tuple[Tensor, Tensor]] = []
        for group in inner.param_groups:
            group.setdefault("max_norm", self._max_norm)
        self.optimizer.clip_stats, self.optimizer.spikes = self.clip_stats, self.spikes
        self.optimizer.stop_double_clip_check = self._record.stop_double_clip_check
        self._hooks = [
            inner.register_step_pre_hook(self._before),
            inner.register_step_post_hook(self._after),
            inner.register_state_dict_post_hook(self._save),
            inner.register_load_state_dict_post_hook(self._load),
        ]

    def spikes(self) -> list[Spike]:
        """The last steps whose gradient norm stood out, as for :class:`ClippedSGD`."""
        return self._record.spikes()

    def clip_stats(self, *, layers: bool = False) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired, as for :class:`ClippedSGD`."""
        return self._record.clip_stats(self.optimizer.param_groups if layers else None)

    def remove(self) -> None:
        """Stop clipping; the optimizer is as it was before."""
        self._after()
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            del self.optimizer.clip_stats, self.optimizer.spikes, self.optimizer.stop_double_clip_check
            for group in self.optimizer.param_groups:
                group.pop("max_norm", None)
        self._hooks = []

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._after()  # a step that raised never got there
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._clip()
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._clipped(closure)}
        return (optimizer, self._clipped(closure), *args[2:]), kwargs

    def _clipped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with gradients clipped after it."""

        def clipped_closure() -> Any:
            self._after()  # the closure accumulates into `.grad`, or clears it
            loss = closure()
            self._clip(loss)
            return loss

        return clipped_closure

    def _after(self, *_: Any) -> None:
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []

    @torch.no_grad()
    def _clip(self, loss: float | None = None) -> None:
        groups = _clipped_groups(self.optimizer)
        decisions = list(chain(*(decisions_of(group, self._policy.norm_scope) for group in groups)))
        if not decisions:
            return
        # The optimizer leaves out by itself a step in which a GradScaler found an overflow.
        overflow: Tensor | None = getattr(self.optimizer, "found_inf", None)
        may_skip = overflow is None and self._policy.may_skip
        if all(map(is_on_host, decisions)):
            norms = self._policy.norms(decisions)
        elif may_skip:
            norms = read_norms(device_norms(decisions, self._policy.norm_scope))
        else:
            self._clip_on_device(decisions, overflow)
            return
        # The fused kernels of torch unscale by themselves: then `.grad` still has the scale in it.
        scale, overflowed = numbers_of_scaler(self.optimizer)
        unscale_pieces(decisions, 1 / scale)
        self._loss = None if loss is None else float(loss)
        self._clip_on_host(decisions, [norm / scale for norm in norms], may_skip, overflowed)

    def _clip_on_host(
        self, decisions: list[Decision], norms: list[float], may_skip: bool, overflowed: bool
    ) -> None:
        """Clip by norms that are floats, or hide the gradients from a step that is left out."""
        counters, norm = self._record.on_host(), self._policy.joint_norm(norms)
        if norm == 0 and may_be_pretended(self.optimizer):
            return
        param_groups, is_spike = self.optimizer.param_groups, norm > counters.spike_bound
        if may_skip and self._policy.should_skip(norms, self._loss, counters, param_groups):
            if is_spike:
                counters.keep_spike(spike_of(counters, norm, 0.0, self._loss, param_groups))
            self._hide(decisions)
            counters.count_skipped(norm)
            return
        counters.keep_loss(self._loss)
        groups = self._record.rules.bounded(decisions, norms, norm, self.optimizer.param_groups)
        bounds = list(map(self._bound, groups))
        coefficients = list(map(_coefficient, norms, bounds))
        if is_spike:  # while the gradients are as they came
            clipped_norm = self._policy.joint_norm(clipped_norms(decisions, norms, coefficients))
            counters.keep_spike(spike_of(counters, norm, clipped_norm, self._loss, param_groups))
        for decision, coefficient in zip(decisions, coefficients, strict=True):
            if coefficient != 1.0:
                _scale_(decision.grads, coefficient)
            elif decision.pieces is not None:
                _scale_pieces_(decision.grads, decision.pieces)
        if overflowed:
            counters.count_skipped(norm)
        else:
            fired = list(map(gt, norms, bounds))
            counters.count(norm, *counted_pieces(decisions, coefficients, fired))

    def _clip_on_device(self, decisions: list[Decision], overflow: Tensor | None) -> None:
        """Clip by norms that are device scalars, of which none is read."""
        norms = device_norms(decisions, self._policy.norm_scope)
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            norms = [norm / scale.to(norm.device) for norm in norms]
            unscale_pieces(decisions, 1 / scale)
        norm = joint_norm_on_device(norms, self._policy.norm_scope)
        skip = torch.zeros_like(norm) if overflow is None else (overflow.view(()) > 0).to(norm)
        counts = counts_on_device(self.optimizer, norm)
        keep = (counts > 0) & (skip == 0)
        groups = self._record.rules.bounded(decisions, norms, norm, self.optimizer.param_groups, keep)
        bounds = list(map(self._bound, groups))
        coefficients = list(map(_coefficient, norms, bounds))
        for decision, coefficient in zip(decisions, coefficients, strict=True):
            if decision.pieces is None:
                _scale_(decision.grads, coefficient)
            else:
                _scale_pieces_(decision.grads, decision.pieces)
        fired = list(map(gt, norms, bounds))
        coefficients, fired = counted_pieces(decisions, coefficients, fired, torch.as_tensor)
        self._record.on_device(norm.device).count(norm, coefficients, fired, skip, counts)

    def _bound(self, group: Group) -> Quantity:
        return group.get("max_norm", self._max_norm)

    def _hide(self, decisions: list[Decision]) -> None:
        """Take the gradients away while a step lasts: torch's optimizers then have nothing to do."""
        for decision in decisions:
            self._hidden += zip(decision.params, decision.grads, strict=True)
        for p, _ in self._hidden:
            p.grad = None

    def _save(self, optimizer: Any, state: Group) -> None:
        self._record.save(state["param_groups"])

    def _load(self, optimizer: Any) -> None:
        self._record.load(optimizer.param_groups, self._max_norm)
        for group in optimizer.param_groups:  # of a state without clipping
            group.setdefault("max_norm", self._max_norm)


class UpdateClipping:
    """Handle of the cap that :func:`clip` with ``what="update"`` added to an optimizer.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: object, max_rms: float | ClipRule) -> None:
        inner = check_optimizer(optimizer)
        if isinstance(max_rms, ClipRule):
            raise ValueError(f'`max_norm={max_rms}` is for gradients. Give a number with what="update".')
        self.optimizer: Any = inner
        self._max_rms = check_positive("max_norm", max_rms)
        self._record = StepRecord(type(inner).__name__)
        self._before: list[tuple[Group, Tensor, Tensor]] = []
        if hasattr(inner, "clip_stats"):
            raise ValueError(f"`optimizer`, a {type(inner).__name__}, clips already. `remove()` that first.")
        self.optimizer.clip_stats = self.clip_stats
        self._hooks = [
            inner.register_step_pre_hook(self._keep),
            inner.register_step_post_hook(self._cap),
            inner.register_state_dict_post_hook(lambda _, state: self._record.save(state["param_groups"])),
            inner.register_load_state_dict_post_hook(lambda opt: self._record.load(opt.param_groups)),
        ]

    def clip_stats(self, *, layers: bool = False) -> ClipStats:
        """As for :class:`ClippedSGD`; ``grad_norm`` is the norm of the update over the learning rate."""
        return self._record.clip_stats(self.optimizer.param_groups if layers else None)

    def remove(self) -> None:
        """Stop clipping; the optimizer is as it was before."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            del self.optimizer.clip_stats
        self._hooks = []

    def _keep(self, *_: object) -> None:
        groups: list[Group] = self.optimizer.param_groups
        self._before = [(group, p, p.detach().clone()) for group in groups for p in group["params"]]

    @torch.no_grad()
    def _cap(self, *_: object) -> None:
        """Shorten the step of each tensor that is too long; numbers stay where the parameters are."""
        norms: list[Tensor] = []
        factors: list[Tensor] = []
        for group, p, before in self._before:
            norm = global_norm([p - before]) / group["lr"]
            factor = (self._max_rms * max(p.numel(), 1) ** 0.5 / norm).clamp(max=1.0).nan_to_num(1.0)
            p.copy_(torch.where((factor < 1.0).to(p.device), before + (p - before) * factor.to(p), p))
            norms.append(norm.nan_to_num(0.0))
            factors.append(factor)
        self._before = []
        self._count(norms, factors)

    def _count(self, norms: list[Tensor], factors: list[Tensor]) -> None:
        norm, fired = joint(norms), [factor < 1.0 for factor in factors]
        if is_readable(norm):
            values = [factor.item() for factor in factors]
            self._record.on_host().count(norm.item(), values, [value < 1.0 for value in values])
        else:
            counters = self._record.on_device(norm.device)
            counters.count(norm, factors, fired, torch.zeros_like(norm), torch.ones_like(norm))


def _clipped_groups(optimizer: Optimizer) -> list[Group]:
    """The groups whose norm is taken: without Muon's, unless there are no others."""
    others = [group for group in optimizer.param_groups if not is_muon_group(optimizer, group)]
    return others or optimizer.param_groups


def _warn_of_muon(optimizer: Optimizer) -> bool:
    """Say which groups are not clipped because Muon steps them; whether that is all."""
    num_muon = sum(is_muon_group(optimizer, group) for group in optimizer.param_groups)
    if num_muon:
        warnings.warn(
            f"Muon steps {num_muon} of {len(optimizer.param_groups)} parameter groups. They are left out of "
            "the norm and not clipped: Muon's steps have one length whatever the gradient's.",
            stacklevel=4,
        )
    return num_muon == len(optimizer.param_groups)


def _coefficient(norm: Norm, max_norm: float) -> Norm:
    return clipped_step(norm, lr=1.0, max_norm=max_norm)


def _scale_(grads: list[Tensor], coefficient: Number) -> None:
    """Multiply the gradients in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in map(local, grads):
        by_device.setdefault(grad.device, []).append(_values_of(grad))
    for device, some in by_device.items():
        factor = coefficient.to(device) if isinstance(coefficient, Tensor) else coefficient
        torch._foreach_mul_(some, factor)


def _scale_pieces_(grads: list[Tensor], pieces: Pieces) -> None:
    """Multiply the pieces of the gradients in place."""
    for grad, factors in zip(grads, pieces.factor_of_each(grads), strict=True):
        _values_of(grad).mul_(factors)


def _values_of(grad: Tensor) -> Tensor:
    """The numbers of a gradient; those of a sparse one share its memory, a product would not."""
    if grad.layout == torch.sparse_coo:
        return grad._values()
    return grad if grad.layout == torch.strided else grad.values()
