"""One run of a reproduction is calibrated, and the claims say how it compares with the paper's numbers."""

import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("lightning_fabric")

from curvestep.calibration.result import CALIBRATION, read_calibration
from curvestep.lab.paper.fig4_curves import CALIBRATED
from curvestep.lab.paper.legend import BY_HAND
from curvestep.lab.paper.reproduction import make_plan, reproduce
from curvestep.lab.run.folder import Run
from tests.lab.paper.test_reproduction import tiny_plan


def the_claim(claims):
    (found,) = [claim for claim in claims if claim.name == "calibrated"]
    return found


def test_plan_has_one_calibrated_run_beside_the_one_by_hand():
    plan = make_plan()
    (run,) = [run for run in plan.runs if run.calibrated]
    assert run.setting == CALIBRATED
    assert run.recipe.seed in [other.recipe.seed for other in plan.of(BY_HAND)]
    assert run.cost <= 80  # two cores: forty seconds of the quarter of an hour
    assert not any(run.calibrated for run in make_plan("laptop", ("fig8",)).runs)


@pytest.mark.slow
def test_reproduction_measures_trains_keeps_the_curve_and_compares(tmp_path):
    plan = tiny_plan(tmp_path / "data", ("fig4",))
    wanted = tuple(run for run in plan.runs if run.setting in (BY_HAND, CALIBRATED))
    plan = replace(plan, runs=wanted)
    result = reproduce(tmp_path / "out", plan=plan, workers=1, offline=True, progress=False)
    (folder,) = [path.parent for path in (tmp_path / "out" / "runs").rglob(CALIBRATION)]
    cal, recipe = read_calibration(folder), Run.load(folder).recipe
    assert cal is not None
    assert (recipe.lr, recipe.max_norm) == (cal.lr, cal.max_norm)
    claim = the_claim(result.claims)
    assert claim.numbers["measured"] == recipe.label
    assert math.isfinite(json.loads((folder / "status.json").read_text())["train_loss"])
