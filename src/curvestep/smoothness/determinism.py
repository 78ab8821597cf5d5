"""The self-test of a replay: the same gradient twice, and the one that training computed; if not, why."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from curvestep.smoothness.observer import Mark, ObservedStep, fingerprint, have_same_values
from curvestep.smoothness.replay import Gradients, Replay, relative_gap, share_turned
from curvestep.smoothness.snapshot import restore_on_exit
from curvestep.tensors.distributed import any_rank
from curvestep.tensors.vectors import difference, global_norm, precision

_COMPILED = "_torchdynamo_orig_callable"  # an attribute of what torch.compile returns


class NonDeterministicError(RuntimeError):
    """The closure's gradient is not a function of the parameters alone, so differences of it mean nothing."""


class UntrackedParametersError(NonDeterministicError):
    """The loss depends on trained tensors that the replay neither moves nor puts back."""


def check_determinism(
    replay: Replay, trained: Gradients | None, seen: ObservedStep, *, clipped: bool
) -> tuple[float, Gradients, float]:
    r"""Relative difference between two replays of one gradient, the gradient, and the precision of its loss.

    Differences up to :math:`\sqrt\varepsilon` are rounding (kernels that add up in any order) and pass; of
    larger ones an error names the cause. The open ``replay`` is where training computed the gradient
    ``trained``, if the closure is to give the same; of one that may be ``clipped`` only the direction of each
    parameter's part is compared, up to clipping by value.
    """
    check_nothing_large_changed(replay, seen.changed_for_good())  # before a replay changes it again
    replay.keep_home()  # a closure that moves the parameters is found out here, and undone
    first, computed_in = _gradient_of_tracked(replay)
    eps = max(precision(replay.parameters), seen.eps, computed_in)
    tolerance = eps**0.5
    gap = 0.0
    if trained is not None:
        gap = share_turned(first, trained) if clipped else relative_gap(trained, first)
        if not clipped and not any_rank(gap != 0, replay.model):
            first = trained  # as it should be: one gradient less to hold
    error = check_repeatable(replay, first, tolerance=tolerance)
    differs = any_rank(gap > tolerance, replay.model) and not math.isnan(error)
    if trained is not None and differs and not (clipped and clipped_by_value(first, trained, tolerance)):
        raise NonDeterministicError(_why_not_training(replay, first, trained, gap, tolerance, seen))
    return error, first, eps  # an error that is not finite: nothing to compare


def check_repeatable(replay: Replay, first: Gradients, *, tolerance: float) -> float:
    """Relative difference between a gradient and its replay; NaN if one is not finite.

    Beyond ``tolerance`` an error names the cause.
    """
    check_nothing_large_changed(replay, replay.changed_for_good())
    before = replay.checksums()
    again = replay.gradient().gradients
    pairs = zip(before, replay.checksums(), strict=True)
    changed = [tensor for (tensor, old), (_, new) in pairs if new != old]  # through ``.data``
    check_nothing_large_changed(replay, next(iter(changed), None))
    apart = difference(again, first, overwrite=True)
    error = global_norm(apart).item() / (global_norm(first).item() or 1.0)
    if math.isnan(error):
        return math.nan
    if any_rank(error > tolerance, replay.model):
        raise NonDeterministicError(_why_not_itself(replay, error, tolerance))
    return error


def check_nothing_large_changed(replay: Replay, changed: Tensor | None) -> None:
    """Refuse a tensor that a pass changed, and that is too large to put back."""
    if any_rank(changed is not None, replay.model):
        where = "on another rank" if changed is None else f"of shape {tuple(changed.shape)}"
        raise NonDeterministicError(
            f"`{replay.function}` changes a tensor {where} in place, no buffer and too large to put back. "
            "Make it one: `module.register_buffer(name, tensor)`."
        )


def _why_not_itself(replay: Replay, error: float, tolerance: float) -> str:
    what = f"`{replay.function}` gave two different gradients at one point (they differ by {error:.1%}): "
    calls, loss = _recorded(replay)
    again, other = _recorded(replay)
    pairs = zip(calls, again, strict=False)
    changed = [(one, two) for one, two in pairs if not have_same_values(one.outputs, two.outputs, tolerance)]
    itself = [one for one, two in changed if have_same_values(one.inputs, two.inputs, tolerance)]
    drawn = [one.module for one, _ in changed if one not in itself]
    if changed:
        return what + _why_outputs_differ(itself, inputs_differ=replay.model in drawn)
    if not abs(loss - other) <= tolerance * max(abs(loss), abs(other)):
        return what + (
            "the model's output is the same, but the loss is not. The loss itself draws random numbers "
            "outside the global generators, or changes what it reads. Make it a function of the batch alone."
        )
    return what + (
        "the loss is the same, its gradient is not. A kernel adds up in random order. "
        "Call `torch.use_deterministic_algorithms(True)`."
    )


def _why_outputs_differ(itself: Sequence[Call], *, inputs_differ: bool) -> str:
    """Why outputs of modules differ, with those whose inputs do not; the model's own may."""
    if inputs_differ or not itself:
        return (
            "the model's input changes from call to call. The function draws (or augments) its batch. "
            "Draw the batch before, so that every call sees the same one."
        )
    inner = itself[0]  # those around it got the change from it
    return (
        f"module '{inner.name}' ({type(inner.module).__name__}) turns the same input into different outputs. "
        "It draws outside the global generators of torch, numpy and Python, or keeps state that is no "
        "buffer. Draw from torch's generator, or register the state as a buffer."
    )


def _why_not_training(
    replay: Replay,
    replayed: Gradients,
    trained: Gradients,
    gap: float,
    tolerance: float,
    seen: ObservedStep,
) -> str:
    what = f"The closure's gradient is not the one in `.grad` (they differ by {gap:.1%}): "
    scale = global_norm(trained).item() / (global_norm(replayed).item() or 1.0)
    scaled = [None if gradient is None else gradient * scale for gradient in replayed]
    if relative_gap(scaled, trained) <= 10 * tolerance:
        return what + (
            f"it is {scale:.4g} times the closure's. The gradient was clipped or scaled before the block. "
            "Clip inside the block. With a GradScaler call `scaler.unscale_(optimizer)` before it. Divide "
            "an accumulated loss by the number of micro-batches in the closure too. Or let "
            "`probe.watch(optimizer)` measure, which allows for both."
        )
    if clipped_by_value(replayed, trained, tolerance):
        return what + "it was clipped by value before the block. Clip inside the block."
    there = seen.trained.inputs
    again = seen.replayed.inputs
    here = again[: len(again) // 2]  # of the first replay
    if not there:
        return what + (
            "and the probe did not see the forward pass of training, so that dropout masks cannot be drawn "
            "again. Give the probe the module that you call, or call `probe.snapshot()` just before the "
            "forward pass."
        )
    if len(there) != len(here):
        return what + (
            f"training called the model {len(there)} times, the closure {len(here)} times. Let the closure "
            "run the same micro-batches as training: BatchNorm statistics, too, then come from the same "
            "batches. Call the model under `torch.no_grad()` for anything but training."
        )
    if not all(have_same_values(a, b, tolerance) for a, b in zip(there, here, strict=True)):
        return what + (
            "the model's input is not that of training. A lambda made in a loop uses the loop's last batch: "
            "write `lambda batch=batch: …`. A closure that draws random numbers before it calls the model "
            "needs `probe.snapshot()` before you compute the loss."
        )
    return what + (
        "`.grad` holds something else too. It may be a gradient left from an earlier step: call "
        "`model.zero_grad()`. It may be a penalty added by hand, or the gradient of another loss. Let the "
        "closure compute all of the loss, and nothing else. In float16, give the probe the loss scaler: "
        "`backward=lambda loss: scaler.scale(loss).backward()`."
    )


def clipped_by_value(gradients: Gradients, trained: Gradients, tolerance: float) -> bool:
    """Whether ``trained`` is the gradient with each entry clipped to a bound."""
    values = [t.to_dense() for t in trained if t is not None and t.numel()]
    bound = max((v.abs().max().item() for v in values), default=0.0)
    clipped = [None if g is None else g.to_dense().clamp(-bound, bound) for g in gradients]
    return relative_gap(clipped, trained) <= 10 * tolerance


class Call(NamedTuple):
    """One call of a module, with the fingerprints of its inputs and outputs."""

    name: str
    module: nn.Module
    inputs: list[Mark]
    outputs: list[Mark]


def _recorded(replay: Replay) -> tuple[list[Call], float]:
    """One replay with the fingerprints of every module's inputs and outputs, inner modules first."""
    calls: list[Call] = []

    def record(name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        calls.append(Call(name or "model", module, fingerprint((args, kwargs)), fingerprint(output)))

    with ExitStack() as hooks:
        for name, module in replay.model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(record, name), with_kwargs=True))
        loss = replay.gradient().loss.item()
    return calls, loss


def untracked_error(tensors: Sequence[Tensor]) -> UntrackedParametersError:
    """The error for tensors that training moves and a replay does not."""
    numbers = sum(tensor.numel() for tensor in tensors)
    return UntrackedParametersError(
        f"The loss also trains {len(tensors)} tensors outside `model` ({numbers} numbers, the first of shape "
        f"{tuple(tensors[0].shape)}). Give one module that holds all that is trained, such as "
        "`nn.ModuleList([encoder, head])`, and detach what is not trained. If another optimizer trains them, "
        "freeze them around this step: `other.requires_grad_(False)`, and True after it."
    )


class BackwardWatch(TorchFunctionMode):
    """Calls ``check(loss)`` before each ``loss.backward()`` of this thread, between ``start`` and ``stop``.

    It is off while a module of ``model`` computes: there a compiled model would notice the mode, and compile
    again. Other threads notice nothing of it.
    """

    def __init__(self, model: nn.Module, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._model = model
        self._check = check
        self._thread = threading.get_ident()
        self._depth = 0  # of calls of modules and of torch's functions
        self._hooks: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Callable[..., Any]]] = []  # by `module.compile()`

    def start(self) -> None:
        """Look at each ``backward()`` from now on."""
        for module in _modules_called_by_python(self._model):
            compiled = getattr(module, "_compiled_call_impl", None)
            if compiled is None:
                self._hooks.append(module.register_forward_pre_hook(self._pause))
                self._hooks.append(module.register_forward_hook(self._resume, always_call=True))
            else:  # its hooks are compiled too
                self._compiled.append((module, compiled))
                module._compiled_call_impl = self._paused_around(compiled)
        self.__enter__()

    def stop(self) -> None:
        """Leave everything as it was; may be called several times."""
        for hook in self._hooks:
            hook.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        self._take_off()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of each of its functions."""
        if func is Tensor.backward:
            self._check(args[0])
        self._depth += 1  # torch takes the mode off meanwhile
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._depth -= 1

    def _pause(self, *_: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._take_off()
        self._depth += 1

    def _resume(self, *_: object) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth == 0:
            self.__enter__()

    def _take_off(self) -> None:
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def _paused_around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            self._pause()
            try:
                return call(*args, **kwargs)
            finally:
                self._resume()

        return paused


def _modules_called_by_python(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside of it, but not what is inside of a compiled one."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    yield module
    if getattr(module, "_compiled_call_impl", None) is None and not hasattr(module.forward, _COMPILED):
        for child in module.children():
            yield from _modules_called_by_python(child)


def _gradient_of_tracked(replay: Replay) -> tuple[list[Tensor | None], float]:
    """A replay's gradient, and the coarsest precision of what ``backward()`` was called on.

    Raises before ``backward()`` changes the gradient of a tensor outside the model, also where the closure
    calls it.
    """
    sharded = any(isinstance(p, DTensor) for p in replay.parameters)  # FSDP2 computes with tensors of its own
    known = {id(p) for p in replay.parameters}
    precisions: list[float] = []

    def check(loss: Tensor) -> None:
        precisions.append(computed_precision(loss))
        untracked = [leaf for leaf in leaves(loss) if id(leaf) not in known and _is_trained(leaf)]
        if untracked and not sharded:
            raise untracked_error(untracked)

    watch = BackwardWatch(replay.model, check)
    try:
        with restore_on_exit(watch.stop):
            watch.start()
            gradients = replay.gradient().gradients
    except BaseException:  # Ctrl-C may have come as the block ended
        watch.stop()
        raise
    return gradients, max(precisions, default=0.0)


def _is_trained(leaf: Tensor) -> bool:
    """False for one made inside the closure to differentiate by, as in a gradient penalty."""
    return isinstance(leaf, nn.Parameter) or leaf.grad is not None


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that ``loss.backward()`` leaves gradients in.

    Example:
        >>> w = nn.Parameter(Tensor([2.0]))
        >>> [leaf is w for leaf in leaves((w * w).sum())]
        [True]
    """
    return [node.variable for node in _nodes(loss) if type(node).__name__ == "AccumulateGrad"]


def computed_precision(loss: Tensor) -> float:
    """Relative precision of the coarsest dtype on the way from the parameters to ``loss``.

    Frameworks enter autocast anywhere, often inside of the model; its casts are in the graph.

    Example:
        >>> w = nn.Parameter(torch.ones(2, dtype=torch.float32))
        >>> computed_precision(w.bfloat16().sum().float()), computed_precision(w.sum()) < 1e-6
        (0.0078125, True)
    """
    dtypes = {m.dtype for node in _nodes(loss) for m in getattr(node, "_input_metadata", ())}
    dtypes.add(loss.dtype)
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)


def _nodes(loss: Tensor) -> list[Any]:
    """The nodes of the graph behind ``loss``."""
    waiting: list[Node | None] = [loss.grad_fn]
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting.extend(after for after, _ in node.next_functions)
    return list(seen)
