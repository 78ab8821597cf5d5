"""Run folders as whoever trains may write them, from descent on a function with known L0 and L1."""

import math

import numpy as np

from curvestep.files import RowFile, add_checksum
from curvestep.trace.run import CONFIG, METRICS, STATUS, TRACE, write_json
from curvestep.trace.schema import OK
from curvestep.trace.trace import Trace
from tests.theory.draws import rotated_walls


def make_run(
    folder, *, lr=0.3, max_norm=0.5, steps=200, every=5, traced=True, layers=(), seed=0, status=None, **fields
):
    """Noisy clipped descent on a sum of exponential walls, kept as a run folder."""
    folder.mkdir(parents=True)
    config = {"name": "walls", "lr": lr, "max_norm": max_norm, "steps": steps, "seed": seed, "batch_size": 20}
    config |= {"probe_every": every, **fields}
    clip = "no clip" if math.isinf(max_norm) else f"clip {max_norm:g}"
    size = [f"{fields['hidden']} hidden"] if "hidden" in fields else []
    config["about"] = {
        "label": f"lr {lr:g}, {clip}",
        "task": ", ".join(["walls", *size, f"batch {config['batch_size']}"]),
        "optimizer": "ClippedSGD",
        "max_norm": max_norm,
        "not_settings": ["name", "seed", "probe_every"],
    }
    write_json(folder / CONFIG, add_checksum(config))
    rows = _descend(lr=lr, max_norm=max_norm, steps=steps, seed=seed)
    metrics = RowFile(folder / METRICS)
    trace = Trace(folder / TRACE, header={"model": "walls"}) if traced else None
    for row in rows:
        names = ("step", "loss", "grad_norm", "coefficient", "lr")
        metrics.append({"split": "train", **{name: row[name] for name in names}})
        if trace is not None and row["step"] % every == 0 and math.isfinite(row["smoothness"]):
            measured = {name: {"smoothness": row["smoothness"] * (k + 1)} for k, name in enumerate(layers)}
            trace.append({**row, "status": OK, "layers": measured} if layers else {**row, "status": OK})
    diverged = len(rows) < steps
    if not diverged:
        metrics.append({"step": len(rows), "split": "valid", "loss": rows[-1]["loss"], "perplexity": 1.0})
    metrics.close()
    if trace is not None:
        trace.close()
    write_status(
        folder,
        status=status or ("diverged" if diverged else "finished"),
        step=len(rows),
        train_loss=math.nan if diverged else float(np.mean([row["loss"] for row in rows[-50:]])),
        metrics={},
        num_parameters=4,
        seconds=1.0,
        data="exponential walls",
        message=f"the loss passed 3 times the first one at step {len(rows)}" if diverged else "",
    )
    return folder


def write_status(folder, **values):
    """Write how a run stands."""
    write_json(folder / STATUS, add_checksum(values))


def _descend(*, lr, max_norm, steps, seed):
    rng = np.random.default_rng(seed)
    problem = rotated_walls(L0=1.0, L1=2.0, dim=4)
    x = np.array([1.2, -0.7, 0.9, 0.4])
    rows = []
    for step in range(1, steps + 1):
        noise = 0.3 * rng.standard_normal(4)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient = problem.gradient(x) + noise
            norm = float(np.linalg.norm(gradient))
            coefficient = min(1.0, max_norm / norm) if math.isfinite(norm) else math.nan
            move = -lr * coefficient * gradient
            change = problem.gradient(x + move) + noise - gradient
            length = float(np.linalg.norm(move))
            smoothness = float(np.linalg.norm(change) / length)
        rows.append(
            {
                "step": step, "loss": float(problem.value(x)), "grad_norm": norm, "step_norm": length,
                "smoothness": smoothness, "lr": lr, "coefficient": coefficient,
            }
        )  # fmt: skip
        x = x + move
        if not math.isfinite(norm) or not rows[-1]["loss"] <= 3 * rows[0]["loss"]:
            break
    return rows
