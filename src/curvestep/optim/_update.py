r"""One update of many parameters, with the factor on the gradient folded in.

All paths compute, for every parameter :math:`p` with gradient :math:`g` and buffer :math:`b`,

.. math::
    d = \pm c\,g + w\,p, \qquad b \leftarrow \mu b + (1-\delta)\,d, \qquad
    p \leftarrow p - \eta\,(b \text{ or } d + \mu b),

and none of them writes to :math:`g`. :func:`update_loop` is the formula; the others are faster.
"""
# pyright: reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvestep._kernel import View, native
from curvestep._torch import fused_sgd

# Below this factor w/c no longer fits into the precision of the fused kernel.
_SMALLEST_FOLDED = 1e-6
# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
_LARGE = 1 << 19


class Rule(NamedTuple):
    """The constants of an update, all but the factor on the gradient."""

    lr: Any  # float or one-element tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def undamped(self) -> Rule:
        """The same rule for a buffer that sees its first gradient."""
        return self._replace(dampening=0.0)

    def without_momentum(self) -> Rule:
        """The same rule on a direction that is averaged already."""
        return self._replace(momentum=0.0, dampening=0.0, nesterov=False)


@dataclass
class Bundle:
    """Parameters that are updated by one call: same path, dtype and device.

    ``buffers`` is empty without momentum. Everything is real and local: complex tensors come as pairs of
    real numbers, sharded ones as this rank's part.
    """

    path: str  # "native", "fused", "foreach" or "loop"
    rule: Rule
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    wholes: list[Tensor] = field(default_factory=list)  # the parameters that `params` are the local parts of
    view: View | None = None  # where gradients, parameters and buffers lie, if that is known already

    def add(self, p: Tensor, g: Tensor, buffer: Tensor | None, whole: Tensor) -> None:
        """Add one parameter."""
        self.wholes.append(whole)
        self.params.append(p)
        self.grads.append(g)
        if buffer is not None:
            self.buffers.append(buffer)


def update(bundle: Bundle, scale: Any, *, skip: Tensor | bool = False) -> None:
    """Update ``bundle`` with the gradient times ``scale`` by the fastest path that is right for it.

    ``scale`` is a float, or on an accelerator a tensor that nobody waits for. ``skip`` may then be a tensor
    too: where it is 1, nothing changes.
    """
    rule = bundle.rule
    if isinstance(scale, Tensor):
        scale = scale.to(bundle.params[0].device)
    if isinstance(skip, Tensor) and bundle.path != "fused" and skip.item():
        return  # only torch's kernel can leave the decision on the device
    if bundle.path == "native":
        if _is_one_long_stream(bundle) and torch.get_num_threads() == 1:
            with torch.no_grad():
                _update_foreach(bundle, rule, scale)
        else:
            _update_native(bundle, rule, float(scale))
    elif bundle.path == "loop":
        for i, (p, g) in enumerate(zip(bundle.params, bundle.grads, strict=True)):
            update_loop(p, g, bundle.buffers[i] if bundle.buffers else None, rule, scale)
    elif bundle.path == "fused" and isinstance(scale, Tensor):
        _update_fused_on_device(bundle, rule, scale, skip if isinstance(skip, Tensor) else None)
    elif bundle.path == "fused" and _can_fold(rule, scale) and not _is_one_long_stream(bundle):
        _update_fused(bundle, rule, scale)
    else:
        _update_foreach(bundle, rule, scale)


def update_loop(p: Tensor, g: Tensor, buffer: Tensor | None, rule: Rule, scale: Any) -> None:
    """The formula for one parameter; the gradient may be sparse."""
    d = g * (-scale if rule.maximize else scale)
    if rule.weight_decay:
        d = torch.add(
            rule.weight_decay * p, d
        )  # in this order: dense + sparse works, sparse + dense does not
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(d, alpha=1 - rule.dampening)
        d = torch.add(rule.momentum * buffer, d) if rule.nesterov else buffer
    if isinstance(rule.lr, Tensor):
        p.add_(d * -rule.lr.to(p.device))
    else:
        p.add_(d, alpha=-rule.lr)


def average_(bundle: Bundle) -> Bundle:
    """Take the gradients into the momentum buffers; the result updates along the averaged direction."""
    rule = bundle.rule
    if not bundle.buffers:
        return bundle
    for g, buffer in zip(bundle.grads, bundle.buffers, strict=True):
        buffer.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)
    directions = bundle.buffers
    if rule.nesterov:
        directions = [
            torch.add(rule.momentum * b, g) for g, b in zip(bundle.grads, bundle.buffers, strict=True)
        ]
    return Bundle(bundle.path, rule.without_momentum(), bundle.params, directions, wholes=bundle.wholes)


def _update_native(bundle: Bundle, rule: Rule, scale: float) -> None:
    """Our own kernel: every tensor once through memory, 16 bytes a parameter, 24 with momentum."""
    kernel = native()
    assert kernel is not None  # a bundle is on this path only where there is one
    view = bundle.view or kernel.view(*filter(None, (bundle.grads, bundle.params, bundle.buffers)))
    if view is None:
        raise ValueError("a gradient or momentum buffer does not have the shape of its parameter.")
    kernel.update(
        view, scale=-scale if rule.maximize else scale, weight_decay=rule.weight_decay,
        momentum=rule.momentum, dampening=rule.dampening, lr=float(rule.lr), nesterov=rule.nesterov,
    )  # fmt: skip
    # torch must know that the values changed, or it would not notice a stale graph.
    torch.autograd.graph.increment_version(bundle.params)


def _can_fold(rule: Rule, scale: float) -> bool:
    if rule.weight_decay and not (scale > _SMALLEST_FOLDED and rule.weight_decay / scale < 1e6):
        return False
    return not rule.nesterov or not rule.weight_decay


def _is_one_long_stream(bundle: Bundle) -> bool:
    """Whether this is p - h*g on large tensors, which torch's plain `add` streams faster than a kernel."""
    if bundle.buffers or bundle.rule.weight_decay:
        return False
    return sum(map(Tensor.numel, bundle.params)) > _LARGE * len(bundle.params)


def _update_fused(bundle: Bundle, rule: Rule, scale: float) -> None:
    """Fold c into the constants of torch's kernel: 16 bytes a parameter, 24 with momentum.

    c(g + (w/c) p) is what the kernel should use as its gradient; without momentum the outer c goes into
    lr, with momentum into 1 - dampening.
    """
    lr = float(rule.lr)
    decay = rule.weight_decay / scale if rule.weight_decay else 0.0
    if not bundle.buffers:
        _kernel(bundle.params, bundle.grads, [], rule, lr=lr * scale, weight_decay=decay)
        return
    dampening = 1 - scale * (1 - rule.dampening)
    # Nesterov: p - lr*(c*g + mu*b) is a momentum update with lr*mu and then a plain one with lr*c.
    lr_buffer = lr * rule.momentum if rule.nesterov else lr
    _kernel(
        bundle.params, bundle.grads, bundle.buffers, rule,
        lr=lr_buffer, weight_decay=decay, momentum=rule.momentum, dampening=dampening,
    )  # fmt: skip
    if rule.nesterov:
        _kernel(bundle.params, bundle.grads, [], rule, lr=lr * scale)


def _update_fused_on_device(bundle: Bundle, rule: Rule, scale: Tensor, skip: Tensor | None) -> None:
    """The same where ``scale`` stays on the device: only lr can be a tensor, so the rest scales a copy."""
    plain = not bundle.buffers and not rule.weight_decay
    grads = bundle.grads if plain else torch._foreach_mul(bundle.grads, scale)
    lr = rule.lr * scale if plain else rule.lr
    if isinstance(lr, Tensor):
        lr = lr.to(bundle.params[0].device, torch.float32)
    _kernel(
        bundle.params, grads, bundle.buffers, rule, lr=lr, weight_decay=rule.weight_decay,
        momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov, found_inf=skip,
    )  # fmt: skip


def _update_foreach(bundle: Bundle, rule: Rule, scale: Any) -> None:
    """A handful of calls over all parameters at once."""
    # Last tensor first: what the norm read last is still in the cache.
    params, grads, buffers = bundle.params[::-1], bundle.grads[::-1], bundle.buffers[::-1]
    sign = -1.0 if rule.maximize else 1.0
    if isinstance(scale, Tensor) or rule.weight_decay or rule.nesterov:
        grads = torch._foreach_mul(grads, sign * scale)
        factor = 1.0
    else:
        factor = sign * scale
    if rule.weight_decay:
        torch._foreach_add_(grads, params, alpha=rule.weight_decay)
    if buffers:
        torch._foreach_mul_(buffers, rule.momentum)
        torch._foreach_add_(buffers, grads, alpha=factor * (1 - rule.dampening))
        if rule.nesterov:
            torch._foreach_add_(grads, buffers, alpha=rule.momentum)
        else:
            grads, factor = buffers, 1.0
    if isinstance(rule.lr, Tensor) and rule.lr.device.type != "cpu":
        torch._foreach_add_(params, torch._foreach_mul(grads, -factor * rule.lr))
    else:
        torch._foreach_add_(params, grads, alpha=-float(rule.lr) * factor)


def _kernel(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    rule: Rule,
    *,
    lr: Any,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    found_inf: Tensor | None = None,
) -> None:
    kernel = fused_sgd()
    assert kernel is not None  # a bundle is on the fused path only where there is one
    # Buffers start at zero, so no step is a first step to the kernel. Last tensor first: what the norm read
    # last is still in the cache.
    kernel(
        params[::-1],
        grads[::-1],
        buffers[::-1],
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        maximize=rule.maximize,
        is_first_step=False,
        grad_scale=None,
        found_inf=found_inf,
    )
