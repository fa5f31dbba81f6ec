"""Rows of a log that is read again are of the split that training from it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recmill.logs.base import open_source
from recmill.logs.counted import CountedLog
from recmill.logs.held_out import find_split
from recmill.logs.scan import scan
from recmill.logs.tally import Tally
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import POSITION, SPLIT

SPLITS: list[dict[str, Any]] = [
    {"by": "tail", "held_out": 0.4, "halve": True},
    {"by": "hash", "column": "user", "held_out": 0.5, "halve": True},
    {"by": "time", "column": "time", "held_out": 0.4, "halve": True},
    {"by": "time", "column": "time", "eval_from": 4, "test_from": 7},
    {"by": "last", "column": "user", "order": "time"},
    {"by": "random", "column": "user", "held_out": 0.4, "halve": True},
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split.values())))
def test_splits_of_a_log_read_again_are_those_of_training(tmp_path: Path, split: dict[str, Any]) -> None:
    rows = [f"{'abcdefg'[number % 7]},{number * 3 % 10}" for number in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    columns = [{"name": "user", "type": "text"}, {"name": "time", "type": "int"}]
    log = {"files": ["log.csv"], "separator": ",", "columns": columns}
    feature = {"columns": "user", "steps": ["vocabulary"]}
    recipe = recipe_from_dict({"name": "small", "log": log, "features": [feature], "split": split})
    counted = CountedLog(recipe, str(tmp_path), max_bad=0.0, num_workers=1)
    expected = pl.concat(frame for piece in counted.pieces for frame in counted.read(piece))
    source = open_source(recipe.log, str(tmp_path))

    def read() -> Any:
        return scan(source, source.units(), Tally())

    assert recipe.split is not None
    found = find_split(source, recipe.split, read)(pl.concat(read()))
    assert found.sort(POSITION)[SPLIT].to_list() == expected.sort(POSITION)[SPLIT].to_list()
    assert set(found[SPLIT]) == {0, 1, 2}
