"""The within-step test on functions outside its benchmark: python benchmarks/within_outside.py [--help].

Nothing of the test was chosen on these. Four kinds have no growth of smoothness with the gradient norm,
three have it. Cells of κ and cosine are those of benchmarks/within.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
from scipy.special import expit
from within import COSINES, KAPPAS, Array, cells

DIM = 6
Places = tuple[Array, Callable[[Array], Array]]  # points, shape (runs, rows, DIM), and the gradient there


def random_field(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """Eighty plane waves of random direction, length and phase."""
    waves = rng.standard_normal((runs, 80, DIM))
    phase = rng.uniform(0, 2 * np.pi, (runs, 1, 80))

    def gradient(x: Array) -> Array:
        return np.sin(x @ waves.swapaxes(1, 2) + phase) @ waves

    return rng.uniform(-5, 5, (runs, rows, DIM)), gradient


def field_on_a_bowl(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """The same on a bowl that makes nearly all of the gradient, so that it says nothing of the Hessian."""
    x, waves = random_field(rng, runs, rows)
    return 2 * x, lambda x: 30 * x + waves(x)


def robust_regression(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """Σ √(1 + r²) over forty residuals: smoothness falls where residuals, and the gradient, are large."""
    data, targets = rng.standard_normal((runs, 40, DIM)), rng.standard_normal((runs, 1, 40))

    def gradient(x: Array) -> Array:
        r = x @ data.swapaxes(1, 2) - targets
        return (r / np.sqrt(1 + r * r)) @ data

    return 2 * rng.standard_normal((runs, rows, DIM)), gradient


def random_network(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """Forty tanh units with random weights, and a bowl."""
    weights, bias = rng.standard_normal((runs, 40, DIM)), rng.standard_normal((runs, 1, 40))
    heads = rng.standard_normal((runs, 1, 40))

    def gradient(x: Array) -> Array:
        unit = np.tanh(x @ weights.swapaxes(1, 2) + bias)
        return 2 * x + (heads * (1 - unit * unit)) @ weights

    return 2 * rng.standard_normal((runs, rows, DIM)), gradient


def logistic_regression(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """Forty separable samples, points where all are told apart: the Hessian is nearly the gradient."""
    truth = rng.standard_normal((runs, 1, DIM))
    truth /= np.linalg.norm(truth, axis=-1, keepdims=True)
    data = rng.standard_normal((runs, 40, DIM))
    margin = (data * truth).sum(axis=-1, keepdims=True)
    data = data * np.sign(margin) + truth  # all margins at least 1

    def gradient(x: Array) -> Array:
        return -expit(-(x @ data.swapaxes(1, 2))) @ data

    return rng.uniform(1, 5, (runs, rows, 1)) * truth + 0.1 * rng.standard_normal((runs, rows, DIM)), gradient


def cubes(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """Σ |q·x|³/3 over twelve random q: smoothness goes as the root of the gradient norm."""
    data = rng.standard_normal((runs, 12, DIM))

    def gradient(x: Array) -> Array:
        along = x @ data.swapaxes(1, 2)
        return (along * np.abs(along)) @ data

    return rng.lognormal(0, 0.5, (runs, rows, 1)) * rng.standard_normal((runs, rows, DIM)), gradient


def factorisation(rng: np.random.Generator, runs: int, rows: int) -> Places:
    """½‖uvᵀ − M‖² of a 3 × 3 matrix: in the factors a polynomial of degree four."""
    target = rng.standard_normal((runs, 1, 3, 3))

    def gradient(x: Array) -> Array:
        u, v = x[..., :3, None], x[..., None, 3:]
        away = u * v - target
        return np.concatenate([(away * v).sum(axis=-1), (away * u).sum(axis=-2)], axis=-1)

    return rng.uniform(1, 3, (runs, rows, 1)) * rng.standard_normal((runs, rows, DIM)), gradient


NULL = {
    "random field": random_field,
    "field on a bowl": field_on_a_bowl,
    "robust regression": robust_regression,
    "random network": random_network,
}
GROWTH = {"logistic regression": logistic_regression, "cubes": cubes, "factorisation": factorisation}
ANSWERS = ("grows", "not-shown", "does-not-grow", "cannot-tell")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("--null", type=int, default=300, help="runs of a cell without growth")
    parser.add_argument("--growth", type=int, default=100, help="runs of a cell with growth")
    parser.add_argument("--rows", type=int, default=100, help="of each run")
    asked = parser.parse_args()
    print(f"| function | κ | cosine | {' | '.join(ANSWERS)} | elasticity | zero | size known |")
    print(f"{'|---' * 10}|")
    for kind, (name, make) in enumerate((NULL | GROWTH).items()):
        num = asked.null if name in NULL else asked.growth
        for (i, kappa), (j, cosine) in itertools.product(enumerate(KAPPAS), enumerate(COSINES)):
            rng = np.random.default_rng([asked.seed, kind, i, j])
            runs = cells(rng, *make(rng, num, asked.rows), None, kappa=kappa, cosine=cosine)
            found = [run.within() for run in runs]
            answers = Counter(fit.answer for fit in found)
            shares = " | ".join(f"{answers[answer] / num:.0%}" for answer in ANSWERS)
            middle = " | ".join(
                f"{np.nanmedian([getattr(fit, key) for fit in found]):.2f}" for key in ("elasticity", "zero")
            )
            known = sum(fit.size_known for fit in found) / num
            print(f"| {name} | {kappa} | {cosine} | {shares} | {middle} | {known:.0%} |", flush=True)


if __name__ == "__main__":
    main()
