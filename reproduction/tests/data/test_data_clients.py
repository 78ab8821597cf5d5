"""The ordinary pip and npm clients, against a small package registry of our own on 127.0.0.1."""

import base64
import hashlib
import io
import json
import shutil
import tarfile
import threading
import zipfile

import pytest

from curvestep_reproduction.data import download
from curvestep_reproduction.data.download import Archive, DataError, Unreachable, npm_archive, pip_archive
from reproduction.tests.data.servers import serving

pytestmark = pytest.mark.slow
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def wheel():
    info = "smalltext-1.0.dist-info"
    files = {
        "smalltext/__init__.py": "words = 'a few'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: smalltext\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def package():
    out = io.BytesIO()
    data = json.dumps({"name": "smallimages", "version": "1.0.0"}).encode()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo("package/package.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def described(file, data):
    return Archive(file=file, size=len(data), sha256=hashlib.sha256(data).hexdigest())


WHEEL, PACKAGE = wheel(), package()
PIP_FILE, NPM_FILE = "smalltext-1.0-py3-none-any.whl", "smallimages-1.0.0.tgz"


@pytest.fixture
def registry(monkeypatch):
    with serving() as server:
        server.files["/simple/smalltext/"] = f'<a href="/{PIP_FILE}">{PIP_FILE}</a>'.encode()
        server.files[f"/{PIP_FILE}"] = WHEEL
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(PACKAGE).digest()).decode()
        dist = {"tarball": f"{server.url}/{NPM_FILE}", "integrity": integrity}
        version = {"name": "smallimages", "version": "1.0.0", "dist": dist}
        packument = {"name": "smallimages", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        server.files["/smallimages"] = json.dumps(packument).encode()
        server.files[f"/{NPM_FILE}"] = PACKAGE
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        monkeypatch.setenv("npm_config_registry", server.url)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


def test_pip_client_fetches_a_wheel_by_package_name(registry, tmp_path):
    data = pip_archive("smalltext", "1.0", described(PIP_FILE, WHEEL), tmp_path, progress=False)
    assert data == WHEEL
    assert list(tmp_path.iterdir()) == []


@needs_npm
def test_npm_client_fetches_an_archive_by_package_name(registry, tmp_path):
    data = npm_archive("smallimages", "1.0.0", described(NPM_FILE, PACKAGE), tmp_path, progress=False)
    assert data == PACKAGE
    assert list(tmp_path.iterdir()) == []


def test_archive_from_a_client_with_another_hash_is_an_error(registry, tmp_path):
    expected = Archive(file=PIP_FILE, size=1, sha256="0" * 64)
    found = hashlib.sha256(WHEEL).hexdigest()
    with pytest.raises(DataError, match=rf"{PIP_FILE}.*expected sha256 0+, found {found}"):
        pip_archive("smalltext", "1.0", expected, tmp_path, progress=False)


@needs_npm
def test_package_that_the_registry_does_not_have_is_unreachable(registry, tmp_path):
    with pytest.raises(Unreachable, match=r"npm could not fetch other-2.0.0.tgz \(.*404"):
        npm_archive("other", "2.0.0", described("other-2.0.0.tgz", b""), tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_client_that_waits_in_vain_is_stopped(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "STALL", 2.0)
    registry.gate = threading.Event()
    with pytest.raises(Unreachable, match=r"pip received no data for 2 s \(smalltext"):
        pip_archive("smalltext", "1.0", described(PIP_FILE, WHEEL), tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_without_the_npm_client_the_source_is_unreachable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match=r"npm.* not installed"):
        npm_archive("smallimages", "1.0.0", described(NPM_FILE, PACKAGE), tmp_path, progress=False)
