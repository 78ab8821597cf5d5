r"""SGD whose step size follows a rule, clipped and normalized, and its update with the factor folded in.

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
from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvestep._checks import check_choice
from curvestep.clip_rules import ClipRule
from curvestep.optim._update import Number, Part, Rule, scaled_copy
from curvestep.optim.policy import Group
from curvestep.optim.scaled import Norm, ScaledOptimizer, ScaledOptions, check_between
from curvestep.steps import clipped_step, normalized_step


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
    gradient (:meth:`coefficient`). Momentum, weight decay, the fast paths, sharded and sparse gradients,
    :meth:`clip_stats` and checkpoints are the same for all.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        rule: ``lr`` and the parameters of the rule; a group may have its own.
        options: Those of :class:`ClippedSGD`.

    Attributes:
        threshold: Name of the group entry with the gradient norm beyond which a step counts as clipped.
    """

    def __init__(self, params: ParamsT, rule: Group, **options: Unpack[SGDOptions]) -> None:
        check_choice("clip", options.get("clip", "gradient"), ("gradient", "momentum"))
        super().__init__(params, rule, {**SGDRule.defaults(), "clip": "gradient"}, options)

    def rule(self, group: Group) -> SGDRule:
        """Momentum, weight decay and ascent of a group."""
        return SGDRule(*map(group.__getitem__, _CONSTANTS))

    def check_group(self, group: Group) -> None:
        """Raise where the values of a group make no sense."""
        check_between("momentum", group["momentum"], "momentum value")
        check_between("dampening", group["dampening"], "dampening value", low=-sys.float_info.max)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        super().check_group(group)


class ClippedSGD(ScaledSGD):
    r"""SGD that clips the norm of the gradient inside the step.

    .. math::
        x_{k+1} = x_k - h_k g_k, \qquad h_k = \min\{\eta,\ \gamma\eta / \lVert g_k \rVert\}

    The same as ``clip_grad_norm_`` followed by ``torch.optim.SGD``, but with no second call to forget, no
    hidden epsilon, ``.grad`` left as it is, and :meth:`clip_stats` to see how often clipping fires.

    Momentum, weight decay and the other options follow ``torch.optim.SGD``. Weight decay enters after
    clipping, so it is never clipped.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: Largest step size :math:`\eta`; a float or a one-element tensor, one for each group if wanted.
        max_norm: Norm :math:`\gamma` at which clipping starts, ``inf`` for never, or a rule of
            :mod:`curvestep.clip_rules`; groups may have their own.
        momentum: Momentum factor :math:`\mu`.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum.
        clip: ``"gradient"`` clips the gradient and then averages it, as torch's utilities do.
            ``"momentum"`` averages the raw gradients and clips the average (Zhang B. et al., 2020): a
            different algorithm, in which one outlier cannot fill the buffer with a clipped direction.
        norm_scope: Whose norm is clipped: of all parameters (``"global"``), of each ``"group"``, or of each
            ``"tensor"``. Only the first keeps the direction of the gradient.
        nonfinite: What to do when the gradient is not finite. ``"raise"`` names the parameter and changes
            nothing, ``"skip"`` changes nothing and counts, ``"propagate"`` steps like torch. On an
            accelerator a step waits once with ``"raise"``, for the norm, and never with the others, unless
            some of the parameters are on CPU; with ``"skip"`` and ``dampening`` the first step waits too,
            because it decides whether the second is damped. With ``"skip"``, paths other than the default
            and ``fused`` keep a copy of the parameters during a step there.
        skip_above: Leave out a step whose gradient norm, over all parameters, is larger than this: a number,
            a multiple of the running median such as ``"10x"``, or standard deviations above the mean such as
            ``"6sigma"``, the last also of a closure's loss on the host. Counted as ``skipped``. Median, mean
            and deviation are those of the last 100, and take at least ten; infinity is above every bound.
        maximize: Ascend instead of descend.
        foreach: Use torch's multi-tensor functions. By default the fastest path that is right is chosen: on
            CPU the package's own kernel, if it was built.
        fused: Use torch's fused kernel where it is right (dense tensors of equal strides; on CPU float32
            and float64), other tensors fall back to ``foreach``. A ``torch.amp.GradScaler`` then leaves
            unscaling to the step, as with torch's fused optimizers: nothing waits for what it found.
        differentiable: Let gradients flow through the step.
        capturable: Promise that the step can be recorded in a CUDA graph, after a few steps outside it, and
            replayed: every number stays on the device, counters among them. All parameters must be on an
            accelerator or all on CPU, and ``nonfinite`` must not be ``"raise"``. A float ``lr`` stays as it
            was recorded; give a Tensor on the device to change it. ``torch.compile`` leaves a step out of its
            graphs, at one graph break: on CPU that is two passes already.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = ClippedSGD([w], lr=0.5, max_norm=1.0)
        >>> (0.5 * w**2).sum().backward()  # the gradient is w, of norm 5
        >>> opt.step()
        >>> w.data
        tensor([2.7000, 3.6000])
        >>> opt.clip_stats()["coefficient"], opt.clip_stats()["grad_norm"]
        (0.2, 5.0)
    """

    threshold = "max_norm"

    def __init__(
        self, params: ParamsT, lr: float | Tensor, max_norm: float | ClipRule, **options: Unpack[SGDOptions]
    ) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm}, **options)

    def coefficient(self, norm: Norm, group: Group) -> Norm:
        r""":math:`\min\{1, \gamma/g\}`."""
        return clipped_step(norm, lr=1.0, max_norm=group["max_norm"])


class NormalizedSGD(ScaledSGD):
    r"""SGD with steps of nearly constant length: clipping with a smooth corner.

    .. math::
        x_{k+1} = x_k - h_k g_k, \qquad h_k = \frac{\eta}{\lVert g_k \rVert + \beta}

    Close to :class:`ClippedSGD` with ``lr/offset`` and ``max_norm=offset``
    (:func:`curvestep.steps.clipped_from_normalized`): the step is between half as long and as long. Note
    that ``lr`` is the largest step *length* here. With momentum the normalized gradients are averaged.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: Largest step length :math:`\eta`; a float or a one-element tensor, one for each group if wanted.
        offset: :math:`\beta > 0`, the norm at which the step has half of its full length.
        momentum: Momentum factor :math:`\mu`.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty, added after normalization.
        nesterov: Nesterov momentum.
        clip: Normalize the ``"gradient"`` and average, or average and normalize the ``"momentum"``.
        norm_scope: As for :class:`ClippedSGD`.
        nonfinite: As for :class:`ClippedSGD`.
        skip_above: As for :class:`ClippedSGD`.
        maximize: Ascend instead of descend.
        foreach: As for :class:`ClippedSGD`.
        fused: As for :class:`ClippedSGD`.
        differentiable: Let gradients flow through the step.

    Note:
        In :meth:`clip_stats` the coefficient is :math:`\beta/(g+\beta)`, the step size relative to that at
        zero gradient, and a step counts as clipped when :math:`g > \beta`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = NormalizedSGD([w], lr=0.6, offset=1.0)
        >>> (0.5 * w**2).sum().backward()  # the gradient is w, of norm 5
        >>> opt.step()
        >>> w.data
        tensor([2.7000, 3.6000])
    """

    threshold = "offset"

    def __init__(
        self, params: ParamsT, lr: float | Tensor, offset: float, **options: Unpack[SGDOptions]
    ) -> None:
        super().__init__(params, {"lr": lr, "offset": offset}, **options)

    def coefficient(self, norm: Norm, group: Group) -> Norm:
        r""":math:`1/(g + \beta)`."""
        return normalized_step(norm, lr=1.0, offset=group["offset"])

    def coefficient_at_zero(self, group: Group) -> float:
        r""":math:`1/\beta`."""
        return 1.0 / group["offset"]


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

    def first(self) -> SGDRule:
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

    def by_fused(self, part: Part, scale: Number, skip: Tensor | None = None) -> None:
        """The kernel of torch, of whose constants only lr can take the factor; others need a scaled copy."""
        lr, grads = self.lr, part.grads
        if part.buffers or self.weight_decay:
            grads = scaled_copy(grads, scale)
        else:
            lr = lr * scale
        if isinstance(lr, Tensor):
            lr = lr.to(torch.float32)
        # Buffers start at zero, so no step is a first step to the kernel. Last tensor first: what the norm
        # read last is still in the cache.
        torch._fused_sgd_(
            part.params[::-1], grads[::-1], list(chain(*part.buffers))[::-1], lr=lr,
            weight_decay=self.weight_decay, momentum=self.momentum, dampening=self.dampening,
            nesterov=self.nesterov, maximize=self.maximize, is_first_step=False, grad_scale=None,
            found_inf=skip,
        )  # fmt: skip

    def by_foreach(self, part: Part, scale: Number) -> None:
        """A handful of calls over all parameters at once."""
        # Last tensor first: what the norm read last is still in the cache.
        params, grads = part.params[::-1], part.grads[::-1]
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
                grads, factor = buffers, 1.0
        if isinstance(self.lr, Tensor):
            torch._foreach_add_(params, torch._foreach_mul(grads, -factor * self.lr))
        else:
            torch._foreach_add_(params, grads, alpha=-self.lr * factor)

    def by_loop(self, part: Part, scale: Number) -> None:
        """:func:`update_loop` for each parameter."""
        for p, g, *buffer in zip(part.params, part.grads, *part.buffers, strict=True):
            update_loop(p, g, self, scale, *buffer)

    def averaged_(self, part: Part, scale: Number) -> tuple[SGDRule, list[Tensor]]:
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


def update_loop(p: Tensor, g: Tensor, rule: SGDRule, scale: Number, buffer: Tensor | None = None) -> None:
    """The formula for one parameter; the gradient may be sparse."""
    d = g * rule.signed(scale)
    if rule.weight_decay:
        # A copy, so that a gradient to the weight decay finds p as it was. In this order: dense + sparse
        # works, sparse + dense does not.
        d = torch.add(rule.weight_decay * p.clone(), d)
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(d, alpha=1 - rule.dampening)
        d = torch.add(rule.momentum * buffer, d) if rule.nesterov else buffer
    if isinstance(rule.lr, Tensor):
        # A copy, so that a gradient to the learning rate finds the buffer as it was.
        p.add_(d.clone() * -rule.lr)
    else:
        p.add_(d, alpha=-rule.lr)
