"""Rows of one Table come from one version of the log, of side tables and of the user's functions."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events

from recmill.errors import ArtifactError, LogError
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare import prepare as preparation

SIDE = {
    "tables": {
        "items": {
            "files": ["items.csv"],
            "separator": ",",
            "header": True,
            "columns": [{"name": "item", "type": "int"}, {"name": "weight", "type": "float"}],
        }
    },
    "rows": [{"join": {"table": "items", "on": "item"}}],
    "features": [{"columns": "weight", "steps": []}],
}


def write_items(folder: Path, factor: int) -> None:
    rows = "".join(f"{item},{item * factor}\n" for item in range(11))
    (folder / "items.csv").write_text("item,weight\n" + rows)


def interrupted(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, data: Path, into: Path) -> None:
    """Prepare up to the moment before publishing."""
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_publish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepared(recipe, data, into)


def test_unfinished_work_with_another_side_table_starts_over(tmp_path, monkeypatch):
    data, recipe = write_events(tmp_path / "log", 100), events_recipe(**SIDE)
    write_items(data, 1)
    interrupted(monkeypatch, recipe, data, tmp_path / "table")
    write_items(data, 3)
    again = prepared(recipe, data, tmp_path / "table")
    assert not again.went_on
    assert set(rows_of(again.table)["weight"]) <= {float(3 * item) for item in range(11)}


def test_a_table_of_another_side_table_is_not_taken_for_this_one(tmp_path):
    data, recipe = write_events(tmp_path / "log", 100), events_recipe(**SIDE)
    write_items(data, 1)
    prepared(recipe, data, tmp_path / "table")
    os.utime(data / "items.csv")  # the same content
    assert prepared(recipe, data, tmp_path / "table").was_complete
    write_items(data, 3)
    with pytest.raises(ArtifactError, match="other side tables"):
        prepared(recipe, data, tmp_path / "table")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's own, which recipes may name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> Recipe:
        (tmp_path / "own_features.py").write_text("import polars as pl\nfrom pathlib import Path\n" + text)
        sys.modules.pop("own_features", None)
        importlib.invalidate_caches()
        return events_recipe(features=[{"columns": "price", "steps": [{"function": "own_features:change"}]}])

    yield write
    sys.modules.pop("own_features", None)


def test_a_table_of_another_function_is_not_taken_for_this_one(tmp_path, module):
    data = write_events(tmp_path / "log", 100)
    prepared(module("def change(price): return price * 2.0\n"), data, tmp_path / "table")
    with pytest.raises(ArtifactError, match="or functions"):
        prepared(module("def change(price): return price * 33.0\n"), data, tmp_path / "table")


@pytest.mark.parametrize("victim", ["events0.tsv", "items.csv"])
def test_files_that_change_while_they_are_read_are_an_error(tmp_path, module, victim: str):
    """The user's function, which runs between the rows, changes a file."""
    data = write_events(tmp_path / "log", 500)
    write_items(data, 1)
    path = data / victim
    recipe = module(
        f"""
def change(price):
    if len(price) > 100:
        path = Path({str(path)!r})
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    return price
"""
    )
    side: dict[str, Any] = {name: SIDE[name] for name in ("tables", "rows")}
    joined = replace(recipe, rows=events_recipe(**side).rows, tables=events_recipe(**side).tables)
    with pytest.raises(LogError, match=f"{victim}: changed while it was being read"):
        prepared(joined, data, tmp_path / "table", workers=1)
    with pytest.raises(ArtifactError, match="incomplete"):
        preparation.Table.open(tmp_path / "table")
