"""Objects come as they were written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_server import Address

from recmill.errors import StorageError
from recmill.storage import objects
from recmill.storage.objects import ObjectStore


def test_an_object_is_read_as_it_was_written(address: Address, tmp_path: Path) -> None:
    store = ObjectStore(address("a"))
    store.write("folder/x.json", b"one")
    store.write("folder/x.json", b"other")
    assert store.read("folder/x.json") == b"other"
    assert store.num_bytes("folder/x.json") == 5
    assert [found.name for found in store.list("folder")] == ["folder/x.json"]
    assert store.below("folder").read("x.json") == b"other"


def test_a_missing_object_is_no_failure_of_the_storage(address: Address) -> None:
    store = ObjectStore(address("a"))
    assert store.num_bytes("x") is None
    assert store.list("x") == []
    store.delete("x")
    with pytest.raises(FileNotFoundError):
        store.read("x")


def test_a_file_of_several_parts_is_uploaded_and_read_whole(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CHUNK_BYTES", 5 << 20)
    content = bytes(range(256)) * (11 << 12)
    (tmp_path / "large").write_bytes(content)
    store = ObjectStore(address("a"))
    store.upload(tmp_path / "large", "large", len(content))
    store.download("large", tmp_path / "copy", len(content))
    assert (tmp_path / "copy").read_bytes() == content


def test_an_address_that_is_none_names_those_that_are() -> None:
    with pytest.raises(StorageError, match=r"expected s3://bucket/\.\.\."):
        ObjectStore("ftp://host/x").read("y")
