"""Files that only other machines read: held to their schemas, and to the files that they speak of."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="comes with the group `dev`")
import hatch_build
import yaml
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESS = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
REPRODUCTION = tomllib.loads((ROOT / "reproduction/pyproject.toml").read_text(encoding="utf-8"))
# Where packages are installed, or somebody is told how: the folder of one, and its extras in brackets.
INSTALLING = [
    *WORKFLOWS, ROOT / "Makefile", ROOT / ".readthedocs.yaml", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"),
    ROOT / "reproduction/README.md", *ROOT.glob("src/**/*.py"), *ROOT.glob("reproduction/src/**/*.py"),
]  # fmt: skip
SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows custom.github-workflows-require-timeout",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".readthedocs.yaml": "vendor.readthedocs",
    "CITATION.cff": "vendor.citation-file-format",
}


def loaded(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", SCHEMAS)
def test_file_follows_its_schema(pattern):
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    for schema in SCHEMAS[pattern].split():
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_every_named_python_is_tested_with_oldest_and_newest_torch():
    named = {name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if "Python :: 3." in name}
    rows = loaded(".github/workflows/tests.yml")["jobs"]["core"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows if "==" in row["set"]} == named
    assert {row["python"] for row in rows if "==" not in row["set"]} == named
    assert PROJECT["project"]["requires-python"] == f">={min(named)}"
    oldest = re.search(r"^OLDEST_SET\s*:= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert oldest is not None
    assert oldest[1] in [row["set"] for row in rows]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_and_get_no_more_than_they_need(path):
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"\buses: (.+)", text)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        if "permissions" in job:  # it publishes, from artifacts alone
            assert job["permissions"] == {"id-token": "write"}
            assert "environment" in job
            assert not [step for step in job["steps"] if "run" in step]
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_one_version_of_each_action_is_used():
    used = {line for path in WORKFLOWS for line in re.findall(r"\buses: (.+)", path.read_text())}
    assert len({line.partition("@")[0] for line in used}) == len(used)


def test_every_extra_and_group_that_is_installed_exists():
    text = "\n".join(path.read_text(encoding="utf-8") for path in INSTALLING)
    for project, folder in ((PROJECT, "."), (REPRODUCTION, "./reproduction")):
        named = re.findall(rf"""['" ]{re.escape(folder)}\[([a-z,]+)\]""", text)
        assert named
        assert set(",".join(named).split(",")) <= set(project["project"]["optional-dependencies"])
    assert set(re.findall(r"--group (\w+)", text)) <= set(PROJECT["dependency-groups"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_calls_targets_and_tests_that_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step for job in loaded(path)["jobs"].values() for step in job["steps"]]
    for line in [step["run"] for step in steps if "run" in step]:
        program, *words = line.split()
        if program == "make":
            assert words[0] in targets
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_classifiers_are_known_to_the_index():
    assert set(PROJECT["project"]["classifiers"]) <= classifiers


def test_address_of_the_project_stands_in_one_place():
    assert loaded("CITATION.cff").get("repository-code", "") == ADDRESS
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert hatch_build.readme_at("", readme) == readme
    assert hatch_build.urls_at("") == {}


def test_links_of_the_readme_lead_to_the_repository():
    text = hatch_build.readme_at("https://x.org/y", "![a](b.png) [c](d.md) [e](https://f) ![g](https://h)")
    assert text == (
        "![a](https://x.org/y/raw/HEAD/b.png) [c](https://x.org/y/blob/HEAD/d.md) [e](https://f) ![g](https://h)"
    )
    assert all(url.startswith("https://x.org/y") for url in hatch_build.urls_at("https://x.org/y").values())
    relative = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert relative
    assert all((ROOT / path).is_file() for path in relative)
