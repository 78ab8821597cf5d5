"""The Python blocks of the docs, run in order as a reader would."""

import re
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page, language="python"):
    """The fenced blocks of a page in this language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def stage():
    """What a reader has before a page's first line: a model, its loss, an optimizer, some batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    x = torch.randn(60, 32, 20)
    loader = list(zip(x, x[..., :5].argmax(dim=-1), strict=True))
    return {
        "model": model, "loader": loader, "batches": loader,
        "loss_of_batch": lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }  # fmt: skip


def run(page, *, quiet=False, **namespace):
    """Run the page's blocks; what is there then. What others warn of does not matter if it is ``quiet``."""
    namespace = {"__name__": "page", "torch": torch, "nn": nn, "F": F, **namespace}
    found = blocks(page)
    assert found
    for number, block in enumerate(found, 1):
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    return namespace
