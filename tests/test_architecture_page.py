"""docs/architecture.md is true: its walks are the ways that steps go, its tree is the one that is there."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.tensors.kernel import native

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "curvestep"
PAGE = ROOT / "docs" / "architecture.md"
MOST_LINES = 45  # of a walk, so that it fits on a screen


def text_block(heading):
    """The first block of plain text below a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"# {heading}\n")[2]
    return re.search(r"^```text\n(.*?)^```", section, re.DOTALL | re.MULTILINE).group(1)


def functions_passed(run):
    """Every function of the package that a call of ``run`` enters, in order, with its file."""
    entered = []

    def see(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(home):
            entered.append((file.relative_to(home).as_posix(), frame.f_code.co_qualname))

    home = Path(cs.__file__).parent
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return entered


@pytest.fixture
def training():
    """A model, its loss, and an optimizer that has stepped once."""
    model = nn.Linear(8, 1)
    x = torch.randn(16, 8)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0, momentum=0.9)

    def loss_fn():
        return model(x).square().mean()

    loss_fn().backward()
    optimizer.step()
    return model, loss_fn, optimizer


def check_walk(heading, run):
    block = text_block(heading)
    assert block.count("\n") <= MOST_LINES
    named = re.findall(r"^ *([\w/]+\.py) +([\w.]+)", block, re.MULTILINE)
    assert len(named) >= 10
    passed = iter(functions_passed(run))
    assert [one for one in named if one not in passed] == []  # each is looked for behind the one before


@pytest.mark.skipif(native() is None, reason="without the kernel a step goes another way")
def test_the_walk_of_a_step_is_the_way_it_goes(training):
    _, _, optimizer = training
    check_walk("A step of ClippedSGD", optimizer.step)


@pytest.mark.skipif(native() is None, reason="without the kernel a step goes another way")
def test_the_walk_of_a_probed_step_is_the_way_it_goes(training, tmp_path):
    model, loss_fn, optimizer = training
    probe = cs.SmoothnessProbe(model, every=1, trace=tmp_path / "trace.jsonl").watch(optimizer)

    def step():
        optimizer.zero_grad()
        probe.record(loss_fn).backward()
        optimizer.step()

    check_walk("A probed step, from the loss to its row", step)
    probe.trace.close()


def test_the_page_shows_every_room_and_module_at_the_root():
    tree = text_block("The tree").partition("reproduction/")[0]
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"(\w+)/", tree.replace("src/curvestep/", ""))) == rooms
    assert set(re.findall(r"\w+\.py", tree)) == modules
