"""Lightning: learning rate and threshold measured before the first step, smoothness along the run, advice.

python examples/lightning_fit.py [folder]
"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from curvestep.integrations.lightning import Calibrate, SmoothnessCallback


class Classifier(L.LightningModule):
    """Which of five directions a vector points along most."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Clipped SGD; both numbers are replaced by what Calibrate finds."""
        return cs.ClippedSGD(self.parameters(), lr=0.01, max_norm=1.0)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
L.seed_everything(0, verbose=False)
x = torch.randn(3200, 20)
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(dim=1))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

calibrate = Calibrate()
watch = SmoothnessCallback(every=10, trace=str(folder / "trace.jsonl"), if_exists="overwrite")
trainer = L.Trainer(
    max_epochs=4, callbacks=[calibrate, watch], accelerator="cpu", logger=False, default_root_dir=folder,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(), loader)

assert calibrate.calibration is not None
assert watch.probe is not None
print(f"lr {calibrate.calibration.lr:.2g}, max_norm {calibrate.calibration.max_norm:.2g}")
for row in list(watch.probe.trace)[::13]:
    numbers = (
        f"loss {row['loss']:.2f}, smoothness {row['smoothness']:.1f}, coefficient {row['coefficient']:.2f}"
    )
    print(f"step {row['step']}: {numbers}")
print(f"{len(watch.probe.trace)} rows. {cs.advise(watch.probe.trace).verdict}")
