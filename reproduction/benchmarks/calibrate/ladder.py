"""The grids of the ladder's judged tasks, and how many more steps an answer needs than the best of them.

All grids are a factor of two apart and were fixed before any of these tasks was run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

NUM_WORSE = 2  # rates on each side of the best that must be worse, on the first seed
NUM_POINTS = 40  # of a curve of held-out loss


@dataclass(frozen=True)
class Grid:
    """Learning rates ``start * 2^k`` with ``-num_below <= k <= num_above``.

    Args:
        start: Where the search of the best begins.
        num_below: Rates below it.
        num_above: Rates above it.
    """

    start: float
    num_below: int
    num_above: int

    @property
    def lowest(self) -> float:
        """The smallest rate."""
        return self.start * 2.0**-self.num_below

    @property
    def highest(self) -> float:
        """The largest rate."""
        return self.start * 2.0**self.num_above

    def around(self, k: int, distance: int) -> list[int]:
        """Places up to ``distance`` from ``k``, near ones first, without those beyond the ends."""
        places = [k]
        for d in range(1, distance + 1):
            places += [k - d, k + d]
        return [place for place in places if -self.num_below <= place <= self.num_above]


# Of Muon's grid it is Muon's rate; AdamW beside it has a fixed share of that.
GRIDS = {
    "adamw": Grid(0.004, 6, 8),
    "momentum": Grid(0.1, 6, 6),
    "plain": Grid(1.0, 6, 6),
    "muon": Grid(0.02, 5, 6),
}


def scan(run: Callable[[float, int], float], grid: Grid, seeds: Sequence[int]) -> float:
    """Train what is needed to know the best rate; that rate.

    On the first seed the search widens until the best has two worse rates on each side, so that one lucky
    run does not end it. Then the best and its neighbours are trained on all seeds, until the rate with the
    lowest mean loss has neighbours with worse means. Only the ends of the grid stop it before.

    Args:
        run: The final loss of a rate and a seed.
        grid: The rates.
        seeds: The first is the one to scan with.
    """
    first: dict[int, float] = {}
    _widen(lambda k: run(grid.start * 2.0**k, seeds[0]), grid, first, 0, NUM_WORSE)
    means: dict[int, float] = {}
    of_all = lambda k: mean(run(grid.start * 2.0**k, seed) for seed in seeds)  # noqa: E731
    best = _widen(of_all, grid, means, min(first, key=lambda k: first[k]), 1)
    return grid.start * 2.0**best


def _widen(
    run: Callable[[int], float], grid: Grid, losses: dict[int, float], start: int, distance: int
) -> int:
    best = start
    while missing := [k for k in grid.around(best, distance) if k not in losses]:
        losses[missing[0]] = run(missing[0])
        best = min(losses, key=lambda k: losses[k])
    return best


def falling(curve: Sequence[float]) -> list[float]:
    """The curve that never rises and is nearest in squares (isotonic regression).

    Example:
        >>> falling([4.0, 2.0, 3.0, 1.0])
        [4.0, 2.5, 2.5, 1.0]
    """
    blocks: list[list[float]] = []
    for value in curve:
        blocks.append([value])
        while len(blocks) > 1 and mean(blocks[-2]) < mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [mean(block) for block in blocks for _ in block]


def steps_needed(answer: Sequence[float], best: Sequence[float]) -> float:
    r"""The practitioner's number: by how many times more steps the answer needs for what the best reaches.

    Measured as :math:`1 / s`, where :math:`s` is the share of its steps at which the best had reached the
    loss that the answer ends with. Both curves are made to fall first, so that noise of one point does not
    count. 1 for an answer that ends no worse; infinite for one that ends above the whole curve of the best.

    Args:
        answer: Held-out losses at equal distances, the first after one distance, the last at the end.
        best: The same of the best of the grid, on the same batches.

    Example:
        >>> round(steps_needed([4.0, 3.0, 2.5, 2.0], [3.0, 2.0, 1.5, 1.0]), 2)
        2.0
    """
    if len(answer) < len(best) or not all(math.isfinite(loss) for loss in answer):
        return math.inf
    end = falling(answer)[-1]
    reached = falling(best)
    if end <= reached[-1]:
        return 1.0
    if end > reached[0]:
        return math.inf
    after = next(i for i, loss in enumerate(reached) if loss <= end)
    place = float(after)
    if after > 0:
        place -= (end - reached[after]) / (reached[after - 1] - reached[after])
    return len(reached) / (place + 1)
