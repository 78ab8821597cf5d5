"""Numbers in README and docs are those in the result files that the commands beside them write."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.test_examples import run_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def words(page):
    """A page's text without line breaks and quotation marks at the start of lines."""
    return re.sub(r"\s+", " ", re.sub(r"^> ", "", Path(page).read_text(encoding="utf-8"), flags=re.MULTILINE))


def results(name):
    return json.loads((DOCS / "results" / name).read_text())


def tables():
    """The script docs/tables.py, as a module."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_comparison_are_those_of_the_results():
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    assert page == tables().filled(page), "the results are newer than the page: run `python docs/tables.py`"


def test_a_changed_result_changes_the_table(tmp_path):
    for file in ("step.json", "calibrate.md"):
        (tmp_path / file).write_text((DOCS / "results" / file).read_text())
    case = {"cost_in_forward_backwards": {"1": 1.06, "2": 2.1, "4": 4.2}, "power_iteration_over_probe": 50.4}
    (tmp_path / "probe.json").write_text(json.dumps({"lstm": case, "memory": {"1 fractions": 2.0}}))
    page = tables().filled((DOCS / "compare.md").read_text(encoding="utf-8"), tmp_path)
    assert "| lstm | 1.06 | 2.10 | 4.20 |  | 50 |" in page
    assert page == tables().filled(page, tmp_path)


def test_the_page_on_trust_tells_what_its_script_found():
    found, page = results("trust.json"), words(DOCS / "trust.md")
    slopes = [round(found[f"L1_at_step_length_{length}"]) for length in ("0.1", "0.05", "0.025")]
    for said in (
        f"everywhere this gives L1 = {found['L1_of_two_batches']:.0f}.",
        f"the points rise steeply, L1 = {found['L1_of_two_batches']:.0f}.",
        f"with a rank correlation of {found['spearman_of_constant_hessian']:.2f}, and the control allows "
        f"up to {found['highest_control_of_constant_hessian']:.0f}.",
        f"rank correlation {found['spearman_of_following_smoothness']:.2f}, control below zero",
        f"step lengths 0.1, 0.05 and 0.025: L1 is {slopes[0]}, {slopes[1]} and {slopes[2]}.",
    ):
        assert said in page
    assert found["highest_control_of_following_smoothness"] < 0
    assert abs(found["L1_of_the_same_batch"]) < 1e-9
    assert f"show L1 = {found['L1_of_two_batches']:.0f} on a quadratic" in words(ROOT / "README.md")


@pytest.mark.slow
def test_the_script_of_the_page_on_trust_still_finds_its_numbers(tmp_path):
    run_script("docs/trust_figures.py", tmp_path)
    found = json.loads((tmp_path / "trust.json").read_text())
    assert found == pytest.approx(results("trust.json"), rel=1e-3, abs=1e-9)


def test_the_story_tells_what_its_script_found():
    found, page = results("choose.json"), words(DOCS / "choose.md")
    for name, run in found["runs"].items():
        threshold = "none" if run["max_norm"] == "inf" else run["max_norm"]
        clipped = f"{100 * run['clipped']:.2g} %" if run["clipped"] < 0.995 else "100 %"
        end = f"diverged at step {run['step']} | |"
        if run["status"] == "finished":
            end = f"{run['train_loss']:.3f} | {run['perplexity']:.1f} |"
            assert f"training loss {run['train_loss']:.4g}, valid perplexity {run['perplexity']:.4g}" in page
        assert f"| {name} | {run['lr']:g} | {threshold} | {clipped} | {end}" in page
    first = found["runs"]["first"]
    assert f"diverged after {first['step']} steps: {first['message']}" in page
    assert found["said"]["calibrate"].splitlines()[0] in page
    assert found["said"]["together"].partition(":")[0] in page


def test_the_results_in_the_readme_are_those_of_the_files():
    page, runs = words(ROOT / "README.md"), results("choose.json")["runs"]
    first, lower, calibrated = (runs[name] for name in ("first", "lower", "calibrated"))
    for said in (
        f"diverges at step {first['step']} with lr {first['lr']:g}",
        f"a validation perplexity of {lower['perplexity']:.0f} in 200 steps with lr {lower['lr']:g}",
        f"lr {calibrated['lr']:g} and `max_norm` {calibrated['max_norm']}",
        f": {calibrated['perplexity']:.0f}.",
    ):
        assert said in page
    reproduction = (DOCS / "results" / "reproduction.md").read_text(encoding="utf-8")
    slope, clipped = re.search(
        r"after 2000 steps: ([\d.]+) for gradient descent, ([\d.e-]+) with", reproduction
    ).groups()
    assert f"a slope of {slope} after 2,000 steps, clipped descent {clipped.replace('e-0', 'e-')}" in page


def test_every_page_with_a_picture_names_a_command_that_makes_it():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if re.search(r"!\[[^\]]*\]\(", text):
            assert re.search(
                r"python (docs/\w+_figures\.py|benchmarks/\w+\.py|-m benchmarks)|make reproduce", text
            ), page
    used = " ".join(page.read_text(encoding="utf-8") for page in (*PAGES, *DOCS.glob("results/*.md")))
    for picture in [*DOCS.glob("images/*.png"), *DOCS.glob("results/**/*.png")]:
        assert picture.name in used, f"{picture} is shown nowhere"
