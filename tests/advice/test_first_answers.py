"""What somebody new is told: after a lost run, a short one, a good one, and of runs that do not compare."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.advice.advice import advise
from curvestep.smoothness.determinism import NonDeterministicError
from tests.fit.traces import inside_steps, make_trace, simulated


def data(num=256, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 10, generator=generator)
    return x, (x @ torch.randn(10, 4, generator=generator)).argmax(1)


def classifier(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 4))


def train(make, *, model=None, steps=60, every=2, batch=32, square=False):
    """Loss before and after, and the trace; the loop goes on whatever becomes of the loss."""
    model = classifier() if model is None else model
    x, y = data()
    optimizer, probe = make(model.parameters()), cs.SmoothnessProbe(model, every=every)

    def loss_of(part):
        out = model(x[part])
        return (out - 3 * F.one_hot(y[part], 4)).square().mean() if square else F.cross_entropy(out, y[part])

    first = loss_of(slice(None)).item()
    for step in range(steps):
        part = torch.arange(step * batch, (step + 1) * batch) % len(x)
        optimizer.zero_grad()
        loss = loss_of(part)
        loss.backward()
        with probe(lambda part=part: loss_of(part), loss=loss):
            optimizer.step()
    return first, loss_of(slice(None)).item(), probe.trace


def sgd(lr, **options):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **options)


def clipped(advice):
    options = {"lr": advice.lr, "max_norm": advice.max_norm}
    return lambda parameters: cs.ClippedSGD(parameters, **options)


def test_after_a_loss_that_ran_away_the_first_line_says_so_and_its_numbers_train():
    first, last, trace = train(sgd(60.0))
    assert last > first
    assert math.isfinite(last)
    advice = advise(trace)
    assert advice.action in ("rescue", "lower")
    assert advice.lr < 60 / 3
    assert math.isfinite(advice.max_norm)
    assert "Clipping gains little" not in str(advice)
    _, followed, _ = train(clipped(advice))
    assert followed < 0.7 * first


def test_after_nan_one_row_is_enough():
    model = classifier(512)
    _, last, trace = train(sgd(5000.0), model=model, square=True, steps=30)
    assert not math.isfinite(last)
    advice = advise(trace)
    assert advice.verdict.startswith("Diverged at step ")
    assert advice.action == "rescue"
    assert advice.verdict.endswith(f": try lr {advice.lr:.3g}, max_norm {advice.max_norm:.3g}.")
    told = " ".join(advice.reasons)
    assert "calibrate" in told
    assert "lr·L/2 = " in told
    first, followed, _ = train(clipped(advice), model=classifier(512), square=True)
    assert followed < first


def test_after_a_first_step_that_overshot_further_batches_are_asked_where_the_run_began():
    model = nn.Linear(1, 1, bias=False)
    optimizer, probe = sgd(100.0)(model.parameters()), cs.SmoothnessProbe(model, every=1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for curvature in (1.0, 2.0, 4.0, 8.0):

        def loss_fn(curvature=curvature):
            return curvature / 2 * model.weight.square().sum()

        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss):
            optimizer.step()
    # The safe step of a quadratic is one over its curvature, and its gradient at 1 the curvature.
    np.testing.assert_allclose(probe.trace.column("safe_fraction")[0] * 100, 1.0, rtol=1e-5)
    np.testing.assert_allclose(probe.trace.column("start_step"), [np.nan, 0.5, 0.25, np.nan], rtol=1e-5)
    np.testing.assert_allclose(probe.trace.column("start_grad_norm"), [np.nan, 2, 4, np.nan], rtol=1e-5)
    advice = advise(probe.trace)
    assert advice.lr == pytest.approx(0.5, rel=1e-5)  # the median, with nothing taken off
    assert advice.max_norm == pytest.approx(0.6 * 2, rel=1e-5)


def test_a_step_far_beyond_a_bend_gets_the_step_that_ends_before_it():
    x = nn.Parameter(torch.ones(1))
    model = nn.ParameterList([x])
    optimizer, probe = torch.optim.SGD([x], lr=30.0), cs.SmoothnessProbe(model)

    def huber():  # curvature 1 between -1 and 1, none beyond: after the bend the gradient stands still
        return F.huber_loss(x, torch.zeros(1), reduction="sum")

    loss = huber()
    loss.backward()
    with probe(huber, loss=loss):
        optimizer.step()
    row = probe.trace[0]
    assert row["kappa"] == pytest.approx(2)
    assert row["secants"][0] == pytest.approx(2 * row["secants"][1])
    advice = advise(probe.trace)
    assert advice.action == "rescue"
    assert advice.lr == pytest.approx(0.9, rel=1e-5)  # of the one batch that measured it
    assert any("the longest that is safe" in reason for reason in advice.reasons)


def test_a_run_that_learned_nothing_is_not_good_because_its_first_batch_was_a_bad_one():
    rng = np.random.default_rng(0)
    loss = 2.3 + 0.05 * rng.standard_normal(50)
    loss[0], loss[-5:] = 2.36, [2.29, 2.31, 2.3, 2.28, 2.31]
    g = 0.3 * rng.lognormal(sigma=0.3, size=50)
    kappa = np.full(50, 0.2)
    g[0], kappa[0] = 3.0, 7.0  # the first step left where training could start
    trace = make_trace(
        g, kappa / 2, lr=2.0, step_norm=2 * g, loss=loss, loss_after=loss - 0.08, coefficient=1.0
    )
    advice = advise(trace)
    assert advice.action == "lower"
    assert "did not fall" in advice.reasons[0]


def test_a_slow_fall_among_noise_is_a_fall():
    rng = np.random.default_rng(0)
    loss = np.linspace(2.25, 2.0, 50) + 0.1 * rng.standard_normal(50)
    g = rng.lognormal(sigma=0.3, size=50)
    columns = {"lr": 0.05, "step_norm": 0.05 * g, "loss": loss, "coefficient": 1.0}
    advice = advise(make_trace(g, np.full(50, 4.0), loss_after=loss - 0.045 * g**2, **columns))
    assert advice.action in ("keep", "raise")
    flat = loss - np.linspace(2.25, 2.0, 50) + 2.25
    columns["loss"] = flat
    advice = advise(make_trace(g, np.full(50, 4.0), loss_after=flat - 0.045 * g**2, **columns))
    assert advice.action == "lower"
    assert "did not fall" in advice.reasons[0]


def test_a_lost_run_whose_first_step_was_not_measured_gets_a_guess_that_is_called_one():
    trace = make_trace([1.0, 3.0], [1.0, 2.0], lr=1.0, step_norm=[1.0, 3.0], loss=[2.0, 90.0], every=5)
    late = cs.Trace()
    for row in trace:
        late.append({**row, "step": row["step"] + 5})
    late.append({"step": 15, "loss": math.nan, "lr": 1.0, "status": "nonfinite"})
    advice = advise(late)
    assert advice.verdict == "Diverged at step 16: try lr 0.333."
    assert any("a third of the lr is a guess" in reason for reason in advice.reasons)


def test_a_run_that_was_ended_when_its_loss_ran_away_has_diverged_though_every_loss_is_finite():
    g, kappa = [0.14, 0.2, 3.3, 0.34], [0.52, 1.03, 1.01, 612.0]
    ell = np.array(kappa) / 10
    loss = {"loss": [9.21, 8.84, 9.83, 9.07], "loss_after": [9.03, 8.31, 9.71, 61.8]}
    trace = make_trace(g, ell, lr=10.0, step_norm=10 * np.array(g), coefficient=1.0, every=2, **loss)
    advice = advise(trace)
    # The start bears steps of lr 10 and more, so what was missing is a threshold.
    assert advice.verdict.startswith("Diverged at step 8: try lr 10, max_norm 0.1")
    assert "inf" not in str(advice)
    ended = make_trace(g[:3], ell[:3], lr=10.0, step_norm=10 * np.array(g[:3]), loss=[9.2, 8.3, 110.0])
    assert advise(ended).verdict.startswith("Diverged at step 3: ")


def header(**facts):
    g, ell = simulated(np.random.default_rng(0), num=40)
    columns = {name: facts.pop(name) for name in ("batch_size", "momentum") if name in facts}
    return make_trace(g, ell, lr=0.1, step_norm=0.1 * g, loss=3.0 - g / 9, header=facts, **columns)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"model": "GPT"}, {"model": "CNN"}, "model (GPT against CNN)"),
        ({"num_parameters": 1000}, {"num_parameters": 5000}, "number of parameters (1000 against 5000)"),
        ({"batch_size": 32}, {"batch_size": 256}, "batch size (32 against 256)"),
        ({"optimizer": "AdamW"}, {"optimizer": "SGD"}, "optimizer (AdamW against SGD)"),
        ({"momentum": 0.0}, {"momentum": 0.9}, "momentum (0 against 0.9)"),
    ],
)
def test_runs_that_do_not_compare_are_refused_with_what_differs(one, other, words):
    advice = advise(header(**one), header(**other))
    assert advice.refused
    assert "cannot be compared" in advice.verdict
    assert words in advice.verdict
    assert not advise(header(**one), header(**one)).refused


def test_a_run_compares_with_the_one_that_clips_as_it_was_advised():
    assert not advise(header(optimizer="SGD"), header(optimizer="ClippedSGD")).refused


METHODS = {
    "momentum": sgd(0.01, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


EDGES = {"momentum": "3.8", "AdamW": "38"}  # 2(1 + β); an average of gradients has 1/(1 − β) times that


@pytest.mark.parametrize("name", METHODS)
def test_momentum_and_adamw_get_an_answer_that_trains(name):
    first, last, trace = train(METHODS[name])
    assert last < first
    advice = advise(trace)
    assert not advice.refused
    assert advice.action == "raise"  # both are far from what these few steps would take
    assert advice.lr > trace[0]["lr"]
    told = " ".join(advice.reasons)
    assert f"the edge of stability is {EDGES[name]}" in told
    assert "weight decay, no trace can say" in told
    assert "No measured step was clipped" in advice.clipping
    make = {"momentum": sgd(advice.lr, momentum=0.9), "AdamW": lambda p: torch.optim.AdamW(p, lr=advice.lr)}
    _, followed, _ = train(make[name])
    assert followed < last


@pytest.mark.parametrize(("limit", "words"), [(1e9, "safety net"), (1e-3, "lr is inert: only lr·max_norm")])
def test_what_the_threshold_does_under_momentum(limit, words):
    _, _, trace = train(lambda p: cs.ClippedSGD(p, lr=0.01, max_norm=limit, momentum=0.9))
    advice = advise(trace)
    assert words in advice.clipping
    assert advice.lr_is_inert == (limit < 1)


def test_two_learning_rates_are_changed_by_the_same_factor():
    def groups(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 1e-4}, {"params": others}], lr=0.03)

    advice = advise(train(groups, steps=150, every=3)[2])
    assert advice.verdict.startswith("Raise lr to 0.09, max_norm ")
    assert any("Change all groups by the same factor" in reason for reason in advice.reasons)


def test_a_loss_that_rises_may_be_that_of_a_game():
    g, ell = simulated(np.random.default_rng(0), num=80)
    noise = 0.05 * np.random.default_rng(1).standard_normal(80)
    advice = advise(make_trace(g, ell, lr=0.01, step_norm=0.01 * g, loss=np.linspace(1, 2, 80) + noise))
    assert advice.action == "lower"
    assert any("as in a GAN" in warning for warning in advice.warnings)


def test_the_two_networks_of_a_game_are_not_compared_and_the_other_is_to_be_frozen():
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(3, 10), nn.Linear(10, 1)
    z = torch.randn(16, 3)
    traces = []
    for trained, other in ((generator, discriminator), (discriminator, generator)):
        probe = cs.SmoothnessProbe(trained, every=1)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

        def loss_fn():
            return F.softplus(-discriminator(generator(z))).mean()

        if trained is generator:
            with pytest.raises(
                NonDeterministicError, match=r"as of a GAN's other network.*requires_grad_\(False\)"
            ):
                probe_once(probe, optimizer, loss_fn)
            probe = cs.SmoothnessProbe(trained, every=1)
        other.requires_grad_(False)
        for _ in range(12):
            probe_once(probe, optimizer, loss_fn)
        other.requires_grad_(True)
        traces.append(probe.trace)
    assert "number of parameters (40 against 11)" in advise(*traces).verdict
    assert not advise(traces[0]).refused


def probe_once(probe, optimizer, loss_fn):
    optimizer.zero_grad()
    loss = loss_fn()
    loss.backward()
    with probe(loss_fn, loss=loss):
        optimizer.step()


def test_a_threshold_that_clips_every_step_of_adam_is_no_limit():
    _, _, trace = train(lambda p: cs.ClippedAdamW(p, lr=1e-3, max_norm=1e-3))
    assert "Adam divides by the gradient's own size" in advise(trace).clipping


def test_smoothness_that_follows_the_norm_is_not_said_to_stand_still():
    rng = np.random.default_rng(0)
    g = np.exp(0.5 * rng.standard_normal(200))
    ell = 18 * g**0.5 * np.exp(0.1 * rng.standard_normal(200))  # lr·L/2 is 0.9 in the median
    fit = cs.fit_smoothness(make_trace(g, ell, lr=0.1, step_norm=0.1 * g, coefficient=1.0))
    assert fit.spearman > 0.8
    assert "whatever the gradient norm" not in f"{fit} {advise(fit)}"


def test_where_half_of_the_steps_were_clipped_nobody_says_without_clipping():
    rng = np.random.default_rng(0)
    g = np.exp(0.3 * rng.standard_normal(200))
    ell = rng.uniform(16, 20, 200)
    coefficient = np.minimum(1.0, np.quantile(g, 0.55) / g)
    trace = make_trace(g, ell, lr=0.1, step_norm=0.1 * coefficient * g, coefficient=coefficient)
    said = str(advise(trace))
    assert "without clipping" not in said
    assert "no clipping" not in said


@pytest.mark.parametrize("lr", [0.003, 0.02, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_the_first_line_agrees_with_the_numbers_beside_it(lr, slope):
    g, ell = simulated(np.random.default_rng(1), num=80, L1=slope)
    trace = make_trace(g, ell, lr=lr, step_norm=lr * g, loss=np.linspace(4, 2, 80), **inside_steps(g, ell))
    advice = advise(trace)
    opening = advice.verdict.split()[0]
    assert {"Raise": advice.lr > lr, "Lower": advice.lr < lr, "Good": advice.lr == lr}[opening]
    assert len(advice.verdict) < 80
    if opening != "Good":
        assert f"lr to {advice.lr:.3g}" in advice.verdict
    for name in ("lr", "max_norm", "step_cap"):
        low, high = getattr(advice, f"{name}_interval")
        assert low <= getattr(advice, name) <= high


def test_a_calibrated_run_is_good_as_it_is():
    model = classifier()
    x, y = data()
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)]
    found = cs.calibrate(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batches)
    _, _, trace = train(lambda p: cs.ClippedSGD(p, lr=found.lr, max_norm=found.max_norm))
    advice = advise(trace)
    assert advice.verdict == "Good as it is. That is by this run alone: calibrate may find better."
    assert any("cs.calibrate measures the step to begin with" in reason for reason in advice.reasons)
    assert "lr  " not in str(advice)  # no numbers to set
    assert repr(advice) == f"<Advice: {advice.verdict}>"  # a threshold that never fired is no "max_norm inf"


@pytest.mark.parametrize("lr", [0.001, 0.02, 1.0])
def test_under_a_schedule_the_lr_is_its_peak_and_called_so(lr):
    g, ell = simulated(np.random.default_rng(1), num=80)
    rates = lr * np.sin(np.linspace(0.02, np.pi - 0.02, 80))  # up and down, in steps of less than a stage
    trace = make_trace(g, ell, lr=rates, step_norm=rates * g, loss=np.linspace(4, 2, 80))
    advice = advise(trace)
    assert advice.lr_is_peak
    assert advice.lr == pytest.approx(rates.max()) if advice.action == "keep" else True
    if advice.action != "keep":
        factor = advice.lr / rates.max()
        assert {"raise": 1.4 < factor <= 3, "lower": factor < 1}[advice.action]
        assert f"peak lr to {advice.lr:.3g}" in advice.verdict
        assert "\n  peak lr " in str(advice)
    several = advise(
        trace, make_trace(g, ell, lr=3 * rates, step_norm=3 * rates * g, loss=np.linspace(4, 1, 80))
    )
    assert several.verdict.startswith(f"Take peak lr {3 * rates.max():.3g}, ")
    assert any(reason.startswith(f"peak lr {rates.max():.3g}, ") for reason in several.reasons)
    assert f"try next    peak lr {several.next_setting['lr']:.3g}, " in str(several)


def test_a_lost_run_is_told_the_peak_of_its_schedule():
    rates = np.linspace(0.1, 3, 20)
    trace = make_trace(
        np.ones(20), np.ones(20), lr=rates, step_norm=rates, loss=np.where(np.arange(20) < 15, 2.0, np.inf)
    )
    advice = advise(trace)
    assert "try peak lr" in advice.verdict
    assert any("at peak lr 3 without clipping" in reason for reason in advice.reasons)


def test_a_spectral_value_counts_with_the_lr_of_its_row():
    """Sharpness rises as 2/lr while lr decays; the peak never met the sharpness of the end."""
    g, _ = simulated(np.random.default_rng(1), num=80, L1=0.0)
    rates = np.linspace(1.0, 0.1, 80)
    spectral = {"spectral_smoothness": 1.5 / rates, "spectral_converged": 1.0}
    trace = make_trace(g, 1 / rates, lr=rates, step_norm=rates * g, loss=np.linspace(4, 2, 80), **spectral)
    assert advise(trace).action == "keep"


def decayed(*, smoothness, yields):
    """Descent along one gradient while lr decays fast; ``yields`` of a step, by its share of the peak."""
    share = (0.5 + 0.5 * np.cos(np.linspace(0, np.pi, 90, endpoint=False))) ** 8
    loss = 4 - np.cumsum(share) / 8 + 0.1 * np.resize([1, -1], 90)
    steps = {"lr": 0.1 * share, "step_norm": 0.1 * share, "loss_after": loss - 0.1 * share * yields(share)}
    return make_trace(np.ones(90), np.full(90, smoothness), loss=loss, **steps)


def test_a_loss_that_ends_with_the_schedule_does_not_speak_against_longer_steps():
    trace = decayed(smoothness=0.3, yields=np.ones_like)
    advice = advise(trace)
    assert advice.action == "raise"
    assert advice.lr == pytest.approx(0.3)


def test_steps_too_long_at_the_peak_are_not_excused_by_short_ones_after_it():
    trace = decayed(smoothness=25.0, yields=lambda share: np.where(share > 0.4, 0.1, 1.0))
    advice = advise(trace)
    assert advice.action == "lower"
    assert "by 10% of what its slope promises: steps are too long" in advice.reasons[0]


def test_a_short_loop_gets_what_its_rows_say():
    _, _, trace = train(sgd(0.01), steps=22, every=5)
    assert len(trace) == 5
    advice = advise(trace)
    assert advice.action == "try"
    assert advice.verdict.startswith("Cannot tell yet; next run lr 0.03, max_norm ")
    assert any("measured rows: 5. A run is judged by 10" in reason for reason in advice.reasons)
    assert not advise(train(sgd(0.01), steps=22, every=2)[2]).refused  # 11 rows


def test_a_path_and_a_run_folder_are_as_good_as_the_trace(tmp_path):
    g, ell = simulated(np.random.default_rng(0), num=60)
    trace = make_trace(g, ell, lr=0.1, step_norm=0.1 * g)
    with cs.Trace(tmp_path / "trace.jsonl", header=trace.header) as file:
        for row in trace:
            file.append(row)
    for use in (advise, cs.fit_smoothness):
        assert use(tmp_path) == use(str(tmp_path / "trace.jsonl")) == use(trace)


@pytest.mark.parametrize("name", ["", "nowhere.jsonl"], ids=["folder", "file"])
def test_a_path_without_a_trace_says_what_is_missing_and_how_to_get_it(tmp_path, name):
    with pytest.raises(
        FileNotFoundError, match=r"there is no trace at .*\.jsonl.*SmoothnessProbe\(model"
    ) as told:
        advise(tmp_path / name)
    assert "\n" not in str(told.value)


HOSTILE = {
    "huge": 10**400,
    "negative": -1.0,
    "words": "x\x00\x1b[31m",
    "list": [None, "x"],
    "infinite": math.inf,
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_values_that_nobody_measured_are_answered_or_refused_in_one_line(value):
    refusals = []
    g, ell = simulated(np.random.default_rng(0), num=16)
    for name in (
        "loss",
        "grad_norm",
        "smoothness",
        "step_norm",
        "secants",
        "grad_norms",
        "lr",
        "coefficient",
        "status",
    ):
        trace = make_trace(g, ell, lr=0.1, step_norm=0.1 * g, loss=3 * 0.97 ** np.arange(16))
        hostile = cs.Trace(header={"fractions": [0.5, 1.0]})
        for row in trace:
            hostile.append({**row, name: value})
        try:
            assert str(advise(hostile))
        except ValueError as error:
            refusals.append(str(error))
    assert not any("\n" in words for words in refusals)
