"""Norm clipping inside the steps of any optimizer, by a hook."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# torch names its functions for lists of tensors with an underscore, and gives tolist no type.

from __future__ import annotations

import gc
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvestep.clip_rules import ClipRule
from curvestep.optim.clip_step import ClipStep, Policy, StepRecord
from curvestep.optim.update import ClipGroup, FloatOrTensor, Settings, clip_groups
from curvestep.optimizer_family import check_optimizer, is_muon_group
from curvestep.steps import clipped_step
from curvestep.tensors.distributed import local

if TYPE_CHECKING:
    from curvestep.optim.stats import ClipStats, Spike


def clip(
    optimizer: Optimizer,
    max_norm: float | ClipRule,
    *,
    norm_scope: str = "global",
    nonfinite: str = "raise",
    skip_above: float | str | None = None,
) -> Clipping:
    r"""Clip the norm of the gradient inside every step of ``optimizer``, and count how often that happens.

    For optimizers that do not clip by themselves; :class:`ClippedSGD` and :class:`ClippedAdamW` do, faster
    and without a write to ``.grad``. A hook multiplies ``.grad`` by :math:`\min\{1, \gamma/\lVert g \rVert\}`
    when the step begins: after gradient accumulation and after a ``GradScaler`` has unscaled, so there is no
    order to keep. Where a step is given a closure, what the closure computed is clipped. The optimizer gets a
    method ``clip_stats()``, and its state dict carries the counters and the threshold.

    Args:
        optimizer: A torch optimizer, or what Accelerate or Lightning wrapped one in. Groups that Muon
            updates are excluded from the norm; a warning says so.
        max_norm: Norm :math:`\gamma` at which clipping starts, ``inf`` to count only, or a rule of
            :mod:`curvestep.clip_rules`. It becomes the entry
            ``max_norm`` of each parameter group that has none; change it there.
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
        "nothing to do". On an accelerator the norm is read, which waits for it once, unless ``nonfinite`` is
        ``"propagate"``, ``max_norm`` a number and ``skip_above`` None. ``copy.deepcopy`` and ``pickle`` leave
        all hooks of an optimizer behind, this one too.

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
    return Clipping(optimizer, max_norm, Policy(norm_scope, nonfinite, skip_above))


class Clipping:
    """Handle of the clipping that :func:`clip` added to an optimizer.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: object, max_norm: float | ClipRule, policy: Policy) -> None:
        inner = check_optimizer(optimizer)  # a wrapper calls the step of the one inside it
        if hasattr(inner, "clip_stats"):
            raise ValueError(
                f"`optimizer`, a {type(inner).__name__}, clips already. Set `max_norm` of its groups, or "
                "`remove()` the first `clip`."
            )
        if _belongs_to_zero_redundancy_optimizer(inner):
            raise RuntimeError(
                "`optimizer` has one rank's part of the gradients, and would clip by the norm of that part. "
                "Give `clip` the ZeroRedundancyOptimizer itself."
            )
        if isinstance(max_norm, ClipRule):
            policy.check_rule(max_norm)
        else:
            clipped_step(0.0, lr=1.0, max_norm=max_norm)  # which checks it
        self.optimizer = inner
        self._max_norm = math.inf if _warn_of_muon(inner) else max_norm
        self._policy = policy
        self._record = StepRecord()
        self._record.load(inner.param_groups, max_norm)  # of a checkpoint that was loaded before
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._set_max_norm(inner.param_groups)
        self._methods: dict[str, Callable[..., object]] = {
            "clip_stats": self.clip_stats,
            "last_clip": self.last_clip,
            "spikes": self.spikes,
            "stop_double_clip_check": self.stop_double_clip_check,
        }
        vars(inner).update(self._methods)
        self._hooks: list[RemovableHandle] = [
            inner.register_step_pre_hook(self._before),
            inner.register_step_post_hook(self._after),
            inner.register_state_dict_post_hook(self._save),
            inner.register_load_state_dict_post_hook(self._load),
        ]

    def clip_stats(self, *, layers: bool = False) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired, as for :class:`ClippedSGD`."""
        from curvestep.optim.stats import clip_stats

        kind = type(self.optimizer).__name__
        return clip_stats(self._record, kind, self.optimizer.param_groups, layers=layers)

    def last_clip(self) -> tuple[float, float]:
        """Norm of the last gradient before clipping, and the factor on it, as for :class:`ClippedSGD`."""
        counters = self._record.read()
        return counters.grad_norm, counters.coefficient

    def spikes(self) -> list[Spike]:
        """The last steps with an unusually large gradient norm, as for :class:`ClippedSGD`."""
        return list(self._record.read().spikes)

    def stop_double_clip_check(self) -> None:
        """Keep :meth:`clip_stats` from warning that gradients arrive already clipped."""
        self._record.checks_double_clip = False

    def remove(self) -> None:
        """Stop clipping; the optimizer is as it was before."""
        self._after()
        if self._hooks:
            for group in self.optimizer.param_groups:
                group.pop("max_norm", None)
        for hook in self._hooks:
            hook.remove()
        for name in self._methods:
            vars(self.optimizer).pop(name, None)
        self._hooks = []
        self._methods = {}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any, /) -> Any:
        self._after()  # a step that raised never got there
        step = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
        closure = step.arguments.get("closure")
        if not callable(closure):
            self._clip()
            return None
        step.arguments["closure"] = self._clipped(closure)
        return step.args, step.kwargs

    def _clipped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with gradients clipped after it."""

        def clipped_closure() -> Any:
            self._after()  # the closure accumulates into `.grad`, or clears it
            loss = closure()
            self._clip(loss)
            return loss

        return clipped_closure

    def _after(self, *_: object) -> None:
        """Give the hidden gradients back, unless others were computed since: after a step that raised."""
        if all(p.grad is None for p, _ in self._hidden):
            for p, grad in self._hidden:
                p.grad = grad
        self._hidden = []

    @torch.no_grad()
    def _clip(self, loss: Any = None) -> None:
        """Clip the gradients by their norm and count, or hide them from a step that is left out."""
        groups = _groups_of(self.optimizer, self._policy.norm_scope)
        if not groups:
            return
        # Under a GradScaler the optimizer leaves out a step by itself, and no number has to be read.
        is_scaled = getattr(self.optimizer, "found_inf", None) is not None
        may_skip = self._policy.nonfinite != "propagate" and not is_scaled
        step = ClipStep(self.optimizer, self._policy, self._record, groups, loss, has_to_read=may_skip)
        if step.is_left_out():
            self._hide(groups)
            return
        if step.skip is not None:  # the optimizer knows whether to leave out the step from a GradScaler
            self.optimizer.found_inf = step.skip  # pyright: ignore[reportAttributeAccessIssue]
        thresholds = [settings.get("max_norm", self._max_norm) for settings in step.resolve_thresholds()]
        pairs = zip(step.norms, thresholds, strict=True)
        coefficients = [clipped_step(norm, lr=1.0, max_norm=threshold) for norm, threshold in pairs]
        if step.is_spike:
            step.keep_spike(coefficients)
        for group, coefficient in zip(groups, coefficients, strict=True):
            _clip_(group, coefficient)
        step.count([*coefficients], thresholds)

    def _hide(self, groups: list[ClipGroup]) -> None:
        """Take the gradients away while a step lasts: torch's optimizers then have nothing to do."""
        for group in groups:
            self._hidden += zip(group.params, group.grads, strict=True)
        for p, _ in self._hidden:
            p.grad = None

    def _save(self, optimizer: Optimizer, state: Settings) -> None:
        self._record.save(state["param_groups"])

    def _load(self, optimizer: Optimizer) -> None:
        self._record.load(optimizer.param_groups, self._max_norm)
        self._set_max_norm(optimizer.param_groups)  # of a state without clipping

    def _set_max_norm(self, groups: list[Settings]) -> None:
        """Give a threshold to the groups that have none."""
        for group in groups:
            group.setdefault("max_norm", self._max_norm)


def _belongs_to_zero_redundancy_optimizer(optimizer: object) -> bool:
    """Whether a ZeroRedundancyOptimizer of several ranks steps this one, for this rank's part."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if kind is None or not (dist.is_available() and dist.is_initialized()):
        return False
    # It leaves no mark on the optimizer inside it, so it is looked for among all objects.
    owners = [owner for owner in gc.get_objects() if isinstance(owner, kind)]
    return any(getattr(o, "optim", None) is optimizer and getattr(o, "world_size", 1) > 1 for o in owners)


def _groups_of(optimizer: Optimizer, norm_scope: str) -> list[ClipGroup]:
    """What is clipped together: all but the groups that Muon steps, or these if there are no others."""
    steps_by_muon = [is_muon_group(optimizer, settings) for settings in optimizer.param_groups]
    groups: list[ClipGroup] = []
    for number, settings in enumerate(optimizer.param_groups):
        if all(steps_by_muon) or not steps_by_muon[number]:
            groups += clip_groups(settings, number, norm_scope, ClipGroup)
    return groups


def _warn_of_muon(optimizer: Optimizer) -> bool:
    """Say which groups are not clipped because Muon steps them; whether that is all."""
    num_groups = len(optimizer.param_groups)
    num_muon = sum(is_muon_group(optimizer, settings) for settings in optimizer.param_groups)
    if num_muon:
        warnings.warn(
            f"Muon steps {num_muon} of {num_groups} parameter groups. They are not clipped, "
            "because the length of Muon's steps does not depend on the gradient.",
            stacklevel=4,
        )
    return num_muon == num_groups


def _clip_(group: ClipGroup, coefficient: FloatOrTensor) -> None:
    """Multiply the gradients of a group in place, each unit by its own factor where it has units."""
    if group.per_unit is not None:
        factors = group.per_unit.factor_of_each(group.grads)
        for grad, factor in zip(group.grads, factors, strict=True):
            _values_of(grad).mul_(factor)
    elif isinstance(coefficient, Tensor):
        for device, values in _by_device(group.grads).items():
            torch._foreach_mul_(values, coefficient.to(device))
    elif coefficient != 1.0:
        for values in _by_device(group.grads).values():
            torch._foreach_mul_(values, coefficient)


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The numbers of the gradients that lie here, by device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = _values_of(local(grad))
        by_device.setdefault(values.device, []).append(values)
    return by_device


def _values_of(grad: Tensor) -> Tensor:
    """The numbers of a gradient; those of a sparse one share its memory, a product would not."""
    if grad.layout == torch.sparse_coo:
        return grad._values()
    return grad if grad.layout == torch.strided else grad.values()
