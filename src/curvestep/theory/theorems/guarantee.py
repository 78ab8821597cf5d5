"""Guarantees, which theorems return: the recipe, the bound, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from curvestep.checks import check_choice, check_nonnegative, check_positive
from curvestep.notes import Note
from curvestep.steps import Parameter
from curvestep.theory.problems.base import Array, Problem
from curvestep.theory.rules import Step, StepRule

TOLERANCE = 1e-9  # relative error that certificates forgive

# What is wrong with a function and its starts, from a theorem's point of view; None if nothing is.
Check = Callable[[Problem, Array], Note | None]
# The largest Hessian norm that goes with each gradient norm.
Law = Callable[[Array], Array]


class AssumptionError(ValueError):
    """The numbers given break an assumption of the theorem."""


@dataclass(frozen=True)
class Assumption:
    """One condition of a theorem."""

    statement: str  # the condition in words
    holds: bool | None = None  # whether the numbers fulfil it; None if it is about f, which `certify` checks


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A theorem applied to numbers."""

    theorem: str  # its name in the paper
    version: str  # "printed", "corrected" or "sharp"
    bound: float  # iterations until the gradient norm is at most `eps`; with noise, the median over runs
    rule: Step | None  # of which it takes at most `bound`; None for a lower bound, of every fixed step
    assumptions: tuple[Assumption, ...]  # what the theorem needs, in words
    checks: tuple[Check, ...]  # what `certify` asks of the function and its starts before it runs
    gap: float  # f(x0) − f*
    eps: float  # the gradient norm to reach
    L0: float | None = None  # constants of the class, where it is that of (L0, L1)-smooth functions
    L1: float | None = None
    M: float | None = None  # largest gradient norm, where the theorem uses one
    tau: float | None = None  # radius of the noise, where the theorem has bounded noise
    sigma: float | None = None  # root mean square of the noise, where the theorem bounds that
    needs_symmetry: bool = False  # whether the law of the noise must be symmetric
    law: Law | None = field(default=None, repr=False, compare=False)  # asked of every step, if given
    # of f, that one step from a given gradient norm is promised
    decrease: Callable[[Array], Array] | None = field(default=None, repr=False, compare=False)
    up_to_constant: bool = False  # whether the bound is an order only

    @property
    def noisy(self) -> bool:
        """Whether the theorem is about gradients with noise."""
        return self.tau is not None or self.sigma is not None

    @property
    def hyperparameters(self) -> dict[str, Parameter]:
        """The rule's hyperparameters by name, as ``lr`` and ``max_norm``."""
        return self.rule.parameters if isinstance(self.rule, StepRule) else {}

    def __str__(self) -> str:
        relation = "at most"
        recipe = "its own step"
        if self.rule is None:
            relation = "at least"
            recipe = "every fixed step"
        elif self.hyperparameters:
            recipe = ", ".join(f"{name} = {value:.4g}" for name, value in self.hyperparameters.items())
        order = "of order " if self.up_to_constant else ""
        needs = "; ".join(a.statement for a in self.assumptions)
        return (
            f"{self.theorem} ({self.version}): it takes {relation} {order}{self.bound:.4g} iterations to "
            f"gradient norm {self.eps:g}, with {recipe}. It needs: {needs}."
        )


def check_version(version: str, versions: tuple[str, ...] = ("printed", "corrected", "sharp")) -> str:
    """``version`` if the theorem has it."""
    return check_choice("version", version, versions)


def check_numbers(*positive: str, **numbers: float) -> dict[str, Any]:
    """The numbers of a theorem by name: L0, eps and those named must be positive, the others not negative."""
    checks = dict.fromkeys(("L0", "eps", *positive), check_positive)
    for name, value in numbers.items():
        checks.get(name, check_nonnegative)(name, value)
    return numbers


def require(*assumptions: Assumption) -> tuple[Assumption, ...]:
    """The assumptions, if none of them is broken by the numbers."""
    for assumption in assumptions:
        if assumption.holds is False:
            raise AssumptionError(f"The theorem does not apply: it needs {assumption.statement}.")
    return assumptions


def in_class(*, L0: float, L1: float, gap: float, radius: float = math.inf) -> tuple[Check, Check]:
    """Checks that a function starts at most ``gap`` above its minimum and is (L0, L1)-smooth.

    It need be smooth within ``radius`` of {f ≤ f(x0)} only, which is the paper's set S for radius 1.
    """
    return partial(_check_frontier, L0=L0, L1=L1, radius=radius), partial(check_gap, gap=gap)


def check_gap(problem: Problem, starts: Array, *, gap: float) -> Note | None:
    """Whether every start is at most ``gap`` above the minimum."""
    found = float(np.max(problem.gap(starts)))
    if found <= gap * (1 + TOLERANCE):
        return None
    claim = f"more than the gap {gap:g} claimed"
    return Note("gap", f"{problem.name} starts {found:g} above its minimum, {claim}")


def _check_frontier(problem: Problem, starts: Array, *, L0: float, L1: float, radius: float) -> Note | None:
    if math.isinf(radius):
        needed = problem.frontier(L1)
    else:
        needed = problem.frontier_near(starts, L1, radius=radius)
    if needed <= L0 * (1 + TOLERANCE):
        return None
    claim = f"L1 = {L1:g} needs L0 = {needed:g}, and L0 = {L0:g} is claimed"
    return Note("outside-class", f"{problem.name} is not in the class: {claim}")


def smooth_within(radius: float) -> tuple[Assumption, Assumption]:
    """Assumptions 1 to 3 of the paper, of which the last need hold near the sublevel set only."""
    region = f"within distance {radius:g} of {{f ≤ f(x0)}}"
    if radius == 0:
        region = "on {f ≤ f(x0)}"
    elif math.isinf(radius):
        region = "everywhere"
    return (
        Assumption("f bounded below and twice differentiable"),
        Assumption(f"‖∇²f‖ ≤ L0 + L1‖∇f‖ {region}"),
    )


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, infinite where the denominator vanishes."""
    return numerator / denominator if denominator > 0 else math.inf
