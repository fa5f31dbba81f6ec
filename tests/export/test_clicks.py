"""What users have seen, and the clicks that recall is fitted to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import recmill.stages.export.clicks as module
from recmill.logs.base import LogFile
from recmill.stages.export.clicks import Clicks, ClickWriter


def clicks_of(folder: Path, pairs: list[tuple[str, int]], pieces: int = 1) -> Clicks:
    """Clicks in this order; users u0 to u9 and items 0 to 99 are known."""
    writer = ClickWriter(folder, "user", "item", [LogFile("log", "log", module._PART_BYTES * 3)])
    rows = pl.DataFrame(pairs, schema={"user": pl.String, "item": pl.Int64}, orient="row")
    rows = rows.with_row_index("index")
    for number in range(pieces):
        writer.add(rows.filter(pl.col("index") % pieces == number), ["index"])
    return writer.finish(pl.Series([f"u{n}" for n in range(10)]), pl.Series(range(100)))


def test_each_user_has_seen_the_items_they_clicked_once_each_the_latest_last(tmp_path: Path) -> None:
    clicks = clicks_of(tmp_path, [("u3", 7), ("u1", 5), ("u3", 2), ("u3", 7), ("nobody", 1)])
    assert clicks.write_seen(tmp_path) == 3
    seen, offsets = np.load(tmp_path / "seen.npy"), np.load(tmp_path / "seen.offsets.npy")
    assert len(offsets) == 11
    assert seen[offsets[3] : offsets[4]].tolist() == [2, 7]
    assert seen[offsets[1] : offsets[2]].tolist() == [5]


def test_interactions_are_all_clicks_oldest_first_however_they_were_spilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HELD_BYTES", 1)
    pairs = [("u3", 7), ("u1", 5), ("u3", 2), ("u3", 7), ("nobody", 1)]
    interactions = clicks_of(tmp_path, pairs, pieces=3).interactions()
    assert (interactions.num_users, interactions.num_items) == (10, 100)
    assert interactions.users.tolist() == [3, 1, 3, 3]
    assert interactions.items.tolist() == [7, 5, 2, 7]


def test_without_clicks_nothing_is_seen(tmp_path: Path) -> None:
    clicks = clicks_of(tmp_path, [])
    assert clicks.write_seen(tmp_path) == 0
    assert len(clicks.interactions()) == 0
