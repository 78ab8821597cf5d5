"""The code of lightning.md, transformers.md, loops.md and clip_questions.md runs, line by line."""

import re
import runpy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs
from tests.integrations.runs import classes
from tests.support.pages import DOCS, ROOT, run, stage

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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
    done = run(DOCS / "lightning.md", quiet=True, L=L, model=model, loader=loader)
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
    given = {"Trainer": transformers.Trainer, "model": gpt2(), "args": args, "data": Tokens()}
    done = run(DOCS / "transformers.md", quiet=True, **given)
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
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    shown = re.search(rf"`python examples/{name}\.py`.*?```text\n(.*?)```", text, re.DOTALL)[1]
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("#", shown) == number.sub("#", printed)
    # Another processor rounds otherwise, and a run goes another way for it.
    ours, theirs = ([float(found) for found in number.findall(words)] for words in (shown, printed))
    assert ours == pytest.approx(theirs, rel=0.5, abs=0.2)
    assert {row["status"] for row in cs.Trace.load(tmp_path / "trace.jsonl")} <= {"ok", "zero-step"}


def test_loops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(run(DOCS / "loops.md", quiet=True, **stage())["probe"].trace) == 2


def test_clip_questions(capsys):
    done = run(DOCS / "clip_questions.md", quiet=True, **stage())
    assert done["optimizer"].clip_stats()["steps"] == 1  # of the last handle
    assert [row["status"] for row in done["probe"].trace] == ["ok"]
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(printed) == 8
