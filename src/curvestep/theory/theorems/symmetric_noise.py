r"""The paper's remark on symmetric noise, proved: finite variance is enough (row 33).

"Bounded noise can be relaxed to sub-gaussian noise if the noise is symmetric" stands after Assumption 5
without a proof. What is true needs a threshold of the size of the noise.

**Lemma.** Let :math:`s` be concave and nondecreasing with :math:`s(0) = 0`, the noise :math:`\xi` symmetric,
and :math:`F(v) = s(\lVert v\rVert)v/\lVert v\rVert`. Then, in every dimension,

.. math::
    \langle a, \mathbb E\,F(a + \xi)\rangle
    \ \ge\ \lVert a\rVert\,\mathbb E\big[s(\lVert\xi\rVert + \lVert a\rVert) - s(\lVert\xi\rVert)\big] \ge 0 .

F is odd, so the left side is :math:`\mathbb E\langle a, F(\xi + a) - F(\xi - a)\rangle/2`. The Jacobian of F
has the eigenvalues :math:`s(r)/r \ge s'(r) \ge 0`. Let :math:`e = a/\lVert a\rVert`. Along e the derivative
of :math:`\langle e, F(\xi + \rho e) - F(\xi - \rho e)\rangle/2` is at least the mean of
:math:`s'(\lVert\xi \pm \rho e\rVert)`, hence at least :math:`s'(\lVert\xi\rVert + \rho)`. Integrate.

For clipping at :math:`\gamma`, where :math:`s(r) = \min\{r, \gamma\}`, the right side is at least
:math:`q\lVert a\rVert\min\{\lVert a\rVert, \gamma/2\}` with :math:`q = P(\lVert\xi\rVert \le \gamma/2)`.

**Theorem.** See :func:`symmetric_noise`. A step is at most :math:`\eta\gamma \le 1/(10L_1)` long, so f leaves
its tangent by at most :math:`\tfrac A2(L_0 + L_1g)` times the step's square, where
:math:`A = 200\varphi(0.1) < 1.035`. By Chebyshev :math:`q \ge \tfrac12`. In the mean f falls

- for :math:`g \ge \gamma/2` by at least :math:`\eta\gamma g/8`, which
  :math:`\eta\gamma g(\tfrac14 - A(L_0\eta + L_1\eta\gamma/2))` exceeds;
- for :math:`g < \gamma/2`, where the mean square of the step is at most :math:`\eta^2(g^2 + \sigma^2)`, by
  :math:`0.4\eta g^2 - 0.518K\eta^2\sigma^2`.

While :math:`g > \varepsilon` both are at least :math:`0.2\eta\varepsilon^2`. So the first iteration
with a smaller gradient has a mean of at most :math:`5\Delta/(\eta\varepsilon^2)`. Its median is at most twice
its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from curvestep.checks import check_positive
from curvestep.theory.problems.base import Array
from curvestep.theory.rules import ClippedStep
from curvestep.theory.theorems.guarantee import (
    Assumption,
    Guarantee,
    check_numbers,
    in_class,
    require,
    smooth_within,
)
from curvestep.theory.theorems.lemmas import Inequality


def least_threshold(*, sigma: float, eps: float) -> float:
    r"""The least threshold of :func:`symmetric_noise`, :math:`\max\{2\sqrt2\,\sigma,\ 3.2\varepsilon\}`.

    Example:
        >>> least_threshold(sigma=0.0, eps=1.0), round(least_threshold(sigma=1.0, eps=0.1), 3)
        (3.2, 2.828)
    """
    return max(2 * math.sqrt(2) * sigma, 3.2 * eps)


def symmetric_noise(
    *, L0: float, L1: float, gap: float, eps: float, sigma: float, max_norm: float | None = None
) -> Guarantee:
    r"""Clipped descent with symmetric noise of finite variance reaches ε with probability at least ½.

    For a threshold :math:`\gamma \ge \max\{2\sqrt2\,\sigma, 3.2\varepsilon\}` the step size is

    .. math::
        K = L_0 + L_1\gamma/2, \qquad
        \eta = 1\big/\max\{20L_0,\ 10L_1\gamma,\ 2.6K\sigma^2/\varepsilon^2\}, \qquad
        T = \frac{10\Delta}{\eta\,\varepsilon^2} .

    There is no bound on the noise's length and none on gradients. The mean of the first iteration with a
    gradient below ε is at most T/2.

    Args:
        L0: :math:`L_0 > 0`.
        L1: :math:`L_1 \ge 0`.
        gap: :math:`\Delta = f(x_0) - f^*`.
        eps: Gradient norm :math:`\varepsilon > 0` to reach.
        sigma: Root mean square :math:`\sigma \ge 0` of the noise's length, at every point.
        max_norm: The threshold :math:`\gamma`; the least if not given.

    Raises:
        AssumptionError: If the threshold is less than the least.

    Example:
        >>> guarantee = symmetric_noise(L0=1.0, L1=1.0, gap=2.0, eps=0.5, sigma=1.0)
        >>> round(guarantee.bound), round(guarantee.hyperparameters["lr"], 4)
        (2263, 0.0354)
    """
    numbers = check_numbers(L0=L0, L1=L1, gap=gap, eps=eps, sigma=sigma)
    least = least_threshold(sigma=sigma, eps=eps)
    threshold = least if max_norm is None else check_positive("max_norm", max_norm)
    reached = Assumption(f"max_norm ≥ max{{2√2·σ, 3.2·ε}} = {least:.4g}", threshold >= least * (1 - 1e-12))
    K = L0 + L1 * threshold / 2
    inverse = max(20 * L0, 10 * L1 * threshold, 2.6 * K * (sigma / eps) ** 2)
    return Guarantee(
        theorem="Symmetric noise",
        version="sharp",
        bound=10 * gap * inverse / eps**2,
        rule=ClippedStep(lr=1 / inverse, max_norm=threshold),
        assumptions=(
            *smooth_within(math.inf),
            *require(reached),
            Assumption(f"symmetric noise with root mean square at most σ = {sigma:g}, always"),
        ),
        checks=in_class(L0=L0, L1=L1, gap=gap),
        needs_symmetry=True,
        **numbers,
    )


def mean_step(
    size: Callable[[Array], Array], gradient: Array, noise: Array, probabilities: Array | None = None
) -> Array:
    r"""The mean of :math:`s(\lVert g\rVert)g/\lVert g\rVert` over a discrete law of the noise.

    Args:
        size: The lengths :math:`s` of gradient norms.
        gradient: True gradients, shape ``(..., d)``.
        noise: The m values that the noise takes, shape ``(..., m, d)``.
        probabilities: Theirs, shape ``(..., m)``; equal if not given.

    Example:
        Noise larger than threshold and gradient together cancels: nothing is left of the gradient.

        >>> def clip(norm):
        ...     return np.minimum(norm, 1.0)
        >>> mean_step(clip, np.array([0.5]), np.array([[-2.0], [2.0]]))
        array([0.])
        >>> mean_step(clip, np.array([0.5]), np.array([[-0.4], [0.4]])).round(3)
        array([0.5])
    """
    seen = gradient[..., None, :] + noise
    norms = np.linalg.norm(seen, axis=-1)
    factors = size(norms) / np.where(norms > 0, norms, 1.0)
    return ((_weights(probabilities, norms) * factors)[..., None] * seen).sum(axis=-2)


def symmetric_lemma(
    size: Callable[[Array], Array], gradient: Array, noise: Array, probabilities: Array | None = None
) -> Inequality:
    r"""The lemma on a discrete law: ``left`` is what it promises, ``right`` the mean progress.

    The law is that of ``noise`` and of minus ``noise``, each with half of the probability. The arguments are
    those of :func:`mean_step`, with a concave and nondecreasing size that vanishes at 0.

    Example:
        >>> found = symmetric_lemma(np.sqrt, np.array([3.0]), np.array([[1.0]]))
        >>> found.left.round(3), found.right.round(3)
        (np.float64(3.0), np.float64(5.121))
    """
    lengths = np.linalg.norm(noise, axis=-1)
    norms = np.linalg.norm(gradient, axis=-1)
    gained = size(lengths + norms[..., None]) - size(lengths)
    there = mean_step(size, gradient, noise, probabilities)
    back = mean_step(size, gradient, -noise, probabilities)
    return Inequality(
        left=norms * (_weights(probabilities, lengths) * gained).sum(axis=-1),
        right=(gradient * (there + back)).sum(axis=-1) / 2,
    )


def _weights(probabilities: Array | None, lengths: Array) -> Array:
    return np.full(lengths.shape, 1 / lengths.shape[-1]) if probabilities is None else probabilities
