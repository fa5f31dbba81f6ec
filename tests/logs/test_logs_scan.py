"""Every pass over a raw log gives the same good rows and counts the same bad ones, whichever stage makes it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from recmill.features.plan import Plan
from recmill.logs.base import BadRow, open_source
from recmill.logs.counted import CountedLog
from recmill.logs.scan import LogScan, scan
from recmill.logs.tail import Tail
from recmill.logs.tally import Tally
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import POSITION, Recipe
from recmill.reporting.progress import Progress
from recmill.stages.export.snapshot import LogRows
from recmill.stages.prepare.prepare import _FirstRows

GOOD = [[0, 0, 1], [0, 11, 3], [1, 0, 4], [1, 4, 5]]  # file, offset and x
BAD = 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "a.tsv").write_text("1\t0\nx\t1\n2\t\n3\t1\n")  # no integer, and no value where one is required
    (folder / "b.tsv").write_text("4\t0\n5\t1\n")
    return folder


@pytest.fixture
def recipe() -> Recipe:
    columns = [{"name": "x", "type": "int"}, {"name": "click", "type": "int", "required": True}]
    tree = {
        "name": "small",
        "log": {"files": ["*.tsv"], "columns": columns},
        "labels": [{"name": "clicked", "columns": "click"}],
        "features": [{"columns": "x", "steps": ["key"]}],
    }
    return recipe_from_dict(tree)


def _rows(frames: list[pl.DataFrame]) -> list[list[int]]:
    rows = pl.concat(frames).select(POSITION, "x").rows()
    return [[position >> 44, position & (2**44 - 1), x] for position, x in rows]


def test_all_passes_over_a_log_agree_on_good_and_bad_rows(data: Path, recipe: Recipe, tmp_path: Path):
    source = open_source(recipe.log, str(data))
    for_engines = LogScan(source, source.units(), tmp_path / "rejected", 0.5, 1 << 20)
    assert _rows([frame for unit in source.units() for frame in for_engines.read(unit)]) == GOOD
    tally = for_engines.check()
    assert (tally.rows, tally.bad) == (6, BAD)

    counted = CountedLog(recipe, str(data), max_bad=0.5)
    assert _rows([frame for piece in counted.pieces for frame in counted.read(piece)]) == GOOD
    assert (counted.tally.rows, counted.tally.reasons, counted.tally.shown) == (6, tally.reasons, tally.shown)

    exported = LogRows(recipe, Plan(recipe), str(data), 1 << 30, Progress(quiet=True))
    assert _rows(list(exported.read())) == GOOD
    assert (exported.tally.rows, exported.tally.reasons) == (6, tally.reasons)

    followed = Tally()
    assert _rows(list(Tail(recipe.log, str(data)).read(followed))) == GOOD
    assert (followed.rows, followed.reasons, followed.shown) == (6, tally.reasons, tally.shown)

    assert _rows(list(_FirstRows(source, 100).read(0))) == GOOD


def test_each_bad_row_is_set_aside_with_its_file_offset_reason_and_text(data: Path, recipe: Recipe):
    source, aside = open_source(recipe.log, str(data)), []
    list(scan(source, source.units(), Tally(), set_aside=aside.append))

    assert aside == [
        {"file": "a.tsv", "offset": 4, "reason": "not an integer", "column": "x", "text": "x\t1"},
        {"file": "a.tsv", "offset": 8, "reason": "missing required value", "column": "click", "text": "2\t"},
    ]


def test_bytes_that_are_no_text_are_shown_as_far_as_they_are() -> None:
    tally = Tally(rows=1)
    tally.note(BadRow("events.csv", 0, "wrong number of fields", None, b"u1\x00\xff,alien"))
    assert tally.describe()[-1].endswith("wrong number of fields  'u1\\x00\ufffd,alien'")
