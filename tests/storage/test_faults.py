"""Storage that fails for a while costs time; one that fails for good is an error that says what to do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from s3_server import FaultyProxy, S3Server

from recmill.errors import StorageError
from recmill.storage.objects import ObjectStore
from recmill.storage.view import opened
from recmill.storage.workspace import written

pytestmark = pytest.mark.services
CONTENT = b"0123456789" * 100_000


@pytest.fixture
def url(s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> str:
    return s3.url(f"{tmp_path.name}/faults", proxy.port)


@pytest.mark.parametrize("kind", ["unavailable", "dropped", "truncated"])
def test_a_read_that_fails_is_tried_again(url: str, proxy: FaultyProxy, kind: str) -> None:
    store = ObjectStore(url)
    store.write("x", CONTENT)
    proxy.fail(kind, "GET", times=3)
    assert store.read("x") == CONTENT
    assert proxy.num_done == 3


@pytest.mark.parametrize("kind", ["unavailable", "dropped"])
@pytest.mark.parametrize("request_line", ["POST", "PUT", "HEAD"])
def test_a_write_that_fails_is_tried_again(
    url: str, proxy: FaultyProxy, tmp_path: Path, kind: str, request_line: str
) -> None:
    content = CONTENT * (11 if request_line == "POST" else 1)  # which only uploads of several parts send
    (tmp_path / "x").write_bytes(content)
    proxy.fail(kind, request_line, times=2)
    ObjectStore(url).upload(tmp_path / "x", "x", len(content))
    assert proxy.num_done == 2
    assert ObjectStore(url).read("x") == content


def test_an_answer_that_never_comes_is_given_up_and_asked_for_again(url: str, proxy: FaultyProxy) -> None:
    store = ObjectStore(url)
    store.write("x", CONTENT)
    proxy.fail("silent", "GET", times=1)
    began = time.monotonic()
    assert store.read("x") == CONTENT
    assert time.monotonic() - began < 15


def test_storage_that_fails_for_good_is_an_error_that_says_what_to_do(
    url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.storage.objects._FIRST_PAUSE", 0.01)
    proxy.fail("unavailable", "HEAD", times=100)
    with pytest.raises(
        StorageError, match=r"x\?.* cannot be read \(2 attempts\).*run the same command again"
    ):
        ObjectStore(url, attempts=2).read("x")


def test_an_artifact_is_published_and_read_through_faults(
    url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, word in (
        ("unavailable", "_writers"),
        ("dropped", "bin"),
        ("unavailable", "bin"),
        ("dropped", "index"),
    ):
        proxy.fail(kind, word, times=2)
    with written(url) as target:
        for number in range(10):
            (target.path / f"{number}.bin").write_bytes(CONTENT[number:])
        target.push()
    for kind, word in (
        ("truncated", "index"),
        ("unavailable", "bin"),
        ("dropped", "bin"),
        ("truncated", "bin"),
    ):
        proxy.fail(kind, f"GET /shop/{tmp_path.name}", times=1)
        proxy.fail(kind, word, times=1)
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / "another-machine"))
    view = opened(url)
    assert all((view / f"{number}.bin").read_bytes() == CONTENT[number:] for number in range(10))
