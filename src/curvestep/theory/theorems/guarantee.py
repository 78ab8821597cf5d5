"""Guarantees, which theorems return: the recipe, the bound, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from curvestep._checks import check_choice, check_nonnegative, check_positive
from curvestep.steps import Parameter
from curvestep.theory.problems.base import Array
from curvestep.theory.rules import StepRule

TOLERANCE = 1e-9  # relative error that certificates forgive
VERSIONS = ("printed", "corrected", "sharp")


class AssumptionError(ValueError):
    """The numbers given break an assumption of the theorem."""


@dataclass(frozen=True)
class Assumption:
    """One condition of a theorem.

    Attributes:
        statement: The condition in words.
        holds: Whether the numbers given fulfil it; ``None`` if it is about the function, which
            :func:`curvestep.theory.certify` checks.
    """

    statement: str
    holds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A theorem applied to numbers.

    Attributes:
        theorem: Its name in the paper.
        version: ``"printed"``, ``"corrected"`` or ``"sharp"``.
        row: The row of docs/theorems.md that says what was wrong.
        kind: ``"upper"`` if descent needs at most ``bound`` iterations, ``"lower"`` if at least.
        bound: Iterations until the gradient norm is at most ``eps``; with noise, the median over runs.
        rule: The step rule with its hyperparameters; ``None`` for a lower bound, which holds for every step.
        assumptions: What the theorem needs.
        L0: L0 of the class.
        L1: L1 of the class.
        gap: f(x0) − f*.
        eps: The gradient norm to reach.
        M: Largest gradient norm, where the theorem uses one.
        tau: Radius of the noise, where the theorem has noise.
        decrease: The decrease of f that one step from a given gradient norm is promised, if any is.
        up_to_constant: Whether the bound is an order only.
    """

    theorem: str
    version: str
    row: int
    kind: str
    bound: float
    rule: StepRule | None
    assumptions: tuple[Assumption, ...]
    L0: float
    L1: float
    gap: float
    eps: float
    M: float | None = None
    tau: float | None = None
    decrease: Callable[[Array], Array] | None = field(default=None, repr=False, compare=False)
    up_to_constant: bool = False

    @property
    def hyperparameters(self) -> dict[str, Parameter]:
        """The rule's hyperparameters by name, as ``lr`` and ``max_norm``."""
        return {} if self.rule is None else self.rule.parameters

    def __str__(self) -> str:
        relation = {"upper": "at most", "lower": "at least"}[self.kind]
        order = {True: "of order ", False: ""}[self.up_to_constant]
        recipe = ", ".join(f"{k} = {v:.4g}" for k, v in self.hyperparameters.items()) or "every fixed step"
        needs = "; ".join(a.statement for a in self.assumptions)
        return (
            f"{self.theorem} ({self.version}): it takes {relation} {order}{self.bound:.4g} iterations to "
            f"gradient norm {self.eps:g}, with {recipe}. It needs: {needs}."
        )


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A number that a lemma gives, with what it rests on.

    Attributes:
        statement: Its name in the paper.
        version: ``"printed"``, ``"corrected"`` or ``"sharp"``.
        row: The row of docs/theorems.md that says what was wrong.
        value: The number; ``float(bound)`` is the same.
        assumptions: What it needs.
    """

    statement: str
    version: str
    row: int
    value: float
    assumptions: tuple[Assumption, ...]

    def __float__(self) -> float:
        return self.value


def check_version(version: str, versions: tuple[str, ...] = VERSIONS) -> str:
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
