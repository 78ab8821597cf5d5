"""What a calibration found: learning rate, threshold, how sure, why, the steps it was read from; its file."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from curvestep._files import dump_json, load_json, write_atomically
from curvestep.bracket import Point
from curvestep.calibration.method import flattened, peak_lr, rescale
from curvestep.display.markup import html_table
from curvestep.optimizer_family import Family, family_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALIBRATION = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    r"""What steps along one batch's gradient did.

    Args:
        points: Every step measured, in ascending order: ``step``, ``kappa``, ``loss``, ``safe``.
        safe_step: The largest safe step :math:`h`.
        loss: The batch's loss at the start.
        grad_norm: Norm of the batch's gradient at the start.
        stretch: Times the largest safe step that ``lr`` is, because other batches' loss falls straight on.
    """

    points: tuple[Point, ...]
    safe_step: float
    loss: float
    grad_norm: float
    stretch: float = 1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    r"""Learning rate and threshold, and what they were read from.

    Args:
        optimizer: The optimizer they are for.
        lr: Learning rate :math:`\eta` for ``schedule``; the largest one if groups differ.
        max_norm: Gradient norm :math:`\gamma` at which to clip; for NormalizedSGD its ``offset``; infinite
            for Adam without a schedule.
        step_cap: Longest step a clipped run can take, :math:`\eta\gamma/(1-\beta)` with momentum
            :math:`\beta`; infinite for Adam, whose steps do not follow the gradient's length.
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
        schedule: ``"constant"``, or ``"warmup-decay"``, of which ``lr`` is the peak.
        momentum: The momentum that the numbers are for.
        pilot: Peaks that a pilot tried, and the change of the loss over each of its runs.
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
    schedule: str = "constant"
    momentum: float = 0.0
    pilot: tuple[tuple[float, float], ...] = ()

    @property
    def offset(self) -> float:
        """The ``offset`` of NormalizedSGD: ``max_norm`` by its other name."""
        return self.max_norm

    @property
    def along_signs(self) -> bool:
        """Whether steps were measured along the signs of the gradient, as Adam takes them."""
        return family_of(self.optimizer) is Family.ADAM

    @property
    def threshold(self) -> str:
        """The threshold by its optimizer's name for it, ready to follow ``lr`` in a line; empty for none."""
        if math.isinf(self.max_norm):
            return ""
        return f", {'offset' if self.optimizer == 'NormalizedSGD' else 'max_norm'} {self.max_norm:.3g}"

    @property
    def reasons(self) -> tuple[str, str]:
        """Why these numbers, in two sentences."""
        step = median(batch.safe_step for batch in self.curve)
        falls = "lowers its loss by at least a tenth of what the slope promises"
        norm = f"The gradient norm at the start is {self.grad_norm:.3g}"
        clipped = f"; clipping at {self.clip_at:.2g} times that"
        if self.along_signs:
            slope = self.schedule == "constant"
            change = "the slope of a batch's loss along it" if slope else "a batch's gradient (by its 1-norm)"
            kept = "a threshold is not part of it."
            if not math.isinf(self.max_norm):
                kept = f"{norm.lower()}{clipped} keeps single gradients out of both moments."
            if not slope:
                kept += " Warm up over a tenth of the steps or so: without it this lr is too large."
            return (
                f"A step of {step:.3g} along the signs of the gradient, and no longer one, changes {change} "
                f"by at most {self.max_kappa:g} times itself and {falls}.",
                f"The learning rate is {self.lr / step:.2g} times that; {kept}",
            )
        measured = (
            f"A step of {step:.3g} along its gradient, and no longer one, changes the gradient of a batch by "
            f"at most {self.max_kappa:g} times itself and {falls}."
        )
        stretch = median(batch.stretch for batch in self.curve)
        if stretch > 1.0:
            times = f"{stretch:.2g} times" if stretch >= 1.05 else "a little above"
            measured += f" The loss of other batches falls straight on: lr is {times} that."
        agree = f" and the mean cosine between batches {self.agreement:.2f}" if len(self.curve) > 1 else ""
        longest = self.step_cap / (step * self.grad_norm)
        return measured, (
            f"{norm}{agree}{clipped} keeps every step within {longest:.2g} times the length that was "
            "measured to be safe."
        )

    @property
    def _headline(self) -> str:
        low, high = self.lr_interval
        count = len(self.curve)
        sure = f" (90 % interval {low:.3g} to {high:.3g})" if count > 1 else ""
        peak = "" if self.schedule == "constant" else ", the peak of a warm-up and decay"
        batches = "1 batch" if count == 1 else f"{count} batches"
        cap = "" if self.along_signs else f", step_cap {self.step_cap:.3g}"
        return (
            f"{self.optimizer}: lr {self.lr:.3g}{sure}{peak}{self.threshold}{cap}; from "
            f"{self.num_gradients} gradients of {batches}"
        )

    def __str__(self) -> str:
        warnings = (f"Warning: {words}" for words in self.warnings)
        return "\n".join([self._headline, *self.reasons, *([self._pilots] if self.pilot else []), *warnings])

    def __repr__(self) -> str:
        return f"<Calibration of {self.optimizer}: lr {self.lr:.3g}{self.threshold}>"

    def _repr_html_(self) -> str:
        rows = [
            (str(number + 1), f"{batch.loss:.4g}", f"{batch.grad_norm:.3g}", f"{batch.safe_step:.3g}")
            for number, batch in enumerate(self.curve)
        ]
        names = ("batch", "loss", "gradient norm", "largest safe step")
        notes = (*self.reasons, *([self._pilots] if self.pilot else []), *self.warnings)
        return html_table(self._headline, [names, *rows], notes)

    def plot(self, *, title: str = "") -> Figure:
        """Change of the gradient and of the loss over steps of growing length; needs matplotlib."""
        from curvestep.display.drawing import figure_of
        from curvestep.display.results import calibration

        note = f"{self.optimizer}: lr {self.lr:.3g}{self.threshold}; {self.num_gradients} gradients"
        return figure_of(calibration(self), title=title, note=note)

    @property
    def _pilots(self) -> str:
        runs = ", ".join(f"{change:+.3g} at {lr:.2g}" for lr, change in self.pilot)
        return f"Pilots of the whole schedule changed the loss by {runs}; lr is between their best and h."

    def times(self, factor: float) -> Calibration:
        """The same with another ``lr``."""
        low, high = self.lr_interval
        return replace(
            self,
            lr=factor * self.lr,
            step_cap=factor * self.step_cap,
            lr_interval=(factor * low, factor * high),
        )

    def apply(self, optimizer: Optimizer, *schedulers: Any) -> None:
        """Set the learning rate and the threshold of an optimizer, and of its schedules.

        The largest peak of its groups becomes ``lr``; every other learning rate is multiplied by the same
        factor, so that groups keep their ratios and schedules their shape: ``initial_lr``, the schedulers'
        ``base_lrs``, their floors (``eta_min``, ``min_lrs``) and, wherever the schedule stands, the ``lr`` of
        this step. ``max_norm`` (or ``offset``) is set in the groups of an optimizer that clips by itself
        or by ``curvestep.clip``; with any other a warning says that it is left to you.

        Args:
            optimizer: Of the kind that was calibrated for.
            schedulers: Every scheduler of the optimizer.

        Raises:
            ValueError: the optimizer is another one, or has a scheduler that was not given.

        Example:
            >>> import torch
            >>> from curvestep import ClippedSGD, calibrate
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> opt = ClippedSGD(model.parameters(), lr=1.0, max_norm=1.0)
            >>> warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=10)
            >>> loss = lambda scale: scale * model.weight.square().sum()
            >>> cal = calibrate(model, loss, [2.0] * 4, optimizer=opt)
            >>> cal.apply(opt, warmup)
            >>> round(opt.param_groups[0]["initial_lr"], 6), round(opt.param_groups[0]["lr"], 6)
            (0.25, 0.125)
        """
        if family_of(type(optimizer)) is not family_of(self.optimizer):
            raise ValueError(
                f"This was measured for {self.optimizer}, got a {type(optimizer).__name__}. Calibrate with "
                "`optimizer=` the one that trains."
            )
        momenta = {float(group.get("momentum", 0.0)) for group in optimizer.param_groups}
        if not self.along_signs and momenta != {self.momentum}:
            raise ValueError(
                f"This was measured for momentum {self.momentum:g}, got {sorted(momenta)}. Calibrate with "
                "`optimizer=` the one that trains."
            )
        scope = optimizer.defaults.get("norm_scope", "global")
        if scope != "global":
            raise ValueError(
                f"max_norm is for the norm of all parameters, and this optimizer clips each {scope}. Make it "
                "with norm_scope='global'."
            )
        every = flattened(schedulers)
        for scheduler in every:
            if scheduler.optimizer is not optimizer:
                raise ValueError(f"The {type(scheduler).__name__} belongs to another optimizer.")
        if not every and any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                "`optimizer` has a scheduler, which would set its own learning rate again at its next step. "
                "Give it too: `apply(optimizer, scheduler)`."
            )
        rescale(optimizer, every, self.lr / peak_lr(optimizer, every))
        name = "offset" if family_of(self.optimizer) is Family.NORMALIZED else "max_norm"
        for group in optimizer.param_groups:
            if name in group:
                group[name] = self.max_norm
        if math.isfinite(self.max_norm) and not any(name in group for group in optimizer.param_groups):
            warnings.warn(
                f"lr {self.lr:.3g} was measured together with max_norm {self.max_norm:.3g}, and this "
                f"{type(optimizer).__name__} does not clip: call `curvestep.clip(optimizer, cal.max_norm)` "
                "before `apply`, or clip at it yourself, before every step.",
                stacklevel=2,
            )


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
    return replace(found.times(fraction), limit=limit, warnings=(*found.warnings, words))


def write_calibration(folder: str | Path, found: Calibration) -> Path:
    """Keep ``found`` in the folder of a run, made if it is not there; the file."""
    path = Path(folder) / CALIBRATION
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump_json(found, indent=2) + "\n")
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
        pilot = tuple((float(lr), float(change)) for lr, change in values.pop("pilot", ()))
        return Calibration(
            **values, lr_interval=(low, high), curve=tuple(curve), warnings=warnings, pilot=pilot
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None
