"""Whether the gradients that a step gets were clipped before it: then no optimizer knows what they were."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from curvestep.distributed import local

NUM_LOOKS = 100  # gradients that are looked at on an accelerator, where no norm is read
NUM_REPEATS = 20  # and on CPU, of those that come to the largest norm so far again
# Gradients of one norm to this precision, pointing elsewhere each, that no other norm is above.
SAME_NORM, SAME_NORMS, SAME_DIRECTION = 1e-5, 4, 0.99
NUM_TENSORS, NUM_ENTRIES = 16, 8  # of a gradient, which tell where it points


class DoubleClipping:
    """Notices a bound that gradient norms never exceed and are at again and again, and warns once.

    Gradients that point the same way may have the same norm; those of different batches do not, unless
    somebody made it so. A number on an accelerator is not read here: what the first steps brought is kept
    there until somebody reads the counters.

    Args:
        optimizer: Whose steps they are, for the warning.
    """

    def __init__(self, optimizer: object) -> None:
        self._whose = type(optimizer).__name__
        self._looks_left = NUM_LOOKS
        self._bound = 0.0
        self._directions: list[tuple[float, ...]] = []
        self._unread: list[Tensor] = []

    def look(self, norm: Any, parts: list[list[Tensor]]) -> None:
        """One more gradient, in parts, and its norm."""
        if not self._looks_left:
            return
        if not isinstance(norm, Tensor):
            if norm > 0 and norm >= self._bound * (1 - SAME_NORM):
                repeats = norm <= self._bound * (1 + SAME_NORM)
                self._looks_left = min(self._looks_left, NUM_REPEATS) - repeats
                self.judge(norm, *_sample(parts, torch.tensor(norm, dtype=torch.float64)).tolist())
        elif not norm.is_meta and not norm.requires_grad:
            self._looks_left -= 1
            self._unread.append(torch.cat([norm.view(1), _sample(parts, norm)]))

    def unread(self) -> list[Tensor]:
        """What was kept on an accelerator since the last call, for :meth:`judge`; nothing if it is little."""
        if len(self._unread) < SAME_NORMS:
            return []
        kept, self._unread = self._unread, []
        return kept

    def judge(self, norm: float, *sample: float) -> None:
        """Warn if this gradient, with some of its entries, is one too many of the largest norm."""
        if not 0 < norm < math.inf or norm < self._bound * (1 - SAME_NORM):
            return
        if norm > self._bound * (1 + SAME_NORM):
            self._bound, self._directions = norm, []
        if all(_differs(sample, other) for other in self._directions):
            self._directions.append(sample)
        if len(self._directions) == SAME_NORMS:
            self.stop()
            warnings.warn(
                f"{SAME_NORMS} different gradients had the norm {norm:.6g} and none a larger one: something "
                f"else clips before {self._whose}, whose clip_stats() counts what that left. Turn it off: "
                "max_grad_norm=0 in TrainingArguments (its default is 1.0), no gradient_clip_val in "
                "Lightning, no clip_grad_norm_.",
                stacklevel=2,
            )

    def stop(self) -> None:
        """Say nothing: it was said already."""
        self._looks_left, self._bound, self._unread = 0, math.inf, []


def _sample(parts: list[list[Tensor]], norm: Tensor) -> Tensor:
    """Some entries of a gradient, divided by its norm."""
    grads = [grad for part in parts for grad in part]
    found = [norm.new_zeros(0)]
    for grad in map(local, grads[:: max(1, len(grads) // NUM_TENSORS)]):
        if type(grad) is Tensor and grad.layout == torch.strided and grad.device == norm.device:
            entries = grad.detach().flatten()[:: max(1, grad.numel() // NUM_ENTRIES)]
            found.append(entries.real.to(norm.dtype))
    return torch.cat(found) / norm


def _differs(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    if len(one) != len(other):
        return True
    cosine = abs(sum(a * b for a, b in zip(one, other, strict=True)))
    return cosine < SAME_DIRECTION * math.hypot(*one) * math.hypot(*other)
