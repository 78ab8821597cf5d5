"""GRPO with TRL, a reward by rule, and outliers among the rewards: what does `max_grad_norm` do?

A small GPT-2 learns to write one letter of sixteen; the reward of a completion is the share of that letter.
One completion in fifty, or in another number, gets a reward of 30 by mistake. Rewards are not scaled by
their spread (`scale_rewards="none"`), so that a wrong one makes a large gradient. Needs the extra
`transformers`, and trl.

python examples/grpo_clipping.py [steps] [seeds] [completions per outlier]
"""

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

import curvestep as cs
from curvestep.clip_rules import ClipRule

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
num_seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
one_in = int(sys.argv[3]) if len(sys.argv) > 3 else 50
WORDS = [*"abcdefghijklmnop", "<pad>", "<eos>"]
THRESHOLDS: dict[str, float | ClipRule] = {
    "none": float("inf"),
    "0.1": 0.1,
    "1.0": 1.0,
    "zscore()": cs.clip_rules.zscore(warmup=10),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter; nothing is downloaded."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def reward_of(seed: int, shares: list[float]) -> Callable[..., list[float]]:
    """The share of the letter "a" in each completion, kept in ``shares``; outliers are planted after that."""
    planted = torch.Generator().manual_seed(seed)

    def reward(completions: list[str], **_: object) -> list[float]:
        true = [completion.split().count("a") / 8 for completion in completions]
        shares.append(statistics.fmean(true))
        wrong = torch.rand(len(true), generator=planted) < 1 / one_in
        return [30.0 if is_wrong else share for share, is_wrong in zip(true, wrong.tolist(), strict=True)]

    return reward


def train(max_norm: float | ClipRule, seed: int, folder: str) -> tuple[float, float, float]:
    """The share of the letter at the end, that of clipped steps, and the largest gradient norm."""
    set_seed(seed)
    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=17,
        eos_token_id=17, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    handle = cs.clip(optimizer, max_norm)
    shares: list[float] = []
    norms: list[float] = []
    args = GRPOConfig(
        output_dir=folder, max_steps=num_steps, per_device_train_batch_size=16, num_generations=8,
        max_completion_length=8, scale_rewards="none", max_grad_norm=0.0, lr_scheduler_type="constant",
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, seed=seed,
        logging_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_of(seed, shares), args, processing_class=words, optimizers=(optimizer, None),
        train_dataset=Dataset.from_list([{"prompt": f"{letter} b"} for letter in WORDS[:16]]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    optimizer.register_step_post_hook(lambda *_: norms.append(handle.clip_stats()["grad_norm"]))
    trainer.train()
    last = shares[-max(num_steps // 6, 1) :]
    return statistics.fmean(last), handle.clip_stats()["clipped_fraction"], max(norms)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("| max_norm | share of the letter: median (range) | steps clipped | largest norm |")
    print("| --- | --- | --- | --- |")
    for name, max_norm in THRESHOLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = [train(max_norm, seed, folder) for seed in range(num_seeds)]
        ends, clipped, norms = zip(*runs, strict=True)
        spread = f"{statistics.median(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"
        print(f"| {name} | {spread} | {statistics.fmean(clipped):.0%} | {max(norms):.2g} |", flush=True)
