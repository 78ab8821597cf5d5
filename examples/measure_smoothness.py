"""A character-level language model, trained as always, and one added line that measures it.

python examples/measure_smoothness.py [folder]
"""

import pydoc_data.topics
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

# ---- an ordinary training loop -------------------------------------------------------------------------
torch.manual_seed(0)
torch.set_num_threads(1)
text = "".join(pydoc_data.topics.topics.values())[:200_000]  # text that comes with Python
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])


class CharLSTM(nn.Module):
    """The next letter from those before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(letters), 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.out = nn.Linear(96, len(letters))

    def forward(self, x):  # noqa: D102
        return self.out(self.lstm(self.embedding(x))[0])


folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
model = CharLSTM()
(folder / "trace.jsonl").unlink(missing_ok=True)  # of an earlier call
optimizer = cs.ClippedSGD(model.parameters(), lr=4.0, max_norm=0.25)
probe = cs.SmoothnessProbe(model, every=2, trace=folder / "trace.jsonl").watch(optimizer)

for _ in range(160):
    start = torch.randint(len(data) - 50, (16,))
    batch = torch.stack([data[i : i + 49] for i in start.tolist()])

    def loss_fn(batch=batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    probe.record(loss_fn).backward()  # <- instead of loss_fn().backward(); everything else stays
    optimizer.step()
    optimizer.zero_grad()

# ---- what was seen, and what to do about it ------------------------------------------------------------
fit = cs.fit_smoothness(probe.trace)
print(fit, "\n")
print(cs.advise(probe))

g, smoothness = probe.trace.column("grad_norm"), probe.trace.column("smoothness")
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
points = axes.scatter(g, smoothness, c=probe.trace.column("step"), s=14)
line = torch.linspace(float(g.min()), float(g.max()), 100).numpy()
axes.plot(
    line, fit.L0 + fit.L1 * line, "k", label=f"L0 + L1 ‖g‖ = {fit.L0:.2g} + {fit.L1:.2g} ‖g‖ (95 % line)"
)
axes.set(xscale="log", yscale="log", xlabel="gradient norm ‖g‖", ylabel="smoothness along the step")
axes.set_title(f"rank correlation {fit.spearman:.2f}, with a constant Hessian {fit.control.spearman:.2f}")
figure.legend(loc="outside lower center")
figure.colorbar(points, label="training step")
figure.savefig(folder / "smoothness.png", dpi=120)
print(f"\nWrote {folder / 'smoothness.png'} and {folder / 'trace.jsonl'}.")
