"""Blocks of README and docs that are made from docs/results, or stand twice: python docs/tables.py.

Each table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; what is between is replaced. A test
fails while the page and the results differ, so run this after a benchmark has written new numbers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # where the modules of docs/ are found
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


# Which threshold: the same words wherever a page asks.
MAX_NORM = """\
| you want | set `max_norm` to |
| --- | --- |
| a safety net for AdamW | `1.0`; Adam rescales gradients, so the exact number matters little |
| a safety net for SGD | `cs.clip_rules.zscore()`, which clips only norms that stand out |
| a threshold that fits SGD's lr | `cal.max_norm` of `cs.calibrate`; `inf` if its trials gain nothing by it |
| to know whether clipping helps | two runs and `cs.advise(with_it, without)`; one run cannot tell |"""


def max_norm_table(results: Path) -> str:
    """The decision about ``max_norm``."""
    return MAX_NORM


def rates_of_readme(results: Path) -> str:
    """The words below README's picture."""
    from docs.readme_figures import caption

    return caption()


def claims_of_readme(results: Path) -> str:
    """How many claims of the paper are reproduced, as the page of the reproduction counts them."""
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- found -->\n(.*?)\n<!-- /found -->", page, re.DOTALL)
    assert found is not None
    return f"{found[1]} [Row by row](docs/reproduction.md)."


def _example(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / "choose.json").read_text())[name]


def _printed(results: Path, name: str, what: str) -> str:
    return f"```text\n{_example(results, name)['said'][what].rstrip()}\n```"


def _settings(results: Path, name: str) -> dict[tuple[float, float], list[dict[str, Any]]]:
    """The runs of an example by lr and threshold, the best held-out loss first."""
    found: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for run in _example(results, name)["runs"]:
        found.setdefault((run["lr"], run["max_norm"] or math.inf), []).append(run)
    return dict(sorted(found.items(), key=lambda item: mean(run["held_out"] for run in item[1])))


def _runs(results: Path, name: str) -> str:
    """Held-out losses of an example, setting by setting."""
    found = _example(results, name)
    lines = []
    for (lr, max_norm), runs in _settings(results, name).items():
        losses = [run["held_out"] for run in runs]
        clipped = mean(run["clipped"] for run in runs)
        note = " (calibrate's)" if lr == found["lr"] else ""
        threshold = "none" if max_norm == math.inf else f"{max_norm:g}"
        spread = f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        lines.append([f"{lr:g}{note}", threshold, f"{clipped:.0%}", str(len(runs)), spread])
    head = ["peak lr", "max_norm", "steps clipped", "seeds", "held-out loss: mean (range)"]
    return markdown(head, lines)


def _finding(results: Path, name: str) -> str:
    """What the runs of an example say about lr, and about clipping."""
    found, settings = _example(results, name), _settings(results, name)
    means = {setting: mean(run["held_out"] for run in runs) for setting, runs in settings.items()}
    (best_lr, best_norm), lowest = min(means.items(), key=lambda item: item[1])
    threshold = "without clipping" if best_norm == math.inf else f"with max_norm {best_norm:g}"
    ours = means[found["lr"], found["max_norm"] or math.inf]
    clipped, unclipped = sorted(key for key in means if key[0] == found["lr"])[:2]
    with_it, without_it = ([run["held_out"] for run in settings[key]] for key in (clipped, unclipped))
    words = [
        f"The lowest mean held-out loss is {lowest:.3f}, at lr {best_lr:g} {threshold}.",
        f"At the lr and max_norm of `calibrate` it is {ours:.3f}.",
        "**Does clipping help here?**",
    ]
    if max(without_it) < min(with_it) or min(without_it) > max(with_it):
        words.append("It helps:" if means[unclipped] > means[clipped] else "It hurts:")
        overlap = "do not overlap"
    else:
        words.append("It makes no clear difference:")
        overlap = "overlap"
    words.append(
        f"at the lr of `calibrate` the mean is {means[clipped]:.3f} with max_norm {clipped[1]:g}, "
        f"{means[unclipped]:.3f} without, and the ranges {overlap}."
    )
    return " ".join(words)


def _steps(results: Path, name: str) -> str:
    found = _example(results, name)
    return f"{found['steps']} steps, {len({run['seed'] for run in found['runs']})} seeds"


def _blocks_of(name: str) -> dict[str, Callable[[Path], str]]:
    """The blocks of the page about one example."""
    return {
        f"{name}-steps": partial(_steps, name=name),
        f"{name}-calibrate": partial(_printed, name=name, what="calibrate"),
        f"{name}-runs": partial(_runs, name=name),
        f"{name}-finding": partial(_finding, name=name),
        f"{name}-all": partial(_printed, name=name, what="all"),
        "max-norm": max_norm_table,
    }


TABLES: dict[str, dict[str, Callable[[Path], str]]] = {
    "../README.md": {"max-norm": max_norm_table, "rates": rates_of_readme, "claims": claims_of_readme},
    "adamw.md": _blocks_of("adamw"),
    "cnn.md": _blocks_of("cnn"),
    "compare.md": {"step-adamw": adamw_step_table},
    "lightning.md": {"overhead": overhead_table, "rates": rates_table},
    "which_clipping.md": {"max-norm": max_norm_table},
}


def filled(page: str, results: Path = RESULTS, *, of: str = "compare.md") -> str:
    """The text of a page with every table made anew."""
    for name, table in TABLES[of].items():
        content = table(results)
        inline = rf"(<!-- {name} -->)[^\n]*?(<!-- /{name} -->)"
        page, count = re.subn(inline, lambda m, text=content: f"{m[1]}{text}{m[2]}", page)
        if count == 0:
            pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
            page, count = re.subn(
                pattern, lambda m, text=content: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL
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
