"""The schema of a trace: every key of a row and of the header, with its kind, unit and meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

Row = dict[str, Any]  # JSON values by the names in FIELDS, and others that a caller added

# What an estimator is called: by the probe, the fit and the column.
ESTIMATORS = ("smoothness", "local_smoothness", "spectral_smoothness")

LEAST_ROWS = 10  # measured ones that a fit or an advice needs; the probe measures them whatever they cost

OK = "ok"
NONFINITE = "nonfinite"  # a loss, gradient or step that is not finite
ZERO_STEP = "zero-step"  # the parameters did not move: the segment has no smoothness
FAILED = "failed: "  # followed by what went wrong


class Field(NamedTuple):
    """One key of a row or of the header.

    Its kind is ``"count"`` (a whole number), ``"number"``, ``"numbers"`` (a list, of a row one entry per
    fraction), ``"flag"``, ``"word"``, ``"group"`` (an object: layers with keys of this schema) or ``"log"``
    (a list of objects); its unit that of the loss and of the parameters (``x``).
    """

    kind: str
    unit: str
    meaning: str


# Every key that the probe writes. Reading and documentation follow from this table. In a trace any
# key may be missing, in some rows or in all; d is the step from x to x + d, g the gradient of one batch.
# fmt: off
_TABLE = (
    ("step", "count", "steps", "Number of the training step; the key of a row."),
    ("loss", "number", "loss", "Loss at x if passed to the probe, else the loss after the step."),
    ("loss_after", "number", "loss", "Loss of the same batch at x + d."),
    ("recent_loss", "number", "loss", "Mean of the losses recorded since the row before, with this one."),
    ("recent_steps", "count", "steps", "How many steps they are of."),
    ("grad_norm", "number", "loss/x", "‖g(x)‖, before any clipping."),
    ("step_norm", "number", "x", "‖d‖."),
    ("smoothness", "number", "loss/x²", "The paper's L̂: the largest of `secants`, along the step."),
    ("fractions", "numbers", "1", "Every γ of this row; those of the header where it has none."),
    ("secants", "numbers", "loss/x²", "‖g(x + γd) − g(x)‖/‖γd‖ for each γ in `fractions`."),
    ("grad_norms", "numbers", "loss/x", "‖g(x + γd)‖ for each γ in `fractions`."),
    ("local_smoothness", "number", "loss/x²", "‖∇²f(x) d‖/‖d‖, at x along the step."),
    ("local_converged", "flag", "", "Whether `local_error` is at most 0.1; if not, the value is not usable."),
    ("local_error", "number", "1", "Relative change of ∇²f(x) d when the difference step is halved."),
    ("spectral_smoothness", "number", "loss/x²", "‖∇²f(x)‖ over all directions."),
    ("spectral_converged", "flag", "", "Whether Lanczos reached its tolerance."),
    ("spectral_residual", "number", "1", "Residual of the eigenvector, relative to the eigenvalue."),
    ("kappa", "number", "1", "‖g(x + γd) − g(x)‖/‖g(x)‖ at the largest γ."),
    ("edge", "number", "1", "lr times `smoothness` over 2: 1 at the edge."),
    ("curvature", "number", "loss/x²", "dᵀ(g(x + d) − g(x))/‖d‖², with its sign."),
    ("cosine", "number", "1", "Cosine of the angle between the step and −g(x)."),
    ("noise", "number", "loss/x", "‖g₁ − g₂‖/2 of the halves of the batch: standard deviation of g."),
    ("grad_variance", "number", "(loss/x)²", "tr Σ of one sample: `batch_size` times `noise` squared."),
    ("grad_signal", "number", "(loss/x)²", "g₁ᵀg₂ of the halves: ‖G‖² on average, negative at times."),
    ("lr", "number", "x²/loss", "lr of the optimizer that stepped; of several the largest."),
    ("coefficient", "number", "1", "Factor of clipping, 1 if it did not clip; of NormalizedSGD β/(‖g‖ + β)."),
    ("clipped", "flag", "", "Whether clipping shortened the step; missing where unknown."),
    ("max_norm", "number", "loss/x", "Norm beyond which the step counts as `clipped`; of smooth rules only."),
    ("spikes", "log", "", "`optimizer.spikes()` since the row before; `step` there is the optimizer's."),
    ("optimizer", "word", "", "Class of the optimizer that stepped."),
    ("momentum", "number", "1", "Its momentum β; of Adam β₁."),
    ("optimizer_smoothness", "number", "1/lr",
     "‖P^(-½)Δg‖/‖P^½Δx‖ along the step, P = √v̂ + ε of Adam, I of SGD. lr times it has no unit."),
    ("optimizer_limit", "number", "1", "Largest stable lr·λ, λ of P⁻¹∇²f: 2 for SGD, 38 for Adam."),
    ("optimizer_missing", "word", "", "Why there is no smoothness in the optimizer's metric."),
    ("batch_size", "count", "samples", "Samples of the step, over all calls and ranks."),
    ("num_gradients", "count", "gradients", "Cost without self-tests; an oracle counts each batch."),
    ("eps", "number", "1", "Relative precision of the gradients: of the dtype or of autocast."),
    ("self_test", "number", "1", "Relative difference of one gradient that was replayed twice."),
    ("status", "word", "", '"ok", "nonfinite", "zero-step" or "failed: …"; none counts as "ok".'),
    ("layers", "group", "", "The same keys for each layer, by its name."),
)

# What the probe writes into the header. The lower half is known at the first measured step, and missing in
# traces of before; a header may hold other keys, too.
_HEADER_TABLE = (
    ("model", "word", "", "Class of the model."),
    ("num_parameters", "count", "", "How many numbers are trained."),
    ("dtype", "word", "", "Type of the parameters."),
    ("measured_on", "word", "", "The training batch, or how many fixed batches."),
    ("fractions", "numbers", "1", "Every γ, if it is the same in all rows."),
    ("estimators", "group", "", "Estimators with their periods, in measurements."),
    ("every", "count", "steps", "Fewest steps between measurements."),
    ("max_overhead", "number", "1", "Gradients for measuring over training's, after ten rows."),
    ("world_size", "count", "", "How many processes train."),
    ("optimizer", "word", "", "Class of the optimizer."),
    ("optimizer_family", "word", "",
     '"sgd", "momentum", "adam", "adam-like", "sign", "muon" or "unknown".'),
    ("momentum", "number", "1", "Its momentum; missing where groups differ."),
    ("betas", "numbers", "1", "β₁ and β₂ of Adam; missing where groups differ."),
    ("weight_decay", "number", "", "Its weight decay; missing where groups differ."),
    ("start_lr", "number", "x²/loss", "The largest lr of its groups at the first measured step."),
    ("peak_lr", "number", "x²/loss", "The largest lr of its schedule, as far as its groups say."),
    ("clipping", "word", "", 'In the optimizer: "norm", "none" or the name of a rule.'),
    ("threshold", "word", "", 'Name of its option for `max_norm`: of NormalizedSGD "offset".'),
    ("max_norm", "number", "loss/x", "Norm beyond which it clips; missing where groups differ."),
    ("norm_scope", "word", "", 'Whose norm is clipped: "global", "group" or "tensor".'),
    ("training_mode", "flag", "", "Whether the model was in training mode."),
    ("num_steps", "count", "steps", "Steps that were planned, where the probe was told."),
)
# fmt: on
FIELDS = {name: Field(*rest) for name, *rest in _TABLE}
HEADER_FIELDS = {name: Field(*rest) for name, *rest in _HEADER_TABLE}
