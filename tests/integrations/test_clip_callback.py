"""``ClipCallback`` logs the norms of every step as they were, and the run is the run without it."""

import csv
import importlib.util
import math
from pathlib import Path

import pytest
import torch

import curvestep as cs
from curvestep.integrations.step_norms import StepNorms
from curvestep.parameter_names import remember_names
from tests.integrations.runs import warned
from tests.models import batch_loss, labelled, mlp

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = {"grad_norm", "coefficient", "clipped_fraction"}

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra `lightning`"
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `transformers`"
)


def norms_of_a_loop(optimizer, model, *, steps=6, clip=None, num_layers=3):
    """The numbers after each step of a loop, beside the true norms before any clipping."""
    watched = StepNorms(optimizer, num_layers, looks_in_step=clip is None)
    watched.measures_clipping = True
    remember_names(model)
    loss_of_batch = batch_loss(model)
    rows = []
    for k in range(steps):
        optimizer.zero_grad()
        x, y = labelled()
        (loss_of_batch((x, y)) * (0.2 + 0.3 * k)).backward()
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        if clip is not None:
            watched.look()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        rows.append((watched.numbers(), norms))
    return rows


def clipped_sgd(params):
    return cs.ClippedSGD(params, lr=0.1, max_norm=0.5)


def sgd_with_clip(params):
    optimizer = torch.optim.SGD(params, lr=0.1)
    cs.clip(optimizer, 0.5)
    return optimizer


@pytest.mark.parametrize(
    ("make", "clip"),
    [(clipped_sgd, None), (sgd_with_clip, None), (lambda p: torch.optim.SGD(p, lr=0.1), 0.5)],
    ids=["ClippedSGD", "clip", "the loop's own"],
)
def test_norms_are_those_before_clipping_whoever_clips(make, clip):
    torch.manual_seed(0)
    model = mlp()
    clipped = 0
    for k, (numbers, norms) in enumerate(norms_of_a_loop(make(model.parameters()), model, clip=clip), 1):
        norm = math.hypot(*norms.values())
        clipped += norm > 0.5
        assert numbers["grad_norm"] == pytest.approx(norm)
        assert numbers["coefficient"] == pytest.approx(min(1.0, 0.5 / norm), rel=1e-5)
        assert numbers["clipped_fraction"] == pytest.approx(clipped / k)
        largest = sorted(norms, key=norms.get, reverse=True)[:3]
        layers = {name: value for name, value in numbers.items() if name.startswith("grad_norm/")}
        assert list(layers) == [f"grad_norm/{name}" for name in largest]
        assert list(layers.values()) == pytest.approx([norms[name] for name in largest])
    assert 0 < clipped < 6


def test_two_who_clip_are_one_coefficient():
    torch.manual_seed(0)
    model = mlp()
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=0.2)
    for numbers, norms in norms_of_a_loop(optimizer, model, clip=0.5):
        assert numbers["coefficient"] == pytest.approx(min(1.0, 0.2 / math.hypot(*norms.values())), rel=1e-4)


def test_sparse_gradients_have_their_norms():
    rows = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    watched = StepNorms(optimizer, 1)
    rows(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert watched.numbers()["grad_norm"] == pytest.approx(math.sqrt(2 * 4 + 2))


def test_spikes_name_the_layers_of_a_model_that_is_known():
    torch.manual_seed(0)
    model = mlp()
    optimizer = cs.ClippedSGD(model.parameters(), lr=1e-3, max_norm=0.5)
    remember_names(model)
    loss_of_batch = batch_loss(model)
    for k in range(40):
        optimizer.zero_grad()
        x, y = labelled(32)
        loss_of_batch((x * (1000.0 if k == 30 else 1.0), y)).backward()
        optimizer.step()
    assert {spike["layer"] for spike in optimizer.spikes()} == {"0.weight"}
    assert set(optimizer.clip_stats(layers=True)["layers"]) == dict(model.named_parameters()).keys()


def lightning_run(folder, *, callbacks=(), module=None, **options):
    from lightning.pytorch.loggers import CSVLogger

    from tests.integrations import test_lightning as runs

    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    state, trainer = runs.run(folder, callbacks, module=module, logger=logger, log_every_n_steps=2, **options)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return state, trainer, rows


LIGHTNING = {
    "no clipping": {},
    "gradient_clip_val": {"gradient_clip_val": 0.5},
    "accumulation": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "ClippedAdamW": {"module": {"optimizer": "ClippedAdamW"}},
    "cs.clip": {"module": {"clip": 0.5}},
    "bf16": {"module": {"clip": 0.5}, "precision": "bf16-mixed"},
}


@needs_lightning
@pytest.mark.parametrize("mode", LIGHTNING)
def test_a_lightning_run_is_the_run_without(mode, tmp_path):
    from curvestep.integrations.lightning import ClipCallback

    plain, _, plain_rows = lightning_run(tmp_path / "plain", **LIGHTNING[mode])
    state, _, rows = lightning_run(tmp_path / "own", callbacks=[ClipCallback(layers=2)], **LIGHTNING[mode])
    assert state == plain
    ours = [row for row in rows if row["curvestep/grad_norm"]]
    others = [{k: v for k, v in row.items() if not k.startswith("curvestep/")} for row in rows]
    assert [row for row in others if row.get("loss_step")] == [r for r in plain_rows if r.get("loss_step")]
    assert len(ours) == (2 if mode == "accumulation" else 6)
    # Where Lightning writes the loss of the same batch.
    assert {row["step"] for row in ours} == {row["step"] for row in plain_rows if row.get("loss_step")}
    for row in ours:
        assert sum(bool(v) for k, v in row.items() if k.startswith("curvestep/grad_norm/net.")) == 2
        norm, coefficient = float(row["curvestep/grad_norm"]), float(row["curvestep/coefficient"])
        if mode not in ("no clipping", "by value"):
            assert coefficient == pytest.approx(min(1.0, 0.5 / norm), rel=1e-4)
        share = float(row["curvestep/clipped_fraction"])
        assert (share > 0) is (mode != "no clipping")
    assert (min(float(row["curvestep/coefficient"]) for row in ours) < 1) is (mode != "no clipping")


@needs_lightning
def test_lightning_clipping_twice_is_named(tmp_path):
    from curvestep.integrations.lightning import ClipCallback

    with warned("gradients are clipped twice"):
        lightning_run(
            tmp_path, callbacks=[ClipCallback()], module={"optimizer": "ClippedAdamW"}, gradient_clip_val=0.4
        )


@needs_lightning
def test_of_two_optimizers_each_has_its_numbers(tmp_path):
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    from curvestep.integrations.lightning import ClipCallback
    from tests.integrations.runs import classes
    from tests.integrations.test_lightning import trainer_of

    class Two(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first = torch.nn.Linear(20, 4).float()
            self.second = torch.nn.Linear(4, 5).float()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.first.parameters(), 0.1), clipped_sgd(self.second.parameters())]

        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.second(self.first(batch[0]).tanh()), batch[1])
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

    torch.manual_seed(0)
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(tmp_path, [ClipCallback(layers=1)], max_steps=8, logger=logger, log_every_n_steps=2)
    trainer.fit(Two(), torch.utils.data.DataLoader(classes(), batch_size=8))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        names = next(csv.reader(file))
    for index in (0, 1):
        assert {f"curvestep/optimizer {index}/{name}" for name in NAMES} <= set(names)


TRANSFORMERS = {
    "max_grad_norm": {"max_grad_norm": 0.5},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulated": {"max_grad_norm": 0.5, "gradient_accumulation_steps": 3},
    "bf16": {"max_grad_norm": 0.5, "bf16": True},
    "ClippedSGD": {"optimizer": "ClippedSGD", "max_grad_norm": 0.0},
    "cs.clip": {"optimizer": "clip", "max_grad_norm": 0.0},
}


def listening():
    """A callback that keeps what loggers are sent."""
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        def __init__(self):
            self.rows = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            if any(name.startswith("curvestep/") for name in logs):
                self.rows.append((state.global_step, logs))

    return Listener()


@needs_transformers
@pytest.mark.parametrize("mode", TRANSFORMERS)
def test_a_hugging_face_run_is_the_run_without(mode, tmp_path):
    from curvestep.integrations.transformers import ClipCallback
    from tests.integrations.test_transformers import finish, trainer_of

    options = TRANSFORMERS[mode] | {"logging_steps": 2}
    plain = finish(trainer_of(tmp_path, **options))
    listener = listening()
    trainer = trainer_of(tmp_path, callbacks=[ClipCallback(layers=2), listener], **options)
    assert finish(trainer) == plain
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    assert [step for step, _ in listener.rows] == [2, 4, 6, 8]
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    for (_, row), by_trainer in zip(listener.rows, logged, strict=True):
        assert {f"curvestep/{name}" for name in NAMES} <= row.keys()
        assert sum(name.startswith("curvestep/grad_norm/transformer.") for name in row) == 2
        assert row["curvestep/grad_norm"] == pytest.approx(by_trainer, rel=1e-5)
        if mode == "no clipping":
            assert row["curvestep/coefficient"] == 1.0
        else:
            bound = 0.4 if "optimizer" in options else 0.5
            assert row["curvestep/coefficient"] == pytest.approx(bound / by_trainer, rel=1e-4)
            assert row["curvestep/clipped_fraction"] == 1.0


@needs_transformers
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_strategy": "epoch", "max_steps": 24}, [12, 24]),
        ({"logging_strategy": "no"}, []),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3, 6]),
    ],
)
def test_numbers_come_whenever_the_trainer_logs(options, steps, tmp_path):
    from curvestep.integrations.transformers import ClipCallback
    from tests.integrations.test_transformers import trainer_of

    listener = listening()
    trainer = trainer_of(tmp_path, callbacks=[ClipCallback(layers=0), listener], **options)
    trainer.train()
    assert [step for step, _ in listener.rows] == steps
    assert {entry["step"] for entry in trainer.state.log_history if "loss" in entry} == set(steps)


@needs_transformers
def test_hugging_face_clipping_twice_is_named(tmp_path):
    from curvestep.integrations.transformers import ClipCallback
    from tests.integrations.test_transformers import trainer_of

    trainer = trainer_of(tmp_path, optimizer="ClippedSGD", callbacks=[ClipCallback()])
    with warned("gradients are clipped twice"):
        trainer.train()


@needs_transformers
def test_a_trainer_alone_logs_no_norm_of_a_layer(tmp_path):
    """transformers#31033: the Trainer's own logs have one norm; the callback's have the layers'."""
    from curvestep.integrations.transformers import ClipCallback
    from tests.integrations.test_transformers import trainer_of

    alone = listening()
    trainer_of(tmp_path, callbacks=[alone]).train()
    assert alone.rows == []
    listener = listening()
    trainer_of(tmp_path, callbacks=[ClipCallback(), listener]).train()
    assert len([name for name in listener.rows[-1][1] if name.startswith("curvestep/grad_norm/")]) == 10


@pytest.mark.parametrize("layers", [-1, 1.5])
def test_a_number_of_layers_that_is_none_is_refused(layers):
    pytest.importorskip("lightning")
    from curvestep.integrations.lightning import ClipCallback

    with pytest.raises((TypeError, ValueError), match="`layers`"):
        ClipCallback(layers=layers)
