"""Know how far to step, and how hard to clip: training under (L0, L1)-smoothness.

Quick start. ``loss_of_batch`` is your function from a batch to a loss, ``loader`` yields the batches::

    import curvestep as cs

    cal = cs.calibrate(model, loss_of_batch, loader)             # lr and max_norm before training
    opt = cs.ClippedSGD(model.parameters(), lr=cal.lr, max_norm=cal.max_norm)
    probe = cs.SmoothnessProbe(model, trace="runs/mine/trace.jsonl").watch(opt)
    for batch in loader:
        loss = probe.record(lambda: loss_of_batch(batch))        # measures a few steps; changes nothing
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(cs.advise(probe))                                      # lr, max_norm, and the reasons
    cs.report(probe)                                             # one page with charts (extra `report`)

Results print as words, are tables in a notebook, and have a ``plot()`` (needs matplotlib). Names are looked
up on first use: ``curvestep.theory`` and ``curvestep.steps`` can be imported where torch is not installed.
"""

from __future__ import annotations

import ast
from importlib import import_module
from textwrap import fill

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """The module of each public name, read from the stub, where type checkers and editors find them."""
    with open(f"{__file__}i", encoding="utf-8") as stub:  # noqa: PTH123 (pathlib costs half of this import)
        imports = [line for line in ast.parse(stub.read()).body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}


_HOMES = _homes()
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll] (the names of the stub)
__doc__ = f"{__doc__}\n{fill('Public names: ' + ', '.join(__all__), 108)}.\n"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'curvestep' has no attribute {name!r}")
    home = _HOMES[name]
    if home in ("curvestep", f"curvestep.{name}"):
        value: object = import_module(f"curvestep.{name}")
    else:
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
