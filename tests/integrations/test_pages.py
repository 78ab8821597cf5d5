"""The code of lightning.md, transformers.md, loops.md and clip_questions.md runs, line by line."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from tests.integrations.runs import classes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def blocks(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(name, **namespace):
    """Run the page's blocks in order; what is there then."""
    torch.manual_seed(0)
    namespace |= {"__name__": "page", "torch": torch, "nn": nn, "F": F}
    found = blocks(name)
    assert found
    for number, block in enumerate(found, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block, f"{name}, block {number}", "exec"), namespace)
    return namespace


def test_lightning(tmp_path, monkeypatch):
    L = pytest.importorskip("lightning", reason="needs the extra `lightning`")
    monkeypatch.chdir(tmp_path)

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.lr = 1e-3
            self.net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)).float()

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    model, loader = Model(), torch.utils.data.DataLoader(classes(), batch_size=8, shuffle=True)
    done = run("lightning.md", L=L, model=model, loader=loader)
    assert done["trainer"].optimizers[0].param_groups[0]["lr"] != 1e-3
    assert [row["step"] for row in done["callback"].probe.trace] == [0, 10]


def test_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
    from tests.integrations.test_transformers import Tokens, gpt2

    monkeypatch.chdir(tmp_path)
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    done = run("transformers.md", Trainer=transformers.Trainer, model=gpt2(), args=args, data=Tokens())
    assert args.learning_rate != 5e-5
    assert done["trainer"].optimizer.optimizer.clip_stats()["steps"] == 4


@pytest.mark.parametrize(
    ("page", "name"), [("lightning", "lightning_fit"), ("transformers", "transformers_trainer")]
)
def test_a_page_shows_what_its_script_prints(page, name, tmp_path, monkeypatch, capsys):
    pytest.importorskip(page, reason=f"needs the extra `{page}`")
    script = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    shown = re.search(rf"`python examples/{name}\.py`.*?```text\n(.*?)```", text, re.DOTALL)[1]
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("#", shown) == number.sub("#", printed)
    # Another processor rounds otherwise, and a run goes another way for it.
    ours, theirs = ([float(found) for found in number.findall(words)] for words in (shown, printed))
    assert ours == pytest.approx(theirs, rel=0.5, abs=0.2)
    assert {row["status"] for row in cs.Trace.load(tmp_path / "trace.jsonl")} <= {"ok", "zero-step"}


def stage():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    batches = list(torch.utils.data.DataLoader(classes(), batch_size=8))
    return {
        "model": model,
        "batches": batches,
        "loader": batches,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loss_of_batch": lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    }


def test_loops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(run("loops.md", **stage())["probe"].trace) == 1


def test_clip_questions(capsys):
    done = run("clip_questions.md", **stage())
    assert done["optimizer"].clip_stats()["steps"] == 1  # of the last handle
    assert [row["status"] for row in done["probe"].trace] == ["ok"]
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(printed) == 7
