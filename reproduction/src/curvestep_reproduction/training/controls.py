"""Measurements beside the probe's: the gradient norm without dropout, and the authors' own estimate.

Each is a row of the metrics, with the step that the trace's row has. Parameters, ``.grad`` and random states
are as without them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from curvestep import Replay
from curvestep_reproduction.tasks import LanguageTask, generator, random_cuts, seed_of
from curvestep_reproduction.training.session import Session

# Splits of the metrics.
WITHOUT_DROPOUT = "without dropout"
AUTHORS = "authors"
AUTHORS_SHARE = 0.1  # of the text, as in the paper


@contextmanager
def measured_beside(session: Session, total: int) -> Iterator[None]:
    """Take the optimizer's step inside; where it is measured, write the rows that the recipe asks for."""
    task = session.task
    step = session.step
    due = session.probe is not None and session.probe.due
    if not due or not isinstance(task, LanguageTask) or not task.recipe.probe_pieces:
        yield
        return
    session.write({"step": step, "split": WITHOUT_DROPOUT, **without_dropout(session)})
    if step not in authors_steps(task.recipe.authors_at, total, task.recipe.probe_every):
        yield
        return
    start = copy.deepcopy(session.module)
    yield
    end = [p.detach() for p in session.module.parameters()]
    cuts = generator(task.recipe, f"authors/cuts/{step}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(task.recipe, f"authors/masks/{step}"))
        estimate = authors_smoothness(start, end, lambda model: summed_gradient(task, model, cuts))
    session.write({"step": step, "split": AUTHORS, **estimate})


def authors_steps(shares: Sequence[float], total: int, every: int) -> set[int]:
    """Measured steps that are nearest below these shares of the run.

    Example:
        >>> sorted(authors_steps((0.0, 0.5), 684, 5))
        [0, 340]
    """
    return {math.floor(share * total / every) * every for share in shares}


def without_dropout(session: Session) -> dict[str, float]:
    """Loss and gradient norm on the probe's data in evaluation mode."""
    assert session.probe is not None
    assert session.probe.oracle is not None
    session.model.eval()
    try:
        with Replay(session.model, session.probe.oracle) as replay:
            measured = replay.gradient()
            return {"loss": float(measured.loss), "grad_norm": norm_of(measured.gradients)}
    finally:
        session.model.train()


def norm_of(tensors: Iterable[Tensor | None]) -> float:
    """Euclidean norm of tensors as one vector."""
    return float(get_total_norm([tensor for tensor in tensors if tensor is not None]))


def norm_of_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Euclidean norm of the difference of two lists of tensors."""
    return norm_of(one - other for one, other in zip(some, others, strict=True))


def summed_gradient(
    task: LanguageTask, model: nn.Module, source: torch.Generator
) -> tuple[list[Tensor], int]:
    """Sum of the gradients over random pieces of a tenth of the text, and how many they are."""
    num_rows = math.ceil(AUTHORS_SHARE * len(task.streams))
    pieces = random_cuts(num_rows - 1, task.recipe.bptt, source)
    state = None
    for start, length in pieces:
        words, following = (task.streams[start + i : start + i + length] for i in (0, 1))
        loss, state = task.loss(model, (words, following), state)
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], len(pieces)


def authors_smoothness(
    model: nn.Module, end: Sequence[Tensor], summed: Callable[[nn.Module], tuple[list[Tensor], int]]
) -> dict[str, float]:
    r"""The estimate of the authors' released code, half of the step on.

    .. math::
        \hat L = \frac{\lVert \sum_j g_j(x + d/2) - \sum_i g_i(x) \rVert}{\lVert d / 2 \rVert}

    Both sums are over freshly cut pieces with fresh dropout masks. Their gradient norm is divided by the
    number of pieces, the difference is not: here ``smoothness`` is, ``smoothness_as_released`` is not.

    Args:
        model: A copy of the model at :math:`x`, which is moved.
        end: :math:`x + d`.
        summed: The summed gradient of a model, and the number of pieces.
    """
    model.zero_grad()
    first, num_pieces = summed(model)
    first = [gradient.clone() for gradient in first]
    start = [p.detach().clone() for p in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        for p, x in zip(model.parameters(), end, strict=True):
            p.lerp_(x, 0.5)
    second, _ = summed(model)
    length = norm_of_difference(end, start)
    smoothness = norm_of_difference(second, first) / (0.5 * length)
    return {
        "smoothness": smoothness / num_pieces,
        "smoothness_as_released": smoothness,
        "grad_norm": norm_of(first) / num_pieces,
    }
