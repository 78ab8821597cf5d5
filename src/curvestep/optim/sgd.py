r"""SGD whose step size follows a rule, and its update with the factor on the gradient folded in.

All paths of :class:`SGDRule` compute, for every parameter :math:`p` with gradient :math:`g` and buffer
:math:`b`,

.. math::
    d = \pm c\,g + w\,p, \qquad b \leftarrow \mu b + (1-\delta)\,d, \qquad
    p \leftarrow p - \eta\,(b \text{ or } d + \mu b),

and none of them writes to :math:`g`. :func:`update_loop` is the formula; the others are faster.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvestep.checks import check_choice
from curvestep.optim.scaled import ScaledOptimizer, ScaledOptions, check_between
from curvestep.optim.update import FloatOrTensor, Part, Rule, Settings

# Below this factor w/c no longer fits into the precision of the fused kernel.
_SMALLEST_FOLDED = 1e-6


class SGDOptions(ScaledOptions, total=False):
    """The options of the optimizers without a second moment, as :class:`ClippedSGD` describes them."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    clip: str


class ScaledSGD(ScaledOptimizer):
    r"""SGD with the step size of a rule: :math:`x_{k+1} = x_k - h(\lVert g_k \rVert)\, g_k`.

    A subclass names the group entry at which the rule bends (``threshold``) and gives the factor on the
    gradient (:meth:`coefficient`). Everything else is the same for all.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        rule: ``lr`` and the parameters of the rule; a group may have its own.
        options: Those of :class:`ClippedSGD`.

    Attributes:
        threshold: Name of the group entry with the gradient norm beyond which a step counts as clipped.
    """

    def __init__(self, params: ParamsT, rule: Settings, **options: Unpack[SGDOptions]) -> None:
        check_choice("clip", options.get("clip", "gradient"), ("gradient", "momentum"))
        super().__init__(params, rule, {**SGDRule.defaults(), "clip": "gradient"}, options)

    def rule(self, group: Settings) -> SGDRule:
        """Momentum, weight decay and ascent of a group."""
        return SGDRule(*[group[name] for name in _CONSTANTS])

    def check_group(self, group: Settings) -> None:
        """Raise where the values of a group make no sense."""
        check_between("momentum", group["momentum"], "momentum value")
        check_between("dampening", group["dampening"], "dampening value", low=-sys.float_info.max)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        super().check_group(group)


@dataclass(slots=True)
class SGDRule(Rule):
    """The constants of an update with or without momentum, all but the factor on the gradient."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The name that torch.optim.SGD uses, so that state dicts can be exchanged."""
        return ("momentum_buffer",) if self.momentum else ()

    def for_new_buffers(self) -> SGDRule:
        """As torch: the first gradient that a buffer sees is not damped."""
        return replace(self, dampening=0.0)

    def by_kernel(self, part: Part, scale: float) -> None:
        """Our own kernel: every tensor once through memory, 16 bytes a parameter, 24 with momentum."""
        assert part.view is not None  # this path is chosen only where there is one
        part.view.kernel.update(
            part.view, scale=self.signed(scale), weight_decay=self.weight_decay,
            momentum=self.momentum, dampening=self.dampening, lr=float(self.lr), nesterov=self.nesterov,
            units=part.units,
        )  # fmt: skip

    def by_fused(self, part: Part, scale: FloatOrTensor, skip: Tensor | None = None) -> None:
        """The kernel of torch; of its constants only lr can be a tensor, others need a scaled copy."""
        if not isinstance(scale, Tensor) and not isinstance(self.lr, Tensor):
            self._by_folding(part, scale, self.lr)
            return
        lr = self.lr
        if part.buffers or self.weight_decay:
            part = replace(part, grads=torch._foreach_mul(part.grads, scale))
        else:
            lr = lr * scale
        if isinstance(lr, Tensor):
            lr = lr.to(torch.float32)
        _fused_call(
            part, lr=lr, weight_decay=self.weight_decay, momentum=self.momentum, dampening=self.dampening,
            nesterov=self.nesterov, maximize=self.maximize, found_inf=skip,
        )  # fmt: skip

    def _by_folding(self, part: Part, scale: float, lr: float) -> None:
        """Fold c into the constants of torch's kernel: 16 bytes a parameter, 24 with momentum.

        c(g + (w/c) p) is what the kernel should use as its gradient; without momentum the outer c goes into
        lr, with momentum into 1 - dampening.
        """
        fits = scale > _SMALLEST_FOLDED and self.weight_decay / scale < 1 / _SMALLEST_FOLDED
        if self.weight_decay and (self.nesterov or not fits):
            self.by_foreach(part, scale)
            return
        decay = self.weight_decay / max(scale, _SMALLEST_FOLDED)
        if not part.buffers:
            _fused_call(part, lr=lr * scale, weight_decay=decay, maximize=self.maximize)
            return
        constants = {"momentum": self.momentum, "dampening": 1 - scale * (1 - self.dampening)}
        if self.nesterov:
            # p - lr*(c*g + mu*b) is a momentum update with lr*mu and then a plain one with lr*c.
            _fused_call(part, lr=lr * self.momentum, maximize=self.maximize, **constants)
            _fused_call(replace(part, buffers=[]), lr=lr * scale, maximize=self.maximize)
        else:
            _fused_call(part, lr=lr, weight_decay=decay, maximize=self.maximize, **constants)

    def by_foreach(self, part: Part, scale: FloatOrTensor) -> None:
        """A handful of calls over all parameters at once."""
        # Last tensor first: what the norm read last is still in the cache.
        params = part.params[::-1]
        grads = part.grads[::-1]
        factor = self.signed(scale)
        if isinstance(factor, Tensor) or self.weight_decay or self.nesterov:
            grads = torch._foreach_mul(grads, factor)
            factor = 1.0
        if self.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.weight_decay)
        if part.buffers:
            buffers = part.buffers[0][::-1]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads, alpha=factor * (1 - self.dampening))
            if self.nesterov:
                torch._foreach_add_(grads, buffers, alpha=self.momentum)
            else:
                grads = buffers
                factor = 1.0
        if isinstance(self.lr, Tensor):
            torch._foreach_add_(params, torch._foreach_mul(grads, -factor * self.lr))
        else:
            torch._foreach_add_(params, grads, alpha=-self.lr * factor)

    def by_loop(self, part: Part, scale: FloatOrTensor) -> None:
        """:func:`update_loop` for each parameter."""
        for p, g, *buffer in zip(part.params, part.grads, *part.buffers, strict=True):
            update_loop(p, g, self, scale, *buffer)

    def update_momentum_(self, part: Part, scale: FloatOrTensor) -> tuple[SGDRule, list[Tensor]]:
        """Take ``scale`` times the gradients into the momentum; the rule without it, and where to go."""
        grads = part.grads
        if isinstance(scale, Tensor) or scale != 1:
            grads = [g * scale for g in grads]
        if not part.buffers:
            return self, grads
        (directions,) = part.buffers
        for g, buffer in zip(grads, directions, strict=True):
            buffer.mul_(self.momentum).add_(g, alpha=1 - self.dampening)
        if self.nesterov:
            directions = [torch.add(self.momentum * b, g) for g, b in zip(grads, directions, strict=True)]
        return replace(self, momentum=0.0, dampening=0.0, nesterov=False), directions


_CONSTANTS = [f.name for f in fields(SGDRule)]


def update_loop(
    p: Tensor, g: Tensor, rule: SGDRule, scale: FloatOrTensor, buffer: Tensor | None = None
) -> None:
    """The formula for one parameter; the gradient may be sparse."""
    d = g * rule.signed(scale)
    if rule.weight_decay:
        # In this order: dense + sparse works, sparse + dense does not.
        d = torch.add(rule.weight_decay * p, d)
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(d, alpha=1 - rule.dampening)
        d = torch.add(rule.momentum * buffer, d) if rule.nesterov else buffer
    if isinstance(rule.lr, Tensor):
        p.add_(d * -rule.lr)
    else:
        p.add_(d, alpha=-rule.lr)


def _fused_call(part: Part, **constants: Any) -> None:
    values: Settings = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    values |= {"found_inf": None, **constants}
    buffers = list(chain(*part.buffers))
    # Buffers start at zero, so no step is a first step to the kernel. Last tensor first: what the norm read
    # last is still in the cache.
    torch._fused_sgd_(
        part.params[::-1], part.grads[::-1], buffers[::-1], is_first_step=False, grad_scale=None, **values
    )
