"""The figure of a calibration shows what was measured."""

import math

import pytest
import torch

pytest.importorskip("matplotlib")

from curvestep import calibrate
from curvestep.lab.report.calibration_figure import calibration


def quadratic(curvatures, **options):
    model = torch.nn.Linear(2, 1, bias=False)
    return calibrate(model, lambda L: 0.5 * L * model.weight.square().sum(), curvatures, **options)


def points(panel):
    """Every finite point drawn as a line or a mark, and the heights of straight lines."""
    return {(float(x), float(y)) for line in panel.lines for x, y in zip(*line.get_data(), strict=True)}


def test_figure_shows_every_measured_step_the_limit_and_the_safe_step(tmp_path):
    cal = quadratic([1.0, 2.0, 4.0, 2.0])
    figure = calibration(cal)
    left, right = figure.axes
    for batch in cal.curve:
        for p in batch.points:
            assert (p.step, p.kappa) in points(left)
            assert (p.step, p.loss - batch.loss) in points(right)
    assert all(math.isclose(y, cal.max_kappa) for y in left.lines[-1].get_ydata()) or (
        0.0,
        cal.max_kappa,
    ) in points(left)
    assert any("safe step 0.5" in str(line.get_label()) for line in left.lines)
    figure.savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_line_of_the_safe_step_has_no_batchs_colour():
    cal = quadratic([1.0, 2.0, 4.0, 2.0])
    left = calibration(cal).axes[0]
    colours = {str(line.get_label()): line.get_color() for line in left.lines}
    batches = {colour for label, colour in colours.items() if label.startswith("batch")}
    assert len(batches) == len(cal.curve)
    assert colours[next(label for label in colours if label.startswith("safe step"))] not in batches


@pytest.mark.parametrize(
    ("optimizer", "axis", "threshold"),
    [
        ("ClippedSGD", "of the gradient", "max_norm"),
        ("NormalizedSGD", "of the gradient", "offset"),
        ("AdamW", "of the slope", None),
    ],
)
def test_figure_names_what_was_measured_for_this_optimizer(optimizer, axis, threshold):
    figure = calibration(quadratic([1.0, 2.0, 4.0], optimizer=optimizer))
    assert axis in figure.axes[0].get_ylabel()
    words = figure.get_supxlabel()
    assert [name for name in ("max_norm", "offset") if name in words] == ([threshold] if threshold else [])


def test_figure_of_one_batch_and_of_a_wall_is_drawn():
    model = torch.nn.Linear(2, 1, bias=False)

    def wall(batch):
        w = model.weight.square().sum()
        return w + torch.where(w > 1e3, w.new_tensor(math.inf), w.new_zeros(()))

    assert len(calibration(calibrate(model, wall, [0])).axes) == 2
