"""Table and figure of the calibration benchmark, from its results file alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.calibrate_tasks import DEVELOPMENT, TASKS
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from curvestep.calibration.search import CLIP_AT, MAX_KAPPA, SLOPE_SHARE
from curvestep.display.drawing import COLOURS, panels, styled

Row = dict[str, Any]
Regrets = dict[str, dict[str, list[float]]]  # method, task, one number a seed; inf where it diverged
TUNED, AIM = "best of grid", 0.02
CHOICE_SEEDS = (1,)  # on which other constants were tried
TUNING_SEED = 100  # of the whole grids
SHARES = (0.1, 0.15, 0.2, 0.25, 1 / 3, 0.5, 1.0)  # of the measured step, for AdamW
DEFAULT_BATCHES = 3
OWN_GRIDS = {
    "best of grid, AdamW": "calibrated, AdamW",
    "best of grid, momentum": "calibrated, momentum 0.9",
}
HALVES = {"development": [t.name for t in DEVELOPMENT], "held out": []}
HALVES["held out"] = [name for name in TASKS if name not in HALVES["development"]]


def regrets(rows: Iterable[Row], *, against: str = TUNED) -> Regrets:
    """Regret of every evaluated run against the tuned grid on the same task and seed."""
    rows = list(rows)
    best = tuned_losses(rows, against)
    found: Regrets = {}
    for r in rows:
        reference = best.get((r["task"], r["seed"]))
        if reference is None or r["label"].startswith(("grid", "choose")):
            continue
        regret = math.inf if r["diverged"] else (r["loss"] - reference) / (r["first_loss"] - reference)
        found.setdefault(r["label"], {}).setdefault(r["task"], []).append(regret)
    return found


def tuned_losses(rows: Iterable[Row], label: str = TUNED) -> dict[tuple[str, int], float]:
    """Loss of the best of the grid by task and seed; none where it diverged, for nothing compares with it."""
    return {(r["task"], r["seed"]): r["loss"] for r in rows if r["label"] == label and not r["diverged"]}


def median_interval(by_task: dict[str, list[float]], *, draws: int = 500) -> tuple[float, float, float]:
    """Median over tasks and seeds with its 90 % interval: tasks are drawn again, then seeds within them."""
    random, tasks = np.random.default_rng(0), [np.array(values) for values in by_task.values()]
    medians = []
    for _ in range(draws):
        drawn = [tasks[i] for i in random.integers(len(tasks), size=len(tasks))]
        values = [v for task in drawn for v in task[random.integers(len(task), size=len(task))].tolist()]
        medians.append(_median(values))
    low, high = np.quantile(medians, [0.05, 0.95], method="inverted_cdf")
    return _median([v for task in by_task.values() for v in task]), float(low), float(high)


def _median(values: list[float]) -> float:
    """The upper median, which is one of the values: infinities need no arithmetic."""
    return sorted(values)[len(values) // 2]


def percent(value: float) -> str:
    """A regret for the table."""
    return "diverged" if math.isinf(value) else f"{100 * value:.1f} %"


def summary(found: Regrets, half: str) -> list[tuple[str, str]]:
    """One table row a method, the best median first."""
    lines = []
    for label, tasks in found.items():
        own = {name: tasks[name] for name in HALVES[half] if name in tasks}
        if not own:
            continue
        middle, low, high = median_interval(own)
        worst = max(own, key=lambda name: _median(own[name]))
        runs = [v for values in own.values() for v in values]
        diverged = sum(math.isinf(v) for v in runs)
        cells = (
            label, percent(middle), f"{percent(low)} to {percent(high)}",
            f"{percent(_median(own[worst]))} ({worst})", f"{diverged} of {len(runs)}", f"{len(own)}",
        )  # fmt: skip
        lines.append((middle, "| " + " | ".join(cells) + " |"))
    head = "| method | median regret | 90 % interval | worst task | diverged | tasks |\n" + 6 * "|---" + "|"
    return [("", head), *((str(m), line) for m, line in sorted(lines, key=lambda pair: pair[0]))]


def by_task(rows: list[Row], found: Regrets) -> str:
    """What the grid and the calibration chose for each task, and the regret of it."""
    lines = [
        "| task | half | best of grid: lr, max_norm | calibrated: lr, max_norm (gradients) "
        "| loss at start, grid, calibrated | regret by seed | without clipping |",
        7 * "|---" + "|",
    ]
    for name in TASKS:
        grid = [r for r in rows if r["task"] == name and r["label"] == TUNED]
        mine = [r for r in rows if r["task"] == name and r["label"] == "calibrated" and not r["problem"]]
        if not grid or not mine or name not in found.get("calibrated", {}):
            continue
        chosen = "; ".join(_setting(r) for r in mine)
        kept = [r for r in grid if not r["diverged"]]
        losses = ", ".join(f"{np.mean([r[k] or math.nan for r in some]):.4g}" for k, some in (
            ("first_loss", grid), ("loss", kept), ("loss", mine)))  # fmt: skip
        own = ", ".join(percent(v) for v in found["calibrated"][name])
        bare = ", ".join(percent(v) for v in found.get("calibrated, no clipping", {}).get(name, []))
        half = "development" if name in HALVES["development"] else "held out"
        lines.append(f"| {name} | {half} | {_setting(grid[0])} | {chosen} | {losses} | {own} | {bare} |")
    return "\n".join(lines)


def _setting(row: Row) -> str:
    threshold = row["chosen"].get("max_norm")
    words = f"{row['chosen']['lr']:.3g}"
    if row["options"].get("optimizer") != "AdamW":
        words += f", {'none' if threshold is None else f'{threshold:.3g}'}"
    return f"{words} ({row['spent']})" if row["spent"] else words


def own_grid(rows: list[Row], label: str, mine: str) -> list[str]:
    """A calibrated optimizer against the tuned grid of that optimizer: both halves, and task by task."""
    found = {mine: regrets(rows, against=label).get(mine, {})}
    if not found[mine]:
        return []
    parts = [f"## {mine[0].upper()}{mine[1:]}: regret against the tuned grid of its own optimizer\n"]
    head = summary(found, "held out")[0][1].replace("| method |", "| tasks of the half |", 1)
    lines = [head]
    for half in ("held out", "development"):
        lines += [line.replace(f"| {mine} |", f"| {half} |", 1) for _, line in summary(found, half)[1:]]
    parts.append("\n".join(lines) + "\n")
    lines = ["| task | half | best of its grid | calibrated | regret by seed |", 5 * "|---" + "|"]
    for name in (n for n in TASKS if n in found[mine]):
        half = "development" if name in HALVES["development"] else "held out"
        best, own = (
            [r for r in rows if r["task"] == name and r["label"] == which] for which in (label, mine)
        )
        setting = ", ".join(f"{k} {v:.3g}" for k, v in best[0]["options"].items() if k != "momentum")
        chosen = "; ".join(_setting(r) for r in own if not r["problem"])
        values = ", ".join(percent(v) for v in found[mine][name])
        lines.append(f"| {name} | {half} | {setting} | {chosen} | {values} |")
    parts.append("\n".join(lines) + "\n")
    return parts


def choices(rows: list[Row]) -> str:
    """Median and worst regret of each pair of constants on the development tasks."""
    best = tuned_losses(rows)
    found: dict[tuple[float, float, float], dict[str, list[float]]] = {}
    for r in rows:
        reference = best.get((r["task"], r["seed"]))
        chosen = r["label"] == "calibrated" and r["seed"] in CHOICE_SEEDS
        if (r["label"] == "choose" or chosen) and reference is not None:
            constants = (
                (MAX_KAPPA, *CLIP_AT) if chosen else (r["options"]["max_kappa"], *r["options"]["clip_at"])
            )
            if r["task"] not in HALVES["development"]:
                continue
            regret = math.inf if r["diverged"] else (r["loss"] - reference) / (r["first_loss"] - reference)
            found.setdefault(constants, {}).setdefault(r["task"], []).append(regret)
    lines = [
        "| max_kappa | clip_at, no agreement | clip_at, full agreement | median regret | worst task "
        "| diverged |",
        6 * "|---" + "|",
    ]
    for (kappa, low, high), tasks in sorted(found.items()):
        runs = [v for values in tasks.values() for v in values]
        worst = max(tasks, key=lambda name, tasks=tasks: _median(tasks[name]))
        lines.append(
            f"| {kappa:g} | {low:g} | {high:g} | {percent(_median(runs))} | {percent(_median(tasks[worst]))} "
            f"({worst}) | {sum(math.isinf(v) for v in runs)} of {len(runs)} |"
        )
    return "\n".join(lines)


def adam_shares(rows: list[Row]) -> list[str]:
    """Regret of AdamW at several shares of the measured step, read off its grid on the development tasks."""
    found: dict[float, dict[str, float]] = {share: {} for share in SHARES}
    for name in TASKS:
        own = [r for r in rows if r["task"] == name]
        grid = [r for r in own if (r["label"], r["seed"]) == ("grid, AdamW", TUNING_SEED)]
        mine = [r["chosen"]["lr"] for r in own if r["label"] == "calibrated, AdamW" and not r["problem"]]
        if name not in HALVES["development"] or not grid or not mine:
            continue
        grid.sort(key=lambda r: r["options"]["lr"])
        losses = [r["first_loss"] if r["diverged"] else r["loss"] for r in grid]
        rates, best = np.log([r["options"]["lr"] for r in grid]), min(losses)
        for share in SHARES:
            loss = np.interp(math.log(_median(mine) * share / SLOPE_SHARE), rates, losses)
            found[share][name] = float((loss - best) / (grid[0]["first_loss"] - best))
    if not found[SHARES[0]]:
        return []
    lines = ["| share | median regret | worst task | tasks |", 4 * "|---" + "|"]
    for share, tasks in found.items():
        worst = max(tasks, key=lambda name, tasks=tasks: tasks[name])
        values = f"{percent(_median(list(tasks.values())))} | {percent(tasks[worst])} ({worst})"
        lines.append(f"| {share:.2g} | {values} | {len(tasks)} |")
    return [
        "\n## The share of the measured step for AdamW, on the development tasks\n",
        "Read off AdamW's own grid, one seed, the loss between its learning rates interpolated; a run that "
        "diverged counts as no progress. Regret against the best of that grid.\n",
        "\n".join(lines),
    ]


def batch_counts(rows: list[Row]) -> list[str]:
    """Regret by the number of batches that are measured at least, on the development tasks."""
    best = tuned_losses(rows)
    runs = {(r["task"], r["seed"], _num_batches(r)): r for r in rows if _num_batches(r)}
    counts = sorted({count for _, _, count in runs})
    shared = [
        pair for pair in best if pair[0] in HALVES["development"] and all((*pair, c) in runs for c in counts)
    ]
    if len(counts) < 2 or not shared:
        return []
    lines = ["| batches at least | median regret | worst | median gradients | runs |", 5 * "|---" + "|"]
    for count in counts:
        own = {pair: runs[(*pair, count)] for pair in shared}
        regret = {
            pair: math.inf if r["diverged"] else (r["loss"] - best[pair]) / (r["first_loss"] - best[pair])
            for pair, r in own.items()
        }
        worst = max(shared, key=lambda pair, regret=regret: regret[pair])
        lines.append(
            f"| {count} | {percent(_median(list(regret.values())))} | {percent(regret[worst])} ({worst[0]}) "
            f"| {_median([r['spent'] for r in own.values()]):g} | {len(shared)} |"
        )
    return ["\n## The number of batches, on the development tasks\n", "\n".join(lines)]


def _num_batches(row: Row) -> int:
    """How many batches a calibrated run measured at least; 0 for other runs."""
    if row["label"] == "calibrated":
        return DEFAULT_BATCHES
    return row["options"]["num_batches"] if row["label"] == "choose, batches" else 0


def figure(found: Regrets) -> Figure:
    """Regret by task for all methods: one row a method, one mark a task, the median over seeds."""
    held_out = HALVES["held out"]
    key = {
        label: _median([v for n, values in tasks.items() if n in held_out for v in values] or [math.inf])
        for label, tasks in found.items()
        if label != TUNED
    }
    order = sorted(key, key=lambda label: -key[label])
    marks = "osD^vP*XphdH8"
    with styled():
        drawn, (panel,) = panels(1, 1, width=9.0, height=0.33 * len(order) + 1.8)
        panel.axvspan(LEFT, AIM, color="#009E73", alpha=0.12, linewidth=0)
        for number, name in enumerate(TASKS):
            own = [(y, _median(found[label][name])) for y, label in enumerate(order) if name in found[label]]
            if not own:
                continue
            panel.plot(
                [min(max(v, LEFT), DIVERGED) for _, v in own], [y for y, _ in own],
                marks[number % len(marks)], markersize=6, color=COLOURS[number % len(COLOURS)], label=name,
                fillstyle="full" if name in held_out else "none",
            )  # fmt: skip
        panel.set_xscale("symlog", linthresh=0.05)
        panel.set_xticks([-0.2, -0.05, 0, 0.02, 0.05, 0.1, 0.2, 0.5, DIVERGED])
        panel.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: "diverged" if v >= DIVERGED else f"{v:.0%}")
        )
        panel.set_xlim(LEFT, 1.2 * DIVERGED)
        panel.set_yticks(range(len(order)), order)
        panel.set_xlabel("regret against the tuned grid of lr x max_norm (median over seeds)")
        panel.set_title("Calibrated before training, tuned while training, and fixed: regret by task")
        panel.legend(
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            title="filled: held out\nopen: development",
            title_fontsize=8,
        )
    return drawn


LEFT, DIVERGED = (
    -0.6,
    2.0,
)  # ends of the figure: the second is where runs are that ended above their first loss


def text(rows: list[Row], *, command: str) -> str:
    """The report: both halves, task by task, other optimizers, the constants tried."""
    found = regrets(rows)
    parts = [
        "# Regret of calibrated training\n",
        f"`{command}`: {cost(rows)}; the grid was tuned on other seeds.\n",
        "Regret = (loss - loss of the tuned grid) / (loss at the start - loss of the tuned grid), with the "
        "same budget of gradient evaluations for all, what is spent before training included. A run diverged "
        "if it ended above its first loss or in NaN. Intervals: bootstrap over tasks and seeds. The column "
        "of divergences says how many runs a method has; the same command adds what is missing.\n",
        "![Regret by task](calibrate.png)\n",
    ]
    missing = [name for name in TASKS if name not in found.get("calibrated", {})]
    if missing:
        parts.append(f"Without a regret here: {', '.join(missing)}.\n")
    for half, title in (
        ("held out", "Tasks that no choice was made on"),
        ("development", "Tasks on which rule and constants were chosen"),
    ):
        parts += [f"## {title}\n", "\n".join(line for _, line in summary(found, half)) + "\n"]
    parts += ["## Task by task\n", by_task(rows, found) + "\n"]
    for label, mine in OWN_GRIDS.items():
        parts += own_grid(rows, label, mine)
    parts += ["## The constants on the development tasks, one seed\n", choices(rows)]
    parts += adam_shares(rows) + batch_counts(rows)
    return "\n".join(parts) + "\n"


def cost(rows: list[Row]) -> str:
    """How many runs, how long, on which seeds."""
    seconds = sum(r["seconds"] for r in rows)
    seeds = sorted({r["seed"] for r in rows if r["label"] == "calibrated"})
    return (
        f"{len(rows)} runs, {seconds / 60:.0f} minutes of CPU time in all, half of that on two cores; "
        f"evaluated on seeds {', '.join(map(str, seeds))}"
    )


def in_short(rows: list[Row]) -> str:
    """The part of the report that the page about calibration quotes: our rows alone."""
    found = regrets(rows)
    wanted = ("calibrated", *OWN_GRIDS.values())
    lines = [f"{cost(rows)[0].upper()}{cost(rows)[1:]}. On the tasks that no choice was made on:\n"]
    lines += [line for _, line in summary({w: found[w] for w in wanted if w in found}, "held out")]
    for label, mine in OWN_GRIDS.items():
        own = {f"{mine}, against its own grid": regrets(rows, against=label).get(mine, {})}
        lines += [line for _, line in summary(own, "held out")[1:]]
    return "\n".join(lines) + "\n"


def quote(page: str, block: str) -> str:
    """The page with ``block`` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no place between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}{END}{after}"


BEGIN, END = "<!-- from the results file -->", "<!-- to here -->"


def write(rows: list[Row], folder: Path, *, command: str, page: Path | None = None) -> str:
    """Write ``calibrate.md`` and ``calibrate.png``, and the tables of ``page``; the text."""
    folder.mkdir(parents=True, exist_ok=True)
    said = text(rows, command=command)
    (folder / "calibrate.md").write_text(said, encoding="utf-8")
    figure(regrets(rows)).savefig(folder / "calibrate.png", dpi=110, metadata={"Software": None})
    if page is not None:
        page.write_text(quote(page.read_text(encoding="utf-8"), in_short(rows)), encoding="utf-8")
    return said
