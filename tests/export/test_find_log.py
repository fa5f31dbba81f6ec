"""Where the log is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import write_manifest
from recmill.errors import ArtifactError, LogError
from recmill.stages.export.find_log import find_log


def checkpoint(path: Path, source: str, data: str | None = None) -> Checkpoint:
    """A folder that says only where its rows come from."""
    path.mkdir(exist_ok=True)
    write_manifest(path, "checkpoint", {"source": source, "data": data})
    return Checkpoint.open(path)


def test_a_checkpoint_knows_the_log_of_its_table(shop) -> None:
    assert find_log(shop.folder) == str(shop.log)


def test_a_checkpoint_that_learned_from_a_log_knows_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", f"log {tmp_path}, plan 0123456789abcdef", str(tmp_path))
    assert find_log(folder) == str(tmp_path)


def test_what_is_asked_for_comes_first(shop) -> None:
    assert find_log(shop.folder, "/somewhere/else", shop.table) == "/somewhere/else"


def test_a_table_tells_what_an_older_checkpoint_does_not(shop, tmp_path: Path) -> None:
    digest = json.loads((shop.table / "manifest.json").read_text())["digest"]
    folder = checkpoint(tmp_path / "c", f"table {digest}")
    with pytest.raises(LogError, match=r"does not record where its log is.*Add --data DIR"):
        find_log(folder)
    assert find_log(folder, table=shop.table) == str(shop.log)


def test_another_table_is_refused(shop, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="was trained from table 0123abcd, but"):
        find_log(checkpoint(tmp_path / "c", "table 0123abcd"), table=shop.table)


def test_a_log_that_moved_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    folder = checkpoint(tmp_path / "c", "table 0123abcd", str(tmp_path / "log"))
    assert find_log(folder) == str(tmp_path / "log")
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogError, match=r"does not exist any more. Give its location with --data DIR"):
        find_log(folder)


def test_a_url_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", "table 0123abcd", "s3://bucket/log")
    assert find_log(folder) == "s3://bucket/log"
