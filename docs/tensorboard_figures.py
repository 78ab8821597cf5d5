"""The picture of docs/lightning.md: python docs/tensorboard_figures.py [FOLDER].

Trains a small network in Lightning for 300 steps, serves its rows by TensorBoard on 127.0.0.1 and takes the
picture of the page in chromium, FOLDER/tensorboard.png (default: docs/images). Needs the extras lightning and
loggers, playwright and chromium; half a minute on one core.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from playwright.sync_api import sync_playwright
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from curvestep.integrations.lightning import SmoothnessCallback

DEADLINE = 1_200_000  # milliseconds: far beyond need
NUM_CHARTS = 6  # that fit into the picture


class Digits(L.LightningModule):
    """A small network on images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> cs.ClippedSGD:
        """The clip inside the step."""
        return cs.ClippedSGD(self.parameters(), lr=1.0, max_norm=0.5)


def train(folder: str) -> None:
    """Train with the lines of the page; rows go to TensorBoard."""
    from sklearn.datasets import load_digits

    L.seed_everything(0, verbose=False)
    x, y = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    logger = TensorBoardLogger(folder, name="digits", version="")
    trainer = L.Trainer(
        max_steps=300, max_epochs=-1, accelerator="cpu", logger=logger,
        callbacks=[SmoothnessCallback(every=5)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), loader)


def picture(folder: str, path: Path) -> None:
    """Serve ``folder`` and take the picture once every chart is drawn."""
    command = [sys.executable, *"-m tensorboard.main --host 127.0.0.1 --port 0 --logdir".split(), folder]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = next(m for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--no-sandbox", "--disable-gpu"],
                timeout=DEADLINE,
            )
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            page.set_default_timeout(DEADLINE)
            page.goto(f"{found[0]}?darkMode=false&smoothing=0&forceSVG=true#timeseries")
            page.get_by_text("Enable step selection").click()  # its tables hide the curves
            drawn = "document.querySelectorAll('scalar-card line-chart svg path').length"
            page.wait_for_function(f"{drawn} >= {NUM_CHARTS}")
            page.wait_for_load_state("networkidle")
            page.screenshot(path=path)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "images")
    with tempfile.TemporaryDirectory() as logs:
        train(logs)
        picture(logs, folder / "tensorboard.png")
    print(folder / "tensorboard.png")
