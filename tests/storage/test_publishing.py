"""What is published at a URL is whole, whatever happens to writers and readers meanwhile."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from s3_server import Address

from recmill.errors import ArtifactError, StorageError
from recmill.storage import cache, lease
from recmill.storage.cache import SHARDS
from recmill.storage.index import INDEX, read_index
from recmill.storage.lease import Lease
from recmill.storage.objects import ObjectStore
from recmill.storage.view import address_of, available, opened
from recmill.storage.workspace import Workspace, written


def publish(url: str, **files: str) -> None:
    with written(url) as target:
        for name in os.listdir(target.path):
            (target.path / name).unlink() if not name.startswith(".") else None
        for name, text in files.items():
            (target.path / name).parent.mkdir(exist_ok=True)
            (target.path / name).write_text(text)
        target.push()


def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / "another-machine"))


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith(".")}


def test_what_is_published_is_read_by_other_machines(
    address: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(address("a"), x="one", y="two")
    on_another_machine(monkeypatch, tmp_path)
    view = opened(address("a"))
    assert texts(view) == {"x": "one", "y": "two"}
    assert address_of(view) == address("a")


def test_what_is_not_published_does_not_exist(address: Address) -> None:
    with written(address("a")) as target:
        assert isinstance(target, Workspace)
        (target.path / "x").write_text("one")
        target.upload(["x"])  # and killed before the index
    with pytest.raises(ArtifactError, match="has no index"):
        opened(address("a"))


def test_a_reader_keeps_what_it_opened_while_another_is_published(address: Address) -> None:
    publish(address("a"), x="one", y="two")
    before = opened(address("a"))
    publish(address("a"), x="three")
    assert texts(opened(address("a"))) == {"x": "three"}
    assert texts(before) == {"x": "one", "y": "two"}


def test_a_reader_finds_one_state_or_another_while_a_writer_publishes(address: Address) -> None:
    publish(address("a"), x="0", y="0")

    def publish_often() -> None:
        for number in range(1, 16):
            publish(address("a"), x=str(number), y=str(number))

    writer = threading.Thread(target=publish_often)
    writer.start()
    while writer.is_alive():
        found = texts(opened(address("a")))
        assert found["x"] == found["y"]
    writer.join()
    assert texts(opened(address("a"))) == {"x": "15", "y": "15"}


def test_objects_that_nothing_names_any_more_are_removed(address: Address) -> None:
    publish(address("a"), x="one", y="two")
    publish(address("a"), x="three")
    index = read_index(ObjectStore(address("a")))
    assert index is not None
    found = {one.name for one in ObjectStore(address("a")).list("")}
    assert found == {INDEX, index.files["x"].object}


def test_a_writer_goes_on_from_what_another_machine_published(
    address: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(address("a"), x="one", y="two")
    on_another_machine(monkeypatch, tmp_path)
    publish(address("a"), x="one", z="three")
    monkeypatch.setenv("RECMILL_CACHE", str(tmp_path / "cache"))
    with written(address("a")) as target:
        assert texts(target.path) == {"x": "one", "z": "three"}


def test_unfinished_work_stays_with_the_writer_that_published_last(address: Address) -> None:
    publish(address("a"), x="one")
    with written(address("a")) as target:
        (target.path / "y").write_text("not published")
    with written(address("a")) as target:
        assert texts(target.path) == {"x": "one", "y": "not published"}


def test_a_second_writer_is_refused(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(lease, "_SECONDS_BETWEEN_LOOKS", 0.3)
    with written(address("a")) as target:
        with pytest.raises(ArtifactError, match="being written by another process of this machine"):
            written(address("a")).__enter__()
        on_another_machine(monkeypatch, tmp_path)
        with pytest.raises(ArtifactError, match=r"is being written by `.*` \(process \d+ on"):
            written(address("a")).__enter__()
        target.push()
    publish(address("a"), x="one")


def test_a_silent_writer_is_taken_over_and_publishes_no_more(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 3600.0)
    store = ObjectStore(address("a"))
    silent = Lease(store, tmp_path / "silent")
    silent.acquire()
    time.sleep(1)
    publish(address("a"), x="one")
    with pytest.raises(ArtifactError, match="was taken over by another process"):
        silent.check()
    silent.release()


def test_a_writer_that_was_killed_here_keeps_nobody_waiting(address: Address, tmp_path: Path) -> None:
    store = ObjectStore(address("a"))
    killed = Lease(store, tmp_path / "lease")
    killed._write()
    killed.record.write_text(killed.name)
    again = Lease(store, tmp_path / "lease")
    again.acquire()
    again.release()
    assert store.list("") == []


def test_bytes_that_differ_from_their_record_are_refused(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.storage.objects._FIRST_PAUSE", 0.01)
    publish(address("a"), x="one")
    store = ObjectStore(address("a"))
    index = read_index(store)
    assert index is not None
    store.write(index.files["x"].object, b"0ne")
    with pytest.raises(StorageError, match="do not have the digest of their record"):
        opened(address("a"))


def test_a_damaged_index_is_an_error_that_names_it(address: Address) -> None:
    publish(address("a"), x="one")
    store = ObjectStore(address("a"))
    store.write(INDEX, store.read(INDEX).replace(b"sha256", b"sha265"))
    with pytest.raises(ArtifactError, match=r"index\.json.* is damaged"):
        opened(address("a"))


def test_streamed_files_come_when_they_are_asked_for(address: Address) -> None:
    publish(address("a"), **{"train/a": "rows", "train/b": "more", "plan": "x"})
    view = opened(address("a"), streamed=SHARDS)
    assert not (view / "train/a").exists()
    assert available(view, "train/a").read_text() == "rows"
    assert not (view / "train/b").exists()


def test_the_cache_stays_below_its_bound(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SECONDS_A_SHARD_STAYS", -1.0)
    monkeypatch.setenv("RECMILL_CACHE_SIZE", "3KB")
    publish(address("a"), **{f"train/{name}": name * 1000 for name in "abcdef"})
    view = opened(address("a"), streamed=SHARDS)
    for name in "abcdefabcdef":
        assert available(view, f"train/{name}").read_text() == name * 1000
        assert cache.used_bytes() <= 3 * 1024


def test_a_view_that_nobody_reads_makes_room(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SECONDS_A_SHARD_STAYS", -1.0)
    publish(address("a"), x="a" * 1000)
    publish(address("b"), x="b" * 1000)
    first = opened(address("a"))
    os.close(cache._held.pop(first))
    monkeypatch.setenv("RECMILL_CACHE_SIZE", "1500B")
    second = opened(address("b"))
    assert not first.exists()
    assert texts(second) == {"x": "b" * 1000}
