"""Gradient descent normalized by the gradient norm."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvestep.optim.scaled import Norm
from curvestep.optim.sgd import ScaledSGD, SGDOptions
from curvestep.optim.update import Settings
from curvestep.steps import normalized_step


class NormalizedSGD(ScaledSGD):
    r"""SGD with steps of nearly constant length: its step is 0.5 to 1 times that of ClippedSGD.

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

    def coefficient(self, norm: Norm, group: Settings) -> Norm:
        r""":math:`1/(g + \beta)`."""
        return normalized_step(norm, lr=1.0, offset=group["offset"])

    def coefficient_at_zero(self, group: Settings) -> float:
        r""":math:`1/\beta`."""
        return 1.0 / group["offset"]
