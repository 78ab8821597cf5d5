"""Every python block of the page on measuring runs as it stands, one after the other."""

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
