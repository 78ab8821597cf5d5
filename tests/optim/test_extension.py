"""The optimizer that CONTRIBUTING.md adds is one function and one short class, and it works."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_optimizer_of_contributing_follows_its_formula():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    opt = names["RootSGD"]([p], lr=1.0, scale=1.0, momentum=0.9)
    opt.step()
    torch.testing.assert_close(p.detach(), -p.grad / 6**0.5)
    assert opt.clip_stats()["coefficient"] == pytest.approx(6**-0.5)
    with pytest.raises(ValueError, match="`scale` must be positive"):
        names["RootSGD"]([p], lr=1.0, scale=0.0)
