"""Every python block of the page on measuring runs as it stands, one after the other."""

import json
import re
import statistics

import pytest
import torch

from tests.support.pages import DOCS, blocks, run

PAGE = DOCS / "measure.md"


@pytest.mark.slow
def test_blocks_of_the_page_run_as_they_are(capsys):
    torch.set_default_dtype(torch.float32)  # as a reader would
    assert len(blocks(PAGE)) == 5
    run(PAGE)
    printed = capsys.readouterr().out
    assert "Does sharpness grow with the gradient norm?" in printed
    assert "of 12 points" in printed
    assert "failed" not in printed
    assert "[128. 128. 128.]" in printed  # four micro-batches of 32


def test_numbers_of_the_edge_are_those_of_the_results():
    page = PAGE.read_text(encoding="utf-8")
    runs = json.loads((PAGE.parent / "results" / "edge.json").read_text(encoding="utf-8"))["runs"]
    for task, name in (
        ("characters, GPT, AdamW", "GPT"),
        ("words, LSTM, AdamW", "LSTM"),
        ("digits, CNN, momentum", "CNN"),
    ):
        products = [run["lr·L_P"] for run in runs[task].values()]
        count = len(products[0])
        middle = slice(round(0.1 * count), round(0.67 * count))
        low, high = (statistics.median(values[middle]) for values in products)
        found = re.search(rf"([\d.]+) and ([\d.]+) for the {name}", page)
        assert [float(x) for x in found.groups()] == [float(f"{x:.2g}") for x in (low, high)]
        assert f"{high / low:.1f}" in page
