"""The real download code against a web server of our own: breaks, lies, races and full disks."""

import hashlib
import io
import multiprocessing
import os
import random
import tarfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from curvestep_reproduction.data import download as fetching
from curvestep_reproduction.data.download import DataError, Unreachable, find, official_archive
from reproduction.tests.data.servers import serving

FILES = {"a.txt": b"first " * 9000, "b.txt": random.Random(0).randbytes(100_000)}
HASHES = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


def tarball(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"some/folder/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CURVESTEP_DATA", raising=False)
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))  # before a retry
    return tmp_path / "cache"


@pytest.fixture
def server():
    with serving() as server:
        archive = tarball(FILES)
        server.files["/set.tgz"] = archive
        server.md5 = "md5:" + hashlib.md5(archive).hexdigest()
        yield server


def fetch(hashes, sources, **where):
    return find("set", hashes, sources, lambda folder: None, progress=False, **where)


def source(url, known_hash, title="official archive"):
    return replace(official_archive(url, known_hash, tuple(HASHES)), title=title)


def get(server, **kwargs):
    return fetch(HASHES, [source(f"{server.url}/set.tgz", server.md5)], **kwargs)


def left_over(cache):
    kept = {*HASHES, "origin.txt", ".lock"}
    return [p for p in cache.rglob("*") if p.is_file() and p.name not in kept and p.suffix != ".tgz"]


def test_files_are_fetched_once_and_then_come_from_the_cache(server, cache):
    (cache / "set").mkdir(parents=True)
    (cache / "set" / ".a.txt.01ab.part").touch()  # of a process that was killed
    assert get(server) == (FILES, "from the official archive")
    assert left_over(cache) == []
    assert get(server) == (FILES, "from the official archive")
    assert get(server, offline=True)[0] == FILES
    assert server.requests == ["/set.tgz"]


def test_broken_transfer_is_restarted_and_leaves_nothing_behind(server, cache):
    server.broken = 1
    assert get(server)[0] == FILES
    assert len(server.requests) == 2
    assert left_over(cache) == []


def test_transfer_that_keeps_breaking_passes_to_the_next_source(server, cache, capsys):
    server.files["/mirror.tgz"] = server.files["/set.tgz"]
    server.broken = 2
    mirror = source(f"{server.url}/mirror.tgz", server.md5, "mirror")
    both = [source(f"{server.url}/set.tgz", server.md5), mirror]
    files, origin = fetch(HASHES, both)
    assert (files, origin) == (FILES, "from the mirror")
    said = capsys.readouterr().err.splitlines()
    assert "set.tgz did not answer" in said[0]
    assert "fetched from the mirror" in said[1]


def test_no_answer_at_all_is_unreachable(server, cache):
    missing = source(f"{server.url}/nothing.tgz", server.md5)
    closed = source("http://127.0.0.1:9/set.tgz", server.md5)
    with pytest.raises(Unreachable, match=r"nothing.tgz did not answer \(HTTPError\).*127.0.0.1:9"):
        fetch(HASHES, [missing, closed])
    assert left_over(cache) == []


def test_host_that_hangs_is_given_up_after_the_timeout(server, cache, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", (0.2, 0.2))
    server.gate = threading.Event()
    with pytest.raises(Unreachable, match=r"set.tgz did not answer"):
        get(server)


def test_wrong_archive_hash_names_file_expected_and_found(server, cache):
    found = hashlib.md5(server.files["/set.tgz"]).hexdigest()
    wrong = source(f"{server.url}/set.tgz", "md5:" + "0" * 32)
    with pytest.raises(DataError, match=rf"set\.tgz.*expected md5:{'0' * 32}.*{found}") as caught:
        fetch(HASHES, [wrong, source(f"{server.url}/set.tgz", server.md5)])
    assert not isinstance(caught.value, Unreachable)
    assert "\n" not in str(caught.value)
    assert left_over(cache) == []


def test_wrong_file_inside_a_right_archive_names_file_expected_and_found(server, cache):
    hashes = {**HASHES, "b.txt": "f" * 64}
    with pytest.raises(
        DataError, match=rf"b\.txt from the official.*expected sha256 f+, found {HASHES['b.txt']}"
    ):
        fetch(hashes, [source(f"{server.url}/set.tgz", server.md5)])
    assert not (cache / "set" / "b.txt").exists()


def test_broken_file_in_the_cache_is_fetched_again_unless_offline(server, cache, capsys):
    get(server)
    (cache / "set" / "a.txt").write_bytes(FILES["a.txt"][:100])
    with pytest.raises(Unreachable, match="not in the cache"):
        get(server, offline=True)
    assert get(server)[0] == FILES
    assert "a.txt is not the file it should be" in capsys.readouterr().err
    assert len(server.requests) == 2


def test_members_are_found_in_any_folder_and_the_first_of_a_name_is_taken():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, data in (("a.txt/b.txt", b"right"), ("c.txt", b"other"), ("deep/b.txt", b"wrong")):
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert dict(fetching.members(out.getvalue(), ("a.txt", "b.txt"))) == {"b.txt": b"right"}


def test_data_folder_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("CURVESTEP_DATA", "/no/such/folder")
    with pytest.raises(DataError, match="`CURVESTEP_DATA` must name a folder"):
        fetching.data_folder()


def test_cache_that_cannot_be_made_says_how_to_move_it(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"Cannot write to the cache .*Set CURVESTEP_CACHE"):
        get(server)


# Other processes, forked from a helper that has imported everything once.


def fetch_in_process(cache, url, md5, answer):
    os.environ["CURVESTEP_CACHE"] = cache
    try:
        files, _ = fetch(HASHES, [source(url, md5)])
        answer.send("whole" if files == FILES else "not whole")
    except DataError as error:
        answer.send(str(error))


def start(server, cache):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answer, theirs = context.Pipe(duplex=False)
    arguments = (str(cache), f"{server.url}/set.tgz", server.md5, theirs)
    process = context.Process(target=fetch_in_process, args=arguments)
    process.start()
    theirs.close()
    return process, answer


def result(process, answer):
    assert answer.poll(300)
    words = answer.recv()
    process.join(300)
    assert process.exitcode == 0
    answer.close()
    return words


@pytest.mark.slow
def test_processes_that_start_together_fetch_once_and_all_get_whole_files(server, cache):
    server.gate = threading.Event()
    running = [start(server, cache) for _ in range(4)]
    assert server.half_sent.wait(300)
    time.sleep(1)  # the others reach the lock
    server.gate.set()
    assert [result(*one) for one in running] == ["whole"] * 4
    assert server.requests == ["/set.tgz"]
    assert left_over(cache) == []


@pytest.mark.slow
def test_after_a_kill_in_a_transfer_the_next_process_starts_cleanly(server, cache):
    server.gate = threading.Event()
    killed, answer = start(server, cache)
    assert server.half_sent.wait(300)
    while not left_over(cache) and killed.is_alive():
        time.sleep(0.01)
    killed.kill()
    killed.join()
    answer.close()
    assert left_over(cache) != []
    server.gate.set()
    assert result(*start(server, cache)) == "whole"
    assert left_over(cache) == []
