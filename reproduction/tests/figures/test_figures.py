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
from curvestep_reproduction.claims.claims import IN_PART, OPEN, PAPER, REPRODUCED, Claim
from curvestep_reproduction.figures.fig1_scatter import scatter_panel
from curvestep_reproduction.figures.fig4_curves import Curve, axis_limits, curve_panels, gather
from curvestep_reproduction.figures.fig6_data_fraction import agreement, data_fraction
from curvestep_reproduction.figures.fig8_lstm_gd import compare, lstm_gd
from curvestep_reproduction.figures.grid import claims_grid
from curvestep_reproduction.figures.layout import LEAST_POINTS, figure_of_panels, trained_on
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.run_folder import TrainedRun, open_run, write_status

L0 = 1.0
L1 = 2.0


def write_run(
    folder, *, recipe="ptb-lstm", steps=60, diverged=False, scale=1.0, held_out=10, valid="valid", **fields
):
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
            metrics.append({"step": step, "split": valid, "loss": loss + 0.1, "perplexity": math.exp(loss)})
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


def title_of(axis):
    return axis.get_title(loc="left")


@pytest.fixture(scope="module")
def wall(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "wall", lr=30.0, max_norm=0.25)


def draw(*panels, runs=(), title="Figure 1: a wall"):
    return figure_of_panels(panels, title=title, note=trained_on(runs))


# Scatter


def test_a_panel_shows_the_points_coloured_by_iteration_on_log_axes(wall):
    figure = draw(scatter_panel([wall], letter="a"), runs=[wall])
    panel, bar = figure.axes
    trace = Trace.load(wall.trace_path)
    points = panel.collections[0]
    np.testing.assert_allclose(
        points.get_offsets(), np.c_[trace.column("grad_norm"), trace.column("smoothness")]
    )
    np.testing.assert_allclose(points.get_array(), trace.column("step"))
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert bar.get_ylabel() == "iteration"


def test_panel_states_setting_correlation_rows_seeds_and_the_papers_value(wall):
    words = texts(draw(scatter_panel([wall], letter="a", paper="strong"), runs=[wall]))
    trace = Trace.load(wall.trace_path)
    logs = np.log(trace.column("grad_norm")), np.log(trace.column("smoothness"))
    r = np.corrcoef(*logs)[0, 1]
    assert f"(a) lr 30, clip 0.25\nr = {r:.2f}\n60 rows, seed 0" in words
    assert "paper: strong" in words
    assert "a wall of exponentials" in words


def test_a_panel_of_fewer_than_fifty_points_is_not_named_as_the_papers(tmp_path, wall):
    few = write_run(tmp_path / "few", steps=LEAST_POINTS - 1)
    many, short = draw(scatter_panel([wall], letter="a"), scatter_panel([few], letter="b")).axes[:2]
    assert title_of(many).startswith("(a) ")
    assert title_of(short).startswith("lr ")
    assert texts(draw(scatter_panel([few]))).count("Not the paper's figure yet") == 1


def test_run_that_diverged_at_once_is_drawn_without_a_fit(tmp_path):
    run = write_run(tmp_path / "run", steps=4, diverged=True, lr=30.0, max_norm=math.inf)
    words = texts(draw(scatter_panel([run])))
    assert "(diverged at step 4)" in words
    assert "r = " not in words


def test_run_without_a_trace_says_so(tmp_path):
    run = write_run(tmp_path / "run", steps=4)
    run.trace_path.unlink()
    assert "nothing was measured" in texts(draw(scatter_panel([run])))


def test_rows_that_cannot_stand_on_a_log_axis_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    with Trace(run.trace_path) as trace:
        trace.append({"step": 4, "grad_norm": 0.0, "smoothness": 1.0, "status": "ok"})
        trace.append({"step": 5, "grad_norm": 1.0, "smoothness": math.nan, "status": "nonfinite"})
    assert scatter_panel([run]).num_points == 3


# Files


@pytest.mark.slow
def test_the_same_folders_give_the_same_bytes_and_an_svg_for_dark_pages(wall, tmp_path):
    png, svg = save(draw(scatter_panel([wall])), tmp_path / "new" / "fig1.png")
    assert matplotlib.image.imread(png)[..., :3].std() > 0.05
    assert "lr 30, clip 0.25" in svg.read_text()  # text stays text
    assert "prefers-color-scheme: dark" in svg.read_text()
    again = save(draw(scatter_panel([wall])), tmp_path / "again")
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
    lost = [
        write_run(folder / "lost", lr=30.0, max_norm=math.inf, steps=7, diverged=True, scale=1e6),
        write_run(folder / "survivor", lr=30.0, max_norm=math.inf, seed=1),
    ]
    image = write_run(folder / "image", recipe="cifar-resnet20", lr=0.1)
    return [*language, *lost, image]


def test_each_task_has_its_row_with_the_units_of_the_paper(settings):
    panels = curve_panels(settings)
    assert [panel.letter for panel in panels] == list("abcd")
    labels = [panel.chart.y.label for panel in panels]
    assert labels[1:] == ["validation loss", "training loss, mean of 20 steps", "test accuracy (%)"]
    words = texts(draw(*panels))
    assert "seeds that diverge:\nlr 30, no clip: 1 of 2" in words
    assert "(a) training loss\nseeds a setting: 2 to 3; points a line: 60" in words
    assert "(b)" not in words  # six points


def test_line_is_the_mean_over_seeds_and_the_band_their_range(settings):
    axis = draw(curve_panels(settings)[1]).axes[0]
    steps, mean = (np.asarray(part) for part in axis.lines[0].get_data())
    rows = np.array([run.column("loss", "valid")[1] for run in settings[:3]])
    np.testing.assert_array_equal(steps, [10, 20, 30, 40, 50, 60])
    np.testing.assert_allclose(mean, rows.mean(0))
    band = np.asarray(axis.collections[0].get_paths()[0].vertices)[:, 1]
    np.testing.assert_allclose((band.min(), band.max()), (rows.min(), rows.max()))


def test_survivors_of_a_setting_that_diverges_are_drawn_thin_one_by_one(settings):
    curve = gather(settings, "loss", "train")[2]
    assert (curve.values.shape, curve.diverged_at, curve.num_seeds) == ((1, 60), (7.0,), 2)
    line, triangle = curve.series(3.0)
    assert line.weight < 1
    assert (float(triangle.x[0]), float(triangle.y[0]), triangle.mark) == (7.0, 3.0, "triangle")


def test_training_loss_is_a_running_mean_of_the_steps_so_far(settings):
    (curve,) = gather(settings[:1], "loss", "train", smoothing=20)
    _, raw = settings[0].column("loss")
    expected = [raw[max(0, k - 19) : k + 1].mean() for k in range(len(raw))]
    np.testing.assert_allclose(curve.values[0], expected)


def test_a_seed_with_its_end_alone_is_a_mark_beside_the_others(tmp_path):
    part = {"valid": "valid-part", "eval_part": 0.2}
    runs = [write_run(tmp_path / "0", seed=0, held_out=60)]
    runs += [write_run(tmp_path / str(n), seed=n, **part) for n in (1, 2)]
    (curve,) = gather(runs, "loss", "valid")
    assert curve.values.shape == (2, 6)
    ((step, value),) = curve.alone
    assert (step, value) == (60.0, pytest.approx(runs[0].rows("valid")[0]["loss"]))
    assert curve_panels(runs)[1].chart.y.label == "validation loss, 20% of the text"


def test_seeds_that_end_early_leave_the_steps_that_all_have(tmp_path):
    runs = [write_run(tmp_path / str(n), steps=n, seed=n) for n in (30, 20)]
    (curve,) = gather(runs, "loss", "train")
    assert curve.values.shape == (2, 20)


def curve(*rows, label="lr 5"):
    return Curve(label=label, steps=np.arange(float(len(rows[0]))), values=np.array(rows))


def test_the_axis_holds_every_seed_and_has_some_length_for_one_point():
    low, high = axis_limits([curve([30.0, 63.0, 60.0], [1, 65, 50]), curve([20.0, 40.0, 52.0])])
    assert low < 1 < 65 < high
    low, high = axis_limits([curve([5.7])])
    assert low < 5.7 < high
    assert axis_limits([]) is None


def test_a_spike_at_the_start_does_not_set_the_axis_of_the_loss():
    spike = [9.0, 80.0, *np.linspace(7, 2, 28)]
    assert axis_limits([curve(spike)], past=0.1)[1] < 12


# A part of the data against all of it


@pytest.mark.slow
def test_agreement_is_taken_at_common_steps_and_shown_with_its_errors(tmp_path):
    part = write_run(tmp_path / "part", probe_data=0.1)
    whole = write_run(tmp_path / "whole", probe_data=1.0, steps=50)
    gradient, smoothness = agreement(part, whole)
    np.testing.assert_array_equal(gradient.steps, np.arange(1, 51))
    for found in (gradient, smoothness):
        assert found.correlation == pytest.approx(1)
        assert (found.ratio, found.largest_error) == (pytest.approx(1), pytest.approx(0))
    words = texts(data_fraction(part, whole))
    assert words.count("mean error 0.0 %, largest 0.0 %\n50 iterates, seed 0") == 2
    assert "from 10% of the data" in words


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
def test_gd_figure_has_norms_losses_scatters_and_the_papers_lines(wall, tmp_path):
    gd = write_run(tmp_path / "gd", lr=1.0, max_norm=math.inf, scale=2.0)
    axes = lstm_gd([gd], [wall]).axes[:4]
    shown = [title_of(axis).partition("\n")[0] for axis in axes]
    assert shown == ["(a) gradient norm", "(b) training loss", "(c) lr 1, no clip", "(d) lr 30, clip 0.25"]
    np.testing.assert_allclose(axes[2].lines[0].get_ydata(), 25.0)
    x, y = axes[3].lines[0].get_data()
    np.testing.assert_allclose(y, 5 + 10 * np.asarray(x))


# Claims by scales


def test_the_grid_frames_the_scale_that_decides_each_claim():
    row = {"kind": PAPER, "source": "Figure 2(a)", "paper": "Smoothness follows.", "sentence": "It does."}
    of_scales = {
        "laptop": [Claim(name="a", verdict=IN_PART, scale="laptop", decides="epoch", **row)],
        "epoch": [Claim(name="a", verdict=REPRODUCED, scale="epoch", decides="epoch", **row)],
    }
    of_scales["laptop"].append(Claim(name="b", verdict=OPEN, **row))
    figure = claims_grid(of_scales)
    words = texts(figure)
    assert words.index("in part") < words.index("reproduced") < words.index("open")
    frames = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert [(int(frame.get_x()), int(frame.get_y())) for frame in frames] == [(2, 0), (0, 1)]
    assert "Of the 2 claims of the paper 1 is reproduced, 1 is open." in words
