"""The schema of a trace: every key of a row and of the header, with its kind, unit and meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

Row = dict[str, Any]  # JSON values by the names in FIELDS, and others that a caller added


class Estimator(NamedTuple):
    """What a reader of rows has to know of an estimator, whose column has its name."""

    converged: str = ""  # the column that says whether a value is usable; empty if each is
    if_not: str = ""  # what is wrong with values that are not


ESTIMATORS = {
    "smoothness": Estimator(),
    "local_smoothness": Estimator(
        "local_converged", "their difference step is too long or too short (see `local_error`)"
    ),
    "spectral_smoothness": Estimator("spectral_converged", "they are only lower bounds"),
}

# What a probe may be asked for beside them; a fit does not read it.
LAYER_CURVATURE = "layer_curvature"

# A step counts as clipped if its coefficient is below that of the edge by more than this share.
COEFFICIENT_TOLERANCE = 1e-6

LEAST_ROWS = 10  # measured ones that a fit or an advice needs; the probe measures them whatever they cost

OK = "ok"
NONFINITE = "nonfinite"  # a loss, gradient or step that is not finite
ZERO_STEP = "zero-step"  # the parameters did not move: the segment has no smoothness
FAILED = "failed: "  # followed by what went wrong


class Field(NamedTuple):
    """One key of a row or of the header.

    Its kind is ``"count"`` (a whole number), ``"number"``, ``"numbers"`` (a list, of a row one entry per
    fraction), ``"flag"``, ``"word"``, ``"group"`` (an object: layers with keys of this schema) or ``"log"``
    (a list of objects). Its unit is that of the loss and of the parameters (``x``).
    """

    kind: str
    unit: str
    meaning: str
    logged: bool = False  # loggers show it as it is


# Every key that the probe writes. Reading and documentation follow from this table. In a trace any
# key may be missing, in some rows or in all; d is the step from x to x + d, g the gradient of one batch.
FIELDS = {
    "step": Field("count", "steps", "Number of the training step; the key of a row."),
    "loss": Field(
        "number", "loss", "Loss at x if passed to the probe, else the loss after the step.", logged=True
    ),
    "loss_after": Field("number", "loss", "Loss of the same batch at x + d."),
    "recent_loss": Field(
        "number", "loss", "Mean of the losses recorded since the row before, with this one."
    ),
    "recent_steps": Field("count", "steps", "How many steps they are of."),
    "grad_norm": Field("number", "loss/x", "‖g(x)‖, before any clipping.", logged=True),
    "step_norm": Field("number", "x", "‖d‖.", logged=True),
    "smoothness": Field(
        "number", "loss/x²", "The paper's L̂: the largest of `secants`, along the step.", logged=True
    ),
    "fractions": Field("numbers", "1", "Every γ of this row; those of the header where it has none."),
    "secants": Field("numbers", "loss/x²", "‖g(x + γd) − g(x)‖/‖γd‖ for each γ in `fractions`."),
    "grad_norms": Field("numbers", "loss/x", "‖g(x + γd)‖ for each γ in `fractions`."),
    "local_smoothness": Field("number", "loss/x²", "‖∇²f(x) d‖/‖d‖, at x along the step."),
    "local_converged": Field(
        "flag", "", "Whether `local_error` is at most 0.1; if not, the value is not usable."
    ),
    "local_error": Field("number", "1", "Relative change of ∇²f(x) d when the difference step is halved."),
    "spectral_smoothness": Field("number", "loss/x²", "‖∇²f(x)‖ over all directions.", logged=True),
    "spectral_converged": Field("flag", "", "Whether Lanczos reached its tolerance."),
    "spectral_residual": Field("number", "1", "Residual of the eigenvector, relative to the eigenvalue."),
    "kappa": Field("number", "1", "‖g(x + γd) − g(x)‖/‖g(x)‖ at the largest γ.", logged=True),
    "stability_margin": Field(
        "number", "1", "lr times `smoothness` over 2; above 1 steps overshoot.", logged=True
    ),
    "curvature": Field("number", "loss/x²", "dᵀ(g(x + d) − g(x))/‖d‖², with its sign."),
    LAYER_CURVATURE: Field(
        "number", "loss/x²", "Part of `curvature` within layers: each is moved alone. Of a layer: its own."
    ),
    "cosine": Field("number", "1", "Cosine of the angle between the step and −g(x)."),
    "noise": Field("number", "loss/x", "‖g₁ − g₂‖/2 of the halves of the batch: standard deviation of g."),
    "grad_variance": Field("number", "(loss/x)²", "tr Σ of one sample: `batch_size` times `noise` squared."),
    "grad_signal": Field("number", "(loss/x)²", "g₁ᵀg₂ of the halves: ‖G‖² on average, negative at times."),
    "lr": Field(
        "number", "x²/loss", "lr of the optimizer that stepped; of several the largest.", logged=True
    ),
    "coefficient": Field(
        "number", "1", "Factor of clipping, 1 if it did not clip; of NormalizedSGD β/(‖g‖ + β).", logged=True
    ),
    "clipped": Field("flag", "", "Whether clipping shortened the step; missing where unknown."),
    "max_norm": Field(
        "number", "loss/x", "Norm beyond which the step counts as `clipped`; of smooth rules only."
    ),
    "spikes": Field("log", "", "`optimizer.spikes()` since the row before; `step` there is the optimizer's."),
    "optimizer": Field("word", "", "Class of the optimizer that stepped."),
    "momentum": Field("number", "1", "Its momentum β; of Adam β₁."),
    "optimizer_smoothness": Field(
        "number",
        "1/lr",
        "‖P^(-½)Δg‖/‖P^½Δx‖ along the step, P = √v̂ + ε of Adam, I of SGD. lr times it has no unit.",
        logged=True,
    ),
    "optimizer_limit": Field("number", "1", "Largest stable lr·λ, λ of P⁻¹∇²f: 2 for SGD, 38 for Adam."),
    "optimizer_missing": Field("word", "", "Why there is no smoothness in the optimizer's metric."),
    "batch_size": Field("count", "samples", "Samples of the step, over all calls and ranks."),
    "num_gradients": Field("count", "gradients", "Cost without self-tests; an oracle counts each batch."),
    "eps": Field("number", "1", "Relative precision of the gradients: of the dtype or of autocast."),
    "self_test": Field("number", "1", "Relative difference of one gradient that was replayed twice."),
    "status": Field("word", "", '"ok", "nonfinite", "zero-step" or "failed: …"; none counts as "ok".'),
    "layers": Field("group", "", "The same keys for each layer, by its name."),
}

RENAMED = {"edge": "stability_margin"}  # keys of rows that were written before, and their names of today


def with_current_keys(row: Row) -> Row:
    """A row from a file under the keys of today; the row itself where it has them."""
    names = {old: new for old, new in RENAMED.items() if old in row and new not in row}
    if not names:
        return row
    return {names.get(key, key): value for key, value in row.items()}


# What the probe writes into the header. The lower half is known at the first measured step, and missing in
# traces of before; a header may hold other keys, too.
HEADER_FIELDS = {
    "model": Field("word", "", "Class of the model."),
    "num_parameters": Field("count", "", "How many numbers are trained."),
    "dtype": Field("word", "", "Type of the parameters."),
    "measured_on": Field("word", "", "The training batch, or how many fixed batches."),
    "fractions": Field("numbers", "1", "Every γ, if it is the same in all rows."),
    "estimators": Field("group", "", "Estimators with their periods, in measurements."),
    "every": Field("count", "steps", "Fewest steps between measurements."),
    "max_overhead": Field("number", "1", "Gradients for measuring over training's, after ten rows."),
    "world_size": Field("count", "", "How many processes train."),
    "optimizer": Field("word", "", "Class of the optimizer."),
    "optimizer_family": Field(
        "word", "", '"sgd", "momentum", "adam", "adam-like", "sign", "muon" or "unknown".'
    ),
    "momentum": Field("number", "1", "Its momentum; missing where groups differ."),
    "betas": Field("numbers", "1", "β₁ and β₂ of Adam; missing where groups differ."),
    "weight_decay": Field("number", "", "Its weight decay; missing where groups differ."),
    "start_lr": Field("number", "x²/loss", "The largest lr of its groups at the first measured step."),
    "peak_lr": Field("number", "x²/loss", "The largest lr of its schedule, as far as its groups say."),
    "clipping": Field("word", "", 'In the optimizer: "norm", "none" or the name of a rule.'),
    "threshold": Field("word", "", 'Name of its option for `max_norm`: of NormalizedSGD "offset".'),
    "max_norm": Field("number", "loss/x", "Norm beyond which it clips; missing where groups differ."),
    "norm_scope": Field("word", "", 'Whose norm is clipped: "global", "group" or "tensor".'),
    "training_mode": Field("flag", "", "Whether the model was in training mode."),
    "num_steps": Field("count", "steps", "Steps that were planned, where the probe was told."),
}
