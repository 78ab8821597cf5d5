"""The tables of docs/compare.md and docs/lightning.md, filled from docs/results: python docs/tables.py.

Each table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; what is between is replaced. A test
fails while the page and the results differ, so run this after a benchmark has written new numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
NOT_YET = "Not measured yet: the command above prints it."


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def adamw_step_table(results: Path) -> str:
    """How much faster ClippedAdamW is than the fastest of ``clip_grad_norm_`` with torch's three."""
    found = json.loads((results / "step.json").read_text())["calls"]
    rows: dict[str, list[str]] = {}
    for name, ending in (("AdamW", ""), ("AdamW, warm", ", its state in the cache")):
        for same in zip(*found[name], strict=True):
            case, ours = same[0], "ClippedAdamW"
            if not ending or case["shape"].startswith("ResNet20"):  # the others do not fit
                speeds = [_speeds(case, "speed_up_on_fastest_of_torch")[ours] for case in same]
                rows.setdefault(case["shape"].split(",")[0] + ending, []).append(_limits(speeds))
    return markdown(["model", "1 thread", "2 threads"], [[name, *cells] for name, cells in rows.items()])


def _speeds(case: dict[str, Any], kind: str) -> dict[str, float]:
    return {variant["variant"]: variant[kind] for variant in case["variants"]}


def _limits(numbers: Iterable[float]) -> str:
    low, high = (f"{limit(numbers):.2f}" for limit in (min, max))
    return low if low == high else f"{low}-{high}"


def rates_table(results: Path) -> str:
    """Learning rates in Lightning by where they come from: gradients used, and the loss they lead to."""
    rows = _of_frameworks(results, "rates").get("rows", [])
    if not rows:
        return NOT_YET
    lines = []
    for key in dict.fromkeys((row["task"], row["optimizer"], row["method"]) for row in rows):
        some = [row for row in rows if (row["task"], row["optimizer"], row["method"]) == key]
        losses, lrs, used = ([row[name] for row in some] for name in ("loss", "lr", "gradients"))
        spread = f"{median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        gradients = f"{min(used)} to {max(used)}" if min(used) < max(used) else str(max(used))
        rates = f"{min(lrs):.2g} to {max(lrs):.2g}" if min(lrs) < max(lrs) else f"{lrs[0]:.2g}"
        lines.append([*key, gradients, rates, str(len(some)), spread])
    head = ["task", "optimizer", "lr from", "gradients", "lr", "seeds", "held-out loss: median (range)"]
    return markdown(head, lines)


def overhead_table(results: Path) -> str:
    """What the callback of Lightning costs: measuring, in steps of training; waiting, in time."""
    found = _of_frameworks(results, "overhead")
    if not found.get("waiting_us"):
        return NOT_YET
    lines = []
    for fractions, costs in found["costs"].items():
        low, middle, high = quantiles(costs, n=4)
        shares = [f"{middle / every:.1%}" for every in (50, 100)]
        lines.append([f"measuring at {fractions}", f"{middle:.2f} steps ({low:.2f} to {high:.2f})", *shares])
    waits = found["waiting_us"]
    share = f"{max(median(waits), 0) / 1e3 / found['step_ms']:.2%}"
    spent = f"{median(waits):.0f} µs a step ({min(waits):.0f} to {max(waits):.0f})"
    lines.append(["waiting", spent, share, share])
    head = ["callback", "cost: median (middle half; waiting: range)", "share at every=50", "at every=100"]
    return markdown(head, lines)


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "compare.md": {"step-adamw": adamw_step_table},
    "lightning.md": {"overhead": overhead_table, "rates": rates_table},
}


def filled(page: str, results: Path = RESULTS, *, of: str = "compare.md") -> str:
    """The text of a page with every table made anew."""
    for name, table in TABLES[of].items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        content = table(results)
        page, count = re.subn(
            pattern, lambda m, text=content: f"{m[1]}\n{text}\n{m[2]}", page, flags=re.DOTALL
        )
        assert count == 1, f"{of} has {count} places for the table {name}"
    return page


def _of_frameworks(results: Path, part: str) -> dict[str, Any]:
    path = results / "frameworks.json"
    return json.loads(path.read_text()).get(part, {}) if path.exists() else {}


if __name__ == "__main__":
    for name in TABLES:
        text = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(filled(text, of=name), encoding="utf-8")
