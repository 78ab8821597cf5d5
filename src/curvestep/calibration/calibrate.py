"""Learning rate and clipping threshold before training, by short trials at the starting point.

Which rates are tried, and how the answer is read, is the rule of ``ladder``. Here its trials get what they
need: a start that is put back, batches, and the rate to begin with. Adam's has no unit. SGD's has one: its
scale is the largest working step along a batch's gradient at the start.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.calibration import calibration_words as words
from curvestep.calibration.bracket import Gradients, step_along_gradient
from curvestep.calibration.ladder import (
    FIRST_STEPS,
    FIRST_TRIALS,
    GROWN,
    GROWN_WITH_CLIP,
    GROWTH,
    NEXT_TRIALS,
    Budget,
    Ladder,
    answer,
    budget_of,
    doubts,
)
from curvestep.calibration.loaders import Batch, Supply, check_batches, unmoved
from curvestep.calibration.lr_schedules import check_schedule, peak_lr, shares_of_parameters
from curvestep.calibration.method import Method, method_of
from curvestep.calibration.result import Calibration
from curvestep.calibration.trials import Judging, Trials
from curvestep.checks import check_positive
from curvestep.optimizer_family import Family
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.smoothness.replay import trainable_parameters
from curvestep.smoothness.snapshot import PassState, restore_on_exit
from curvestep.smoothness.surroundings import Surroundings
from curvestep.tensors.vectors import difference, global_norm

NUM_JUDGES = 16  # batches that trials are judged by
CLIP_AT = (0.6, 1.75)  # thresholds by the first gradient norm: of batches with nothing, with all in common
ADAM_SCALE, ADAM_MAX_NORM = 0.004, 1.0  # of Adam, where it has no threshold of its own
MUON_SCALE = 0.02  # of Muon, and of others beside it in units of theirs
# Whose answer may be clear after two lengths: Muon's goes on falling on a development task.
CLEAR_FAMILIES = (Family.ADAM, Family.MOMENTUM, Family.SGD)
REPEATABLE = 0.04  # part of a gradient by which it may differ from itself


def calibrate(
    model: nn.Module,
    loss_of_batch: Callable[[Batch], Tensor | float],
    batches: Iterable[Batch],
    *,
    optimizer: str | type | Optimizer | Sequence[Optimizer] = "ClippedSGD",
    momentum: float | None = None,
    weight_decay: float | None = None,
    max_norm: float | None = None,
    schedule: str | None = None,
    num_steps: int | None = None,
    budget: float | None = None,
    metric: Callable[[Batch], Tensor | float] | None = None,
    progress: bool | None = None,
) -> Calibration:
    r"""Find a learning rate and ``max_norm`` by short trials before training; nothing is changed.

    Trials run the whole schedule in 16 steps, then in 48, and in more where the answer is doubtful. They are
    judged by batches that they do not step on. The rule is in :mod:`~curvestep.calibration.ladder`.

    Parameters, buffers, ``.grad``, optimizer, random states and a loader's own generator are the same bits
    afterwards, after an interrupt too. Batch size, and gradient accumulation inside ``loss_of_batch``, are
    part of what is measured. Under DDP and FSDP2 every rank calls with its share of each batch.

    Args:
        model: The model to be trained, in the mode it will be trained in: plain, DDP or FSDP2.
        loss_of_batch: Loss of a batch, a scalar; or a function that itself calls ``backward()`` for several
            micro-batches and returns the loss as a number.
        batches: At least three, better 24 or, for longer trials, 80 to 200. A data loader is read only as far
            as needed.
        optimizer: The instance that will train, or its class or name; or a list of instances that train
            together. Only the ratios between learning rates are used. For optimizers other than Adam's, SGD's
            and Muon, trials begin at the largest.
        momentum: SGD's momentum, if ``optimizer`` is a class or a name.
        weight_decay: The weight decay, if ``optimizer`` is a class or a name.
        max_norm: The threshold that training clips at outside of the optimizer, as by ``clip_grad_norm_``;
            ``math.inf`` if it does not clip.
        schedule: ``"constant"``, the default, or ``"warmup-decay"``: ``lr`` is then the peak of a warm-up
            over about a tenth of the steps and a decay to zero.
        num_steps: Steps that training will take, if known.
        budget: Gradients that the trials may take, or, if at most one, a share of ``num_steps``. More of them
            buy longer trials. Default: about 230, and up to 480 or a twentieth of ``num_steps`` where the
            answer is doubtful; for SGD, whose threshold has to be earned, about 320 and up to 640.
        metric: What to judge trials by instead of the loss: a number for a batch, smaller is better, such as
            an error against data, or minus a reward.
        progress: Whether to show the trials on standard error. Default: where that is a terminal.

    Returns:
        The learning rate and the threshold, with the trials, how far to trust them, and warnings.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: The loss, the batches or the optimizer cannot be calibrated.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 1, bias=False)
        >>> batches = [torch.randn(8, 2) for _ in range(80)]
        >>> loss = lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()
        >>> cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay")
        >>> cal.max_norm, sorted({trial.num_steps for trial in cal.trials})
        (1.0, [16, 48])
    """
    trainable_parameters(model)  # refuses what is no model, and a lazy one
    check_function("loss_of_batch", loss_of_batch)
    if metric is not None:
        check_function("metric", metric)
    check_batches(batches)
    shape = schedule or "constant"
    check_schedule(shape)
    method = method_of(optimizer, model, momentum=momentum, weight_decay=weight_decay)
    given = method.max_norm
    if max_norm is not None:  # what clips less does nothing
        given = min(given, check_threshold(max_norm))
    chooses = max_norm is None and math.isinf(given)
    earns = chooses and method.family.is_descent and method.threshold == "max_norm"
    limit = budget_of(budget, num_steps, GROWN_WITH_CLIP if earns else GROWN)
    if method.family not in CLEAR_FAMILIES:
        limit = Budget(limit.most, uses_all=True, longest=limit.longest)
    is_shown = sys.stderr.isatty() if progress is None else progress
    began = perf_counter()

    def show(text: str) -> None:
        if is_shown:
            print(f"{text}, {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    usual = min(limit.most, FIRST_TRIALS * limit.first_steps + NEXT_TRIALS * GROWTH * FIRST_STEPS)
    show(words.before(method.name, limit.most if limit.uses_all else usual, limit.most))
    functions = [loss_of_batch] if metric is None else [loss_of_batch, metric]
    surroundings = Surroundings(functions, model)
    with restore_on_exit(surroundings.restore), unmoved(batches):
        supply = Supply(batches, model, NUM_JUDGES, limit.first_steps)
        steps = supply.steps(0, 3)
        passes = BatchReplay(model, _either(loss_of_batch, metric))
        with passes:
            with restore_on_exit(PassState(model).keep_large()):
                loss, grad_norm, num_idle = _look(passes, steps[0], method)
            scale, threshold = scale_and_threshold(passes, steps, method, given, chooses=chooses)
            trials = Trials(passes, method, shape, supply, show)
            ladder = Ladder(
                trials.run,
                limit,
                scale / 2 if shape == "constant" else scale * 2,
                max_norm=math.inf if earns else threshold,
                to_earn=threshold if earns else math.inf,
            )
            ladder.climb()
    start = words.of_start(passes, method, loss, grad_norm, num_idle, batches, supply.known)
    asked = words.of_schedule(method, schedule, num_steps)
    warnings = (*start, *asked, *words.of_rungs(ladder.rungs, doubts(ladder.rungs)))
    return Calibration(
        optimizer=method.name,
        family=method.family,
        threshold=method.threshold,
        momentum=method.momentum,
        lr=answer(ladder.rungs, num_steps),
        max_norm=ladder.max_norm,
        schedule=shape,
        confidence=words.confidence(warnings),
        trials=tuple(ladder.trials),
        loss=loss,
        grad_norm=grad_norm,
        num_gradients=passes.num_gradients,
        seconds=perf_counter() - began,
        warnings=warnings,
        clips_outside=max_norm is not None,
    )


def check_threshold(max_norm: float) -> float:
    """Refuse a threshold that is not above zero; infinite is none."""
    return max_norm if max_norm == math.inf else check_positive("max_norm", max_norm)


def check_function(name: str, function: object) -> None:
    """Refuse what cannot be called with one batch."""
    if not callable(function):
        raise TypeError(
            f"`{name}` must be a function that takes a batch and returns its loss, got a "
            f"{type(function).__name__}. The order is `calibrate(model, loss_of_batch, batches)`."
        )
    takes: Any = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(takes)
    except (TypeError, ValueError):  # a builtin does not say
        return
    try:
        signature.bind(None)
    except TypeError as error:
        what = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"`{name}(batch)` is called with one batch, and {what} does not take one argument ({error}). "
            "Write a function, such as `lambda batch: criterion(model(batch[0]), batch[1])`."
        ) from None


def _either(
    loss_of_batch: Callable[[Batch], Tensor | float], metric: Callable[[Batch], Tensor | float] | None
) -> Callable[[Batch], Tensor | float]:
    """The loss of a batch to step on, and the metric, if there is one, of a batch to judge by."""
    loss = _named("loss_of_batch", loss_of_batch)
    if metric is None:
        return lambda batch: loss(batch.batch if isinstance(batch, Judging) else batch)
    judge = _named("metric", metric)

    def either(batch: Batch) -> Tensor | float:
        if not isinstance(batch, Judging):
            return loss(batch)
        return torch.as_tensor(judge(batch.batch)).detach()

    return either


def _named(name: str, function: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """The same function; what it raises says whose it is."""

    @wraps(function)
    def named(batch: Batch) -> Any:
        try:
            return function(batch)
        except Exception as error:
            error.add_note(f"Raised inside your `{name}`, which calibrate called with one of your batches.")
            raise

    return named


def _look(passes: BatchReplay, batch: Batch, method: Method) -> tuple[float, float, int]:
    """Loss and gradient norm of a batch, and how many parameters with a gradient the optimizer leaves."""
    loss, gradients = passes.gradient_of(batch)
    norm = global_norm(gradients).item()
    check_start(loss, norm)
    shares = shares_of_parameters(method.optimizers, passes.parameters)
    trained = [share > 0 for share, g in zip(shares, gradients, strict=True) if g is not None]
    if not any(trained):
        raise ValueError("`optimizer` trains no parameter that the loss depends on, or with an lr of zero.")
    passes.check_repeatable(batch, gradients, tolerance=REPEATABLE)
    return loss, norm, trained.count(False)


def scale_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], method: Method, given: float, *, chooses: bool
) -> tuple[float, float]:
    """The lr to try around, and the threshold: ``given``, or one of our own to begin with or to earn."""
    threshold = given
    if method.family.is_descent:
        shares = shares_of_parameters(method.optimizers, passes.parameters)
        step, measured = _step_and_threshold(passes, batches, shares)
        scale = step * (1.0 - method.momentum)
        if chooses or (math.isinf(given) and method.threshold != "max_norm"):
            threshold = measured
    elif method.family is Family.ADAM:
        scale = ADAM_SCALE
        if chooses and len(method.optimizers) == 1:
            threshold = ADAM_MAX_NORM
    elif method.family is Family.MUON:
        scale = ADAM_SCALE if method.is_rms_matched else MUON_SCALE
    else:
        scale = peak_lr(method.optimizers)
    return method.lr_of(scale, threshold), threshold


def _step_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], shares: Sequence[float]
) -> tuple[float, float]:
    r"""The median step, and the threshold :math:`c_0^{1-\rho^2} c_1^{\rho^2} \lVert g \rVert`.

    :math:`\rho` is the mean cosine between the batches' gradients. Where they agree, the norm at the start is
    that of a signal, which fades; where they do not, it is that of noise, which the signal will exceed.
    """
    steps, norms, guess = list[float](), list[float](), None
    total: Gradients = [None] * len(shares)  # of the directions, with the other sign
    for batch in batches:
        at = partial(_gradient_at, passes, batch)
        guess, gradients = step_along_gradient(at, passes.parameters, shares, guess)
        steps.append(guess)  # the next search begins there
        norms.append(global_norm(gradients).item())
        units = each(lambda g: g.to(torch.promote_types(g.dtype, torch.float32)) / norms[-1], gradients)
        total = difference(total, units, overwrite=True)
    passes.restart()
    count = len(norms)
    agreement = (global_norm(total).item() ** 2 - count) / max(1, count * (count - 1))
    weight = min(max(agreement, 0.0), 1.0) ** 2
    return median(steps), CLIP_AT[0] ** (1.0 - weight) * CLIP_AT[1] ** weight * median(norms)


def _gradient_at(
    passes: BatchReplay, batch: Batch, direction: Gradients, fraction: float
) -> tuple[float, Gradients]:
    passes.move(direction, fraction)
    loss, gradients = passes.gradient_of(batch)
    if fraction == 0:
        check_start(loss, global_norm(gradients).item())
    return loss, each(Tensor.to_dense, gradients)


def check_start(loss: float, grad_norm: float) -> None:
    """Refuse a start from which nothing can be trained."""
    if not math.isfinite(loss):
        raise ValueError(f"The loss at the start is {loss}. Look at the initialisation and the batch.")
    if not math.isfinite(grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is, as of a root at zero."
        )
    if grad_norm == 0:
        raise ValueError("The gradient at the start is zero. Are all parameters zero, or all units dead?")
