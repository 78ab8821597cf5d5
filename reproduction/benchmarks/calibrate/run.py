"""Runs of the benchmark, each once: a line of JSON in the rows' folder, safe to kill at any time.

    python -m reproduction.benchmarks.calibrate.run --rows FOLDER [--tasks ...]
        --part develop | judge | judge-sgd | judge-ladder | judge-long | smoke

``develop`` never opens a judged task; the other parts refuse to run with other constants than the frozen ones
in ``ladder.json``. The tasks of ``judge`` and ``judge-sgd`` judged earlier rules, and are development for the
ladder. ``judge-ladder`` runs the grid, calibrate by default and with each budget, random search with as many
gradients, and the rivals of the kind; ``judge-long`` runs calibrate's rate, half, twice and four times it, on
tasks of 5,000 steps and one seed.

``--methods "budget 80" "budget 160" "budget 320"`` asks AdamW's calibrate so, on tasks that are open already:
a table follows from it, no rule. The order is: for each task, grid and calibrate on the first seed, then both
on the others, then the rivals. With ``--probe`` every run of a grid also keeps a trace of about 25 rows, for
the benchmark of advise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from reproduction.benchmarks.calibrate.data import Batch
from reproduction.benchmarks.calibrate.judged import JUDGED
from reproduction.benchmarks.calibrate.judged_ladder import JUDGED_LADDER, LONG
from reproduction.benchmarks.calibrate.judged_sgd import JUDGED_SGD
from reproduction.benchmarks.calibrate.ladder import GRIDS, NUM_POINTS as NUM_HELD_OUT, scan
from reproduction.benchmarks.calibrate.methods import (
    BUDGETS,
    FIRST_RATE,
    FIXED,
    LADDER_BUDGETS,
    LADDER_RIVALS,
    MUON_FIXED,
    RANDOM,
    RANDOM_BUDGETS,
    RIVALS,
    SGD_FIXED,
    NotInstalled,
    Prepared,
    peaks_of,
    prepare,
    scale_rates,
    step,
)
from reproduction.benchmarks.calibrate.scheduled import Recipe
from reproduction.benchmarks.calibrate.tasks import (
    DEVELOPMENT,
    FEW_PEAKS,
    RECIPES,
    num_parameters,
    trivial_loss,
)
from torch import nn

from curvestep import SmoothnessProbe
from curvestep.calibration import calibrate as search, ladder as ladder_rule

SEEDS = (1, 2, 3)
NUM_JUDGES = 12  # batches that the final loss is read from
MOST_RATES = 9  # of a grid
NUM_POINTS = 100  # of a loss curve that is kept
NUM_PROBED = 25
# A point of a curve of held-out loss is read from so many samples, or so many numbers to predict.
CURVE_SAMPLES, CURVE_NUMBERS = 256, 2048
FACTORS = (0.5, 2.0, 4.0)  # of the long tasks, on calibrate's rate
LADDER = "judge-ladder"
LONG_PART = "judge-long"
PARTS = {
    "develop": DEVELOPMENT,
    "judge": JUDGED,
    "judge-sgd": JUDGED_SGD,
    LADDER: JUDGED_LADDER,
    LONG_PART: LONG,
}
FROZEN = Path(__file__).with_name("ladder.json")
NO_NUMBERS = {"CLEAR_FAMILIES"}
HELD_OUT_CURVES = {recipe.task.name for recipe in (*JUDGED_LADDER, *LONG)}

Job = dict[str, Any]


def constants() -> dict[str, Any]:
    """The numbers of the rule that this benchmark judges, as the package has them."""
    rule = {name: value for name, value in vars(ladder_rule).items() if _is_constant(name, value)}
    start = {name: value for name, value in vars(search).items() if _is_constant(name, value)}
    return json.loads(json.dumps(start | rule))


def _is_constant(name: str, value: object) -> bool:
    return name.isupper() and isinstance(value, (int, float, tuple)) and name not in NO_NUMBERS


def check_frozen() -> None:
    """Refuse to judge a rule whose constants are others than the frozen ones."""
    current = constants()
    if not FROZEN.exists():
        raise SystemExit(f"{FROZEN.name} does not exist: freeze the rule before you judge it.")
    if json.loads(FROZEN.read_text(encoding="utf-8")) != current:
        raise SystemExit(f"The constants are {current}, and {FROZEN.name} has others.")


def judged(recipe: Recipe, model: nn.Module, judges: list[Batch]) -> float:
    """Mean loss of data that training never sees."""
    model.eval()
    with torch.no_grad():
        return mean(recipe.task.loss(model, batch).item() for batch in judges)


def train(job: Job, *, steps: int | None = None, trace: Path | None = None) -> Job:
    """Run one job; its row."""
    torch.set_num_threads(1)
    recipe, started = RECIPES[job["task"]], time.process_time()
    model, judges = recipe.task.start(job["seed"]), recipe.judging(NUM_JUDGES)
    first = judged(recipe, model, judges)
    model.train()
    row = {**job, "first": first, "trivial": trivial_loss(recipe, judges), "steps": recipe.task.steps,
           "parameters": num_parameters(recipe)}  # fmt: skip
    try:
        prepared = prepare(recipe, job, model)
    except ValueError as error:  # a refusal is a result, too
        return {**row, "loss": None, "problem": str(error)}
    held_out = HeldOut(recipe, model, prepared, judges, steps or recipe.task.steps)
    curve = _losses(recipe, prepared, model, job["seed"], steps or recipe.task.steps, trace, held_out)
    last = math.nan
    if math.isfinite(curve[-1]):
        _deploy(recipe, prepared, model, job["seed"])
        last = judged(recipe, model, judges)
    stride = max(1, len(curve) // NUM_POINTS)
    kept = [round(loss, 5) if math.isfinite(loss) else None for loss in curve[::stride]]
    ending = {"loss": last if math.isfinite(last) else None, "spent": prepared.spent, "curve": kept}
    if held_out.points:
        ending["held_out"] = held_out.losses
    return {**row, **ending, "found": prepared.found, "seconds": round(time.process_time() - started, 2)}


def _enough(judges: list[Batch]) -> list[Batch]:
    """As many of the first batches as say enough about a curve, whose points share them."""
    chosen: list[Batch] = []
    for batch in judges:
        chosen.append(batch)
        samples = sum(len(y) for _, y in chosen)
        numbers = sum(y.numel() for _, y in chosen)
        if samples >= CURVE_SAMPLES or numbers >= CURVE_NUMBERS:
            break
    return chosen


class HeldOut:
    """A curve of held-out loss, read at equal distances; only the ladder's tasks have one.

    Reading it changes neither the run nor its random numbers.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, prepared: Prepared, judges: list[Batch], steps: int
    ) -> None:
        self.recipe, self.model, self.prepared = recipe, model, prepared
        self.judges = _enough(judges)
        self.losses: list[float | None] = []
        self.points: set[int] = set()
        if recipe.task.name in HELD_OUT_CURVES and steps >= NUM_HELD_OUT:
            self.points = {round((i + 1) * steps / NUM_HELD_OUT) for i in range(NUM_HELD_OUT)}

    def after(self, num_steps: int) -> None:
        """Read the loss if one is due after so many steps."""
        if num_steps not in self.points:
            return
        averages = self.prepared.shape is None
        if averages:
            self.prepared.optimizers[0].eval()  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            loss = judged(self.recipe, self.model, self.judges)
        self.losses.append(round(loss, 6) if math.isfinite(loss) else None)
        self.model.train()
        if averages:
            self.prepared.optimizers[0].train()  # type: ignore[attr-defined]


def _losses(
    recipe: Recipe,
    prepared: Prepared,
    model: nn.Module,
    seed: int,
    steps: int,
    trace: Path | None,
    held_out: HeldOut,
) -> list[float]:
    """The training losses; the last is not finite if the run was lost."""
    optimizers, losses = prepared.optimizers, list[float]()
    peaks = peaks_of(optimizers)
    probe = None
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.unlink(missing_ok=True)
        probe = SmoothnessProbe(model, every=max(1, steps // NUM_PROBED), trace=trace)
        probe.watch(optimizers[0])
    if prepared.shape is None:
        optimizers[0].train()  # type: ignore[attr-defined]
    for k, batch in enumerate(islice(recipe.task.stream(seed, "training"), steps)):
        if prepared.shape is not None:
            scale_rates(optimizers, peaks, prepared.shape[k])
        for optimizer in optimizers:
            optimizer.zero_grad()
        closure = lambda batch=batch: recipe.task.loss(model, batch)  # noqa: E731
        loss = closure() if probe is None else probe.record(closure)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        step(prepared, model, loss)
        held_out.after(k + 1)
    return losses


def _deploy(recipe: Recipe, prepared: Prepared, model: nn.Module, seed: int) -> None:
    """Schedule-free's README: its average, and BatchNorm's statistics for it."""
    if prepared.shape is None:
        prepared.optimizers[0].eval()  # type: ignore[attr-defined]
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            with torch.no_grad():
                for batch in islice(recipe.task.stream(seed, "measuring"), 50):
                    recipe.task.loss(model, batch)


# Rows


def key(job: Job) -> str:
    """What makes two runs the same."""
    return json.dumps([job.get(name) for name in ("task", "kind", "method", "seed", "lr")])


def read(folder: Path) -> dict[str, Job]:
    """The finished runs; torn lines are left out."""
    rows = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(text)
            except ValueError:
                continue
            rows[key(row)] = row
    return rows


class Rows:
    """The cache: every run once."""

    def __init__(self, folder: Path, *, probe: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.probe, self.rows = folder, probe, read(folder)

    def run(self, **job: Any) -> Job:
        """The row of a job, trained if it is not there."""
        if key(job) not in self.rows:
            row = self._same(job) or self._train(job)
            self.rows[key(job)] = row
            with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(row) + "\n")  # the first ends a line that was torn
            shown = {name: row.get(name) for name in (*job, "first", "loss", "seconds")}
            print(len(self.rows), shown, flush=True)
        return self.rows[key(job)]

    def _same(self, job: Job) -> Job | None:
        """A fixed rate that is a point of the grid is that very run, if the grid clips as it does."""
        same = self.rows.get(key({**job, "method": "grid"}))
        unclipped = RECIPES[job["task"]].sgd_max_norm == math.inf and job["method"] in SGD_FIXED
        is_point = unclipped or job["method"] in FIXED or job["method"] in MUON_FIXED
        return {**same, "method": job["method"]} if same and is_point else None

    def _train(self, job: Job) -> Job:
        name = "".join(c if c.isalnum() else "-" for c in f"{job['task']}-{job['kind']}-{job.get('lr')}")
        traced = self.folder / "traces" / f"{name}-{job['seed']}.jsonl"
        wants_trace = self.probe and job["method"] == "grid"
        return train(job, trace=traced if wants_trace else None)


def loss_of(row: Job) -> float:
    """The final loss, that of the start if the run diverged or was refused."""
    return row["first"] if row["loss"] is None else row["loss"]


def widen(run: Callable[[float], float], start: float, most: int = MOST_RATES) -> dict[float, float]:
    """Losses at rates a factor of two apart from ``start``, until the best has worse neighbours."""
    losses = {0: run(start)}
    while len(losses) < most:
        best = min(losses, key=lambda k: losses[k])
        missing = [k for k in (best - 1, best + 1) if k not in losses]
        if not missing:
            break
        losses[missing[0]] = run(start * 2.0 ** missing[0])
    return {start * 2.0**k: losses[k] for k in sorted(losses)}


def tune(rows: Rows, task: str, kind: str, seeds: tuple[int, ...]) -> None:
    """The grid: widened on the first seed, its best and the neighbours on the others."""
    run = lambda lr, seed: loss_of(rows.run(task=task, kind=kind, method="grid", seed=seed, lr=lr))  # noqa: E731
    found = widen(lambda lr: run(lr, seeds[0]), FIRST_RATE[kind], 4 if task in FEW_PEAKS else MOST_RATES)
    best = min(found, key=lambda lr: found[lr])
    for seed in seeds[1:]:
        for lr in (best, best / 2, best * 2):
            run(lr, seed)


def run_task(rows: Rows, recipe: Recipe, seeds: tuple[int, ...], methods: list[str]) -> None:
    """Grid and calibrate first, then rivals of AdamW."""
    task = recipe.task.name
    seeds = seeds[:1] if task in FEW_PEAKS else seeds
    for kind in recipe.optimizers:
        for count in (1, len(seeds)):
            if "grid" in methods:
                tune(rows, task, kind, seeds[:count])
            for seed in seeds[:count] if "calibrate" in methods else ():
                rows.run(task=task, kind=kind, method="calibrate", seed=seed)
    for kind in set(recipe.optimizers) & {"momentum", "plain"}:
        for method in set(SGD_FIXED) & set(methods):
            for seed in seeds:
                rows.run(task=task, kind=kind, method=method, seed=seed, lr=SGD_FIXED[method])
    for method in BUDGETS if "adamw" in recipe.optimizers else ():
        for seed in seeds if method in methods else ():
            rows.run(task=task, kind="adamw", method=method, seed=seed)
    for method in RIVALS if "adamw" in recipe.optimizers else ():
        for seed in seeds if method in methods else ():
            rate = {"lr": FIXED[method]} if method in FIXED else {}
            try:
                rows.run(task=task, kind="adamw", method=method, seed=seed, **rate)
            except NotInstalled as reason:
                print(reason, flush=True)
                break


def run_ladder(rows: Rows, recipe: Recipe, seeds: tuple[int, ...], methods: list[str] | None) -> None:
    """The grid, calibrate with each budget, random search with the same, and the rivals of each kind."""
    task = recipe.task.name
    fixed = {**FIXED, **SGD_FIXED, **MUON_FIXED}
    for kind in recipe.optimizers:
        run = lambda lr, seed: loss_of(rows.run(task=task, kind=kind, method="grid", seed=seed, lr=lr))  # noqa: B023, E731
        if methods is None or "grid" in methods:
            scan(run, GRIDS[kind], seeds)
        for method in ("calibrate", RANDOM, *LADDER_BUDGETS, *RANDOM_BUDGETS, *LADDER_RIVALS[kind]):
            for seed in seeds if methods is None or method in methods else ():
                job: Job = {"task": task, "kind": kind, "method": method, "seed": seed}
                if method in fixed:
                    job["lr"] = fixed[method]
                if method == RANDOM:
                    answer = rows.run(**{**job, "method": "calibrate"})
                    if "spent" not in answer:
                        continue  # calibrate refused
                    job["budget"] = answer["spent"]
                try:
                    rows.run(**job)
                except NotInstalled as reason:
                    print(reason, flush=True)
                    break


def run_long(rows: Rows, recipe: Recipe, seeds: tuple[int, ...]) -> None:
    """calibrate, and multiples of its rate with its threshold."""
    kind = recipe.optimizers[0]
    for seed in seeds:
        name = {"task": recipe.task.name, "kind": kind, "seed": seed}
        answer = rows.run(**name, method="calibrate").get("found")
        if answer is None:
            continue  # calibrate refused
        for factor in FACTORS:
            max_norm = answer["max_norm"]
            is_clipped = max_norm is not None and math.isfinite(max_norm)
            rows.run(
                **name, method=f"answer x {factor:g}", lr=factor * answer["lr"],
                max_norm=max_norm if is_clipped else None,
            )  # fmt: skip


def smoke(recipe: Recipe) -> float:
    """Two steps of a task, forgotten: the seconds of one."""
    started = time.process_time()
    job = {"task": recipe.task.name, "kind": recipe.optimizers[0], "method": "grid", "seed": 0, "lr": 1e-4}
    row = train(job, steps=2)
    assert row["loss"] is not None, row
    return (time.process_time() - started) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--part", choices=(*PARTS, "smoke"), required=True)
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), metavar="TASK")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all of the part")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1 2 3, and 1 for long tasks")
    parser.add_argument("--probe", action="store_true", help="keep traces of the grid's runs")
    options = parser.parse_args()
    recipes = PARTS.get(options.part, RECIPES.values())
    chosen = [recipe for recipe in recipes if not options.tasks or recipe.task.name in options.tasks]
    if options.part == "smoke":
        for recipe in chosen:
            print(f"{recipe.task.name}: {num_parameters(recipe):,} parameters, {smoke(recipe):.3f} s a step")
        return
    if options.part.startswith("judge"):
        check_frozen()
    rows = Rows(options.rows, probe=options.probe)
    seeds = tuple(options.seeds or (SEEDS[:1] if options.part == LONG_PART else SEEDS))
    for recipe in chosen:
        if options.part == LADDER:
            run_ladder(rows, recipe, seeds, options.methods)
        elif options.part == LONG_PART:
            run_long(rows, recipe, seeds)
        else:
            methods = options.methods or ["calibrate", "grid", *RIVALS, *SGD_FIXED]
            run_task(rows, recipe, seeds, methods)


if __name__ == "__main__":
    main()
