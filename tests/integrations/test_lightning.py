"""A Lightning run with our callbacks is the run without them, bit for bit, and its rows are right."""
# Lightning types its hooks and hyperparameters loosely.

import shutil
import warnings
from collections import UserList

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning", reason="needs the extra `lightning`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L
    import torchmetrics
    from lightning.pytorch.plugins import MixedPrecision

import curvestep as cs
from curvestep.integrations.lightning import Calibrate, SmoothnessCallback, record
from tests.integrations.runs import (
    Drawing,
    check_rows_of_ranks,
    classes,
    digest,
    network,
    printed_by,
    state_of,
    warned,
)

# Calibrate doubts trials on so few batches.
pytestmark = pytest.mark.filterwarnings(
    "ignore:::(lightning|torch|torchmetrics)",
    "ignore:.*lightning.*",
    "ignore:No trial|Only|All trials|The best rates|Noise|Rates|Trials of|The run has no",
)


class Module(L.LightningModule):
    def __init__(self, optimizer="AdamW", lr=1e-2, scheduler=False, clip=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = network()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=5)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.seen += len(x)
        self.log("loss", loss, on_epoch=True, on_step=True)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self):
        kinds = {
            "AdamW": lambda p: torch.optim.AdamW(p, lr=self.hparams.lr),
            "SGD": lambda p: torch.optim.SGD(p, lr=self.hparams.lr),
            "ClippedSGD": lambda p: cs.ClippedSGD(p, lr=self.hparams.lr, max_norm=0.5),
            "ClippedAdamW": lambda p: cs.ClippedAdamW(p, lr=self.hparams.lr, max_norm=0.5),
        }
        opt = kinds[self.hparams.optimizer](self.parameters())
        if self.hparams.clip:
            cs.clip(opt, self.hparams.clip)
        if not self.hparams.scheduler:
            return opt
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k))
        return [opt], [{"scheduler": schedule, "interval": "step"}]


class Plain(Module):
    def training_step(self, batch, batch_idx):  # torchmetrics cannot be compiled
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Manual(Module):
    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def loss(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = record(self, lambda: self.loss(batch))
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        opt.step()


def loader(batch_size=8, count=96):
    return torch.utils.data.DataLoader(Drawing(classes(count)), batch_size=batch_size, shuffle=True)


def trainer_of(folder, callbacks=(), **options):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    return L.Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **(settings | options),
    )


def run(folder, callbacks=(), kind=Module, module=None, batches=None, backend=None, **options):
    """Train; what is left, and the Trainer."""
    torch.manual_seed(1)
    model = kind(**(module or {}))
    trainer = trainer_of(folder, callbacks, **options)
    trainer.fit(torch.compile(model, backend=backend) if backend else model, batches or loader())
    state = state_of(model, trainer.optimizers[0])
    state["metrics"] = digest({k: v for k, v in trainer.callback_metrics.items()})
    return state, trainer


def scaler(scale=1024.0):
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]


MODES = {
    "AdamW": {},
    "AdamW clipped": {"gradient_clip_val": 0.5},
    "AdamW accumulated": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3},
    "a short last group": {"accumulate_grad_batches": 5},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "16 with a scaler": {"plugins": scaler, "gradient_clip_val": 0.5},
    "scheduler": {"module": {"scheduler": True}},
    "ClippedSGD": {"module": {"optimizer": "ClippedSGD", "lr": 0.3}},
    "ClippedSGD bf16": {
        "module": {"optimizer": "ClippedSGD", "lr": 0.3},
        "accumulate_grad_batches": 4,
        "precision": "bf16-mixed",
    },
    "cs.clip": {"module": {"clip": 0.3}},
    "manual": {"kind": Manual},
    "manual bf16": {"kind": Manual, "precision": "bf16-mixed"},
    "manual with a scaler": {"kind": Manual, "plugins": scaler},
    "compiled": {"kind": Plain, "backend": "eager", "gradient_clip_val": 0.5},
    "inductor": {"kind": Plain, "backend": "inductor", "gradient_clip_val": 0.5},
}
EPS = {"bf16-mixed": torch.finfo(torch.bfloat16).eps, "plugins": torch.finfo(torch.float16).eps}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.slow) if "backend" in MODES[m] else m for m in MODES],
)
def test_a_probed_run_is_the_run_without_the_probe(mode, tmp_path):
    if mode == "inductor" and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")

    def options():
        return {k: v() if k == "plugins" else v for k, v in MODES[mode].items()}

    plain, _ = run(tmp_path, **options())
    callback = SmoothnessCallback(every=2, on_error="raise")
    probed, trainer = run(tmp_path, [callback], **options())
    assert probed == plain
    rows = list(callback.probe.trace)
    parts = trainer.accumulate_grad_batches
    num_steps = -(-12 // parts)
    assert [row["step"] for row in rows] == list(range(0, num_steps, 2))
    eps = EPS["plugins"] if "plugins" in MODES[mode] else EPS.get(MODES[mode].get("precision"), 2**-23)
    module = MODES[mode].get("module", {})
    own = module.get("optimizer") == "ClippedSGD"
    limit = 0.5 if own or "gradient_clip_val" in MODES[mode] else None
    if "manual" in mode or mode == "cs.clip":
        limit = 0.3 / 1024 if "scaler" in mode else 0.3  # clipped before the scaler's unscaling: a mistake
    for row in rows:
        assert row["status"] == "ok"
        assert row["smoothness"] > 0
        last = (row["step"] + 1) * parts > 12
        assert row["batch_size"] == 8 * (12 % parts if last else parts)
        assert row["eps"] == pytest.approx(eps)
        base = module.get("lr", 1e-2)
        assert row["lr"] == pytest.approx(base / (1 + row["step"]) if module.get("scheduler") else base)
        expected = 1.0 if limit is None else min(1.0, limit / row["grad_norm"])
        assert row["coefficient"] == pytest.approx(expected, rel=2e-2 if eps > 1e-4 else 1e-4)
        if own:  # the coefficient is what the step shows
            assert row["step_norm"] == pytest.approx(
                row["lr"] * row["coefficient"] * row["grad_norm"], rel=2e-2 if eps > 1e-4 else 1e-3
            )
    if limit is not None:
        assert any(row["coefficient"] < 1 for row in rows)


class Losses(L.Callback):
    """Training's loss of every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item() * trainer.accumulate_grad_batches)


@pytest.mark.parametrize(("parts", "every"), [(1, 5), (2, 4)])
def test_rows_hold_the_mean_loss_since_the_row_before(parts, every, tmp_path):
    callback, losses = SmoothnessCallback(every=every, on_error="raise"), Losses()
    _, trainer = run(tmp_path, [callback, losses], accumulate_grad_batches=parts)
    assert "training_step" not in vars(trainer.strategy)  # put back
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    rows = list(callback.probe.trace)
    assert [row["recent_steps"] for row in rows] == [1] + [every] * (len(rows) - 1)
    for row in rows:
        end = (row["step"] + 1) * parts
        since = losses.seen[end - row["recent_steps"] * parts : end]
        assert row["recent_loss"] == pytest.approx(sum(since) / len(since))
    assert isinstance(callback.probe._recent.total, torch.Tensor)  # nothing waits for what no row needs yet


@pytest.mark.parametrize("fractions", [(0.5, 1.0), (1.0,)])
def test_a_measurement_takes_a_pass_a_fraction_and_waiting_takes_none(fractions, tmp_path):
    class Counted(Module):
        def training_step(self, batch, batch_idx):
            passes.append(self.trainer.global_step)
            return super().training_step(batch, batch_idx)

    passes = UserList()  # replays put lists and the module's attributes back
    run(tmp_path, [SmoothnessCallback(every=5, fractions=fractions, on_error="raise")], kind=Counted)
    expected = [1 + len(fractions) * (step % 5 == 0) for step in range(12)]
    expected[0] += 3  # the self-test, whether the loss writes to parameters …
    expected[5] += 1  # … of the first two measured steps
    assert [passes.count(step) for step in range(12)] == expected


def test_a_step_that_the_scaler_skips_is_not_measured(tmp_path):
    callback = SmoothnessCallback(every=1, on_error="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, trainer = run(tmp_path, [callback], plugins=scaler(2.0**22), module={"optimizer": "SGD"})
    rows = list(callback.probe.trace)
    assert 0 < len(rows) < trainer.global_step == 12
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize("in_file", [True, False])
def test_fit_called_again_goes_on_measuring(in_file, tmp_path):
    trace = str(tmp_path / "trace.jsonl") if in_file else None
    callback, model = SmoothnessCallback(every=5, trace=trace, on_error="raise"), Module()
    trainer = trainer_of(tmp_path, [callback])
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    rows = cs.Trace.load(trace) if in_file else callback.probe.trace
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20]


def test_a_second_run_is_written_beside_the_first(tmp_path):
    trace = tmp_path / "trace.jsonl"
    run(tmp_path, [SmoothnessCallback(every=5, trace=str(trace))])
    callback = SmoothnessCallback(every=4, trace=str(trace), on_error="raise")
    with warned(r"trace\.jsonl holds a run already.*go to .*trace-2\.jsonl"):
        run(tmp_path, [callback])
    steps = [[row["step"] for row in cs.Trace.load(path)] for path in (trace, tmp_path / "trace-2.jsonl")]
    assert steps == [[0, 5, 10], [0, 4, 8]]


def test_a_batch_that_training_leaves_out_is_no_failure(tmp_path):
    class Picky(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx not in (0, 4) else None

    plain, _ = run(tmp_path, kind=Picky)
    callback = SmoothnessCallback(every=2, on_error="raise")
    probed, _ = run(tmp_path, [callback], kind=Picky)
    assert probed == plain
    assert [row["step"] for row in callback.probe.trace] == [2, 6, 8, 10]


def test_gradient_clip_val_before_our_optimizer_is_noticed_and_measured(tmp_path):
    callback = SmoothnessCallback(every=3, on_error="raise")
    with warned(r"gradient_clip_val=0.1\) clips before ClippedSGD"):
        run(tmp_path, [callback], module={"optimizer": "ClippedSGD", "lr": 0.3}, gradient_clip_val=0.1)
    for row in callback.probe.trace:
        assert row["coefficient"] == pytest.approx(0.1 / row["grad_norm"], rel=1e-3)


def test_a_training_step_that_pops_from_its_batch_is_measured(tmp_path):
    class Popping(Module):
        def training_step(self, batch, batch_idx):
            y = batch.pop()
            return F.cross_entropy(self.net(batch.pop()), y)

    callback = SmoothnessCallback(every=4, on_error="raise")
    run(tmp_path, [callback], kind=Popping)
    assert [row["status"] for row in callback.probe.trace] == ["ok"] * 3


def test_a_failing_probe_never_stops_training(tmp_path):
    class Unrepeatable(Module):
        def training_step(self, batch, batch_idx):
            calls.append(0)
            return (1 + len(calls)) * F.cross_entropy(self.net(batch[0]), batch[1])

    calls = []
    callback = SmoothnessCallback(every=2)
    with warned("No more are taken"):
        _, trainer = run(tmp_path, [callback], kind=Unrepeatable)
    assert trainer.global_step == 12
    with pytest.raises(cs.smoothness.determinism.NonDeterministicError):
        run(tmp_path, [SmoothnessCallback(every=2, on_error="raise")], kind=Unrepeatable)


class Two(Module):
    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 4)]


class Empty(L.LightningModule):
    def training_step(self, batch, batch_idx):
        return torch.zeros((), requires_grad=True)

    def configure_optimizers(self):
        return torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize("callback", [SmoothnessCallback, Calibrate])
def test_several_optimizers_none_and_no_parameters_get_one_clear_line(callback, tmp_path):
    with pytest.raises(ValueError, match=r"one optimizer.* 2"):
        run(tmp_path, [callback()], kind=Two)
    with pytest.raises(ValueError, match=r"no parameter with|not in `model`"):
        trainer_of(tmp_path, [callback()]).fit(Empty(), loader())

    class NoneYet(Module):
        def configure_optimizers(self):
            return None

    with pytest.raises(ValueError, match=r"one optimizer.* 0"):
        trainer_of(tmp_path, [callback()]).fit(NoneYet(), loader())


@pytest.mark.parametrize(
    "options",
    [
        {"module": {"optimizer": "ClippedSGD", "lr": 1.0}},
        {
            "module": {"optimizer": "AdamW"},
            "accumulate_grad_batches": 2,
            "precision": "bf16-mixed",
            "gradient_clip_val": 0.7,
        },
        {"module": {"optimizer": "ClippedAdamW", "scheduler": True}},
    ],
)
def test_a_calibrated_run_is_the_run_with_the_numbers_typed_in(options, tmp_path):
    calibrate = Calibrate()
    found, trainer = run(tmp_path, [SmoothnessCallback(every=5), calibrate], **options)
    cal = calibrate.calibration
    assert cal.num_gradients <= 240
    assert cal.schedule == ("warmup-decay" if options["module"].get("scheduler") else "constant")
    group = trainer.optimizers[0].param_groups[0]
    lr = group.get("initial_lr", group["lr"])
    assert lr == pytest.approx(cal.lr)
    assert group.get("max_norm", cal.max_norm) == cal.max_norm

    class Typed(Module):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            opt = made[0][0] if isinstance(made, tuple) else made
            if "max_norm" in opt.param_groups[0]:
                opt.param_groups[0]["max_norm"] = cal.max_norm
            return made

    typed = {**options, "module": {**options["module"], "lr": lr}}
    expected, _ = run(tmp_path, kind=Typed, **typed)
    assert found == expected


@pytest.mark.parametrize(
    ("module", "threshold"),
    [
        ({"optimizer": "ClippedSGD"}, "gradients of trials; it clips at 0.5."),
        ({"optimizer": "SGD"}, "gradients of trials."),  # a threshold has to be earned
        ({"optimizer": "AdamW"}, "clipped: use Trainer(gradient_clip_val={max_norm:.4g})."),
    ],
)
def test_calibrate_prints_one_line_of_what_it_set(module, threshold, tmp_path, monkeypatch):
    lines, doubts, callback = [], [], Calibrate()
    monkeypatch.setattr("curvestep.integrations.lightning.rank_zero_info", lines.append)
    monkeypatch.setattr("curvestep.integrations.lightning.rank_zero_warn", doubts.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*`cal`|.*apply")
        run(tmp_path, [callback], module=module)
    cal = callback.calibration
    assert len(lines) == 1
    assert doubts == list(map(str, cal.warnings)) != []
    assert f"lr {cal.lr:.4g}" in lines[0]
    assert f"{cal.num_gradients} gradients" in lines[0]
    assert threshold.format(max_norm=cal.max_norm) in lines[0]


@pytest.mark.parametrize(("max_steps", "told"), [(7, 7), (-1, None)])
def test_calibrate_is_told_the_number_of_steps(max_steps, told, monkeypatch, tmp_path):
    asked = []

    def seen(*args, num_steps, **options):
        asked.append(num_steps)
        raise KeyboardInterrupt

    monkeypatch.setattr("curvestep.integrations.lightning.calibrate", seen)
    trainer = trainer_of(tmp_path, [Calibrate()], max_steps=max_steps, max_epochs=-1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Module(), loader())
    assert asked == [told]


def test_manual_optimization_that_records_nothing_is_told_how(tmp_path):
    class Unrecorded(Manual):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    with warned(r"manual optimization, `loss = record\(self, loss_fn\)`"):
        run(tmp_path, [SmoothnessCallback(every=2)], kind=Unrecorded)


def test_data_that_can_be_read_once_is_not_used_up(tmp_path):
    batches = iter([[torch.randn(8, 20), torch.randint(5, (8,))] for _ in range(12)])
    with pytest.raises(ValueError, match=r"which is an iterator.*DataLoader"):
        trainer_of(tmp_path, [Calibrate()], limit_train_batches=12).fit(Module(), batches)

    class Stream(torch.utils.data.IterableDataset):
        samples = iter(classes())

        def __iter__(self):
            return self.samples

    with pytest.raises(ValueError, match=r"which is an iterator.*DataLoader"):
        trainer_of(tmp_path, [Calibrate()]).fit(Module(), torch.utils.data.DataLoader(Stream(), batch_size=8))
    with pytest.raises(ValueError, match="manual optimization"):
        run(tmp_path, [Calibrate()], kind=Manual)


def test_the_command_line_of_lightning_takes_the_arguments(tmp_path):
    from lightning.pytorch.cli import LightningCLI

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return loader()

    name = "curvestep.integrations.lightning.SmoothnessCallback"
    arguments = [
        "fit", "--trainer.max_epochs=1", f"--trainer.callbacks+={name}", "--trainer.callbacks.every=6",
        "--trainer.callbacks.fractions=[0.25,1.0]", "--trainer.logger=false", "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_model_summary=false",
    ]  # fmt: skip
    cli = LightningCLI(Module, Data, args=arguments, save_config_callback=None)
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, SmoothnessCallback)]
    assert [row["step"] for row in callback.probe.trace] == [0, 6]
    assert callback.probe.trace.fractions == (0.25, 1.0)


def test_an_old_version_is_refused_in_one_line(monkeypatch):
    from curvestep.integrations import reporting

    monkeypatch.setattr(reporting, "version", lambda package: "2.4.1")
    with pytest.raises(ImportError, match=r"2.5 or newer, found 2.4.1.*pip install"):
        reporting.require("lightning", "2.5", "lightning")


DDP = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
from tests.integrations.test_lightning import Module, SmoothnessCallback, run
from tests.integrations.runs import digest
folder = sys.argv[1]
for parts in (1, 2):
    found = []
    for probed in (False, True):
        torch.manual_seed(5)
        trace = f"{folder}/{parts}.jsonl" if probed else None
        callback = SmoothnessCallback(every=2, on_error="raise", trace=trace)
        state, trainer = run(
            folder, [callback] if probed else [], strategy="ddp", devices=2, accumulate_grad_batches=parts,
            gradient_clip_val=0.5,
        )
        found.append(state)
    assert found[0] == found[1], found
    if trainer.is_global_zero:
        print("same", flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # torch's threads now and then abort a process at its end, with no process group left too
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_measure_together(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    assert printed_by(script, tmp_path).count("same") == 2
    for parts in (1, 2):
        steps = range(0, 6 // parts, 2)
        check_rows_of_ranks(tmp_path / f"{parts}.jsonl", steps=steps, batch_size=16 * parts)
