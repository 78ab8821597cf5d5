"""The result pages of the reproduction, from runs written by hand; some of the plan are missing."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from curvestep_reproduction.claims.claims import NOT_TESTED
from curvestep_reproduction.figures.legend import BY_HAND
from curvestep_reproduction.figures.plan import KeptRuns, Results
from curvestep_reproduction.figures.reproduction import make_plan
from curvestep_reproduction.training.run_folder import CHECKPOINT
from reproduction.tests.claims.test_statements import write_trace
from reproduction.tests.figures.pages import load_script
from reproduction.tests.figures.test_reproduction import fake_runs


def marks(*names):
    return "\n".join(f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in names)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, writing into a folder of its own."""
    module = load_script()
    (tmp_path / "docs" / "results" / "images").mkdir(parents=True)
    for name in ("reproduction", "longer", "epoch", "paper"):
        (tmp_path / "docs" / "results" / f"{name}.md").write_text(marks("found", "runs", "figures"))
    (tmp_path / "docs" / "reproduction.md").write_text(marks("found", "summary", "claims"))
    (tmp_path / "docs" / "report.md").write_text(marks("found", "results", "compute"))
    (tmp_path / "docs" / "results" / "claims.md").write_text(marks("numbers"))
    (tmp_path / "docs" / "results" / "verdicts.md").write_text(marks("changed"))
    (tmp_path / "docs" / "results" / "errata.md").write_text(marks("errata"))
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction" / "README.md").write_text(marks("missing"))
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(module, "IMAGES", tmp_path / "docs" / "results" / "images")
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(module, "KEPT_CLAIMS", tmp_path / "kept.json")
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
def test_kept_runs_are_judged_and_drawn_again_without_their_folder(script, tmp_path, capsys):
    leave_runs(tmp_path / "out")
    script.main(["--keep", str(tmp_path / "out"), "--commit", "0123456"])
    assert len(list((tmp_path / "kept" / "longer").iterdir())) == 4
    claims = {claim["name"]: claim for claim in json.loads((tmp_path / "kept.json").read_text())["longer"]}
    assert claims["less-without-clipping"]["verdict"] == NOT_TESTED  # two of its three seeds
    assert "[numbers](results/claims.md#affine-law)" in (tmp_path / "docs" / "reproduction.md").read_text()
    changed = (tmp_path / "docs" / "results" / "verdicts.md").read_text()
    assert f"| [Figure 2(b)](claims.md#less-without-clipping) | supported | {NOT_TESTED} |" in changed
    assert '<a id="affine-law"></a>' in (tmp_path / "docs" / "results" / "claims.md").read_text()
    page = (tmp_path / "docs" / "results" / "longer.md").read_text()
    assert "| `lm-lr30clip0.25`: lr 30, clip 0.25 | 0, 1 | 400 steps | 5.1" in page
    assert re.search(r"4 of \d+ runs, made by 0123456", page)
    assert "Not run yet: lr 2, clip 0.25; " in page
    assert "(images/longer-fig2.svg)" in page
    assert (tmp_path / "docs" / "results" / "images" / "longer-fig2.svg").exists()
    assert "\nold\n" not in page

    script.main([])
    assert (tmp_path / "docs" / "results" / "longer.md").read_text() == page
    assert (tmp_path / "docs" / "results" / "images" / "claims.svg").exists()

    assert script.main(["--check"]) == 0
    capsys.readouterr()
    edited = page.replace("4 of ", "5 of ")
    (tmp_path / "docs" / "results" / "longer.md").write_text(edited)
    assert script.main(["--check"]) == 1
    assert "results/longer.md: `found` disagrees with the kept runs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pages_in_the_repository_say_what_their_kept_runs_show(capsys):
    assert load_script().main(["--check"]) == 0, capsys.readouterr().out


def test_runs_are_not_kept_without_the_commit_that_made_them(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--keep", str(tmp_path)])
    assert "--commit is needed" in capsys.readouterr().err


def test_runs_are_kept_by_their_scale_and_no_longer_as_unfinished(script, tmp_path, monkeypatch):
    leave_runs(tmp_path / "out", seeds=(0,))
    monkeypatch.setattr(script, "UNFINISHED", tmp_path / "kept" / "unfinished")
    (tmp_path / "kept" / "unfinished").mkdir(parents=True)
    for name in ("lm-lr2-seed0", "cifar-momentum-seed0"):
        (tmp_path / "kept" / "unfinished" / f"{name}.tar.xz").touch()
    (tmp_path / "out" / "runs" / "ptb-longer" / "lm-lr2-seed0").rename(tmp_path / "out" / "of-no-plan")
    assert script.keep(tmp_path / "out", commit="0123456") == [f"{BY_HAND}-seed0"]
    (tmp_path / "out" / "of-no-plan").rename(tmp_path / "out" / "lm-lr2-seed0")
    script.keep(tmp_path / "out", commit="0123456")
    kept = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*.xz")}
    assert kept == {
        "longer/lm-lr2-seed0.tar.xz", f"longer/{BY_HAND}-seed0.tar.xz",
        "unfinished/cifar-momentum-seed0.tar.xz",
    }  # fmt: skip


def test_a_damaged_run_is_named_and_the_rest_is_kept(script, tmp_path, monkeypatch, capsys):
    leave_runs(tmp_path / "out", seeds=(0,))
    monkeypatch.setattr(script, "UNFINISHED", tmp_path / "kept" / "unfinished")
    (tmp_path / "out" / "runs" / "ptb-longer" / "lm-lr2-seed0" / "status.json").write_text("{")
    assert script.keep(tmp_path / "out", commit="0123456") == [f"{BY_HAND}-seed0"]
    line = capsys.readouterr().out.strip()
    assert line.startswith("lm-lr2-seed0 is damaged and is not kept: ")
    assert "\n" not in line


def test_the_readme_names_what_is_not_run_yet_with_its_command(script, tmp_path):
    results = Results(make_plan("longer"), tmp_path)
    none = KeptRuns(results=results, damaged=(), commits={})
    scales = ("laptop", "epoch", "paper")
    kept = {"longer": none} | {
        scale: replace(none, results=Results(make_plan(scale), tmp_path)) for scale in scales
    }
    lines = script.missing_table(kept).splitlines()
    (longer,) = [line for line in lines if "--scale longer" in line]
    assert "--only lm-lr10clip0.25-seed0 lm-lr10clip0.25-seed1 lm-lr10clip0.25-seed2 cifar-" in longer
    assert longer.startswith("| A | 2.5 |")
    assert lines[-1] == "| B | 12 | `curvestep reproduce --scale paper --only cifar-lr1-seed0` |"


def test_a_page_without_a_place_for_a_part_says_so(script, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="no place for 'runs'"):
        script.fill(tmp_path / "page.md", runs="")
