"""The synthetic experiment: the paper's numbers, the honest ones, and figures from the folder alone."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from curvestep.theory.complexity import descend
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.rules import FixedStep
from curvestep_reproduction.figures.fig7_synthetic import (
    FOLDER,
    RULES,
    SyntheticConfig,
    grids,
    growth,
    jittered,
    load_synthetic,
    run_synthetic,
    summarize,
)
from curvestep_reproduction.figures.reproduction import reproduce

# The whole experiment but for M up to 40 instead of 2000.
SHORT = SyntheticConfig(num_decades=1.3, num_M=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    run_synthetic(folder, progress=False, config=SHORT)
    return folder


@pytest.fixture(scope="module")
def result(folder):
    return load_synthetic(folder)[0]


# Row 29.
def test_the_papers_gradients_are_reproduced_to_two_digits(result):
    assert f"{result.gd_grad_norm:.2g}" == "0.36"
    assert f"{result.clipped_grad_norm:.2g}" == "1.3e-08"
    assert result.gd_best_lr == 10 * 2.0**-15
    assert result.clipped_best_lr == 3e4 * 2.0**-10


def test_many_starts_give_a_median_ratio_near_the_papers_and_a_wide_range(result, folder):
    assert SHORT.num_starts == 200
    assert result.jittered_ratio == pytest.approx(result.ratio, rel=0.1)
    low, high = result.jittered_range
    assert low == pytest.approx(9.0e6, rel=0.05)
    assert high > 1e10
    # With the step sizes that were best from 30, luck alone is worth eight orders of magnitude.
    assert result.fixed_range[0] < 100
    assert result.fixed_range[1] > 1e9
    numbers = load_synthetic(folder)[1]
    assert (np.abs(numbers["starts"] - 30) <= 0.5).all()
    ratios = np.nanmin(numbers["gd_jittered_final"], 0) / np.nanmin(numbers["clipped_jittered_final"], 0)
    assert np.median(ratios) == result.jittered_ratio
    alone = descend(Quartic(), FixedStep(lr=numbers["gd_lrs"]), numbers["starts"][7], SHORT.num_steps)
    np.testing.assert_array_equal(alone.grad_norms[-1], numbers["gd_jittered_final"][:, 7])


# Row 30.
def test_the_table_compares_printed_corrected_and_measured(result):
    cells = {row.quantity: row for row in result.table}
    assert cells["(M L1 + L0) / L0 on x⁴"].corrected == "1.08e7"
    assert cells["(M L1 + L0) / L0 on x⁴"].measured.startswith("6.75e6")
    by_bounds = cells["Gradient norms on x⁴, GD over clipped, by the bounds"]
    assert (by_bounds.printed, by_bounds.corrected) == ("1e5", "√1.08e7 = 3286")
    assert by_bounds.measured.startswith("2.67e7")
    assert cells["Gradient norms of the LSTM, GD over clipped"].corrected == "√(25 / 5) = 2.24"
    law = (result.clipped_best_lr / result.gd_best_lr) ** 1.5
    assert law == pytest.approx(result.ratio, rel=0.15)  # the right explanation is local


def test_numbers_are_a_function_of_the_config(folder):
    saved, numbers = load_synthetic(folder)
    assert asdict(SHORT) == json.loads((folder / "config.json").read_text())
    assert summarize(SHORT, numbers) == saved
    for stage in (grids, jittered):
        for name, values in stage(SHORT).items():
            np.testing.assert_array_equal(values, numbers[name])
    assert not np.array_equal(jittered(replace(SHORT, seed=1))["starts"], numbers["starts"])


def test_iterations_keep_the_corrected_bounds(folder):
    numbers = load_synthetic(folder)[1]
    fixed, clipped, normalized, smooth = numbers["iterations"]
    assert len(RULES) == 4
    assert (fixed >= numbers["fixed_lower"]).all()
    assert (fixed <= numbers["fixed_upper"]).all()
    for iterations, slack in ((clipped, 1), (normalized, 2), (smooth, 1)):
        assert (iterations <= slack * numbers["clipped_upper"]).all()


@pytest.mark.slow
def test_what_a_fixed_step_loses_grows_with_M_as_predicted():
    config = SyntheticConfig()
    numbers = growth(config)
    M, (fixed, clipped) = numbers["M"], numbers["iterations"][:2]
    assert math.log10(M[-1] / M[0]) == pytest.approx(3)
    kappa = M * config.L1 / config.L0
    slope = np.polyfit(np.log(M), np.log(fixed / clipped), 1)[0]
    predicted = np.polyfit(np.log(M), np.log(kappa / np.log1p(kappa)), 1)[0]
    assert slope == pytest.approx(predicted, rel=0.1)
    assert (np.diff(fixed / clipped) > 0).all()
    assert (fixed >= numbers["fixed_lower"]).all()
    assert fixed[-1] / clipped[-1] > 50


@pytest.mark.slow
def test_figures_are_drawn_from_the_folder_alone(folder, tmp_path):
    (tmp_path / FOLDER).mkdir()
    for name in ("config.json", "numbers.npz"):
        (tmp_path / FOLDER / name).write_bytes((folder / name).read_bytes())
    result = reproduce(tmp_path, figures=["fig7"], progress=False, offline=True)
    assert result.figures == {"fig7": tmp_path / "figures" / "fig7.png"}
    svgs = sorted((tmp_path / "figures").glob("*.svg"))
    assert [svg.name for svg in svgs] == ["claims.svg", "fig7.svg", "theorems.svg"]
    text = svgs[1].read_text()
    assert "(f) clipped GD: |f′(x)| = 4|x|³" in text
    assert text.count("η = 0.000305, best") == 1
    assert "paper: 0.36" in text
