"""What `ClipCallback` costs: its share of the processor time of a training step, in both frameworks.

    python reproduction/benchmarks/clip_callback.py [--steps 60]

Both write to a logger in every step, ten layers among the numbers, which is more often than
by default. The time in the callback and its hooks is taken out of each step: both numbers come from the same
steps, whatever else the machine does. Medians over the steps.
"""
# ruff: noqa: D101, D102

import argparse
import statistics
import tempfile
import time
import warnings
from functools import wraps

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from curvestep.integrations import lightning as for_lightning, transformers as for_transformers
from curvestep.integrations.step_norms import StepNorms
from curvestep_reproduction.models import ResNet20

BATCH_SIZE = 32
WARM_UP = 5  # steps that are not counted


class Clock:
    """The time inside of functions, and the times of steps without it."""

    def __init__(self):
        self.inside = 0.0
        self.depth = 0
        self.steps = []
        self._last = None

    def around(self, owner, name):
        """Count the time in ``owner.name``."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            begun = time.thread_time()
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.inside += time.thread_time() - begun

        setattr(owner, name, timed)

    def end_step(self):
        now = time.thread_time()
        if self._last is not None:
            self.steps.append((self.inside, now - self._last - self.inside))
        self.inside, self._last = 0.0, now

    def share(self):
        ours, others = zip(*self.steps[WARM_UP:], strict=True)
        return statistics.median(ours), statistics.median(others)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {"x": torch.randn(3, 32, 32, generator=generator), "labels": i % 10}


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = ResNet20()

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels)}


def gpt():
    """A million parameters."""
    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config)


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def in_lightning(model, data, folder, steps, clock):
    callback = for_lightning.ClipCallback()
    for name in ("on_before_optimizer_step", "on_train_batch_end"):
        clock.around(callback, name)

    class Ends(L.Callback):
        def on_train_batch_end(self, *_):
            clock.end_step()

    L.Trainer(
        max_steps=steps, accelerator="cpu", gradient_clip_val=1.0, log_every_n_steps=1,
        logger=CSVLogger(folder, flush_logs_every_n_steps=10**6), callbacks=[callback, Ends()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(Module(model), torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE))  # fmt: skip


def in_transformers(model, data, folder, steps, clock):
    callback = for_transformers.ClipCallback()
    clock.around(callback, "on_step_end")

    class Ends(TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.end_step()

    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=BATCH_SIZE, use_cpu=True, logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback, Ends()])
    trainer.remove_callback(PrinterCallback)  # its lines would stand between those of the table
    trainer.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    hooks = StepNorms._before_step, StepNorms._after_step
    print("| model | framework | a step | ClipCallback | share |\n| --- | --- | --- | --- | --- |")
    for name, make, data in (("ResNet20", Classifier, Images()), ("GPT", gpt, Tokens())):
        for framework, run in (("Lightning", in_lightning), ("transformers", in_transformers)):
            torch.manual_seed(0)
            clock = Clock()
            StepNorms._before_step, StepNorms._after_step = hooks
            for hook in ("_before_step", "_after_step"):
                clock.around(StepNorms, hook)
            with tempfile.TemporaryDirectory() as folder:
                model = make()
                run(model, data, folder, options.steps, clock)
            ours, step = clock.share()
            size = sum(p.numel() for p in model.parameters())
            print(
                f"| {name}, {size / 1e6:.2f} M | {framework} | {step * 1e3:.0f} ms | {ours * 1e3:.2f} ms "
                f"| {ours / step:.1%} |"
            )


if __name__ == "__main__":
    main()
