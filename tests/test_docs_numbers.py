"""Numbers in README and docs are those in the result files that the commands beside them write."""

import importlib.util
import json
import random
import re
from pathlib import Path

import pytest
from docs import facts

from tests.processes import run_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def words(page):
    """A page's text without line breaks and quotation marks at the start of lines."""
    return re.sub(r"\s+", " ", re.sub(r"^> ", "", Path(page).read_text(encoding="utf-8"), flags=re.MULTILINE))


def results(name):
    return json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))


def tables():
    """The script docs/tables.py, as a module."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", tables().TABLES)
def test_the_tables_of_a_page_are_those_of_the_results(name):
    page = (DOCS / name).read_text(encoding="utf-8")
    made = tables().filled(page, of=name)
    assert page == made, "the results are newer than the page: run `python docs/tables.py`"


# Numbers of trust.json that the page repeats, by the digits it gives them.
REPEATED = {
    0: "L1_of_two_batches highest_control_of_constant_hessian largest_smoothness_of_ReLU "
    "L1_at_step_length_0.1 L1_at_step_length_0.05 L1_at_step_length_0.025 smoothness_of_ReLU_at_lr_0.003",
    1: "L1_of_time smoothness_of_ReLU_at_lr_0.1 smoothness_of_ReLU_at_lr_0.02 L1_of_batches",
    2: "spearman_of_constant_hessian spearman_of_following_smoothness elasticity_of_cosh spearman_of_time "
    "spearman_of_its_parts least_smoothness_of_GELU most_smoothness_of_GELU least_smoothness_of_tanh "
    "most_smoothness_of_tanh local_smoothness_of_ReLU L0_of_full_gradients L1_of_full_gradients "
    "L0_of_noisy_gradients L1_of_noisy_gradients L0_of_scatter L1_of_scatter spearman_of_batches "
    "lowest_spearman_of_batches highest_control_of_batches",
}


def test_the_page_on_trust_tells_what_its_script_found():
    found, page = results("trust.json"), words(DOCS / "trust.md")
    for digits, names in REPEATED.items():
        for name in names.split():
            assert re.search(rf"(?<![\d.]){abs(found[name]):.{digits}f}(?![\d])", page), name
    assert found["highest_control_of_following_smoothness"] < 0
    assert abs(found["L1_of_the_same_batch"]) < 1e-9
    assert abs(found["elasticity_of_constant_hessian"]) < 1e-9


def test_the_page_on_trust_repeats_its_tables_rightly():
    text, page = (DOCS / "trust.md").read_text(encoding="utf-8"), words(DOCS / "trust.md")
    rows = {cells[0]: cells for line in text.splitlines() if len(cells := line.strip("| ").split(" | ")) == 6}
    names = rows["scenario"]
    share = {
        scenario: {name: cell.strip("% ") for name, cell in zip(names, cells, strict=True)}
        for scenario, cells in rows.items()
    }
    warned, reverse = share["time confounds"]["warns"], share["sharpening"]["warns"]
    assert f"It warned in {warned} % of such simulated runs, and in {reverse} % of the reverse ones" in page
    covered = share["scatter grows with g"]["L0 covered"]
    assert f"90 % interval of L0 covers in {covered} % of such traces" in page
    printed = (ROOT / "benchmarks" / "coverage.py").read_text(encoding="utf-8")
    headers = re.findall(r"^\| (?:rows|scenario) \|.*\|$", text, re.MULTILINE)
    assert len(headers) == 2
    assert all(header in printed for header in headers)


@pytest.mark.slow
def test_the_script_of_the_page_on_trust_finds_its_numbers_and_draws(tmp_path):
    run_script("docs/trust_figures.py", tmp_path)
    shown = re.findall(
        r"!\[[^\]]+\]\(images/([\w-]+\.svg)\)", (DOCS / "trust.md").read_text(encoding="utf-8")
    )
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == sorted(shown)
    assert len(shown) == 9
    found, kept = json.loads((tmp_path / "trust.json").read_text(encoding="utf-8")), results("trust.json")
    said = {name: value for name, value in kept.items() if isinstance(value, str)}
    assert {name: found.pop(name) for name in said} == said
    numbers = {name: value for name, value in kept.items() if name not in said}
    assert found == pytest.approx(numbers, rel=1e-3, abs=1e-9)


def test_every_page_with_a_picture_names_a_command_that_makes_it():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if re.search(r"!\[[^\]]*\]\(", text):
            assert re.search(
                r"python (-m )?((\w+/)?\w+_figures|(reproduction.)?benchmarks.\w+)|make reproduce",
                text,
            ), page
    used = " ".join(page.read_text(encoding="utf-8") for page in (*PAGES, *DOCS.glob("results/*.md")))
    for picture in [*DOCS.glob("images/*.*"), *DOCS.glob("results/**/*.png")]:
        assert picture.name in used, f"{picture} is shown nowhere"


def test_a_fact_is_one_number_wherever_it_stands():
    assert facts.problems(facts.texts()) == []


def shared_numbers(texts):
    """Every place of a number that stands on several pages: page, first character, last."""
    found = set()
    for fact in facts.FACTS:
        places = [(page, *match.span(1)) for page, match in fact.places(texts)]
        found |= set(places if len(places) > 1 else ())
    blocks = [
        (page, match.span())
        for page, text in texts.items()
        for match in re.finditer(r"(?ms)<!-- max-norm -->.*?<!-- /max-norm -->|^```text\n.*?^```", text)
        if page in ("README.md", "docs/tutorial.md", "docs/which_clipping.md")
    ]
    for page, (start, end) in blocks:
        numbers = re.finditer(r"(?<![\w.])\d+(?:\.\d+)?", texts[page][start:end])
        found |= {(page, start + number.start(), start + number.end()) for number in numbers}
    return sorted(found)


def test_thirty_numbers_changed_one_at_a_time_are_all_noticed():
    everything = facts.texts()
    holding = {page for fact in facts.FACTS for page, _ in fact.places(everything)}
    texts = {page: everything[page] for page in (*holding, "docs/which_clipping.md", "docs/tutorial.md")}
    rng = random.Random(47)
    places = rng.sample(shared_numbers(texts), 30)
    assert len({page for page, *_ in places}) > 5
    for page, start, end in places:
        text = texts[page]
        old = text[start:end]
        new = rng.choice([word for word in facts.WORDS if word != old])
        if old not in facts.WORDS:
            new = f"{facts.number(old) + rng.randint(1, 9):g}"
        changed = {**texts, page: text[:start] + new + text[end:]}
        assert facts.problems(changed), f"{page}: {old} became {new} unseen"
