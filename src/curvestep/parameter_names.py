"""The names of parameters, for words about optimizers that were given parameters without names."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_NAMES = WeakTensorKeyDictionary()
# Modules that a wrapper puts between a model and its parameters: DDP, torch.compile, FSDP1.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}


def remember_names(model: nn.Module) -> None:
    """Remember what the parameters of a model are called, as long as they exist.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 1))
        >>> remember_names(model)
        >>> name_of(model[0].bias, "?")
        '0.bias'
    """
    for name, p in model.named_parameters():
        parts = name.split(".")
        while parts[0] in _WRAPPERS:
            del parts[0]
        _NAMES[p] = ".".join(parts)


def name_of(parameter: Tensor, default: str) -> str:
    """The name of a parameter in the last model that had it, else ``default``."""
    return str(_NAMES.get(parameter, default))
