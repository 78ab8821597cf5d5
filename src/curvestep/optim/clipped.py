"""Gradient descent with norm clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvestep.optim.scaled import clip_coefficient
from curvestep.optim.sgd import ScaledSGD, SGDOptions

if TYPE_CHECKING:
    from curvestep.clip_rules import ClipRule


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
            accelerator a step waits once with ``"raise"``, a rule or ``skip_above``, for the norm, and never
            otherwise, unless some of the parameters are on CPU. A step that waits with ``clip="momentum"``
            waits twice. With ``"skip"`` and ``dampening`` the first step waits too, because it decides
            whether the second is damped. With ``"skip"``, paths other than the default and ``fused`` keep a
            copy of the parameters during a step there.
        skip_above: Leave out a step whose gradient norm, over all parameters, is larger than this: a number,
            a multiple of the running median such as ``"10x"``, or standard deviations above the mean such as
            ``"6sigma"``, the last also of a closure's loss on the host. Counted as ``skipped``. Median, mean
            and deviation are those of the last 100, and take at least ten; infinity is above every bound.
        maximize: Ascend instead of descend.
        foreach: Use torch's multi-tensor functions. By default the fastest path that is right is chosen: on
            CPU the package's own kernel, if it was built.
        fused: Use torch's fused kernel where it is right (dense tensors of equal strides; on CPU float32
            and float64), other tensors fall back to ``foreach``. A ``torch.amp.GradScaler`` then leaves
            unscaling to the step, as with torch's fused optimizers, so no host synchronisation reads its
            ``found_inf``.
        capturable: Promise that the step can be recorded in a CUDA graph, after a few steps outside it, and
            replayed: every number stays on the device, counters among them. All parameters must be on an
            accelerator or all on CPU. What reads a norm is refused: ``nonfinite="raise"``, ``skip_above`` and
            rules. A float ``lr`` stays as it
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
    coefficient = clip_coefficient

    def __init__(
        self, params: ParamsT, lr: float | Tensor, max_norm: float | ClipRule, **options: Unpack[SGDOptions]
    ) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm}, **options)
