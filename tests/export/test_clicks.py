"""What users have seen, and which items are clicked by the same users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import recmill.stages.export.clicks as module
from recmill.logs.base import LogFile
from recmill.stages.export.clicks import NUM_SIMILAR, RECENT_CLICKS, Clicks, ClickWriter


def clicks_of(folder: Path, pairs: list[tuple[str, int]], pieces: int = 1) -> Clicks:
    """Clicks in this order; users u0 to u9 and items 0 to 99 are known."""
    writer = ClickWriter(folder, "user", "item", [LogFile("log", "log", module._PART_BYTES * 3)])
    rows = pl.DataFrame(pairs, schema={"user": pl.String, "item": pl.Int64}, orient="row")
    rows = rows.with_row_index("index")
    for number in range(pieces):
        writer.add(rows.filter(pl.col("index") % pieces == number), ["index"])
    return writer.finish(pl.Series([f"u{n}" for n in range(10)]), pl.Series(range(100)))


def test_each_user_has_seen_the_items_they_clicked_once_each(tmp_path: Path) -> None:
    clicks = clicks_of(tmp_path, [("u3", 7), ("u1", 5), ("u3", 2), ("u3", 7), ("nobody", 1)])
    assert clicks.write_seen(tmp_path) == 3
    seen, offsets = np.load(tmp_path / "seen.npy"), np.load(tmp_path / "seen.offsets.npy")
    assert len(offsets) == 11
    assert seen[offsets[3] : offsets[4]].tolist() == [2, 7]
    assert seen[offsets[1] : offsets[2]].tolist() == [5]


def test_similar_items_are_those_of_the_same_users(tmp_path: Path) -> None:
    """1 and 2 are clicked by the same two users; 3 by one of them; 4 by another user alone."""
    pairs = [("u1", 1), ("u1", 2), ("u2", 1), ("u2", 2), ("u2", 3), ("u3", 4)]
    similar = clicks_of(tmp_path, pairs).similar()
    assert similar is not None
    assert similar.shape == (100, NUM_SIMILAR)
    assert similar[1, :3].tolist() == [2, 3, -1]
    assert similar[3, :3].tolist() == [1, 2, -1]
    assert (similar[4] == -1).all()


def test_only_the_last_clicks_of_a_user_make_items_similar(tmp_path: Path) -> None:
    long_ago = [("u1", 90)]
    since = [("u1", item) for item in range(RECENT_CLICKS)]
    similar = clicks_of(tmp_path, long_ago + since).similar()
    assert similar is not None
    assert (similar[90] == -1).all()
    assert similar[0, 0] == 1


@pytest.mark.parametrize("pieces", [1, 3])
def test_similar_items_are_the_same_in_one_go_and_in_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    random = np.random.default_rng(0)
    pairs = [
        (f"u{user}", int(item)) for user, item in zip(*random.integers(0, (10, 100), (300, 2)).T, strict=True)
    ]
    whole = clicks_of(tmp_path / "whole", pairs).similar()
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 50)
    monkeypatch.setattr(module, "_HELD_BYTES", 1)
    clicks = clicks_of(tmp_path / "parts", pairs, pieces)
    assert np.array_equal(clicks.similar(), whole)  # type: ignore[arg-type]
    assert np.array_equal(whole, _by_hand(pairs))  # type: ignore[arg-type]


def test_many_items_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ITEMS", 99)
    assert clicks_of(tmp_path, [("u1", 1)]).similar() is None


def test_without_clicks_nothing_is_seen_and_nothing_similar(tmp_path: Path) -> None:
    clicks = clicks_of(tmp_path, [])
    assert clicks.write_seen(tmp_path) == 0
    assert (clicks.similar() == -1).all()  # type: ignore[union-attr]


def _by_hand(pairs: list[tuple[str, int]]) -> np.ndarray:
    who = np.zeros((10, 100))
    for user in range(10):
        items = [item for name, item in pairs if name == f"u{user}"][-RECENT_CLICKS:]
        who[user, items] = 1
    together = who.T @ who
    counts = np.diag(together)
    cosine = together / np.sqrt(np.maximum(1, np.outer(counts, counts)))
    np.fill_diagonal(cosine, 0)
    best = np.argsort(-cosine, axis=1, kind="stable")[:, :NUM_SIMILAR]
    return np.where(np.take_along_axis(cosine, best, axis=1) > 0, best, -1)
