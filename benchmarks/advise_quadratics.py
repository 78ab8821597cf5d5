"""Whether advice leaves stability where the truth is known.

    python benchmarks/advise_quadratics.py [runs [first seed]]

Plain and clipped descent on random constant Hessians: 2 to 300 directions, six kinds of spectra, gradient
noise of four colours from 1e-4 to 2 of the first gradient, plain steps up to lr·λ = 1.98, clipped ones up to
20. There clipping gains nothing, and a step size beyond 2/λ is unstable. Each run is advised on four times:
by its rows alone, with the secants inside steps, with a converged spectral value in every tenth
row, with both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from curvestep.advice.advice import advise
from curvestep.smoothness.trace import Trace

SPECTRA = ("geometric", "power", "spiked", "uniform", "two levels", "nearly isotropic")
FRACTIONS = (0.5, 1.0)


@dataclass(frozen=True)
class Run:
    """Rows of a descent on one constant Hessian."""

    largest: float  # eigenvalue
    lr: float
    rows: list[dict[str, float | list[float]]]

    def trace(self, *, secants: bool = False, spectral: bool = False) -> Trace:
        """The rows with only the columns that are asked for."""
        trace = Trace(header={"fractions": list(FRACTIONS), "dtype": "float64"})
        for index, row in enumerate(self.rows):
            kept = {name: value for name, value in row.items() if secants or not isinstance(value, list)}
            if spectral and index % 10 == 0:
                kept["spectral_smoothness"], kept["spectral_converged"] = self.largest, 1.0
            trace.append(kept)
        return trace


def spectrum(rng: np.random.Generator, num: int) -> np.ndarray:
    """Eigenvalues of one of six kinds, the largest anywhere between 0.1 and 30."""
    kind = rng.choice(SPECTRA)
    values = {
        "geometric": np.geomspace(10 ** rng.uniform(-4, -0.2), 1, num),
        "power": np.arange(1, num + 1.0) ** -rng.uniform(0.5, 2.5),
        "spiked": np.append(10 ** rng.uniform(-3, -1) * rng.uniform(0.5, 1.5, num - 1), 1.0),
        "uniform": rng.uniform(0.01, 1, num),
        "two levels": np.where(np.arange(num) % 2, 10 ** rng.uniform(-3, -0.3), 1.0),
        "nearly isotropic": rng.uniform(0.95, 1.0, num),
    }[kind]
    return 10 ** rng.uniform(-1, 1.5) * values / values.max()


def constant_hessian_run(seed: int) -> Run:
    """One random run that neither ran away nor came to rest within rounding."""
    rng = np.random.default_rng([seed, 12])
    while True:
        num = int(rng.choice([2, 3, 6, 12, 30, 100, 300]))
        curvature = spectrum(rng, num)
        x = rng.standard_normal(num) * curvature ** rng.uniform(-1, 0.5)
        first = float(np.linalg.norm(curvature * x))
        colour = curvature ** rng.choice([0.0, 0.5, 1.0, -0.5]) * np.sqrt(rng.gamma(1.0, size=num))
        noise = first * 10 ** rng.uniform(-4, 0.3) * colour / np.linalg.norm(colour)
        clipped = rng.random() < 0.5
        product = rng.choice([0.02, 0.1, 0.5, 1.5, 5, 20] if clipped else [0.02, 0.1, 0.3, 1, 1.6, 1.9, 1.98])
        lr = float(product / curvature.max())
        max_norm = first * rng.choice([0.02, 0.1, 0.3, 1.0]) if clipped else np.inf
        rows: list[dict[str, float | list[float]]] = []
        for step in range(int(rng.integers(60, 300))):
            g = curvature * x + noise * rng.standard_normal(num)
            norm = float(np.linalg.norm(g))
            coefficient = min(1.0, max_norm / norm)
            move = -lr * coefficient * g
            length = float(np.linalg.norm(move))
            ends = [g + fraction * curvature * move for fraction in FRACTIONS]
            secants = [
                float(np.linalg.norm(end - g)) / (f * length) for f, end in zip(FRACTIONS, ends, strict=True)
            ]
            rows.append(
                {
                    "step": step,
                    "loss": 0.5 * float(curvature @ x**2),
                    "grad_norm": norm,
                    "smoothness": max(secants),
                    "step_norm": length,
                    "kappa": secants[-1] * length / norm,
                    "lr": lr,
                    "coefficient": coefficient,
                    "secants": secants,
                    "grad_norms": [float(np.linalg.norm(end)) for end in ends],
                }
            )
            x = x + move
        norms = np.array([row["grad_norm"] for row in rows])
        if np.isfinite(norms).all() and norms.min() > 1e-9 * norms.max() and norms.max() < 1e6 * first:
            return Run(float(curvature.max()), lr, rows)


COLUMNS = {
    "rows alone": {},
    "with secants": {"secants": True},
    "with spectral values": {"spectral": True},
    "with both": {"secants": True, "spectral": True},
}


def main(runs: int, first: int = 0) -> None:
    """Print for each set of columns how far the advised steps go."""
    found = [constant_hessian_run(seed) for seed in range(first, first + runs)]
    print(f"{runs} constant Hessians: lr·λ of the advice")
    print(
        "| columns | above 2 | and not the lr that was run | and no threshold | above 10 | median "
        "| clipping pays |\n|" + " --- |" * 7
    )
    for name, chosen in COLUMNS.items():
        advice = [advise(run.trace(**chosen)) for run in found]
        product = np.array([(one.lr or 0.0) * run.largest for one, run in zip(advice, found, strict=True)])
        open_ended = np.array([one.max_norm == np.inf for one in advice])
        pays = sum("Clipping pays" in one.clipping for one in advice)
        other = np.array(
            [not np.isclose(one.lr or 0.0, run.lr) for one, run in zip(advice, found, strict=True)]
        )
        beyond = product > 2
        cells = (
            beyond.sum(),
            (beyond & other).sum(),
            (beyond & open_ended).sum(),
            (product > 10).sum(),
            f"{np.median(product):.2f}",
            pays,
        )
        print("| " + " | ".join(map(str, (name, *cells))) + " |", flush=True)
        for index in np.flatnonzero(beyond):
            run = found[index]
            shown = np.median([row["smoothness"] for row in run.rows]) / run.largest
            print(
                f"  seed {first + index}: {advice[index].action}, lr·λ {run.lr * run.largest:.3g} -> "
                f"{product[index]:.3g}, smoothness along its steps {shown:.1%} of λ"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["60"]))
