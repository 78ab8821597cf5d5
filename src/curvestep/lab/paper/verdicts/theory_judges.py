"""Findings that need no training: the synthetic experiment, and the theorems as printed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from curvestep.lab.paper.fig7_synthetic import summary_of
from curvestep.lab.paper.plan import Results
from curvestep.lab.paper.verdicts.claims import CORRECTED, NOT_REPRODUCED, REPRODUCED, Finding
from curvestep.theory import ExponentialWall, Guarantee, certify, certify_lower_bound, theorem4

CERTIFICATES, MOST_ITERATIONS = 100, 20_000  # random problems of a theorem, and what each may take


def _verdict(holds: bool) -> str:
    return REPRODUCED if holds else NOT_REPRODUCED


def quartic_faster(results: Results) -> Finding:
    """Final gradients on x⁴."""
    found = summary_of(results)
    low, high = found.jittered_range
    return Finding(
        verdict=_verdict(low > 1),
        sentence=f"After {found.config.num_steps} steps |f'| is {found.gd_grad_norm:.2g} for GD, "
        f"{found.clipped_grad_norm:.2g} with clipping.",
        numbers={
            "ratio": f"{found.ratio:.2g}",
            "median over jittered starts": f"{found.jittered_ratio:.2g}, from {low:.2g} to {high:.2g}",
        },
    )


def quartic_conservative(results: Results) -> Finding:
    """Whether the measured gain is at least what theory predicts."""
    found = summary_of(results)
    return Finding(
        verdict=_verdict(found.ratio >= found.predicted_ratio),
        sentence=f"Theory predicts a factor of {found.predicted_ratio:.0f}; measured is {found.ratio:.2g}.",
        numbers={row.quantity: f"measured {row.measured}" for row in found.table},
    )


def quartic_arithmetic(results: Results) -> Finding:
    """The paper's prediction for x⁴, computed again."""
    found = summary_of(results)
    return Finding(
        verdict=CORRECTED,
        sentence=f"The ratio is {found.predicted_ratio**2:.3g}; its square root, which the bounds have, "
        f"{found.predicted_ratio:.0f}.",
        numbers={row.quantity: f"printed {row.printed}, corrected {row.corrected}" for row in found.table},
    )


def certified(results: Results, *, theorem: Callable[..., Guarantee]) -> Finding:
    """A theorem as printed, run on random exponential walls: iterations and decreases that it promises."""
    rng, kept = np.random.default_rng(0), []
    while len(kept) < CERTIFICATES:
        L0, L1 = 10 ** rng.uniform(-1, 1, size=2)
        problem, x0 = ExponentialWall(L0=L0, L1=L1), rng.normal() * 3 / L1
        eps = float(problem.grad_norm(np.asarray(x0))) * 10 ** rng.uniform(-2, -0.05)
        gap = float(problem.gap(np.asarray(x0)))
        guarantee = theorem(L0=L0, L1=L1, gap=gap, eps=eps, version="printed")
        if guarantee.bound < MOST_ITERATIONS:
            kept.append(certify(problem, guarantee, x0).status == "holds")
    return Finding(
        verdict=_verdict(all(kept)),
        sentence=f"As printed it holds on {sum(kept)} of {len(kept)} random exponential walls.",
        numbers={"more": "docs/theorems.md; thousands of random certificates in the tests"},
    )


def lower_bound_corrected(results: Results) -> Finding:
    """Theorem 4 as printed and corrected, on the pair of functions of its proof."""
    numbers = {"L0": 1.0, "L1": 5.0, "M": 50.0, "gap": 12.0, "eps": 0.1}
    found = {v: certify_lower_bound(theorem4(**numbers, version=v)).status for v in ("printed", "corrected")}
    return Finding(
        verdict=CORRECTED,
        sentence="The printed pair of functions leaves its class; the corrected pair stays inside.",
        numbers={"on one pair": ", ".join(f"{version}: {status}" for version, status in found.items())},
    )
