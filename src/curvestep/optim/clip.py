"""Norm clipping inside the steps of any optimizer, by a hook."""
# pyright: reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep._checks import check_choice
from curvestep.distributed import local
from curvestep.optim.counters import (
    COUNTERS,
    ClipStats,
    check_skip_above,
    clip_stats_of,
    count_step,
    is_above,
    joint_norm,
    new_counters,
    read_counters,
)
from curvestep.optim.double_clipping import DoubleClipping
from curvestep.optim.scaled import has_zero_lr, nonfinite_gradient
from curvestep.optimizer_family import check_optimizer
from curvestep.steps import clipped_step
from curvestep.vectors import global_norm


def clip(
    optimizer: Optimizer,
    max_norm: float,
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
        optimizer: Any torch optimizer, or what Accelerate or Lightning wrapped one in.
        max_norm: Norm :math:`\gamma` at which clipping starts, ``inf`` to count only. It becomes the entry
            ``max_norm`` of each parameter group that has none; change it there.
        norm_scope: Whose norm is clipped: of all parameters (``"global"``), of each ``"group"``, or of each
            ``"tensor"``.
        nonfinite: What to do when the gradient is not finite. ``"raise"`` names the parameter and changes
            nothing, ``"skip"`` leaves the step out and counts it, ``"propagate"`` takes it. Under a
            ``GradScaler`` such steps are the scaler's: it leaves them out.
        skip_above: Leave out a step whose gradient norm is larger than this: a number, or a multiple of the
            running median such as ``"10x"``.

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
    return Clipping(optimizer, max_norm, norm_scope, nonfinite, skip_above)


class Clipping:
    """What :func:`clip` added to an optimizer.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(
        self, optimizer: Any, max_norm: float, norm_scope: str, nonfinite: str, skip_above: float | str | None
    ) -> None:
        inner = check_optimizer(optimizer)  # a wrapper calls the step of the one inside it
        if hasattr(inner, "clip_stats"):
            raise ValueError(
                f"`optimizer`, a {type(inner).__name__}, clips already. Set `max_norm` of its groups, or "
                "`remove()` the first `clip`."
            )
        clipped_step(0.0, lr=1.0, max_norm=max_norm)  # which checks it
        self.optimizer: Any = inner
        self._max_norm = max_norm
        self._scope = check_choice("norm_scope", norm_scope, ("global", "group", "tensor"))
        self._nonfinite = check_choice("nonfinite", nonfinite, ("raise", "skip", "propagate"))
        self._skip_above = check_skip_above(skip_above)
        self._counters = new_counters()
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._double_clipping = DoubleClipping(inner)
        for group in inner.param_groups:
            group.setdefault("max_norm", max_norm)
        self.optimizer.clip_stats = self.clip_stats
        self._hooks = [
            inner.register_step_pre_hook(self._before),
            inner.register_step_post_hook(self._after),
            inner.register_state_dict_post_hook(self._save),
            inner.register_load_state_dict_post_hook(self._load),
        ]

    def clip_stats(self) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired, as for :class:`ClippedSGD`."""
        return clip_stats_of(self._counters, self._double_clipping)

    def remove(self) -> None:
        """Stop clipping; the optimizer is as it was before."""
        self._after()
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            del self.optimizer.clip_stats
            for group in self.optimizer.param_groups:
                group.pop("max_norm", None)
        self._hooks = []

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._after()  # a step that raised never got there
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._clip()
            return None

        def clipped_closure() -> Any:
            self._after()  # the closure accumulates into `.grad`, or clears it
            loss = closure()
            self._clip()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": clipped_closure}
        return (optimizer, clipped_closure, *args[2:]), kwargs

    def _after(self, *_: Any) -> None:
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []

    @torch.no_grad()
    def _clip(self) -> None:
        groups = self.optimizer.param_groups
        decisions = [(group, [p.grad for p in group["params"] if p.grad is not None]) for group in groups]
        if self._scope == "tensor":
            decisions = [(group, [grad]) for group, grads in decisions for grad in grads]
        decisions = [(group, grads) for group, grads in decisions if grads]
        if not decisions:
            return
        norms = self._norms([grads for _, grads in decisions])
        if not self.optimizer.state and all(map(has_zero_lr, groups)) and not any(norms):
            return  # torch.distributed.checkpoint makes an optimizer create its state by such a step
        norm = joint_norm(norms, self._scope)
        overflow = getattr(self.optimizer, "found_inf", None)  # then the optimizer leaves the step out itself
        if overflow is None and self._leaves_out(norm):
            self._hidden = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
            for p, _ in self._hidden:
                p.grad = None
            count_step(self._counters, norm, [1.0], [False], skip=True)
            return
        self._double_clipping.look(norm, [grads for _, grads in decisions])
        bounds = [group.get("max_norm", self._max_norm) for group, _ in decisions]
        coefficients = [
            clipped_step(n, lr=1.0, max_norm=bound) for n, bound in zip(norms, bounds, strict=True)
        ]
        for (_, grads), coefficient in zip(decisions, coefficients, strict=True):
            _scale_(grads, coefficient)
        fired = [n > bound for n, bound in zip(norms, bounds, strict=True)]
        skip = False if overflow is None else (overflow > 0).to(torch.float32)
        count_step(self._counters, norm, coefficients, fired, skip)

    def _norms(self, parts: list[list[Tensor]]) -> list[Any]:
        """One norm for each decision, without a loss scale; floats on CPU, else device scalars."""
        together = self._scope == "global"
        norms = [
            global_norm(grads) for grads in ([[g for part in parts for g in part]] if together else parts)
        ]
        # The fused kernels of torch unscale by themselves: then `.grad` still has the scale in it.
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            norms = [norm / scale.to(norm.device) for norm in norms]
        found = [norm.item() if norm.is_cpu else norm for norm in norms]
        return found * len(parts) if together else found

    def _leaves_out(self, norm: Any) -> bool:
        """Whether this step is to be left out; raises where that is wanted."""
        if self._nonfinite != "propagate" and not math.isfinite(norm):
            if self._nonfinite == "raise":
                raise FloatingPointError(nonfinite_gradient(self.optimizer.param_groups))
            return True
        return self._skip_above is not None and bool(is_above(norm, self._skip_above, self._counters))

    def _save(self, optimizer: Any, state: dict[str, Any]) -> None:
        state["param_groups"][0][COUNTERS] = read_counters(self._counters, self._double_clipping)

    def _load(self, optimizer: Any) -> None:
        self._counters = optimizer.param_groups[0].pop(COUNTERS, None) or new_counters()
        for group in optimizer.param_groups:  # of a state without clipping
            group.setdefault("max_norm", self._max_norm)


def _scale_(grads: list[Tensor], coefficient: Any) -> None:
    """Multiply the gradients, unless the coefficient is known to be one."""
    if not isinstance(coefficient, Tensor) and coefficient == 1.0:
        return
    dense: dict[torch.device, list[Tensor]] = {}
    for grad in map(local, grads):
        if grad.layout != torch.strided:  # its values share memory, a product would not
            grad = grad._values() if grad.layout == torch.sparse_coo else grad.values()
        dense.setdefault(grad.device, []).append(grad)
    for device, some in dense.items():
        torch._foreach_mul_(some, coefficient.to(device) if isinstance(coefficient, Tensor) else coefficient)
