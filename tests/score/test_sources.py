"""What engines read beside logs: rows of Tables and places of bundles, cut anywhere, each once and in order."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from recmill.dataset.shard import ShardFile, checksums_of
from recmill.recipe.recipe import POSITION
from recmill.stages.score import sources
from recmill.stages.score.sources import EntityRows, TableRows, file_and_offset


@pytest.mark.parametrize("rows_per_unit", [1, 5, 1000])
def test_rows_of_shards_come_in_order_with_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_unit: int
) -> None:
    monkeypatch.setattr(sources, "_ROWS_PER_UNIT", rows_per_unit)
    shards = []
    for name, first in (("a", 0), ("b", 10)):
        path = tmp_path / f"{name}.parquet"
        rows = pl.DataFrame({"x": range(first, first + 10), "y": range(10)})
        rows.write_parquet(path, row_group_size=3)
        shards.append(ShardFile(tmp_path, path.name, 10, path.stat().st_size, "", checksums_of(path)))
    source = TableRows(tuple(shards), ("x",))
    read = pl.concat([batch for unit in source.units() for batch in source.read(unit)])
    assert read.columns == ["x", POSITION]
    assert read["x"].to_list() == list(range(20))
    file, offset = file_and_offset(read[POSITION], [shard.file for shard in source.shards])
    assert file.to_list() == ["a.parquet"] * 10 + ["b.parquet"] * 10
    assert offset.to_list() == [*range(10), *range(10)]
    starts = [source.first_position(unit) for unit in source.units()]
    assert starts == sorted(starts)
    assert len(starts) == {1: 8, 5: 4, 1000: 2}[rows_per_unit]


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_places_are_all_numbers_below_the_count(count: int) -> None:
    source = EntityRows(count, per_unit=4)
    read = [
        place for unit in source.units() for batch in source.read(unit) for place in batch[POSITION].to_list()
    ]
    assert read == list(range(count))
