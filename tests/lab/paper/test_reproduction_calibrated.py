"""One run of a reproduction is calibrated, and the claims say how it compares with the paper's numbers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("lightning_fabric")

from curvestep.calibration.result import CALIBRATION, read_calibration
from curvestep.lab.paper.claims import CONTRADICTED, SUPPORTED
from curvestep.lab.paper.fig4_curves import CALIBRATED
from curvestep.lab.paper.plan import BY_HAND, Results
from curvestep.lab.paper.reproduction import make_claims, make_plan, reproduce
from curvestep.lab.run.folder import Run
from tests.lab.paper.test_reproduction import fake_runs, tiny_plan


def the_claim(claims):
    (found,) = [claim for claim in claims if "measured before training" in claim.paper]
    return found


def test_plan_has_one_calibrated_run_beside_the_one_by_hand():
    plan = make_plan()
    (run,) = [run for run in plan.runs if run.calibrated]
    assert run.setting == CALIBRATED
    assert run.recipe.seed in [other.recipe.seed for other in plan.of(BY_HAND)]
    assert run.cost <= 80  # two cores: forty seconds of the quarter of an hour
    assert not any(run.calibrated for run in make_plan("laptop", ("fig8",)).runs)


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, SUPPORTED), (0.1, SUPPORTED), (0.5, CONTRADICTED)])
def test_verdict_is_the_share_of_the_way_that_is_missed(tmp_path, gain, verdict):
    plan = make_plan("laptop", ("fig4",), language={"steps": 50, "eval_every": 0})

    def loss_of(setting, seed):
        end = 6.0 + (gain if setting == CALIBRATED else 0.0)
        return [9.0, *np.full(49, end)]

    fake_runs(plan, tmp_path, loss_of=loss_of)
    claim = the_claim(make_claims(Results(plan, tmp_path)))
    assert claim.verdict == verdict
    assert f"{gain / 3:.1%} of the way down is missed" in claim.measured


def test_calibrated_run_that_diverged_is_said(tmp_path):
    plan = make_plan("laptop", ("fig4",), language={"steps": 50, "eval_every": 0})
    fake_runs(plan, tmp_path, loss_of=lambda setting, seed: np.full(50, 5.0), diverged=(CALIBRATED,))
    claim = the_claim(make_claims(Results(plan, tmp_path)))
    assert claim.verdict == CONTRADICTED
    assert "diverged at step" in claim.measured


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
    assert f"lr {cal.lr:.3g} and max_norm {cal.max_norm:.3g} from {cal.num_gradients}" in claim.measured
    assert math.isfinite(json.loads((folder / "status.json").read_text())["train_loss"])
