"""Hugging Face Trainer: learning rate and max_grad_norm measured before, smoothness along the run, advice.

python examples/transformers_trainer.py [folder]
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

import curvestep as cs
from curvestep.integrations.transformers import SmoothnessCallback, calibrate


class Counting(torch.utils.data.Dataset):
    """Sequences that count on by one to four, from anywhere."""

    def __len__(self) -> int:
        """Their number."""
        return 1600

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """One of them."""
        ids = (i + (1 + i % 4) * torch.arange(16)) % 64
        return {"input_ids": ids, "labels": ids}


folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
args = TrainingArguments(
    str(folder / "out"), max_steps=200, warmup_steps=20, per_device_train_batch_size=16, use_cpu=True,
    report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no",
)  # fmt: skip
callback = SmoothnessCallback(every=5, trace=folder / "trace.jsonl", if_exists="overwrite")
trainer = Trainer(model, args, train_dataset=Counting(), callbacks=[callback])
trainer.remove_callback(PrinterCallback)

calibrate(trainer)
print(f"learning_rate {args.learning_rate:.2g}, max_grad_norm {args.max_grad_norm:.2g}")
trainer.train()

assert callback.probe is not None
for row in list(callback.probe.trace)[1::13]:  # the first step of a warm-up has lr 0
    numbers = (
        f"loss {row['loss']:.2f}, smoothness {row['smoothness']:.1f}, coefficient {row['coefficient']:.2f}"
    )
    print(f"step {row['step']}: {numbers}")
print(f"{len(callback.probe.trace)} rows. {cs.advise(callback.probe.trace).verdict}")
