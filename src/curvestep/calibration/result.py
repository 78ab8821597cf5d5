"""What a calibration found: learning rate, threshold, how sure, why, the steps it was read from; its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from curvestep._files import dump_json, load_json, write_atomically
from curvestep.calibration.bracket import Point

CALIBRATION = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    r"""What steps along one batch's gradient did.

    Args:
        points: Every step measured, in ascending order: ``step``, ``kappa``, ``loss``, ``safe``.
        safe_step: The largest safe step :math:`h`.
        loss: The batch's loss at the start.
        grad_norm: Norm of the batch's gradient at the start.
        stretch: How many times the largest safe step the other batches' loss falls straight on.
    """

    points: tuple[Point, ...]
    safe_step: float
    loss: float
    grad_norm: float
    stretch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    r"""Learning rate and threshold, and what they were read from.

    Args:
        optimizer: The optimizer they are for.
        lr: Learning rate :math:`\eta`; the peak of a warm-up or decay schedule.
        max_norm: Gradient norm :math:`\gamma` at which to clip; for NormalizedSGD its ``offset``; infinite
            for Adam and AdamW.
        step_cap: Longest step a clipped run can take, :math:`\eta\gamma/(1-\beta)` with momentum
            :math:`\beta`.
        lr_interval: 90 % interval of ``lr`` from the spread of the batches; NaN for a single batch.
        grad_norm: Median gradient norm at the start.
        num_gradients: Gradients evaluated.
        max_kappa: Largest safe change of the gradient, relative to itself.
        clip_at: ``max_norm / grad_norm``.
        agreement: Mean cosine of the angles between the batches' gradients; NaN for a single batch.
        limit: What limits ``lr``: ``"curvature"``, ``"noise"``, or ``"unknown"`` where no step lowers the
            loss of batches that it was not taken on.
        curve: The measured steps, batch by batch.
        warnings: What to know before relying on the numbers.
    """

    optimizer: str
    lr: float
    max_norm: float
    step_cap: float
    lr_interval: tuple[float, float]
    grad_norm: float
    num_gradients: int
    max_kappa: float
    clip_at: float
    agreement: float
    curve: tuple[BatchCurve, ...]
    limit: str = "curvature"
    warnings: tuple[str, ...] = ()

    @property
    def offset(self) -> float:
        """The ``offset`` of NormalizedSGD: ``max_norm`` by its other name."""
        return self.max_norm

    @property
    def along_signs(self) -> bool:
        """Whether steps were measured along the signs of the gradient, as Adam takes them."""
        return self.optimizer in ("Adam", "AdamW")

    @property
    def threshold(self) -> str:
        """The threshold by its optimizer's name for it, ready to follow ``lr`` in a line; empty for Adam."""
        if self.along_signs:
            return ""
        return f", {'offset' if self.optimizer == 'NormalizedSGD' else 'max_norm'} {self.max_norm:.3g}"

    @property
    def reasons(self) -> tuple[str, str]:
        """Why these numbers, in two sentences."""
        step = median(batch.safe_step for batch in self.curve)
        falls = "lowers its loss by at least a tenth of what the slope promises"
        if self.along_signs:
            return (
                f"A step of {step:.3g} along the signs of the gradient, and no longer one, lowers the slope "
                f"of a batch's loss along it by at most {self.max_kappa:g} times itself and {falls}.",
                f"The learning rate is {self.lr / step:.2g} of that, which leaves room for momentum; a "
                "threshold is not part of it.",
            )
        measured = (
            f"A step of {step:.3g} along its gradient, and no longer one, changes the gradient of a batch by "
            f"at most {self.max_kappa:g} times itself and {falls}."
        )
        stretch = median(batch.stretch for batch in self.curve)
        if stretch > 1.0:
            measured += f" The loss of other batches falls straight on to {stretch:.2g} times that step."
        agree = ""
        if len(self.curve) > 1:
            agree = f" and the mean cosine between batches {self.agreement:.2f}"
        return measured, (
            f"The gradient norm at the start is {self.grad_norm:.3g}{agree}; clipping at {self.clip_at:.2g} "
            f"times that keeps every step within {self.clip_at:.2g} times the length that was measured to be "
            "safe."
        )

    def __str__(self) -> str:
        low, high = self.lr_interval
        count = len(self.curve)
        sure = f" (90 % interval {low:.3g} to {high:.3g})" if count > 1 else ""
        batches = "1 batch" if count == 1 else f"{count} batches"
        cap = "" if self.along_signs else f", step_cap {self.step_cap:.3g}"
        lines = [
            f"{self.optimizer}: lr {self.lr:.3g}{sure}{self.threshold}{cap}; from {self.num_gradients} "
            f"gradients of {batches}",
            *self.reasons,
            *(f"Warning: {words}" for words in self.warnings),
        ]
        return "\n".join(lines)


RISES = "the safe step of one batch raises the loss of the others"


def limited(found: Calibration, fraction: float, limit: str) -> Calibration:
    """``found`` with a fraction of its ``lr``, because of noise or because nothing can be told."""
    if limit == "noise":
        words = (
            f"noise, not curvature, is the limit: {RISES}. Their loss is lowest at {fraction:.2g} of that "
            "step, and lr is that fraction of what curvature allows. Larger batches allow more."
        )
    else:
        words = (
            f"cannot tell: {RISES}, and no part of it lowers their loss for sure. The start may be an "
            f"optimum, up to noise. lr is {fraction:.2g} of what curvature allows, which should do no harm. "
            "Larger batches say more."
        )
    return replace(
        found,
        lr=fraction * found.lr,
        step_cap=fraction * found.step_cap,
        lr_interval=(fraction * found.lr_interval[0], fraction * found.lr_interval[1]),
        limit=limit,
        warnings=(*found.warnings, words),
    )


def write_calibration(folder: str | Path, found: Calibration) -> Path:
    """Keep ``found`` in the folder of a run, made if it is not there; the file."""
    path = Path(folder) / CALIBRATION
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump_json(asdict(found), indent=2) + "\n")
    return path


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration that the folder of a run keeps; None if its numbers were given by hand."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    try:
        values = load_json(path.read_text(encoding="utf-8"))
        curve = []
        for batch in values.pop("curve"):
            points = tuple(Point(**point) for point in batch.pop("points"))
            curve.append(BatchCurve(**batch, points=points))
        low, high = map(float, values.pop("lr_interval"))
        warnings = tuple(values.pop("warnings"))
        return Calibration(**values, lr_interval=(low, high), curve=tuple(curve), warnings=warnings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None
