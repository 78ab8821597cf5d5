"""Fine-tuning with LoRA: a clip for the adapters, which are all that is trained, and what it did.

A small GPT-2 learns to count by ones, its adapters then to count by threes. Needs the extra `transformers`,
and peft.

python examples/lora_finetune.py [steps]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import curvestep as cs

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
torch.manual_seed(0)


def counting(stride: int) -> torch.Tensor:
    """Sequences that count on from anywhere."""
    return (torch.randint(64, (16, 1)) + stride * torch.arange(16)) % 64


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, stride: int) -> float:
    """Train, and give the last loss."""
    loss = torch.zeros(())
    for _ in range(num_steps):
        optimizer.zero_grad()
        ids = counting(stride)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return loss.item()


config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
base = GPT2LMHeadModel(config)
print(f"base: loss {train(base, cs.ClippedAdamW(base.parameters(), lr=3e-3, max_norm=1.0), 1):.2f}")
adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(base, adapters)
trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
# Names make `spikes()` and `clip_stats(layers=True)` speak of adapters instead of numbers.
optimizer = cs.ClippedAdamW(trained, lr=1e-2, max_norm=1.0)
num_trained = sum(p.numel() for _, p in trained)
print(f"adapters: loss {train(model, optimizer, 3):.2f}, {num_trained:,} trained numbers")
stats = optimizer.clip_stats(layers=True)
layer, norm = max(stats.get("layers", {}).items(), key=lambda item: item[1])
print(f"{stats['clipped_fraction']:.0%} of {stats['steps']} steps clipped")
print(f"largest gradient: {norm:.2g} of {layer.removeprefix('base_model.model.')}")
