"""One rule says where a row is; all that write positions and all that read them follow it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from recmill.dataset.positions import file_of, offset_of, position
from recmill.engines.engine import order_keys
from recmill.logs.base import open_source
from recmill.logs.splits import by_files
from recmill.recipe.recipe import POSITION, SPLIT, Column, Log
from recmill.stages.score.sources import file_and_offset


def test_a_position_is_the_file_above_44_bits_of_offset():
    assert position(0, 7) == 7
    assert position(3, 5) == 3 * 2**44 + 5
    assert (file_of(3 * 2**44 + 5), offset_of(3 * 2**44 + 5)) == (3, 5)


def test_file_and_offset_of_many_positions_come_back():
    positions = np.array([position(0, 0), position(0, 2**44 - 1), position(1, 0), position(2**19 - 1, 9)])

    assert file_of(positions).tolist() == [0, 0, 1, 2**19 - 1]
    assert offset_of(positions).tolist() == [0, 2**44 - 1, 0, 9]


def test_readers_splits_order_and_scores_agree_on_positions(tmp_path: Path):
    (tmp_path / "a.csv").write_text("1\n22\n")
    (tmp_path / "b.csv").write_text("3\n44\n")
    log = Log(("*.csv",), (Column("x", "int"),), "csv", separator=",", header=False)
    source = open_source(log, str(tmp_path))
    rows = pl.concat([batch.frame for unit in source.units() for batch in source.read(unit)])
    positions = rows[POSITION].to_numpy()

    assert positions.tolist() == [position(0, 0), position(0, 2), position(1, 0), position(1, 2)]
    assert by_files(frozenset([1]), 1 << 62, rows)[SPLIT].to_list() == [0, 0, 1, 1]
    assert order_keys("interleave", 0, rows).tolist() == [0, 2, 0, 2]
    files, offsets = file_and_offset(rows[POSITION], ["a.csv", "b.csv"])
    assert files.to_list() == ["a.csv", "a.csv", "b.csv", "b.csv"]
    assert offsets.to_list() == offset_of(positions).tolist() == [0, 2, 0, 2]
