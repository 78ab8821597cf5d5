"""Tensors outside the model that a loss trains too: a replay would add to their gradients unseen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class StrangersError(RuntimeError):
    """The loss depends on trained tensors that the replay neither moves nor puts back."""


@contextmanager
def refusing_strangers(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside, every ``loss.backward()`` first looks where it would lead, and raises if out of the model.

    The closure may call ``backward()`` itself, and once it has, the gradients of strangers are already
    changed. Hence the method is stood in for; a torch function mode would make compiled models compile again.
    """
    parameters = list(parameters)
    if any(isinstance(p, DTensor) for p in parameters):  # FSDP2 computes with tensors of its own
        yield
        return
    known = {id(p) for p in parameters}
    backward = Tensor.backward

    def looking(self: Tensor, *args: Any, **kwargs: Any) -> None:
        check_strangers(self, known)
        backward(self, *args, **kwargs)

    Tensor.backward = looking
    try:
        yield
    finally:
        Tensor.backward = backward


def check_strangers(loss: Tensor, known: set[int]) -> None:
    """Raise if ``loss.backward()`` would change the gradient of a tensor whose ``id`` is not in ``known``."""
    strangers = [leaf for leaf in leaves(loss) if id(leaf) not in known and _is_trained(leaf)]
    if strangers:
        numbers = sum(leaf.numel() for leaf in strangers)
        raise StrangersError(
            f"The loss also trains {len(strangers)} tensors outside `model` ({numbers} numbers, the first of "
            f"shape {tuple(strangers[0].shape)}), which move with the step and collect gradients in a "
            "replay. Give one module that holds all that is trained, such as `nn.ModuleList([encoder, "
            "head])`; detach what is not trained."
        )


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that ``loss.backward()`` leaves gradients in.

    Example:
        >>> w = nn.Parameter(Tensor([2.0]))
        >>> [leaf is w for leaf in leaves((w * w).sum())]
        [True]
    """
    found: list[Tensor] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        waiting.extend(after for after, _ in node.next_functions)
    return found


def _is_trained(leaf: Tensor) -> bool:
    """Not so a tensor made inside the closure to differentiate by, as in a gradient penalty."""
    return isinstance(leaf, nn.Parameter) or leaf.grad is not None
