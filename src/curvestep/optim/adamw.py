"""AdamW with norm clipping."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvestep.optim.scaled import ScaledOptimizer, ScaledOptions, check_between, clip_coefficient
from curvestep.optim.update import FloatOrTensor, Part, Rule, Settings
from curvestep.steps import check_threshold
from curvestep.tensors.distributed import as_sharded, local
from curvestep.tensors.vectors import global_norm, is_readable

if TYPE_CHECKING:
    from curvestep.clip_rules import ClipRule


class AdamWOptions(ScaledOptions, total=False):
    """The options of :class:`ClippedAdamW`, as it describes them."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool
    update_rms: float


class ClippedAdamW(ScaledOptimizer):
    r"""AdamW that clips the norm of the gradient inside the step, before both moments.

    .. math::
        \hat g_k = \min\{1,\ \gamma / \lVert g_k \rVert\}\, g_k, \qquad
        m_k = \beta_1 m_{k-1} + (1 - \beta_1)\, \hat g_k, \qquad
        v_k = \beta_2 v_{k-1} + (1 - \beta_2)\, \hat g_k^2,

    .. math::
        x_{k+1} = (1 - \eta w)\, x_k
        - \eta\, \frac{m_k / (1 - \beta_1^k)}{\sqrt{v_k / (1 - \beta_2^k)} + \epsilon}

    The same as ``clip_grad_norm_`` followed by ``torch.optim.AdamW``, but without the 1e-6 that the former
    adds to the norm, with no second call to forget, ``.grad`` left as it is, and :meth:`clip_stats` to see
    how often clipping fires. The state of a parameter is that of ``torch.optim.AdamW`` (``step``,
    ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``), and state dicts of the one load into the other.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        lr: Learning rate :math:`\eta`; a float or a one-element tensor, one for each group if wanted.
        max_norm: Norm :math:`\gamma` at which clipping starts, ``inf`` for plain AdamW, or a rule of
            :mod:`curvestep.clip_rules`; groups may have their own.
        betas: Decay rates :math:`\beta_1, \beta_2` of the two moments.
        eps: :math:`\epsilon`, added to the denominator.
        weight_decay: Decoupled weight decay :math:`w`; it is never clipped.
        amsgrad: Divide by the largest second moment so far.
        update_rms: Largest root mean square of :math:`\hat g/\sqrt{v}` in a tensor, 1 in StableAdamW
            (Wortsman et al., 2023). The learning rate of a tensor is divided by what it has beyond that.
        norm_scope: As for :class:`ClippedSGD`.
        nonfinite: As for :class:`ClippedSGD`: on an accelerator a step waits once with ``"raise"``, a rule or
            ``skip_above``, and never otherwise, unless some of the parameters are on CPU. There the
            clipped gradients are a copy while the step lasts, because torch's kernel would scale ``.grad``
            itself; with ``"skip"`` the paths other than the default and ``fused`` also copy parameters and
            state.
        skip_above: As for :class:`ClippedSGD`.
        maximize: Ascend instead of descend.
        foreach: As for :class:`ClippedSGD`.
        fused: As for :class:`ClippedSGD`.
        capturable: As for :class:`ClippedSGD`.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = ClippedAdamW([w], lr=0.5, max_norm=1.0, weight_decay=0.0)
        >>> (0.5 * w**2).sum().backward()  # the gradient is w, of norm 5
        >>> opt.step()
        >>> w.data  # the first step of Adam has the length lr in each coordinate
        tensor([2.5000, 3.5000])
        >>> opt.clip_stats()["coefficient"], opt.state[w]["exp_avg"]
        (0.2, tensor([0.0600, 0.0800]))
    """

    threshold = "max_norm"
    coefficient = clip_coefficient

    def __init__(
        self, params: ParamsT, lr: float | Tensor, max_norm: float | ClipRule, **options: Unpack[AdamWOptions]
    ) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm}, AdamWRule.defaults(), options)

    def rule(self, group: Settings) -> AdamWRule:
        """Moments, weight decay and ascent of a group."""
        return AdamWRule(*[group[name] for name in _CONSTANTS])

    def check_group(self, group: Settings) -> None:
        """Raise where the values of a group make no sense."""
        betas: Any = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"`betas` must be two numbers, got {betas!r}.")
        for i, beta in enumerate(betas):
            check_between("betas", beta, f"beta parameter at index {i}", high=1.0)
        check_between("eps", group["eps"], "epsilon value")
        check_threshold("update_rms", group["update_rms"])
        super().check_group(group)


@dataclass(slots=True)
class AdamWRule(Rule):
    """The constants of an update by AdamW, all but the factor on the gradient."""

    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    update_rms: float = math.inf

    counts_steps = True
    sparse_error = (
        "ClippedAdamW does not support sparse gradients. Use ClippedSGD, or torch.optim.SparseAdam for them."
    )

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The names that torch.optim.AdamW uses, so that state dicts can be exchanged."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    @property
    def measures_tensors(self) -> bool:
        """Whether the update of a tensor is capped."""
        return self.update_rms < math.inf

    def by_kernel(self, part: Part, scale: float) -> None:
        """Our own kernel: every tensor once through memory, 28 bytes a parameter, 36 with amsgrad."""
        assert part.view is not None  # this path is chosen only where there are both
        assert part.steps_view is not None
        part.view.kernel.adamw(
            part.view, part.steps_view, scale=self.signed(scale), lr=float(self.lr),
            betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
            units=part.units, update_rms=self.update_rms,
        )  # fmt: skip

    def by_fused(self, part: Part, scale: FloatOrTensor, skip: Tensor | None = None) -> None:
        """The kernel of torch on a scaled copy of the gradients: its `grad_scale` would change `.grad`.

        It counts the step even if ``skip`` is 1.
        """
        if isinstance(self.lr, Tensor):
            self.lr = self.lr.to(torch.float32)
        exp_avgs, exp_avg_sqs, *largest = part.buffers
        torch._foreach_add_(part.steps, 1)
        torch._fused_adamw_(
            part.params, _scaled(part.grads, scale), exp_avgs, exp_avg_sqs, list(chain(*largest)),
            part.steps, lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps,
            weight_decay=self.weight_decay, amsgrad=self.amsgrad, maximize=self.maximize, grad_scale=None,
            found_inf=skip,
        )  # fmt: skip

    def by_foreach(self, part: Part, scale: FloatOrTensor) -> None:
        """A handful of calls over all parameters at once."""
        params = part.params
        beta1, beta2 = self.betas
        exp_avgs, exp_avg_sqs, *largest = part.buffers
        grads = _scaled(part.grads, self.signed(scale))
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        seconds = exp_avg_sqs
        for seconds in largest:
            torch._foreach_maximum_(seconds, exp_avg_sqs)
        corrections = [self._corrected(step, params[0]) for step in part.steps]
        roots: list[Any] = [root for _, root in corrections]
        denominators = torch._foreach_sqrt(seconds)
        torch._foreach_div_(denominators, roots)
        torch._foreach_add_(denominators, self.eps)
        each = zip(grads, exp_avg_sqs, roots, part.global_params, strict=True)
        rates = [self._rate(*of_tensor) for of_tensor in each]
        sizes: list[Any] = [size * rate for (size, _), rate in zip(corrections, rates, strict=True)]
        if self.weight_decay:
            kept: list[Any] = [1 - self.lr * self.weight_decay * rate for rate in rates]
            torch._foreach_mul_(params, kept)
        if isinstance(sizes[0], Tensor):
            torch._foreach_div_(denominators, [-size for size in sizes])
            torch._foreach_addcdiv_(params, exp_avgs, denominators)
        else:
            torch._foreach_addcdiv_(params, exp_avgs, denominators, [-size for size in sizes])
        torch._foreach_add_(part.steps, 1)

    def by_loop(self, part: Part, scale: FloatOrTensor) -> None:
        """The formula for each parameter."""
        beta1, beta2 = self.betas
        each = zip(part.params, part.grads, part.steps, part.global_params, *part.buffers, strict=True)
        for p, g, step, global_param, *buffers in each:
            d = g * self.signed(scale)
            exp_avg, exp_avg_sq, *largest = buffers
            exp_avg.lerp_(d, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(d, d, value=1 - beta2)
            second = exp_avg_sq
            for maximum in largest:
                second = torch.maximum(maximum, exp_avg_sq, out=maximum)
            size, root = self._corrected(step, p)
            rate = self._rate(d, exp_avg_sq, root, global_param)
            direction = exp_avg / (second.sqrt() / root + self.eps)
            if self.weight_decay:
                p.mul_(1 - self.lr * self.weight_decay * rate)
            p.sub_(direction * (size * rate))
        torch._foreach_add_(part.steps, 1)

    def _rate(self, d: Tensor, v: Tensor, root: FloatOrTensor, global_param: Tensor) -> FloatOrTensor:
        """Factor on the learning rate of a tensor; of a sharded one the same on all ranks."""
        if not self.measures_tensors:
            return 1.0
        ratios = d / (v.sqrt() / root).clamp(min=self.eps)
        # A complex number has two entries.
        count = global_param.numel() * ratios.numel() / max(local(global_param).numel(), 1)
        rms = global_norm([as_sharded(ratios, global_param)]) / max(count, 1) ** 0.5
        rate = 1 / (rms / self.update_rms).clamp(min=1.0).to(d)
        return rate.item() if is_readable(rate) else rate

    def _corrected(self, step: Tensor, p: Tensor) -> tuple[FloatOrTensor, FloatOrTensor]:
        """lr/(1 - b1^k) and the root of 1 - b2^k; tensors where ``step``, k - 1, is not read."""
        beta1, beta2 = self.betas
        if is_readable(step):
            count = step.item() + 1
            return self.lr / (1 - beta1**count), (1 - beta2**count) ** 0.5
        counts = (step if step.device.type == "mps" else step.double()) + 1
        dtype = torch.promote_types(p.dtype, torch.float32)
        size = self.lr / (1 - beta1**counts)
        root = (1 - beta2**counts) ** 0.5
        return size.to(dtype), root.to(dtype)


_CONSTANTS = [f.name for f in fields(AdamWRule)]


def _scaled(grads: list[Tensor], scale: FloatOrTensor) -> list[Tensor]:
    """The gradients times ``scale``: a copy, or themselves where the factor is known to be one."""
    if not isinstance(scale, Tensor) and scale == 1:
        return grads
    return list(torch._foreach_mul(grads, scale))
