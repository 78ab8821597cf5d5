"""What clipping does in every step of an optimizer, as numbers for a logger; nothing is measured again."""
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch names its functions for lists of tensors, and the hooks of an optimizer, with an underscore.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.checks import check_count
from curvestep.optimizer_family import parameters_of, register_first_step_pre_hook
from curvestep.parameter_names import name_of, remember_names
from curvestep.smoothness.observer import ClipsItself
from curvestep.tensors.distributed import is_sharded
from curvestep.tensors.vectors import global_norm

RECENT_STEPS = 100  # that the share of clipped steps looks back on
CLIPPED = 1 - 1e-6  # a gradient below this share of its norm was clipped
PREFIX = "curvestep/"


class StepNorms:
    """The gradient norms of an optimizer's last step, before clipping and after it.

    Numbers stay on their device until they are asked for.

    Args:
        optimizer: Whose steps are followed, by hooks.
        num_layers: How many of the largest parameters are named.
        looks_in_step: Whether gradients are looked at when the step begins. Else the framework calls
            :meth:`look`: where the step is given a closure, it begins before there are gradients.
    """

    def __init__(self, optimizer: Optimizer, num_layers: int, *, looks_in_step: bool = True) -> None:
        self.optimizer = optimizer
        self.num_layers = num_layers
        self.measures_clipping = False  # by a norm after the step; for clipping that is no factor
        self._expected: Tensor | None = None  # the factor by which the framework clips, if that is known
        self._norm: Tensor | None = None  # of the last gradient before clipping
        self._coefficient = torch.ones(())  # of the framework
        self._layers: list[tuple[Tensor, Tensor]] = []  # a parameter, and the norm of its gradient
        self._clipped = deque[Tensor](maxlen=RECENT_STEPS)
        self._hooks = [optimizer.register_step_post_hook(self._after_step)]
        if looks_in_step:
            # Before that of `clip`.
            self._hooks.append(register_first_step_pre_hook(optimizer, self._before_step))

    def expect_clipping(self, max_norm: float, norm: Tensor | None = None) -> None:
        """Take note that the framework clips, as torch's ``clip_grad_norm_`` does; ``norm`` is before it."""
        if norm is not None:
            self._norm = norm
        assert self._norm is not None
        self._expected = (max_norm / (self._norm + 1e-6)).clamp(max=1.0)

    def look(self, scale: float | Tensor = 1.0) -> None:
        """Take the norms of the gradients, which are multiplied by ``scale``."""
        gradients = _gradients_of(self.optimizer)
        if self._expected is None:
            norm = global_norm(gradients)
            self._norm = norm / torch.as_tensor(scale).to(norm)
        if self.num_layers:
            params = [p for p in parameters_of(self.optimizer) if p.grad is not None]
            self._layers = list(zip(params, _norms_of_each(gradients), strict=True))

    def _before_step(self, *_: object) -> None:
        scale = getattr(
            self.optimizer, "grad_scale", None
        )  # of a GradScaler that leaves unscaling to the step
        self.look(1.0 if scale is None else scale)

    def _after_step(self, *_: object) -> None:
        if self._norm is None:  # there was no gradient
            return
        if self._expected is not None:
            self._coefficient = self._expected
        elif self.measures_clipping:
            ratio = self._handed() / self._norm
            self._coefficient = torch.where(ratio < CLIPPED, ratio, torch.ones_like(ratio))
        self._clipped.append(self._coefficient < 1.0)
        self._expected = None

    def _handed(self) -> Tensor:
        """The norm of the gradient that the optimizer was handed."""
        if isinstance(self.optimizer, ClipsItself):
            return torch.tensor(self.optimizer.clip_stats()["grad_norm"])
        return global_norm(_gradients_of(self.optimizer))

    def numbers(self) -> dict[str, float]:
        """What a logger gets: norm before clipping, coefficient, share of clipped steps, largest layers."""
        if self._norm is None or not self._clipped:
            return {}
        norm = float(self._norm)
        coefficient = float(self._coefficient)
        clipped_fraction = sum(float(clipped) for clipped in self._clipped) / len(self._clipped)
        numbers: dict[str, float] = {}
        if isinstance(self.optimizer, ClipsItself):
            stats = self.optimizer.clip_stats()
            coefficient *= stats["coefficient"]
            clipped_fraction = max(clipped_fraction, stats["recent_clipped_fraction"])
            numbers["skipped"] = float(stats["skipped"])
        numbers |= {"grad_norm": norm, "coefficient": coefficient, "clipped_fraction": clipped_fraction}
        for name, of_layer in self._largest(norm):
            numbers[f"grad_norm/{name}"] = of_layer
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def _largest(self, norm: float) -> list[tuple[str, float]]:
        """The parameters with the largest gradients, by name, with norms before clipping."""
        if not self._layers:
            return []
        values = torch.stack([value.to(self._layers[0][1].device) for _, value in self._layers]).tolist()
        together = math.hypot(*values)
        factor = norm / together if together > 0 else 1.0  # of clipping and of a loss scale
        order = sorted(range(len(values)), key=lambda i: values[i], reverse=True)[: self.num_layers]
        params = [p for p, _ in self._layers]
        return [(name_of(params[i], f"parameter {i}"), values[i] * factor) for i in order]

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()


class ClipReport:
    """The part of a callback that both frameworks have: whose steps are looked at, and under which names.

    Args:
        layers: How many of the largest layers are named, by the norm of their gradient before clipping.
    """

    def __init__(self, layers: int = 10) -> None:
        self.layers = check_count("layers", layers, least=0)
        self._watched: list[StepNorms] = []

    def _watch(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, looks_in_step: bool = True
    ) -> None:
        for optimizer in optimizers:
            if any(type(p).__name__ == "FlatParameter" for p in parameters_of(optimizer)):
                raise NotImplementedError(
                    "ClipCallback does not see the whole gradient under FSDP1. Use FSDP2, or DDP."
                )
        remember_names(model)
        self._close()
        self._watched = [
            StepNorms(optimizer, self.layers, looks_in_step=looks_in_step) for optimizer in optimizers
        ]

    def _watcher_of(self, optimizer: object) -> StepNorms | None:
        return next((one for one in self._watched if one.optimizer is optimizer), None)

    def _numbers(self) -> dict[str, float]:
        """The numbers of all optimizers; of several each under its number."""
        numbers: dict[str, float] = {}
        for index, watched in enumerate(self._watched):
            prefix = PREFIX if len(self._watched) == 1 else f"{PREFIX}optimizer {index}/"
            for name, value in watched.numbers().items():
                numbers[prefix + name] = value
        return numbers

    def _close(self) -> None:
        for watched in self._watched:
            watched.close()


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


@torch.no_grad()
def _norms_of_each(gradients: Sequence[Any]) -> list[Tensor]:
    """The norm of each gradient, left where it is; of a DTensor that of all ranks."""
    plain = [g for g in gradients if not is_sharded(g) and g.layout == torch.strided]
    norms = iter(torch._foreach_norm(plain) if plain else ())
    of_plain = {id(g): next(norms) for g in plain}
    return [of_plain[id(g)] if id(g) in of_plain else global_norm([g]) for g in gradients]
