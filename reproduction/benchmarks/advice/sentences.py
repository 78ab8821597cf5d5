"""Every sentence of every answer, held against the rows and against the truth that training showed.

    python -m reproduction.benchmarks.advice.sentences --rows FOLDER --part judge-bounds

Numbers are computed again here from the lines of the trace, by other code than ``advise`` has. A verdict is
false if what it claims did not happen: DIVERGED of a loss that did not rise to three times its start or end
there, STUCK of a run that reached four fifths of the best, RAISE or LOWER that ends worse by 10 % or more.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from reproduction.benchmarks.advice.run import PARTS, Job, Rows, loss_of
from reproduction.benchmarks.advice.score import Grid, grids, wider

from curvestep.advice.advice import Advice, advise
from curvestep.trace.trace import Trace

Row = dict[str, Any]
NUMBER = r"(-?[0-9.]+(?:e[+-]?[0-9]+)?)"


def rows_of(path: Path) -> list[Row]:
    """The lines of a trace, as they stand there."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line) for line in lines]


def number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def close(text: str, value: float) -> bool:
    """Whether a printed number is this one, at the digits that it has."""
    return math.isclose(float(text), value, rel_tol=0.06, abs_tol=1e-9)


def late_rows(rows: list[Row]) -> list[Row]:
    """Those near the peak lr in the later half."""
    top = max(number(row.get("lr")) for row in rows)
    share = [number(row.get("lr")) / top for row in rows]
    ok = [row for row in rows if row.get("status", "ok") == "ok" and "kappa" in row]
    near = [row for row in ok if number(row["lr"]) / top >= median(share)]
    middle = (near[0]["step"] + near[-1]["step"]) / 2
    later = [row for row in near if row["step"] >= middle]
    return near[-max(5, len(later)) :]


def loss_is_true(text: str, rows: list[Row]) -> bool:
    first, last, highest = re.search(f"from {NUMBER} to {NUMBER}; the highest is (.*)$", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    losses = [(row["step"], row["loss"]) for row in rows if math.isfinite(number(row.get("loss")))]
    middle = (losses[0][0] + losses[-1][0]) / 2
    end = [loss for step, loss in losses if step >= middle][-max(5, len(losses) // 10) :]
    after = number(rows[-1].get("loss_after"))
    top = max([loss for _, loss in losses] + ([after] if math.isfinite(after) else []))
    is_finite = all(math.isfinite(number(row.get("loss"))) for row in rows)
    highest_is_true = close(highest, top) if re.fullmatch(NUMBER, highest) else not is_finite
    return close(first, losses[0][1]) and close(last, mean(end)) and highest_is_true


def steps_are_true(text: str, rows: list[Row]) -> bool:
    late = late_rows(rows)
    kappa = float(re.search(f"by {NUMBER} of its norm", text).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    true = math.isclose(kappa, median(number(row["kappa"]) for row in late), rel_tol=0.06, abs_tol=1e-9)
    share = re.search(r"by ([0-9]+)% of what", text)
    if share:
        fall = median(row["loss"] - row["loss_after"] for row in late)
        promise = median(row.get("cosine", 1.0) * row["grad_norm"] * row["step_norm"] for row in late)
        true = true and abs(float(share.group(1)) / 100 - fall / promise) < 0.006
    return true


def stability_is_true(text: str, rows: list[Row], header: Row) -> bool:
    lr = re.search(f"up to lr {NUMBER}", text).group(1)  # pyright: ignore[reportOptionalMemberAccess]
    first = next(row["loss"] for row in rows if math.isfinite(number(row.get("loss"))))
    limits = []
    for row in rows:
        if number(row.get("loss")) - first > 2 * abs(first):
            break
        if "optimizer_smoothness" in row and "optimizer_limit" in row:
            limits.append(row["optimizer_limit"] / row["optimizer_smoothness"])
        if header["optimizer_family"] in ("sgd", "momentum") and "smoothness" in row:
            limits.append(
                row.get("optimizer_limit", 2 * (1 + number(header["momentum"]))) / row["smoothness"]
            )
    return close(lr, min(limits))


def start_is_true(text: str, rows: list[Row], header: Row) -> bool:
    """Whether a whole step of the first rows fails, or is shorter than what lr comes to later."""
    share = float(re.search(f"up to {NUMBER}", text).group(1))  # pyright: ignore[reportOptionalMemberAccess]
    top = max(number(row.get("lr")) for row in rows)
    for row in rows[:5]:
        fall = number(row.get("loss")) - number(row.get("loss_after"))
        promise = row.get("cosine", 1.0) * row["grad_norm"] * row["step_norm"]
        grows = row["lr"] < 0.9 * top or number(header.get("momentum")) > 0
        if grows or number(row.get("kappa")) > 1 or not fall >= 0.1 * promise:
            return 0 < share < 1
    return False


def clipping_is_true(text: str, rows: list[Row], job: Job) -> bool:
    steps = [row["step"] for row in rows if "clipped" in row and row.get("status", "ok") == "ok"]
    flags = [bool(row["clipped"]) for row in rows if "clipped" in row and row.get("status", "ok") == "ok"]
    spans = [max(1, b - a) for a, b in zip([steps[0] - 1, *steps], steps, strict=False)]
    share = sum(s for s, flag in zip(spans, flags, strict=True) if flag) / sum(spans)
    if text.startswith("no measured"):
        return share == 0
    said, threshold = re.search(f"about ([0-9]+)% .* max_norm {NUMBER}", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return abs(float(said) / 100 - share) < 0.006 and close(threshold, job["clipped_at"])


def spikes_are_true(text: str, rows: list[Row]) -> bool:
    logged = [spike for row in rows for spike in row.get("spikes") or ()]
    worst = max(logged, key=lambda spike: spike["grad_norm"])
    return text == f"{len(logged)} gradient norms stand out, the largest at step {worst['step']}"


def verdict_is_true(advice: Advice, grid: Grid, job: Job, rows: list[Row]) -> bool:
    """Whether what was claimed happened."""
    before = grid.regret(loss_of(job))
    first = number(rows[0].get("loss"))
    finite = [row["loss"] for row in rows if math.isfinite(number(row.get("loss")))]
    if advice.action == "diverged":
        end = number(rows[-1].get("loss_after"))
        rose = max([mean(finite[-5:]), end if math.isfinite(end) else -math.inf]) >= 2 * first
        return len(finite) < len(rows) or job["loss"] is None or rose
    if advice.action == "stuck":
        return before > 0.2
    if advice.action == "data":
        return len(finite) < len(rows)
    if advice.action in ("raise", "lower") and advice.lr is not None:
        norm = wider(Trace.load(grid.rows.trace_of(job)))
        after = grid.at(advice.lr) if norm is None else grid.at_threshold(job["lr"], norm)
        return after <= before + 0.1
    return True


def check(grid: Grid, job: Job) -> list[tuple[str, bool, str]]:
    """Kind, truth and text of every sentence of one answer."""
    path = grid.rows.trace_of(job)
    rows = rows_of(path)
    header = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    advice = advise(Trace.load(path))
    checks: dict[str, Callable[[str], bool]] = {
        "loss": lambda text: loss_is_true(text, rows),
        "steps": lambda text: steps_are_true(text, rows),
        "stability": lambda text: stability_is_true(text, rows, header),
        "start": lambda text: start_is_true(text, rows, header),
        "clipping": lambda text: clipping_is_true(text, rows, job),
        "spikes": lambda text: spikes_are_true(text, rows),
        "next": lambda _: True,  # it claims nothing
    }
    found = [(advice.action, verdict_is_true(advice, grid, job, rows), advice.verdict)]
    for note in (*advice.reasons, *advice.warnings):
        found.append((note.kind, checks[note.kind](note.text), note.text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--train", action="store_true", help="train answers beyond the grid")
    options = parser.parse_args()
    counts: Counter[tuple[str, bool]] = Counter()
    for grid in grids(Rows(options.rows), PARTS[options.part], train=options.train):
        for job in () if grid.problem else grid.runs:
            for kind, is_true, text in check(grid, job):
                counts[kind, is_true] += 1
                if not is_true:
                    print(f"false: {job['task']}, seed {job['seed']}, lr {job['lr']:g}: {kind}: {text}")
    print("| sentence | true | false |\n| --- | --- | --- |")
    for kind in sorted({kind for kind, _ in counts}):
        print(f"| {kind} | {counts[kind, True]} | {counts[kind, False]} |")


if __name__ == "__main__":
    main()
