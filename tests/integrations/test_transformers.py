"""A Hugging Face run with our callback is the run without it, bit for bit, and its rows are right."""
# transformers types its Trainer loosely.

import os
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("accelerate", reason="needs the extra `transformers`")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_TELEMETRY="1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

import curvestep as cs
from curvestep.integrations.transformers import SmoothnessCallback, calibrate
from curvestep.optimizer_family import check_optimizer
from tests.integrations.runs import TORCHRUN, check_rows_of_ranks, digest, printed_by, state_of, warned

pytestmark = pytest.mark.filterwarnings("ignore")


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count=48):
        self.ids = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def gpt2(**options):
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options))


def without_dropout():
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def learner_of(folder, parts, size):
    """A Trainer of batches of ``parts`` times ``size``, of numbers to count on from."""
    data = Tokens(192)
    data.ids = (data.ids[:, :1] + torch.arange(16)) % 64
    return trainer_of(
        folder, model=without_dropout, data=data, max_grad_norm=0.5, gradient_accumulation_steps=parts,
        per_device_train_batch_size=size, max_steps=100,
    )  # fmt: skip


class Bigram(torch.nn.Sequential):
    """Letters from the letter before: a model of few kernels, since inductor takes a second for each."""

    def __init__(self):
        super().__init__(torch.nn.Embedding(64, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 64))

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


OPTIMIZERS = {
    "ClippedSGD": lambda p: cs.ClippedSGD(p, lr=0.5, max_norm=0.4),
    "clip": lambda p: (opt := torch.optim.AdamW(p, lr=1e-3), cs.clip(opt, 0.4))[0],
}


def trainer_of(folder, optimizer=None, kind=Trainer, model=None, data=None, callbacks=None, **options):
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # where transformers 4 leaves that of the last run
    set_seed(0)
    model = gpt2() if model is None else model()
    settings = {
        "max_steps": 8, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "per_device_train_batch_size": 4,
    }  # fmt: skip
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **(settings | options))
    if isinstance(optimizer, str):
        own = {"optimizers": (OPTIMIZERS[optimizer](model.parameters()), None)}
    else:
        own = {} if optimizer is None else {"optimizer_cls_and_kwargs": optimizer}
    data = Tokens() if data is None else data
    return kind(model, args, train_dataset=data, callbacks=callbacks, **own)


def watch(trainer, **options):
    """A callback that measures along the Trainer's run."""
    callback = SmoothnessCallback(**options)
    trainer.add_callback(callback)
    return callback


def finish(trainer):
    """Train; what is left, the logged metrics among it."""
    trainer.train()
    state = state_of(trainer.model, trainer.optimizer)
    names = ("loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "entropy")
    history = [{k: v for k, v in entry.items() if k in names} for entry in trainer.state.log_history]
    return state | {"logs": digest(history)}


def lora():
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))


MODES = {
    "AdamW": {},
    "max_grad_norm 0.1": {"max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "accumulated": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
    "a short last group": {"gradient_accumulation_steps": 5, "max_steps": 6},
    "bf16": {"bf16": True, "max_grad_norm": 0.5},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "inductor": {"torch_compile": True, "model": Bigram},
    "ClippedSGD": {"optimizer": "ClippedSGD", "max_grad_norm": 0.0},
    "optimizer_cls_and_kwargs": {
        "optimizer": (cs.ClippedSGD, {"lr": 0.5, "max_norm": 0.4}), "max_grad_norm": 0.0,
    },
    "cs.clip": {"optimizer": "clip", "max_grad_norm": 0.0},
    "LoRA": {"model": lora},
}  # fmt: skip


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.slow) if "torch_compile" in MODES[m] else m for m in MODES],
)
def test_a_watched_run_is_the_run_without(mode, tmp_path):
    if mode == "inductor" and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    plain = finish(trainer_of(tmp_path, **MODES[mode]))
    trainer = trainer_of(tmp_path, **MODES[mode])
    callback = watch(trainer, every=2, on_error="raise")
    assert finish(trainer) == plain
    rows = list(callback.probe.trace)
    assert [row["step"] for row in rows] == list(range(0, trainer.args.max_steps, 2))
    parts = trainer.args.gradient_accumulation_steps
    sizes = [parts, parts, 2 if mode == "a short last group" else parts]  # 12 batches: 5, 5 and 2
    limit = trainer.args.max_grad_norm or (0.4 if "optimizer" in MODES[mode] else float("inf"))
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    for row in rows:
        assert row["status"] == "ok"
        assert row["smoothness"] > 0
        assert row["batch_size"] == 4 * sizes[row["step"] % 3]
        assert row["eps"] == pytest.approx(
            torch.finfo(torch.bfloat16 if mode == "bf16" else torch.float32).eps
        )
        logged = losses[row["step"]]
        assert row["lr"] == pytest.approx(logged["learning_rate"])
        assert row["loss"] == pytest.approx(logged["loss"], abs=2e-4)
        since = range(max(0, row["step"] - 1), row["step"] + 1)
        assert row["recent_steps"] == len(since)
        mean = np.average([losses[k]["loss"] for k in since], weights=[sizes[k % 3] for k in since])
        assert row["recent_loss"] == pytest.approx(mean, abs=2e-4)
        if trainer.args.max_grad_norm:  # then the Trainer logs the norm before clipping
            assert row["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-3)
        expected = min(1.0, limit / row["grad_norm"])
        assert row["coefficient"] == pytest.approx(expected, rel=2e-2 if mode == "bf16" else 1e-4)


def test_a_callback_given_to_the_trainer_measures_what_an_added_one_does(tmp_path):
    watched = trainer_of(tmp_path, max_grad_norm=0.5)
    rows = watch(watched, every=3, on_error="raise")
    expected = finish(watched)
    callback = SmoothnessCallback(every=3, on_error="raise")
    for _ in range(2):  # the same callback in a second Trainer measures that one
        assert finish(trainer_of(tmp_path, max_grad_norm=0.5, callbacks=[callback])) == expected
        for row, other in zip(callback.probe.trace, rows.probe.trace, strict=True):
            assert row["smoothness"] == other["smoothness"]
            assert row["coefficient"] == other["coefficient"]


def test_the_class_of_the_callback_is_a_callback_too(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, callbacks=[SmoothnessCallback])
    trainer.train()
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SmoothnessCallback))
    assert [row["step"] for row in callback.probe.trace] == [0]
    watch(trainer)
    with pytest.raises(ValueError, match="one is enough"):
        trainer.train()


def test_a_callback_outside_a_trainer_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="`callbacks` of a transformers Trainer"):
        SmoothnessCallback().on_train_begin(None, None, None)


def test_sft_of_trl_keeps_its_counts(tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets", reason="needs trl")

    def make():
        set_seed(0)
        args = trl.SFTConfig(
            str(tmp_path), per_device_train_batch_size=4, max_steps=6, logging_steps=1, save_strategy="no",
            use_cpu=True, disable_tqdm=True, report_to="none", dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False, gradient_checkpointing=False, max_length=16,
        )  # fmt: skip
        data = datasets.Dataset.from_dict({"input_ids": Tokens().ids.tolist()})
        return trl.SFTTrainer(gpt2(), args, train_dataset=data, processing_class=tokenizer())

    plain = finish(make())
    trainer = make()
    callback = watch(trainer, every=2, on_error="raise")
    assert finish(trainer) == plain
    assert [row["status"] for row in callback.probe.trace] == ["ok"] * 3
    assert any("num_tokens" in entry for entry in trainer.state.log_history)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<unk>": 62, "<pad>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="<pad>"
    )


def test_two_clippings_are_said_and_measured(tmp_path):
    trainer = trainer_of(tmp_path, optimizer="ClippedSGD", max_grad_norm=0.2)
    callback = watch(trainer, every=2, on_error="raise")
    with warned(r"max_grad_norm=0.2\) clips before ClippedSGD.*max_grad_norm=0\.") as seen:
        trainer.train()
        check_optimizer(trainer.optimizer).clip_stats()
    assert len([w for w in seen if "clip" in str(w.message)]) == 1
    for row in callback.probe.trace:
        assert row["coefficient"] == pytest.approx(0.2 / row["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "optimizer", ["ClippedSGD", "clip", (cs.ClippedAdamW, {"lr": 1e-3, "max_norm": 0.4})]
)
def test_two_clippings_are_said_without_our_callback(optimizer, tmp_path):
    trainer = trainer_of(tmp_path, optimizer=optimizer, max_grad_norm=0.5)
    trainer.train()
    with warned(r"already clipped \(several had norm 0\.5.*max_grad_norm=0"):
        check_optimizer(trainer.optimizer).clip_stats()


class Listener(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def test_rows_and_clip_share_go_to_every_reporting_callback(tmp_path):
    trainer = trainer_of(tmp_path, optimizer="ClippedSGD", max_grad_norm=0.0, logging_steps=100)
    listener = Listener()
    trainer.add_callback(listener)
    callback = watch(trainer, every=3)
    trainer.train()
    rows = [(step, logs) for step, logs in listener.logs if "curvestep/smoothness" in logs]
    assert [step for step, _ in rows] == [0, 3, 6]
    assert isinstance(callback.probe._recent.total, torch.Tensor)  # nothing waits for what no row needs yet
    for (_, logs), row in zip(rows, callback.probe.trace, strict=True):
        assert logs["curvestep/grad_norm"] == row["grad_norm"]
        assert 0 < logs["curvestep/clipped_fraction"] <= 1
        assert logs["curvestep/skipped"] == 0.0  # which only the optimizer knows
    assert not check_optimizer(trainer.optimizer)._optimizer_step_post_hooks


def test_rows_are_not_printed_among_the_logs_of_the_trainer(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    watch(trainer, every=2)
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("'loss'") == 8  # the Trainer's own
    assert "curvestep/smoothness" not in out


def test_a_second_run_is_written_beside_the_first(tmp_path):
    trainer = trainer_of(tmp_path)
    callback = watch(trainer, every=3, trace=tmp_path / "trace.jsonl", on_error="raise")
    trainer.train()
    with warned(r"trace\.jsonl holds a run already.*go to .*trace-2\.jsonl"):
        trainer.train()
    assert callback.probe.trace.path == tmp_path / "trace-2.jsonl"
    assert [row["step"] for row in callback.probe.trace] == [0, 3, 6]


def test_a_step_that_pops_from_its_inputs_is_measured(tmp_path):
    class Popping(Trainer):
        def training_step(self, model, inputs, *args):
            labels = inputs.pop("labels")
            return super().training_step(model, {**inputs, "labels": labels}, *args)

    trainer = trainer_of(tmp_path, kind=Popping)
    callback = watch(trainer, every=2, on_error="raise")
    trainer.train()
    assert [row["status"] for row in callback.probe.trace] == ["ok"] * 4


def test_a_failing_probe_never_stops_training(tmp_path):
    class Unrepeatable(Trainer):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            type(self).calls += 1
            return self.calls * super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, kind=Unrepeatable)
    watch(trainer, every=2)
    with warned("No more are taken"):
        trainer.train()
    assert trainer.state.global_step == 8


@pytest.mark.parametrize("options", [
    {"lr_scheduler_type": "constant"},
    {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    {"optimizer": "ClippedSGD", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
    {"optimizer": (cs.ClippedAdamW, {"lr": 1e-3, "max_norm": 1.0}), "max_grad_norm": 0.0},
])  # fmt: skip
def test_a_calibrated_run_is_the_run_with_the_numbers_typed_in(options, tmp_path):
    trainer = trainer_of(tmp_path, **options)
    before = digest([trainer.model.state_dict(), torch.get_rng_state()])
    watch(trainer, every=3)
    cal = calibrate(trainer)
    assert digest([trainer.model.state_dict(), torch.get_rng_state()]) == before
    assert trainer.args.learning_rate == cal.lr
    assert cal.schedule == ("constant" if options.get("lr_scheduler_type") == "constant" else "warmup-decay")
    has_warmup = cal.schedule == "constant" or options.get("warmup_steps", 0) > 0
    assert ("no-warmup" in {note.kind for note in cal.warnings}) == (not has_warmup)
    found = finish(trainer)
    typed = {**options, "learning_rate": cal.lr}
    twin = None
    if options.get("optimizer") == "ClippedSGD":
        assert trainer.optimizer.param_groups[0]["max_norm"] == cal.max_norm
        twin = trainer_of(tmp_path, **typed)
        twin.optimizer.param_groups[0].update(
            lr=trainer.optimizer.param_groups[0]["lr"], max_norm=cal.max_norm
        )
    elif "optimizer" in options:
        typed["optimizer"] = (cs.ClippedAdamW, {"lr": cal.lr, "max_norm": cal.max_norm})
    else:
        assert trainer.args.max_grad_norm == cal.max_norm
        typed["max_grad_norm"] = cal.max_norm
    assert finish(twin or trainer_of(tmp_path, **typed)) == found


def test_bad_input_gets_one_clear_line(tmp_path):
    with pytest.raises(TypeError, match=r"`trainer` must be.*Linear"):
        calibrate(torch.nn.Linear(2, 2))
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match="has not trained yet"):
        calibrate(trainer)
    trainer = trainer_of(tmp_path)
    once = trainer_of(tmp_path)
    once.train_dataset = iter(Tokens())
    with pytest.raises(ValueError, match="`train_dataset`, which is an iterator"):
        calibrate(once)

    with pytest.raises(ValueError, match=r"elsewhere holds no calibration.*Leave out `calibrate`"):
        calibrate(trainer, resume_from_checkpoint=tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint`.*holds no calibration"):
        calibrate(trainer, resume_from_checkpoint=True)

    def frozen():
        model = gpt2()
        model.requires_grad_(False)
        return model

    with pytest.raises(ValueError, match="no parameter with `requires_grad`"):
        calibrate(trainer_of(tmp_path, model=frozen))


DDP = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from tests.integrations.test_transformers import calibrate, digest, finish, learner_of, trainer_of, watch
folder = sys.argv[1]
for parts in (1, 2):
    trainer = learner_of(folder, parts, 4)
    before = digest([trainer.model.state_dict(), torch.get_rng_state()])
    found = calibrate(trainer)
    assert digest([trainer.model.state_dict(), torch.get_rng_state()]) == before
    with open(f"{folder}/{parts}-{trainer.args.process_index}.lr", "w") as file:
        print(repr(found.lr), found.confidence, found.num_gradients, file=file)
    trainer.args.max_steps = 1
    trainer.train()  # the Trainer wraps the model itself, after us
for parts in (1, 2):
    found = []
    for probed in (False, True):
        trainer = trainer_of(folder, gradient_accumulation_steps=parts, max_steps=4, max_grad_norm=0.5)
        if probed:
            watch(trainer, every=2, on_error="raise", trace=f"{folder}/{parts}.jsonl")
        found.append(finish(trainer))
    assert found[0] == found[1], found
    print("same", flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # torch's threads now and then abort a process at its end, with no process group left too
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_measure_and_calibrate_together(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    assert printed_by(*TORCHRUN, script, tmp_path).count("same") == 4
    for parts in (1, 2):
        alone = calibrate(learner_of(tmp_path, parts, 8))
        answers = [(tmp_path / f"{parts}-{rank}.lr").read_text().split() for rank in range(2)]
        assert answers[0] == answers[1]
        assert float(answers[0][0]) == pytest.approx(alone.lr, rel=0.1)  # rounding, amplified
        assert answers[0][1:] == [alone.confidence, str(alone.num_gradients)]
        assert alone.trials[-1].gain > 10 * alone.trials[-1].error > 0
    for parts in (1, 2):
        check_rows_of_ranks(tmp_path / f"{parts}.jsonl", steps=[0, 2], batch_size=8 * parts)
