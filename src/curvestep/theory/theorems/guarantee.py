"""Guarantees, which theorems return: the recipe, the bound, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from curvestep.checks import check_choice, check_nonnegative, check_positive
from curvestep.steps import Parameter
from curvestep.theory.problems.base import Array
from curvestep.theory.rules import StepRule

TOLERANCE = 1e-9  # relative error that certificates forgive


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
    rule: StepRule | None  # of which it takes at most `bound`; None for a lower bound, of every fixed step
    assumptions: tuple[Assumption, ...]  # what the theorem needs
    L0: float
    L1: float
    gap: float  # f(x0) − f*
    eps: float  # the gradient norm to reach
    M: float | None = None  # largest gradient norm, where the theorem uses one
    tau: float | None = None  # radius of the noise, where the theorem has noise
    # of f, that one step from a given gradient norm is promised
    decrease: Callable[[Array], Array] | None = field(default=None, repr=False, compare=False)
    up_to_constant: bool = False  # whether the bound is an order only

    @property
    def hyperparameters(self) -> dict[str, Parameter]:
        """The rule's hyperparameters by name, as ``lr`` and ``max_norm``."""
        return {} if self.rule is None else self.rule.parameters

    def __str__(self) -> str:
        relation = "at most" if self.rule else "at least"
        order = {True: "of order ", False: ""}[self.up_to_constant]
        recipe = ", ".join(f"{k} = {v:.4g}" for k, v in self.hyperparameters.items()) or "every fixed step"
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


def smooth_on(region: str) -> tuple[Assumption, Assumption]:
    """Assumptions 1 to 3 of the paper."""
    return (
        Assumption("f bounded below and twice differentiable"),
        Assumption(f"‖∇²f‖ ≤ L0 + L1‖∇f‖ {region}"),
    )


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, infinite where the denominator vanishes."""
    return numerator / denominator if denominator > 0 else math.inf
