"""The benchmark of the frameworks goes on where it stopped; the tables of the page read its numbers."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs the extra `lightning`")
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_file_has_is_not_run_again(tmp_path, monkeypatch):
    benchmark, tables = module_of(ROOT / "benchmarks/frameworks.py"), module_of(ROOT / "docs/tables.py")
    monkeypatch.setattr(benchmark, "TASKS", {"digits MLP": benchmark.digits})
    monkeypatch.setattr(benchmark, "METHODS", (("AdamW", "1e-3"),))
    monkeypatch.setattr(benchmark, "letters", benchmark.digits)
    path = tmp_path / "frameworks.json"
    benchmark.rates(1, 3, path)
    first = json.loads(path.read_text())["rates"]["rows"]
    monkeypatch.setattr(benchmark, "EVERY", 4)
    benchmark.overhead(3, 1, path)
    benchmark.rates(2, 3, path)
    found = json.loads(path.read_text())
    assert [row["seed"] for row in found["rates"]["rows"]] == [0, 1]
    assert found["rates"]["rows"][:1] == first
    assert {name: len(costs) for name, costs in found["overhead"]["costs"].items()} == {
        "0.5 and 1": 3, "1 alone": 3,
    }  # fmt: skip
    assert "| digits MLP | AdamW | 1e-3 | 0 | 0.001 | 2 |" in tables.rates_table(tmp_path)
    assert "| waiting |" in tables.overhead_table(tmp_path)
    benchmark.rates(1, 4, path)  # other settings: from the start
    assert len(json.loads(path.read_text())["rates"]["rows"]) == 1


def test_a_measurement_costs_what_its_step_and_the_next_take_beyond_those_before():
    benchmark = module_of(ROOT / "benchmarks/frameworks.py")
    seconds = [0.1] * 14  # of the steps 1 to 14; 5 and 10 are measured
    seconds[4], seconds[5], seconds[9] = 0.3, 0.12, 0.32
    assert benchmark.cost_in_steps(seconds, 5) == pytest.approx([2.2, 2.2])
