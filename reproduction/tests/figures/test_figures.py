"""The training figures, drawn from run folders that a descent on a known function filled."""

import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from curvestep.files import RowFile
from curvestep.fit.fit import fit_smoothness
from curvestep.report.drawing import save
from curvestep.trace.run import METRICS
from curvestep.trace.trace import Trace
from curvestep_reproduction.figures.fig1_scatter import scatter
from curvestep_reproduction.figures.fig4_curves import Curve, curve_chart, curves, gather
from curvestep_reproduction.figures.fig6_data_fraction import agreement, data_fraction
from curvestep_reproduction.figures.fig8_lstm_gd import compare, lstm_gd
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.run_folder import TrainedRun, open_run, write_status

L0, L1 = 1.0, 2.0


def write_run(folder, *, recipe="ptb-lstm", steps=60, diverged=False, scale=1.0, held_out=10, **fields):
    """A run folder from clipped descent on (L0/L1²)(exp(L1|x|) − L1|x| − 1), where f'' = L0 + L1|f'|."""
    made = get_recipe(recipe, steps=steps, **fields)
    run = open_run(folder, made, resume=False)
    rng = np.random.default_rng(made.seed)
    gradient = lambda x: L0 / L1 * np.sign(x) * np.expm1(L1 * abs(x))  # noqa: E731
    metrics, trace = RowFile(folder / METRICS), Trace(run.trace_path)
    x = 1.5
    for step in range(1, steps + 1):
        g = gradient(x) * rng.uniform(0.5, 1)  # a noisy step, so that the norms vary
        h = 0.02 * min(1.0, 2.0 / abs(g))
        new = x - h * g
        smoothness = abs(gradient(new) - gradient(x)) / abs(new - x)
        loss = scale * L0 / L1**2 * (math.exp(L1 * abs(x)) - L1 * abs(x) - 1)
        norm = abs(gradient(x))
        row = {"step": step, "loss": loss, "grad_norm": norm}
        metrics.append(row | {"split": "train", "coefficient": 1.0, "lr": made.lr})
        trace.append(row | {"smoothness": smoothness, "step_norm": abs(new - x), "lr": 0.05})
        if step % held_out == 0:
            metrics.append({"step": step, "split": "valid", "loss": loss + 0.1, "perplexity": math.exp(loss)})
            metrics.append({"step": step, "split": "test", "loss": loss, "accuracy": 90.0 - loss})
        x = new
    metrics.close()
    trace.close()
    write_status(
        folder, status="diverged" if diverged else "finished", step=steps, data="a wall of exponentials"
    )
    return TrainedRun.load(folder)


def texts(figure):
    """Every word in the figure, in one string."""
    FigureCanvasAgg(figure).draw()
    return "\n".join(t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")))


def line(panel, label):
    (found,) = [one for one in panel.lines if str(one.get_label()).startswith(label)]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


@pytest.fixture(scope="module")
def wall(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "wall", lr=30.0, max_norm=0.25)


@pytest.fixture(scope="module")
def drawn(wall):
    return scatter([[wall]], title="Figure 1")


# Scatter


def test_panel_shows_the_measured_points_coloured_by_iteration_on_log_axes(drawn, wall):
    panel, bar = drawn.axes
    trace = Trace.load(wall.trace_path)
    points = panel.collections[0]
    np.testing.assert_allclose(
        points.get_offsets(), np.c_[trace.column("grad_norm"), trace.column("smoothness")]
    )
    np.testing.assert_allclose(points.get_array(), trace.column("step"))
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert bar.get_ylabel() == "iteration"
    assert panel.get_title().startswith("lr 30, clip 0.25\n")


def test_the_title_gives_the_correlation_and_the_note_the_data(drawn, wall):
    trace = Trace.load(wall.trace_path)
    logs = np.log(trace.column("grad_norm")), np.log(trace.column("smoothness"))
    assert f"correlation of logs {np.corrcoef(*logs)[0, 1]:.2f}" in drawn.axes[0].get_title()
    assert "a wall of exponentials" in texts(drawn)


@pytest.mark.slow
def test_seeds_share_a_panel_and_each_setting_has_axes_of_its_own(tmp_path):
    seeds = [write_run(tmp_path / f"{seed}", seed=seed, scale=2.0, lr=30.0, max_norm=0.25) for seed in (1, 2)]
    other = write_run(tmp_path / "other", seed=1, steps=30, lr=2.0, max_norm=math.inf)
    figure = scatter([seeds, [other]])
    first, second = figure.axes[:2]
    rows = [len(Trace.load(run.trace_path)) for run in seeds]
    assert len(np.asarray(first.collections[0].get_offsets())) == sum(rows)
    assert first.get_xlim() != second.get_xlim()
    assert [panel.get_title().partition(" ")[0] for panel in (first, second)] == ["(a)", "(b)"]


@pytest.mark.slow
def test_linear_panels_begin_at_zero(wall):
    linear, log, *_ = scatter([[wall], [wall]], linear=[0]).axes
    assert (linear.get_xscale(), log.get_xscale()) == ("linear", "log")
    assert linear.get_xlim()[0] == linear.get_ylim()[0] == 0


def test_run_that_diverged_at_once_is_drawn_without_a_fit(tmp_path):
    run = write_run(tmp_path / "run", steps=4, diverged=True, lr=30.0, max_norm=math.inf)
    words = texts(scatter([[run]]))
    assert "lr 30, no clip (diverged\nat step 4)" in words
    assert "correlation" not in words


def test_run_without_a_trace_says_so(tmp_path):
    run = write_run(tmp_path / "run", steps=4)
    run.trace_path.unlink()
    assert "nothing was measured" in texts(scatter([[run]]))


def test_rows_that_cannot_stand_on_a_log_axis_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    with Trace(run.trace_path) as trace:
        trace.append({"step": 4, "grad_norm": 0.0, "smoothness": 1.0, "status": "ok"})
        trace.append({"step": 5, "grad_norm": 1.0, "smoothness": math.nan, "status": "nonfinite"})
    assert len(np.asarray(scatter([[run]]).axes[0].collections[0].get_offsets())) == 3


# Files


@pytest.mark.slow
def test_figure_is_saved_as_png_and_svg_and_the_same_folders_give_the_same_bytes(wall, tmp_path):
    png, svg = save(scatter([[wall]], title="Figure 1"), tmp_path / "new" / "fig1.png")
    assert matplotlib.image.imread(png)[..., :3].std() > 0.05
    assert "lr 30, clip 0.25" in svg.read_text()  # text stays text
    again = save(scatter([[wall]], title="Figure 1"), tmp_path / "again")
    assert [p.read_bytes() for p in again] == [png.read_bytes(), svg.read_bytes()]


# Curves


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    language = [
        write_run(folder / f"lm-{lr}-{seed}", lr=lr, max_norm=0.25, seed=seed, scale=seed + 1)
        for lr in (30.0, 3.0)
        for seed in (0, 1, 2)
    ]
    lost = write_run(folder / "lost", lr=30.0, max_norm=math.inf, steps=7, diverged=True)
    image = write_run(folder / "image", recipe="cifar-resnet20", lr=0.1)
    return [*language, lost, image]


@pytest.mark.slow
def test_each_task_has_its_row_with_the_units_of_the_paper(settings):
    figure = curves(settings)
    titles = [panel.get_title() for panel in figure.axes]
    assert titles[:2] == ["(a) ptb-lstm: training loss", "(b) ptb-lstm: validation loss"]
    assert titles[3] == "(d) cifar-resnet20: test accuracy"
    assert figure.axes[3].get_ylabel() == "test accuracy (%)"
    assert "lr 30, no clip (1 of 1\ndiverge)" in texts(figure)
    assert "seeds 0 to 2" in texts(figure)


def test_line_is_the_mean_over_seeds_and_the_band_their_range(settings):
    panel = curves(settings).axes[1]
    steps, mean = (np.asarray(part) for part in panel.lines[0].get_data())  # named beside the training loss
    rows = np.array([run.column("loss", "valid")[1] for run in settings[:3]])
    np.testing.assert_array_equal(steps, [10, 20, 30, 40, 50, 60])
    np.testing.assert_allclose(mean, rows.mean(0))
    band = np.asarray(panel.collections[0].get_paths()[0].vertices)[:, 1]
    np.testing.assert_allclose((band.min(), band.max()), (rows.min(), rows.max()))


def test_training_loss_is_a_running_mean_of_the_steps_so_far(settings):
    (curve,) = gather(settings[:1], "loss", "train", smoothing=20)
    _, raw = settings[0].column("loss")
    expected = [raw[max(0, k - 19) : k + 1].mean() for k in range(len(raw))]
    np.testing.assert_allclose(curve.values[0], expected)


def test_runs_that_train_set_the_range_not_the_one_that_exploded(tmp_path, settings):
    lost = write_run(tmp_path / "lost", lr=30.0, max_norm=math.inf, steps=7, diverged=True, scale=1e6)
    assert curves([*settings[:3], lost]).axes[0].get_ylim()[1] < 50


def test_seeds_that_end_early_leave_the_steps_that_all_have(tmp_path):
    runs = [write_run(tmp_path / str(n), steps=n, seed=n) for n in (30, 20)]
    (curve,) = gather(runs, "loss", "train")
    assert curve.values.shape == (2, 20)


# A part of the data against all of it


@pytest.fixture(scope="module")
def part_and_whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return write_run(folder / "part", probe_data=0.1), write_run(folder / "whole", probe_data=1.0, steps=50)


@pytest.mark.slow
def test_agreement_is_taken_at_common_steps(part_and_whole):
    gradient, smoothness = agreement(*part_and_whole)
    np.testing.assert_array_equal(gradient.steps, np.arange(1, 51))
    for found in (gradient, smoothness):
        assert found.correlation == pytest.approx(1)
        assert found.ratio == pytest.approx(1)
    figure = data_fraction(*part_and_whole, title="Figure 6")
    for panel in figure.axes[2:4]:
        assert "correlation of logs 1.000, median ratio 1.000" in panel.get_xlabel()
        assert panel.get_ylabel() == "from 10% of the data"


# GD against clipped GD


def test_gradients_are_compared_up_to_the_step_that_both_reached(wall, tmp_path):
    short = write_run(tmp_path / "short", steps=30, lr=30.0, max_norm=0.25)
    assert [compare(wall, short)[1], compare(short, wall)[1]] == pytest.approx([1, 1])


def test_comparison_by_hand(wall):
    printed, measured = compare(wall, wall)
    fit = fit_smoothness(Trace.load(wall.trace_path), control=False)
    norms = Trace.load(wall.trace_path).column("grad_norm")
    assert measured == pytest.approx(1)
    assert printed == pytest.approx((fit.L0 + fit.L1 * norms.max()) / fit.L0)


@pytest.mark.slow
def test_gd_figure_has_norms_losses_and_both_scatters(wall, tmp_path):
    gd = write_run(tmp_path / "gd", lr=1.0, max_norm=math.inf, scale=2.0)
    figure = lstm_gd([gd], [wall])
    titles = [panel.get_title() for panel in figure.axes]
    shown = [title.partition("\n")[0] for title in titles[:4]]
    assert shown[:2] == ["(a) gradient norm, mean of 5 rows", "(b) training loss"]
    assert shown[2:] == ["(c) lr 1, no clip", "(d) lr 30, clip 0.25"]


def test_a_curve_of_one_point_has_an_axis_of_some_length():
    curve = Curve(label="lr 30", steps=np.array([1.0]), values=np.array([[5.7]]))
    chart = curve_chart([curve], "loss", title="")
    low, high = chart.y.range
    assert low < 5.7 < high


def test_the_axis_holds_every_point_of_curves_that_did_not_diverge():
    peak = Curve(label="momentum", steps=np.arange(3.0), values=np.array([[30.0, 63.0, 60.0], [1, 65, 50]]))
    low = Curve(label="lr 5", steps=np.arange(3.0), values=np.array([[20.0, 40.0, 52.0]]))
    bottom, top = curve_chart([peak, low], "accuracy", title="").y.range
    assert bottom < 1
    assert top > 65
