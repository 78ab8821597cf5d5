"""What may be wrong with what ``curvestep train`` is given: one line, exit code not zero, nothing changed."""

import gzip
import json

import pytest
from tests.report.pages import make_run

from curvestep.cli import main
from curvestep.report.views import find_views
from curvestep.trace.run import Run, read_json
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import TrainedRun, locked, open_run, write_status
from reproduction.tests.small import small_language

PTB = ("ptb.train.txt.gz", "ptb.valid.txt.gz", "ptb.test.txt.gz")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *words):
    """The one line that the command says on its way out with an exit code that is not zero."""
    capsys.readouterr()
    assert main(["train", *map(str, words), "--quiet", "--offline", "--threads", "1"]) not in (0, None)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("curvestep: ")
    return said


@pytest.fixture
def data(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("CURVESTEP_DATA", str(folder))
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "cache"))
    return folder


def write_ptb(folder):
    for name in PTB:
        (folder / name).write_bytes(gzip.compress(b" the cat sat \n" * 500))


@pytest.mark.parametrize("name", ["config.json", "status.json"])
def test_no_flipped_bit_of_config_or_status_changes_what_is_read(name, tmp_path):
    folder = tmp_path / "run"
    open_run(folder, small_language(tmp_path), resume=False)
    write_status(folder, status="finished", step=3, train_loss=2.5, metrics={"valid": {"loss": 0.1}})
    before, content = TrainedRun.load(folder), (folder / name).read_bytes()
    refused = 0
    for place in range(0, len(content), 2):
        for bit in range(place % 3, 8, 3):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            (folder / name).write_bytes(damaged)
            try:
                after = TrainedRun.load(folder)
            except ValueError as error:
                refused += str(folder / name) in str(error)
                continue
            assert after.recipe == before.recipe
            assert after.status.items() >= before.status.items()
    assert refused > len(content)


def test_metrics_cut_at_a_line_end_are_noticed_by_page_and_advise(tmp_path, capsys):
    folder = make_run(tmp_path / "run", steps=60)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:20]))
    words = f"{path} ends at step 20, status.json counts 60 steps: rows were lost."
    (view,) = find_views([folder])
    (note,) = [note for note in view.notes if note.kind == "damaged"]
    assert note.text.startswith(words)
    main(["advise", str(folder)])
    assert words in capsys.readouterr().err
    path.write_bytes(whole)
    assert Run.load(folder).lost_rows == ""


def test_a_new_run_removes_the_parts_that_killed_ones_left(tmp_path):
    (tmp_path / ".checkpoint.pt.01ab.part").touch()
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_another_text_under_the_name_of_ptb_is_named_by_its_hash(data, tmp_path, capsys):
    write_ptb(data)
    before = contents(data)
    said = refused(capsys, "ptb-lstm", "--folder", tmp_path / "run")
    assert "expected" in said
    assert "found" in said
    assert contents(data) == before


def small_run(folder, **fields):
    recipe = small_language(folder, steps=4, probe_every=2, **fields)
    train(recipe, folder / "run", progress=False, threads=1)
    sizes = {"corpus": recipe.corpus, "embedding": 8, "hidden": 10, "batch-size": 4, "bptt": 6, "steps": 4}
    sizes |= {"eval-size": 0, "lr": 1.0, "max-norm": 0.25, "probe-every": 2, "folder": folder / "run"}
    return sizes


def options(sizes, **changes):
    return [f"--{name}={value}" for name, value in (sizes | changes).items()]


def unfinished(folder):
    """Take away the end of a run, so that it would be resumed."""
    write_status(folder, **{**read_json(folder / "status.json"), "status": "running"})


def test_a_checkpoint_that_cannot_be_used_is_refused_and_left_alone(tmp_path, capsys):
    sizes = small_run(tmp_path)
    unfinished(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:3000])
    before = {file: content for file, content in contents(tmp_path / "run").items() if file.suffix != ".json"}
    assert "is corrupt or is no checkpoint" in refused(capsys, "ptb-lstm", *options(sizes), "--resume")
    assert contents(tmp_path / "run").items() >= before.items()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "status.json has no valid status: it is damaged. Delete it, then resume"),
        ({"status": ["odd"]}, "status.json has no valid status"),
        ({"status": "finished"}, "status.json has no 'step': there is no result. Delete it"),
    ],
)
def test_a_status_that_says_nothing_is_refused_and_left_alone(tmp_path, capsys, status, words):
    sizes = small_run(tmp_path)
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    before = contents(tmp_path / "run")
    assert words in refused(capsys, "ptb-lstm", *options(sizes), "--resume")
    assert contents(tmp_path / "run") == before
