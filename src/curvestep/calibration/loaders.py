"""Batches that a caller gives: read on all ranks alike, nothing moved by the reading, and a few chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from curvestep.checks import check_count
from curvestep.smoothness.snapshot import RandomState, restore_on_exit
from curvestep.tensors.distributed import any_rank

Batch = Any  # whatever the caller's loss takes


def check_batches(batches: object) -> None:
    """Refuse one batch in place of several, and a loader that would be used up."""
    if _is_single_batch(batches):
        raise TypeError(
            f"`batches` must be a sequence of batches, got one batch or none of them, a "
            f"{type(batches).__name__}. Give a list of batches or a data loader."
        )
    data = getattr(batches, "dataset", None)
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"`batches` is a DataLoader over a {type(data).__name__}, which has no length and is read once. "
            "Make a list of it, or wrap what makes it in a torch.utils.data.IterableDataset."
        )


def _is_single_batch(batches: object) -> bool:
    if isinstance(batches, (tuple, list)):  # inputs and targets, not two batches
        return len({(part.dtype, part.dim()) for part in batches if isinstance(part, Tensor)}) > 1
    is_iterable = isinstance(batches, Iterable) or hasattr(type(batches), "__getitem__")
    return isinstance(batches, (Tensor, Mapping, str)) or not is_iterable


@dataclass(frozen=True)
class Readable:
    """Batches that ``make`` gives again whenever they are read: none is lost, as an iterator's are."""

    make: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.make()


class Supply:
    """Batches to judge by and others to step on, read only as far as needed."""

    def __init__(self, batches: Iterable[Batch], model: nn.Module, num_judges: int, num_steps: int) -> None:
        self._stream = _shared(batches, model)
        self.known: list[Batch] = []
        self._read(max(num_judges + num_steps, 3 * num_judges))
        count = len(self.known)
        if count < 3:
            raise ValueError(
                "`batches` must hold at least three batches, one to step on and two others to judge by, got "
                f"{count}. Is it one batch, or a used-up iterator? Else use smaller batches; 24 are better."
            )
        self._num_judges = max(2, min(num_judges, count // 3))

    @property
    def judges(self) -> list[Batch]:
        """Batches to judge by: of few a third."""
        return self.known[: self._num_judges]

    def steps(self, first: int, count: int) -> list[Batch]:
        """So many batches to step on from the ``first``; of few the same again."""
        self._read(self._num_judges + first + count)
        others = self.known[self._num_judges :]
        return [others[(first + k) % len(others)] for k in range(count)]

    def _read(self, count: int) -> None:
        self.known.extend(islice(self._stream, max(0, count - len(self.known))))


def _shared(batches: Iterable[Batch], model: nn.Module) -> Iterator[Batch]:
    """The batches, as long as every rank has one."""
    iterator, end = iter(batches), object()
    while not any_rank((batch := next(iterator, end)) is end, model):
        yield batch


@contextmanager
def unmoved(loader: object) -> Iterator[None]:
    """Put back the random states that reading a data loader draws from: the global ones and its own."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    owners = [loader, *samplers, getattr(samplers[1], "sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(own, own.get_state()) for own in generators if isinstance(own, torch.Generator)]
    random = RandomState.capture()

    def put_back() -> None:
        random.restore()
        for generator, state in states:
            generator.set_state(state)

    with restore_on_exit(put_back):
        yield


def representative_batches(
    batches: Sequence[Batch], count: int, *, labels: Callable[[Batch], Tensor] = itemgetter(-1)
) -> list[int]:
    r"""Indices of a few batches whose labels together have nearly the shares of all batches.

    .. math::
        i_m = \arg\min_i \sum_c \Bigl( \frac{t_c + n_{ic}}{\sum_c (t_c + n_{ic})}
            - \frac{\sum_i n_{ic}}{\sum_{ic} n_{ic}} \Bigr)^2, \qquad t = n_{i_1} + \dots + n_{i_{m-1}}

    with :math:`n_{ic}` the number of labels :math:`c` in batch :math:`i`: one batch after the other, each the
    best beside those before it. No loss is computed. For a language model the labels are words.

    Args:
        batches: To choose from.
        count: How many to choose.
        labels: The labels of a batch, whole numbers; negative ones, such as ``ignore_index``, are left out.
            Default: the last part of the batch.

    Returns:
        Indices into ``batches``, ascending.

    Raises:
        ValueError: ``count`` is not between 1 and the number of batches, or ``labels`` finds none.

    Example:
        >>> batches = [(None, torch.tensor(y)) for y in ([0, 0, 0], [1, 1, 1], [0, 0, 1], [2, 0, 1])]
        >>> representative_batches(batches, 3)
        [2, 3, 1]
    """
    found = [_counted(labels(batch)) for batch in batches]
    if check_count("count", count) > len(found):
        raise ValueError(f"`count` must be at most {len(found)}, the number of batches, got {count}.")
    sizes = torch.tensor(list(map(len, found)), dtype=torch.float64)
    if not sizes.all():
        raise ValueError("`labels` must give at least one label that is not negative for each batch.")
    # Σ(t + n)² = Σt² + 2 Σtn + Σn²: sums over the labels that a batch has, not over all that there are.
    label, place = torch.cat(found), torch.arange(len(found)).repeat_interleave(sizes.long())
    everything = torch.bincount(label).double()

    def inner(counts: Tensor) -> Tensor:
        return torch.zeros_like(sizes).index_add_(0, place, counts[label])

    aim, taken, total = everything / sizes.sum(), torch.zeros_like(everything), 0.0
    squares = torch.stack([torch.bincount(y).double().square().sum() for y in found])
    along, chosen = inner(aim), list[int]()
    for _ in range(count):
        joint = taken.square().sum() + 2 * inner(taken) + squares
        distance = joint / (total + sizes) ** 2 - 2 * (aim @ taken + along) / (total + sizes)
        distance[chosen] = torch.inf
        chosen.append(int(distance.argmin()))
        taken += torch.bincount(found[chosen[-1]], minlength=len(taken))
        total += float(sizes[chosen[-1]])
    return chosen


def _counted(labels: object) -> Tensor:
    """Those that are not negative, if they are whole numbers."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"`labels` must be whole numbers, got {labels!r}.")
    return labels[labels >= 0].cpu()
