r"""The rule of calibrate: which learning rates are tried, for how many steps, and what follows from it.

Trials climb a ladder. On the first rung they compress the run's whole schedule into 16 steps, on the next
into 48, then 144, each time on fresh batches and only for rates near the answer of the rung below. What
counts on a rung is what a rate gains beyond the best of the rung below, which any good rate reaches:

.. math::
    \text{share}(\eta) = \frac{g_k(\eta) - b}{\max_\eta g_k(\eta) - b}, \qquad b = \max_\eta g_{k/3}(\eta) ,

with the gain g, the mean fall of the loss of batches that no trial steps on. A language model reaches the
frequencies of its symbols within 16 steps at any of several rates; on the next rung that no longer counts.
The answer of a rung is the middle, in logarithms, of the rates with a sufficient share.

``Ladder.climb`` says which trials are run, ``answer`` reads the rate, ``doubts`` says what they leave open.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from curvestep.checks import check_count, check_positive

# All constants of the rule, chosen on 20 development tasks: 1,100 trials on grids of rates (docs/results).
FIRST_STEPS = 16  # of a trial on the first rung
GROWTH, LEAST_GROWTH = 3, 1.7  # of the steps, from one rung to the next; where the budget ends
FIRST_OCTAVES = (-2, 0, 2)  # where the trials of a rung begin: a factor of four apart
FIRST_TRIALS, MOST_TRIALS = 5, 7  # on the first rung, and on any one whose best lies at an end
NEXT_TRIALS, CLIP_TRIALS = 3, 2  # on the other rungs; of these, to earn a threshold
FIRST_SHARE, SHARE = 0.97, 0.8  # sufficient shares: on the first rung, on the others
NEW = 0.01  # of the best gain: a rung that gains less beyond the one below is read like the first
MOST_DRIFT = 2.0  # factor by which the answer for the run may lie below that of the last rung
USUAL_RUN = 1000  # steps, where the caller does not say how many
GROWN, GROWN_WITH_CLIP = 480, 640  # gradients at most, if the answer stays doubtful
OF_RUN = 1 / 20  # or this share of the run, if it is more
CLEAR, BLIND = 8.0, 2.0  # standard errors of the best gain: below, noise hides it; nothing is known
SURE = 2.0  # standard errors of a difference
AGREE = 3.0  # factor within which two rungs agree
APART = 4.0  # factor at which rates must lose clearly, for the answer to be trusted


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Gain of one trial."""

    lr: float  # the peak, under a schedule
    num_steps: int
    gain: float  # mean fall of the judges' loss; minus infinity if it broke
    error: float  # standard error of ``gain`` over the judges
    max_norm: float = math.inf  # that its steps were clipped at
    falls: tuple[float, ...] = field(default=(), repr=False, compare=False)  # of each judge

    @classmethod
    def of(cls, falls: np.ndarray, *, lr: float, num_steps: int, max_norm: float) -> Trial:
        """The trial with these falls of the judges' losses; it broke if one is not finite."""
        values = {"lr": lr, "num_steps": num_steps, "max_norm": max_norm}
        if not np.isfinite(falls).all():
            return cls(gain=-math.inf, error=0.0, **values)
        gain, error = _mean_and_error(falls)
        return cls(gain=gain, error=error, falls=tuple(falls.tolist()), **values)

    def beats(self, other: Trial) -> bool:
        """Whether it surely gained more on the same judges."""
        if not (self.falls and other.falls):
            return self.gain > other.gain
        mean, error = _mean_and_error(np.subtract(self.falls, other.falls))
        return mean > SURE * error


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return values.mean().item(), np.std(values, ddof=1).item() / math.sqrt(len(values))


@dataclass(frozen=True)
class Rung:
    """Trials of one length, ascending in ``lr``, and the best gain of the rung below."""

    trials: Sequence[Trial]
    base: float = 0.0

    @property
    def num_steps(self) -> int:
        """Steps of each trial."""
        return self.trials[0].num_steps

    @property
    def best(self) -> Trial:
        """The trial that gained most."""
        return max(self.trials, key=lambda trial: trial.gain)

    @property
    def clarity(self) -> float:
        """Gain of the best trial in standard errors; zero if there is none."""
        return max(self.best.gain, 0.0) / max(self.best.error, sys.float_info.min)

    def sufficient(self) -> tuple[float, float]:
        """The smallest and the largest rate with a sufficient share, linear in log lr between trials."""
        best, base = self.best.gain, self.base
        if best <= 0:
            return self.best.lr, self.best.lr
        enough = SHARE
        if base <= 0 or best - base < NEW * best:
            base = 0.0
            enough = FIRST_SHARE
        shares = np.array([max((trial.gain - base) / (best - base), -1.0) for trial in self.trials])
        logs = [math.log(trial.lr) for trial in self.trials]
        place = int(np.argmax(shares))
        low = _crossing(logs[: place + 1], shares[: place + 1], enough)
        high = _crossing(logs[place:][::-1], shares[place:][::-1], enough)
        return math.exp(low), math.exp(high)

    @property
    def answer(self) -> float:
        """The middle of the sufficient rates, in logarithms."""
        return math.sqrt(math.prod(self.sufficient()))

    @property
    def is_at_an_end(self) -> bool:
        """Whether better rates may lie beyond those tried."""
        low, high = self.sufficient()
        return low <= self.trials[0].lr or high >= self.trials[-1].lr


def _crossing(logs: Sequence[float], shares: np.ndarray, enough: float) -> float:
    """Where the shares, towards the best at the end, first reach ``enough``."""
    i = int(np.argmax(shares >= enough))
    if i == 0:
        return logs[0]
    part = (enough - shares[i - 1]) / (shares[i] - shares[i - 1])
    return logs[i - 1] + part * (logs[i] - logs[i - 1])


@dataclass(frozen=True)
class Budget:
    """Gradients that trials may take.

    Args:
        most: All of them together.
        uses_all: Whether trials go on however clear the answer is: the caller gave the budget.
        longest: Steps of a trial at most: those of the run.
    """

    most: int
    uses_all: bool
    longest: float = math.inf

    @property
    def first_steps(self) -> int:
        """Steps of the first trials."""
        return int(min(FIRST_STEPS, self.longest))


def budget_of(budget: float | None, num_steps: int | None, grown: int = GROWN) -> Budget:
    """The budget that a caller gives, in gradients or at most 1 as a share of the run; or the default."""
    run = 0 if num_steps is None else check_count("num_steps", num_steps)
    longest = run or math.inf
    if budget is None:
        return Budget(max(grown, int(run * OF_RUN)), uses_all=False, longest=longest)
    gradients = check_positive("budget", budget)
    if gradients <= 1:
        gradients *= run
    found = Budget(int(gradients), uses_all=True, longest=longest)
    least = len(FIRST_OCTAVES) * found.first_steps
    if gradients < least:
        raise ValueError(
            f"`budget` must be at least {least} gradients, three trials, got {gradients:.0f}. "
            "At most 1 it is a share of `num_steps`: give both."
        )
    return found


class Ladder:
    """The trials, rung by rung.

    Args:
        run: Runs a trial of a rate with a threshold, and so many steps, on fresh batches from the given one.
        budget: What all trials may take.
        start: The rate to begin with.
        max_norm: The threshold of the trials.
        to_earn: A threshold to try on the last rung, if any.
    """

    def __init__(
        self,
        run: Callable[[float, float, int, int], Trial],
        budget: Budget,
        start: float,
        *,
        max_norm: float = math.inf,
        to_earn: float = math.inf,
    ) -> None:
        self._run, self._budget, self._start = run, budget, start
        self.max_norm, self._to_earn = max_norm, to_earn
        self.rungs: list[Rung] = []
        self.trials: list[Trial] = []
        self._spent = 0
        self._first_batch = 0

    def climb(self) -> None:
        """Try rungs until the answer is clear, or the budget is used up; then the threshold."""
        trials = self._bracket({}, 0, self._budget.first_steps, FIRST_TRIALS)
        self._add(trials)
        length = self._next_length()
        while length > 0 and (self._budget.uses_all or len(self.rungs) == 1 or doubts(self.rungs)):
            middle = round(math.log2(self.rungs[-1].answer / self._start))
            trials = self._bracket({}, middle, length, NEXT_TRIALS)
            self._add(trials)
            length = self._next_length()
        if math.isfinite(self._to_earn):
            self._earn(trials)

    def _next_length(self) -> int:
        """Steps of the next rung's trials; zero if the budget has no room for it."""
        last = self.rungs[-1].num_steps
        count = NEXT_TRIALS
        if math.isfinite(self._to_earn):
            count += CLIP_TRIALS
        left = (self._budget.most - self._spent) // count
        length = int(min(GROWTH * last, left, self._budget.longest))
        return length if length >= LEAST_GROWTH * last else 0

    def _add(self, trials: dict[int, Trial]) -> None:
        base = self.rungs[-1].best.gain if self.rungs else 0.0
        rung = Rung([trials[octave] for octave in sorted(trials)], base)
        self.rungs.append(rung)
        self._first_batch += rung.num_steps

    def _bracket(self, trials: dict[int, Trial], middle: int, length: int, most: int) -> dict[int, Trial]:
        """Trials around an octave: beyond an end that is best, then between those tried, up to ``most``."""
        wanted = [middle + octave for octave in FIRST_OCTAVES]
        while wanted:
            octave = wanted.pop(0)
            if not self._try(trials, octave, length):
                break
            if not wanted:
                further = next_octave({octave: trial.gain for octave, trial in trials.items()})
                is_beyond = further is not None and not min(trials) < further < max(trials)
                if further is not None and len(trials) < (MOST_TRIALS if is_beyond else most):
                    wanted = [further]
        return trials

    def _try(self, trials: dict[int, Trial], octave: int, length: int) -> bool:
        """Run one trial, if the budget has room for it."""
        if self._spent + length > self._budget.most:
            return False
        lr = self._start * 2.0**octave
        trials[octave] = self._run(lr, self.max_norm, length, self._first_batch)
        self.trials.append(trials[octave])
        self._spent += length
        return True

    def _earn(self, trials: dict[int, Trial]) -> None:
        """Take the threshold if the best trial with it leaves none without it a sufficient share.

        Both see the same batches, and noise must not explain it.
        """
        without = self.rungs[-1]
        self._first_batch -= without.num_steps
        self.max_norm, kept = self._to_earn, self.max_norm
        octave = max(trials, key=lambda octave: trials[octave].gain)
        clipped: dict[int, Trial] = {}
        while len(clipped) < MOST_TRIALS and self._try(clipped, octave, without.num_steps):
            best = max(clipped, key=lambda octave: clipped[octave].gain)
            if len(clipped) >= CLIP_TRIALS and (best < octave or not clipped[best].beats(without.best)):
                break
            octave += 2
        trials = trials | clipped
        rung = Rung([trials[octave] for octave in sorted(trials)], without.base)
        if rung.best.beats(without.best) and without.best.gain - rung.base < SHARE * (
            rung.best.gain - rung.base
        ):
            self.rungs[-1] = rung
        else:
            self.max_norm = kept


def next_octave(gains: dict[int, float]) -> int | None:
    """The octave to try next: beyond an end that is best, else between the best and its better neighbour.

    Example:
        >>> next_octave({-2: 0.1, 0: 0.9, 2: 1.0}), next_octave({-2: 0.1, 0: 1.0, 2: 0.9})
        (4, 1)
    """
    octaves = sorted(gains)
    place = max(range(len(octaves)), key=lambda i: gains[octaves[i]])
    best = octaves[place]
    if place == 0:
        return best - 2
    if place == len(octaves) - 1:
        return best + 2
    neighbours = [octaves[place - 1], octaves[place + 1]]
    for neighbour in sorted(neighbours, key=lambda octave: -gains[octave]):
        if abs(neighbour - best) > 1:
            return (neighbour + best) // 2
    return None


def answer(rungs: Sequence[Rung], num_steps: int | None) -> float:
    r"""The learning rate of the run.

    Where the answer falls from one rung to the next, by a factor q, it goes on falling to the length N of
    the run, to :math:`q^{\log(N/k) / \log(k/k')}` of it, but at most by a factor of two. An answer that
    rises is left alone: what trials learn late is no reason to go beyond all rates that were good.
    """
    last = rungs[-1]
    if last.clarity < BLIND:  # no trial gained for sure
        return last.trials[0].lr / 2
    if len(rungs) == 1:
        return last.answer
    below = rungs[-2]
    q = min(1.0, last.answer / below.answer)
    further = math.log((num_steps or USUAL_RUN) / last.num_steps) / math.log(last.num_steps / below.num_steps)
    return last.answer * max(1 / MOST_DRIFT, q ** max(0.0, further))


def doubts(rungs: Sequence[Rung]) -> list[str]:
    """What the trials leave open, by kinds; a clear answer has none."""
    last = rungs[-1]
    if last.clarity < BLIND:
        return ["unknown"]
    low, high = last.sufficient()
    found = {
        "noise": last.clarity < CLEAR,
        "edge": last.is_at_an_end,
        "flat": high > APART**2 * low,
        "one-length": len(rungs) == 1,
        "lengths": len(rungs) > 1 and abs(math.log(last.answer / rungs[-2].answer)) > math.log(AGREE),
    }
    return [kind for kind, holds in found.items() if holds]
