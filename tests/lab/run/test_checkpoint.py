import multiprocessing
import os
import resource

import pytest
import torch

from curvestep.lab.run.session import (
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


def _save_under_a_limit(path, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # writes fail beyond, as on a full disk
    try:
        save_checkpoint(path, state_of(step=2, x=torch.zeros(100_000)))
        results.put("saved")
    except OSError as error:
        results.put(f"OSError {error}")


def test_a_full_disk_is_an_os_error_and_keeps_the_checkpoint_before(tmp_path):
    save_checkpoint(tmp_path / "checkpoint.pt", state_of())
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_save_under_a_limit, args=(tmp_path / "checkpoint.pt", results))
    child.start()
    assert results.get(timeout=300).startswith("OSError")
    child.join()
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_torn_checkpoint_is_refused_in_one_line(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state_of(x=torch.zeros(1000)))
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"checkpoint.pt is corrupt or is no checkpoint. Delete it"):
            load_checkpoint(path)
        assert path.stat().st_size == length


def test_damaged_bytes_are_refused_wherever_they_are(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state_of(model={"weight": torch.randn(4000)}))
    whole = path.read_bytes()
    for share in (0.3, 0.5, 0.7):  # among the numbers of the tensor, where nothing but a checksum can tell
        at = int(share * len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"checkpoint.pt is corrupt or is no checkpoint. Delete it"):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("fields", [{"step": "many"}, {"model": None}, {"lengths": [1, 2]}, {"probe": 3}])
def test_a_field_of_another_kind_is_refused_in_one_line(tmp_path, fields):
    save_checkpoint(tmp_path / "checkpoint.pt", state_of(**fields))
    with pytest.raises(ValueError, match=r"checkpoint.pt is corrupt or is no checkpoint. Delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("name", state_of())
def test_a_checkpoint_that_lacks_a_field_is_refused_in_one_line(tmp_path, name):
    state = state_of()
    del state[name]
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    with pytest.raises(ValueError, match=r"checkpoint.pt is corrupt or is no checkpoint. Delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt")


def test_a_foreign_file_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a checkpoint of curvestep"):
        load_checkpoint(tmp_path / "other.pt")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"format": "curvestep-checkpoint", "version": 1, "x": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="corrupt or is no checkpoint"):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("version", [99, None, "one"])
def test_a_checkpoint_of_another_version_is_refused(tmp_path, version):
    torch.save({"format": "curvestep-checkpoint", "version": version}, tmp_path / "new.pt")
    with pytest.raises(
        ValueError, match=rf"has version {version}, this curvestep reads up to 1. Update curvestep"
    ):
        load_checkpoint(tmp_path / "new.pt")


def test_random_numbers_go_on_where_they_were():
    torch.randn(3)
    before = random_state()
    expected = torch.randn(4)
    set_random_state(before)
    torch.testing.assert_close(torch.randn(4), expected, rtol=0, atol=0)


def test_rows_after_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\nthr")
    truncate_rows(path, 8)
    assert path.read_bytes() == b"one\ntwo\n"


def test_rows_that_the_checkpoint_has_and_the_file_has_not_are_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\n")
    with pytest.raises(ValueError, match="4 bytes, its checkpoint was written at 8: rows were lost"):
        truncate_rows(path, 8)
    assert path.read_bytes() == b"one\n"
