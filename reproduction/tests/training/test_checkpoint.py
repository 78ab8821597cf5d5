import os

import pytest
import torch

from curvestep_reproduction.training.session import (
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
    truncate_rows,
)


def state_of(**fields):
    """A state as a run saves it, with almost nothing in it."""
    empty = {"state": None, "random": {}, "model": {}, "optimizer": {}, "step": 1, "data": "text"}
    return {**empty, "probe": None, "first_loss": None, "lengths": {}, **fields}


def test_what_is_saved_comes_back(tmp_path):
    state = state_of(step=3, x=torch.randn(5), state=((torch.ones(2), torch.zeros(2)),))
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    torch.testing.assert_close(loaded["x"], state["x"], rtol=0, atol=0)
    torch.testing.assert_close(loaded["state"], state["state"], rtol=0, atol=0)
    assert (loaded["step"], loaded["probe"]) == (3, None)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_write_that_fails_keeps_the_checkpoint_before(tmp_path):
    save_checkpoint(tmp_path / "checkpoint.pt", state_of())
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path / "checkpoint.pt", state_of(step=2, bad=lambda: None))
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def flipped(whole, share):
    """The file with one bit changed among the numbers of the tensor, where only a checksum can tell."""
    at = int(share * len(whole))
    return whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]


@pytest.mark.parametrize(
    "harm",
    [
        *(lambda whole, n=n: whole[: n * len(whole) // 4] for n in range(4)),
        lambda whole: whole[:-1],
        *(lambda whole, share=share: flipped(whole, share) for share in (0.3, 0.5, 0.7)),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_left_alone(tmp_path, harm):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state_of(model={"weight": torch.randn(4000)}))
    harmed = harm(path.read_bytes())
    path.write_bytes(harmed)
    with pytest.raises(ValueError, match=r"checkpoint.pt.*Delete it"):
        load_checkpoint(path)
    assert path.read_bytes() == harmed


OF_ANOTHER_KIND = [{"step": "many"}, {"model": None}, {"lengths": [1, 2]}, {"probe": 3}]


@pytest.mark.parametrize(
    "state",
    [
        *(state_of(**fields) for fields in OF_ANOTHER_KIND),
        *({k: v for k, v in state_of().items() if k != name} for name in state_of()),
    ],
)
def test_a_missing_field_or_one_of_another_kind_is_refused_in_one_line(tmp_path, state):
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    with pytest.raises(ValueError, match=r"checkpoint.pt.*Delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"format": "curvestep-checkpoint", "version": 1, "x": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="corrupt or is no checkpoint"):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"epoch": 3}, "not a checkpoint of curvestep"),
        ({"format": "curvestep-checkpoint"}, "has version None, this curvestep reads up to 1"),
        ({"format": "curvestep-checkpoint", "version": 99}, "has version 99, this curvestep reads up to 1"),
    ],
)
def test_a_foreign_file_or_one_of_another_version_is_refused(tmp_path, content, words):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=words):
        load_checkpoint(tmp_path / "other.pt")


def test_random_numbers_go_on_where_they_were():
    torch.randn(3)
    before = random_state()
    expected = torch.randn(4)
    set_random_state(before)
    torch.testing.assert_close(torch.randn(4), expected, rtol=0, atol=0)


def test_rows_after_the_checkpoint_are_cut_and_lost_ones_are_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\nthr")
    truncate_rows(path, 8)
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(ValueError, match=r"8 bytes.* at 9"):
        truncate_rows(path, 9)
    assert path.read_bytes() == b"one\ntwo\n"
