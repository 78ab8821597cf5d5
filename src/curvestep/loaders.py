"""Batches that a caller gives: read on all ranks alike, and nothing moved by the reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from curvestep.distributed import any_rank
from curvestep.smoothness.snapshot import RandomState, undone

Batch = Any  # whatever the caller's loss takes


def shared(batches: Iterable[Batch], model: nn.Module) -> Iterator[Batch]:
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

    with undone(put_back):
        yield
