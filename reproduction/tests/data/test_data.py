"""What the data sets contain, wherever they come from."""

import gzip
import hashlib
import io
import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from curvestep_reproduction import data
from curvestep_reproduction.data import corpus as ptb, download as fetch, images as cifar10
from curvestep_reproduction.data.corpus import batchify, encode, load_corpus
from curvestep_reproduction.data.download import DataError, Unreachable
from curvestep_reproduction.data.images import augment, first_of_each_class, load_digits, normalise
from curvestep_reproduction.progress import print_notice_once
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.tasks import load_data
from reproduction.tests.data.servers import serving

REAL = fetch.data_folder()  # read before the fixture below hides it
needs_ptb = pytest.mark.skipif(
    not (REAL and (REAL / "ptb.train.txt.gz").is_file()), reason="no PTB in CURVESTEP_DATA"
)
needs_subset = pytest.mark.skipif(
    not (REAL and (REAL / "cifar10-subset.npz").is_file()), reason="no CIFAR-10 subset in CURVESTEP_DATA"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CURVESTEP_DATA", raising=False)


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setenv("CURVESTEP_DATA", str(REAL))
    return REAL


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's data folder, empty."""
    path = tmp_path / "mine"
    path.mkdir()
    monkeypatch.setenv("CURVESTEP_DATA", str(path))
    return path


@pytest.mark.parametrize(
    ("held_out", "most", "expected"),
    [
        ("a", 9, ("a", "b", "<eos>")),  # every word is known
        ("c", 9, ("<unk>", "a", "b", "<eos>")),
        ("c", 3, ("<unk>", "<eos>", "a")),
        ("a", 3, ("a", "b", "<eos>")),
    ],
)
def test_unknown_is_a_word_only_where_there_is_one(held_out, most, expected):
    lines = {"train": [["a", "a", "b"], []], "valid": [[held_out]], "test": [["b"]]}
    corpus = encode("tiny", lines, source="here", max_vocabulary=most)
    assert corpus.vocabulary == expected
    assert corpus.vocabulary[corpus.valid[0]] == {"c": "<unk>"}.get(held_out, held_out)


# Streams


@given(length=st.integers(20, 200), batch_size=st.integers(1, 20))
def test_columns_are_contiguous_pieces_of_the_text(length, batch_size):
    tokens = torch.arange(length)
    streams = batchify(tokens, batch_size)
    rows = length // batch_size
    assert streams.shape == (rows, batch_size)
    assert streams.is_contiguous()
    for b in range(batch_size):
        assert streams[:, b].tolist() == list(range(b * rows, (b + 1) * rows))


# Penn Treebank


@needs_ptb
def test_ptb_has_the_published_counts_its_own_text_and_ids_by_frequency(real):
    corpus = ptb.load_ptb(offline=True)
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (929_589, 73_760, 82_430)
    assert len(set(corpus.vocabulary)) == len(corpus.vocabulary) == 10_000
    assert {"<eos>", "<unk>", "N"} < set(corpus.vocabulary)
    assert (corpus.name, corpus.source) == ("ptb", "Penn Treebank from CURVESTEP_DATA")
    eos = corpus.vocabulary.index("<eos>")
    counts = [int((s == eos).sum()) for s in (corpus.train, corpus.valid, corpus.test)]
    assert counts == [42_068, 3_370, 3_761]
    text = gzip.open(real / "ptb.valid.txt.gz", "rt").read()
    words = [corpus.vocabulary[i] for i in corpus.valid.tolist()]
    assert " ".join(words).replace("<eos>", "\n").split() == text.split()
    counts = Counter(corpus.train.tolist())
    frequencies = [counts[i] for i in range(10_000)]
    assert frequencies == sorted(frequencies, reverse=True)


@pytest.mark.slow
@needs_ptb
def test_ptb_from_its_official_archive_equals_ptb_from_the_folder(real, monkeypatch):
    expected = ptb.load_ptb(offline=True)
    archive = official_ptb(real)
    monkeypatch.delenv("CURVESTEP_DATA")
    with serving() as server:
        server.files["/simple-examples.tgz"] = archive
        url, md5 = f"{server.url}/simple-examples.tgz", "md5:" + hashlib.md5(archive).hexdigest()
        official = fetch.official_archive(url, md5, tuple(ptb.HASHES))
        monkeypatch.setattr(ptb, "SOURCES", [official, *ptb.SOURCES[1:]])
        corpus = ptb.load_ptb(progress=False)
    assert corpus.source == "Penn Treebank from the official archive"
    assert corpus.vocabulary == expected.vocabulary
    torch.testing.assert_close(corpus.train, expected.train)


@needs_ptb
def test_part_of_ptb_names_what_is_missing(folder):
    (folder / "ptb.train.txt.gz").write_bytes((REAL / "ptb.train.txt.gz").read_bytes())
    with pytest.raises(DataError, match=r"ptb.test.txt, ptb.valid.txt"):
        ptb.load_ptb()


def test_truncated_and_foreign_ptb_files_are_one_clear_line(folder):
    whole = gzip.compress(b"some words \n" * 1000)
    for name in ptb.HASHES:
        (folder / f"{name}.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"ptb.train.txt.gz .*expected sha256 fcea.*found [0-9a-f]{64}"):
        ptb.load_ptb()
    (folder / "ptb.train.txt.gz").write_bytes(whole[:40])
    with pytest.raises(DataError, match=r"ptb.train.txt.gz is not a whole gzip file"):
        ptb.load_ptb()


def official_ptb(folder):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for name in ("ptb.char.train.txt", *ptb.HASHES):  # the real one holds other files too
            text = b"not this" if "char" in name else gzip.open(folder / f"{name}.gz").read()
            info = tarfile.TarInfo(f"./simple-examples/data/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return out.getvalue()


# Stand-ins


@pytest.mark.parametrize(
    ("recipe", "name", "wanted"), [("ptb-lstm", "topics", "PTB"), ("cifar-resnet20", "digits", "CIFAR-10")]
)
def test_a_stand_in_says_once_that_it_is_one(capsys, recipe, name, wanted):
    print_notice_once.cache_clear()
    found = load_data(get_recipe(recipe), offline=True)
    assert found.name == name
    assert f"stand-in for {wanted}" in found.source
    assert f"these are not {wanted} results" in capsys.readouterr().err
    load_data(get_recipe(recipe), offline=True)  # the second of many runs
    assert capsys.readouterr().err == ""


def test_get_does_not_take_a_stand_in():
    with pytest.raises(Unreachable, match="ptb is not in the cache"):
        data.get(["ptb"], offline=True)
    with pytest.raises(Unreachable, match="cifar10 is not in the cache"):
        data.get(["cifar10"], offline=True)
    with pytest.raises(ValueError, match="`names` must be one of"):
        data.get(["mnist"])


def test_digits_are_the_bundled_images_magnified():
    from sklearn.datasets import load_digits as bundled_digits

    bundled, images = bundled_digits(), load_digits()
    assert images.train_x.shape == (1437, 3, 32, 32)
    assert images.test_x.shape == (360, 3, 32, 32)
    small = images.train_x[:, 0, ::4, ::4].double() * 16 / 255
    torch.testing.assert_close(small.round(), torch.as_tensor(bundled.images[:1437]), check_dtype=False)
    torch.testing.assert_close(images.test_y, torch.as_tensor(bundled.target[1437:]))


# Any text


def test_running_text_is_lowered_tokenised_and_split_by_lines(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The cat's hat, <unk>!\n\n" * 40)
    corpus = load_corpus(path)
    words = [corpus.vocabulary[i] for i in corpus.train[:8].tolist()]
    assert words == ["the", "cat's", "hat", ",", "<unk>", "!", "<eos>", "the"]
    assert [len(s) for s in (corpus.train, corpus.valid, corpus.test)] == [36 * 7, 2 * 7, 2 * 7]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"short\n", "1 lines with words; at least 20"),
        (b"\xff\xfe\x00" * 50, "not readable UTF-8"),
        (b"some\x00words\n" * 50, "NUL bytes"),
    ],
)
def test_corpus_that_cannot_be_used_is_one_clear_line(tmp_path, content, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_corpus(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="is no file"):
        load_corpus(tmp_path)


# CIFAR-10


@needs_subset
def test_subset_of_cifar10_is_balanced_and_exact(real):
    images = cifar10.load_cifar10(offline=True)
    raw = np.load(real / "cifar10-subset.npz")
    assert (images.name, images.source) == ("cifar10-subset", "CIFAR-10 subset from CURVESTEP_DATA")
    assert images.train_x.dtype == torch.uint8
    assert torch.bincount(images.train_y).tolist() == [1000] * 10
    assert torch.bincount(images.test_y).tolist() == [200] * 10
    np.testing.assert_array_equal(images.train_x.permute(0, 2, 3, 1), raw["x_train"])
    assert images.classes == tuple(raw["label_names"])
    published = [[0.4936, 0.4832, 0.4470], [0.2478, 0.2448, 0.2626]]
    np.testing.assert_allclose(images.mean_and_std, published, atol=5e-5, rtol=0)


def test_foreign_subset_is_one_clear_line(folder):
    path = folder / "cifar10-subset.npz"
    arrays = {"x_train": np.zeros((1, 32, 32, 3)), "y_train": np.zeros(1)}
    np.savez(path, **arrays, x_test=arrays["x_train"], y_test=arrays["y_train"])
    with pytest.raises(DataError, match=r"cifar10-subset.npz .*expected sha256 .*found"):
        cifar10.load_cifar10()
    whole, one_array, partial = path.read_bytes(), io.BytesIO(), io.BytesIO()
    np.save(one_array, np.zeros(3))
    np.savez(partial, **arrays)
    for content in (whole[:400], b"no archive at all", one_array.getvalue(), partial.getvalue()):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cifar10-subset.npz is not the subset"):
            cifar10.load_cifar10()


def test_records_of_the_release_are_class_then_red_green_blue_rows():
    records = np.random.default_rng(0).integers(0, 256, (20, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    files = dict.fromkeys(cifar10.HASHES, b"") | {"test_batch.bin": records[3:4].tobytes()}
    files |= {"data_batch_2.bin": records[10:].tobytes(), "data_batch_1.bin": records[:10].tobytes()}
    train_x, train_y, test_x, _ = cifar10._decode(dict(reversed(files.items())))
    assert train_y.tolist() == records[:, 0].tolist()  # in the order of the release, not of the mapping
    assert int(train_x[7, 2, 5, 31]) == records[7, 1 + 2 * 1024 + 5 * 32 + 31]
    torch.testing.assert_close(test_x[0], train_x[3])


def test_first_of_each_class_are_the_first_in_order():
    y = torch.randint(0, 10, (500,))
    expected = sorted(i for c in range(10) for i in (y == c).nonzero().flatten().tolist()[:7])
    assert first_of_each_class(y, 7).tolist() == expected


def test_sheets_rebuild_the_binary_layout(tmp_path):
    from PIL import Image

    records = np.random.default_rng(1).integers(0, 256, (6, 3073), dtype=np.uint8)
    rows = records[:, 1:].reshape(6, 3, 1024).transpose(0, 2, 1)
    sheet = io.BytesIO()
    Image.fromarray(rows).save(sheet, "PNG")
    assert cifar10._records_of_sheet(sheet.getvalue(), records[:, 0]) == records.tobytes()


# Pixels


def test_normalised_training_images_have_mean_zero_and_deviation_one():
    images = load_digits()
    x = normalise(images, images.train_x)
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-12, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3), correction=0), torch.ones(3))
    last = normalise(images, images.test_x[:2].contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)


def crop_and_flip(image, top, left, flip, padding):
    """One image at a time, from the words: pad, cut out, turn over."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    cut = padded[:, top : top + height, left : left + width]
    return torch.stack([torch.stack([row.flip(0) if flip else row for row in plane]) for plane in cut])


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_augmented_batch_equals_images_cropped_and_flipped_one_by_one(padding):
    x = torch.randint(1, 256, (50, 3, 8, 6), dtype=torch.uint8)
    got = augment(x, torch.Generator().manual_seed(1), padding=padding)
    places = [
        (t, s, f) for t in range(2 * padding + 1) for s in range(2 * padding + 1) for f in (False, True)
    ]
    seen = set()
    for before, after in zip(x, got, strict=True):
        matches = [p for p in places if torch.equal(crop_and_flip(before, *p, padding), after)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) > len(places) / 4
    assert max(top for top, _, _ in seen) == max(left for _, left, _ in seen) == 2 * padding


def test_augmentation_is_a_function_of_the_generator_alone():
    x = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8)
    first = augment(x, torch.Generator().manual_seed(5))
    torch.manual_seed(99)
    torch.testing.assert_close(augment(x, torch.Generator().manual_seed(5)), first)
    assert not torch.equal(augment(x, torch.Generator().manual_seed(6)), first)
