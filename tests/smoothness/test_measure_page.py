"""Every python block of the page on measuring runs as it stands, one after the other."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "measure.md"


@pytest.mark.slow
def test_blocks_of_the_page_run_as_they_are(capsys):
    torch.set_default_dtype(torch.float32)  # as a reader would
    namespace = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Does sharpness grow with the gradient norm?" in printed
    assert "of 12 points" in printed
    assert "failed" not in printed
    assert "[128. 128. 128.]" in printed  # four micro-batches of 32
