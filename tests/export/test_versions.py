"""The folder of versions: who writes, what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.artifacts.bundle.bundle import current_of, previous_of, publish_bundle, set_current, versions_of
from recmill.stages.export.versions import exporting, keep_newest, written_aside


def published(into: Path, *versions: str) -> None:
    """Bundles with nothing in them, made one after the other; the last is current."""
    for number, version in enumerate(versions):
        (into / version).mkdir()
        nothing = {"recipe": {}, "columns": [], "rows_dtype": "float32", "models": {}, "created_at": number}
        publish_bundle(into / version, nothing)
        set_current(into, version)


def test_the_newest_versions_stay_whatever_their_steps(tmp_path: Path) -> None:
    published(tmp_path, "0000000900-a", "0000000100-b", "0000000200-c", "0000000150-d")
    assert keep_newest(tmp_path, 3) == ["0000000900-a"]
    assert versions_of(tmp_path) == ["0000000100-b", "0000000150-d", "0000000200-c"]


def test_the_current_and_the_previous_version_stay_with_their_deltas(tmp_path: Path) -> None:
    published(tmp_path, "1-a", "2-b", "3-c")
    for version in ("1-a", "3-c"):
        (tmp_path / f"{version}.deltas").mkdir()
    assert keep_newest(tmp_path, 1) == ["1-a"]
    assert (current_of(tmp_path), previous_of(tmp_path)) == ("3-c", "2-b")
    assert sorted(path.name for path in tmp_path.glob("*.deltas")) == ["3-c.deltas"]


def test_what_dead_exports_left_is_cleared(tmp_path: Path) -> None:
    published(tmp_path, "1-a")
    (tmp_path / "2-b.partial" / "items").mkdir(parents=True)
    (tmp_path / "current.partial").write_text("{")
    with exporting(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "1-a", "current"]


def test_a_folder_gets_its_name_only_when_all_went_well(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_aside(tmp_path, "1-a") as aside:
        (aside / "missing").read_text()
    assert list(tmp_path.iterdir()) == []
    with written_aside(tmp_path, "1-a") as aside:
        (aside / "all").write_text("")
        assert aside.name == "1-a.partial"
    assert [path.name for path in tmp_path.rglob("*")] == ["1-a", "all"]
