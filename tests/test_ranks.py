"""Odd modules on two gloo ranks, wrapped: a measurement leaves the same bits on each, or is refused."""

import pytest
from benchmarks import ranks


@pytest.mark.slow
@pytest.mark.distributed
def test_measuring_wrapped_modules_changes_nothing_on_two_ranks():
    names = ["momentum_encoder_by_data", "batchnorm", "iterator_that_shows_late"]
    found = ranks.play(2, names, ["ddp", "fsdp2"])
    assert len(found) == len(names) * 2 * len(ranks.MODES)
    assert not {key: words for key, words in found.items() if "DIFFERENT" in words}
    assert {found["batchnorm", wrapper, "watch"] for wrapper in ("ddp", "fsdp2")} == {"same"}
