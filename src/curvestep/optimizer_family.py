"""Which optimizer this is: the one place that knows optimizers by the names of their classes.

By name, because a trace holds names, and because optimizers of other packages need not be installed. Torch is
imported only where an optimizer is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer


class Family(StrEnum):
    r"""How an optimizer makes a direction of its gradients :math:`g`, however it scales them before."""

    SGD = "sgd"  # −η g
    MOMENTUM = "momentum"  # −η m, m a sum or mean of gradients
    ADAM = "adam"  # −η m/(√v + ε), with v in the state as torch keeps it
    ADAM_LIKE = "adam-like"  # a variant of it: other corrections, norms or states
    SIGN = "sign"  # −η sign(m)
    MUON = "muon"  # −η times an orthogonal matrix
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Family | None:
        # Files of before name a family of its own for NormalizedSGD.
        return cls.SGD if value == "normalized" else None

    @property
    def is_adaptive(self) -> bool:
        """Whether steps are divided by the gradient's own size, coordinate by coordinate."""
        return self in (Family.ADAM, Family.ADAM_LIKE)

    @property
    def is_descent(self) -> bool:
        """Whether steps go along gradients, or along sums of them."""
        return self in (Family.SGD, Family.MOMENTUM)


_FAMILIES = {
    **dict.fromkeys(("SGD", "ClippedSGD", "NormalizedSGD", "ScaledSGD"), Family.SGD),
    **dict.fromkeys(("Adam", "AdamW", "ClippedAdamW", "FusedAdam"), Family.ADAM),
    **dict.fromkeys(("NAdam", "RAdam", "Adamax"), Family.ADAM_LIKE),
    **dict.fromkeys(("Lion", "SignSGD", "Signum"), Family.SIGN),
    "Muon": Family.MUON,
}


def family_of(optimizer: Any) -> Family:
    """The family of an optimizer, given as an instance (wrapped or not), a class or the name of one.

    A subclass counts as its nearest base that is known; only an instance tells whether it has momentum.

    Example:
        >>> family_of("ClippedAdamW").value, family_of("NormalizedSGD").value, family_of("Shampoo").value
        ('adam', 'sgd', 'unknown')
    """
    family = _family_by_name(_known_name(optimizer))
    if family is Family.SGD and any(momenta(optimizer)):
        return Family.MOMENTUM
    return family


def momenta(optimizer: object) -> list[float]:
    """The momentum of an instance's groups: one, unless they differ."""
    groups = getattr(inner_optimizer(optimizer), "param_groups", ())
    return sorted({float(group.get("momentum", 0.0)) for group in groups})


def threshold_of(optimizer: object) -> str:
    """Name of the group entry with the gradient norm at which steps stop growing, of an instance or a class.

    Example:
        >>> import curvestep as cs, torch
        >>> threshold_of(cs.NormalizedSGD), threshold_of(torch.optim.SGD)
        ('offset', 'max_norm')
    """
    name = getattr(inner_optimizer(optimizer), "threshold", None)
    return name if isinstance(name, str) else "max_norm"


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Everything that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def register_first_step_pre_hook(
    optimizer: Optimizer, hook: Callable[..., None]
) -> torch.utils.hooks.RemovableHandle:
    """A hook that is called when a step begins, before the hooks that the optimizer has already."""
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage] (no public name)
    hooks.move_to_end(handle.id, last=False)
    return handle


def is_muon_group(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether Muon steps a group: it says so itself (``use_muon``) where one optimizer has other groups too.

    Example:
        >>> is_muon_group("Muon", {}), is_muon_group("Muon", {"use_muon": False}), is_muon_group("AdamW", {})
        (True, False, False)
    """
    return bool(group.get("use_muon", family_of(optimizer) is Family.MUON))


def check_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer that steps: ``optimizer``, or what frameworks wrapped in it."""
    from torch.optim import Optimizer

    inner = inner_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"`optimizer` must be a torch optimizer, got a {type(optimizer).__name__}.")
    return inner


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of frameworks (Accelerate's, Lightning's, Fabric's), or itself."""
    # Only torch's own optimizers call hooks around a step.
    while hasattr(optimizer, "optimizer") and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer = optimizer.optimizer
    return optimizer


def torch_name(name: str) -> str:
    """The optimizer of torch that takes the same steps, but for clipping.

    Example:
        >>> torch_name("ClippedAdamW"), torch_name("Lion")
        ('AdamW', 'Lion')
    """
    return name.removeprefix("Clipped")


@cache
def _family_by_name(name: str) -> Family:
    if name in _FAMILIES:
        return _FAMILIES[name]
    return Family.ADAM_LIKE if "Adam" in name else Family.UNKNOWN


def _known_name(optimizer: Any) -> str:
    """Name of the class, or of its nearest base that is known."""
    if isinstance(optimizer, str):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(inner_optimizer(optimizer))
    names = [base.__name__ for base in kind.__mro__]
    return next((name for name in names if name in _FAMILIES), names[0])


def group_peak(group: dict[str, Any]) -> float:
    """Largest learning rate that a group's schedule reaches, as far as the group says."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))
