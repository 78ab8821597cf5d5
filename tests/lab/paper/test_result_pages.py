"""The result pages of the reproduction, from runs written by hand; some of the plan are missing."""

import importlib.util
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from curvestep.lab.paper.claims import CANNOT_TELL, SUPPORTED, Claim, claims_table
from curvestep.lab.paper.plan import BY_HAND
from curvestep.lab.paper.reproduction import make_plan
from curvestep.lab.report.captions import findings
from curvestep.lab.run.folder import CHECKPOINT
from tests.lab.paper.test_protocol import write_trace
from tests.lab.paper.test_reproduction import fake_runs

DOCS = Path(__file__).parents[3] / "docs"
MARKS = "\n".join(
    f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in ("found", "runs", "claims", "figures")
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, writing into a folder of its own."""
    spec = importlib.util.spec_from_file_location("reproduction_figures", DOCS / "reproduction_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reproduction_figures", module)  # its dataclass asks for it
    spec.loader.exec_module(module)
    (tmp_path / "docs" / "results" / "images").mkdir(parents=True)
    for name in ("reproduction", "longer"):
        (tmp_path / "docs" / "results" / f"{name}.md").write_text(MARKS)
    (tmp_path / "docs" / "reproduction.md").write_text("<!-- claims -->\nold\n<!-- /claims -->")
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(module, "LONGER_CLAIMS", tmp_path / "longer.json")
    return module


def leave_runs(folder, *, seeds=(0, 1)):
    """What a part of the longer runs might leave: the main pair of figure 2 on some seeds."""
    plan = make_plan("longer", ("fig2",))
    chosen = [run for run in plan.runs if run.setting in (BY_HAND, "lm-lr2") and run.recipe.seed in seeds]
    plan = replace(plan, runs=tuple(chosen))
    fake_runs(plan, folder, loss_of=lambda setting, seed: np.linspace(9, 5, 400))
    (folder / "runs").rename(folder / "all")
    (folder / "runs").mkdir()
    (folder / "all").rename(folder / "runs" / "ptb-longer")
    for run in chosen:
        there = folder / "runs" / "ptb-longer" / run.name
        alpha = 1.0 if run.setting == BY_HAND else 0.0
        write_trace(there / "trace.jsonl", alpha + 0.02 * run.recipe.seed**2, seed=run.recipe.seed)
        (there / CHECKPOINT).write_bytes(b"heavy")


@pytest.mark.slow
def test_a_part_of_the_longer_runs_is_kept_judged_and_drawn_again_without_their_folder(script, tmp_path):
    leave_runs(tmp_path / "out")
    script.main(["--longer", str(tmp_path / "out")])
    kept = tmp_path / "docs" / "results" / "longer"
    with tarfile.open(kept / "runs.tar.xz") as packed:
        assert not any(CHECKPOINT in name for name in packed.getnames())
    claims = json.loads((kept / "claims.json").read_text())
    verdicts = [claim["verdict"] for claim in claims["claims"]]
    assert verdicts[0] == SUPPORTED
    assert verdicts[1] == script.NOT_RUN
    assert "4 of 15 runs. Not run yet: cifar-lr5clip0.25-seed0, " in claims["notes"][0]
    assert json.loads((tmp_path / "longer.json").read_text()) == claims
    page = (tmp_path / "docs" / "results" / "longer.md").read_text()
    assert "| `lm-lr30clip0.25`: lr 30, clip 0.25 | 0, 1 | 400 | 5.1" in page
    assert "**supported**" in page
    assert "(images/longer-fig2.png)" in page
    assert (tmp_path / "docs" / "results" / "images" / "longer-fig2.png").exists()
    assert "\nold\n" not in page

    before = (kept / "runs.tar.xz").read_bytes()
    script.main([])
    assert (tmp_path / "docs" / "results" / "longer.md").read_text() == page
    script.pack(tmp_path / "out", kept / "again.tar.xz")
    assert (kept / "again.tar.xz").read_bytes() == before


def test_claims_of_both_scales_stand_in_one_table(script, tmp_path):
    for name, verdict in (("reproduction", SUPPORTED), ("longer", CANNOT_TELL)):
        (tmp_path / "docs" / "results" / name).mkdir()
        claim = {
            "figure": "fig2",
            "paper": "It | grows.",
            "measured": "0.3 higher; by ranks 0.2",
            "verdict": verdict,
        }
        other = claim | {"figure": name}
        path = tmp_path / "docs" / "results" / name / "claims.json"
        path.write_text(json.dumps({"notes": [], "claims": [claim, other]}))
    lines = script.comparison().splitlines()
    assert lines[2] == "| fig2 | It \\| grows. | **supported**: 0.3 higher | **cannot tell**: 0.3 higher |"
    assert lines[3].endswith("| not in the plan |")
    assert lines[4].endswith("| not in the plan | **cannot tell**: 0.3 higher |")


def test_what_decides_a_claim_is_said_before_its_first_semicolon():
    decided = {
        (name, one["paper"]): one["measured"].partition("; ")[0]
        for name in ("longer", "reproduction")
        for one in json.loads((DOCS / "results" / name / "claims.json").read_text(encoding="utf-8"))["claims"]
    }
    assert [key for key, words in decided.items() if words.count("(") != words.count(")")] == []
    assert "gradient norm" in decided["reproduction", "GD lowers the loss but not the gradient norm."]


def test_what_was_found_names_the_papers_own_claims_first():
    papers = "Not in the paper: a.", "b.", "c."
    said = findings([{"figure": "fig2", "paper": paper, "verdict": SUPPORTED} for paper in papers])
    assert said.endswith("Supported: “b” (figure 2), and 2 more.")


def test_a_page_without_a_place_for_a_part_says_so(script):
    with pytest.raises(ValueError, match="no place for 'runs'"):
        script.filled("nothing", {"runs": ""})


def test_the_verdicts_of_the_longer_runs_stand_beside():
    rows = [
        Claim(figure="fig2", paper=paper, measured="m", verdict=SUPPORTED, longer=longer)
        for paper, longer in (("a", CANNOT_TELL), ("b", ""))
    ]
    assert claims_table(rows).splitlines()[2] == "| fig2 | a | m | **supported** | cannot tell |  |"
    assert "longer" not in claims_table(rows[1:])


def test_the_pages_have_a_place_for_every_part():
    for name in ("longer", "reproduction"):
        text = (DOCS / "results" / f"{name}.md").read_text(encoding="utf-8")
        for part in ("claims", "figures"):
            assert f"<!-- {part} -->" in text
            assert f"<!-- /{part} -->" in text
