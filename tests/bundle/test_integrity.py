"""Checksums find what changed, wherever it is, and nothing is read twice without need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recmill.artifacts.bundle import integrity
from recmill.artifacts.bundle.integrity import CHUNK_BYTES, open_verified, publish_with_checksums
from recmill.errors import ArtifactError


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "small").write_bytes(b"abc")
    (tmp_path / "tables" / "large").write_bytes(bytes(2 * CHUNK_BYTES + 5))
    publish_with_checksums(tmp_path, "delta", {"number": 1})
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    return tmp_path


def test_a_file_has_the_xxh64_of_each_chunk(artifact: Path) -> None:
    files = open_verified(artifact, "delta", ())["files"]
    assert files["empty"] == {"num_bytes": 0, "checksums": []}
    assert files["small"] == {"num_bytes": 3, "checksums": ["44bc2cf5ad770999"]}  # as `xxhsum -H64` has it
    assert [len(files["tables/large"]["checksums"]), files["tables/large"]["num_bytes"]] == [
        3,
        2 * CHUNK_BYTES + 5,
    ]


@pytest.mark.parametrize("index", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4])
def test_one_bit_in_any_chunk_is_noticed_though_the_time_of_the_file_is_old(
    artifact: Path, index: int
) -> None:
    open_verified(artifact, "delta", ())
    file = artifact / "tables" / "large"
    with open(file, "r+b") as opened:
        opened.seek(index)
        opened.write(b"\x01")
    os.utime(file, (1, 1))
    with pytest.raises(ArtifactError, match="tables/large does not have the checksums of its record"):
        open_verified(artifact, "delta", ())


@pytest.mark.parametrize("name", ["graph.onnx", "tables/more"])
def test_a_file_that_the_manifest_does_not_record_is_refused(artifact: Path, name: str) -> None:
    (artifact / ".hidden").write_bytes(b"nobody opens it")
    open_verified(artifact, "delta", ())
    (artifact / name).write_bytes(b"never verified")
    with pytest.raises(ArtifactError, match=rf"manifest\.json has no record of {name}"):
        open_verified(artifact, "delta", ())


def test_what_is_no_file_is_refused_before_it_is_opened(artifact: Path) -> None:
    (artifact / "empty").unlink()
    os.mkfifo(artifact / "empty")  # as many bytes as the record has; whoever opens it waits for ever
    with pytest.raises(ArtifactError, match="empty is missing"):
        open_verified(artifact, "delta", ())


def test_what_has_not_changed_is_not_read_again(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "_SETTLED_NS", 0)
    open_verified(artifact, "delta", ())
    monkeypatch.setattr(integrity, "_read_span", lambda span: pytest.fail(f"{span} is read again"))
    open_verified(artifact, "delta", ())


def test_a_manifest_without_a_field_says_which(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r'manifest\.json has no "tables"'):
        open_verified(artifact, "delta", ("number", "tables"))
