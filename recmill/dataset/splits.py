"""Rows with features by split: a Table, or what was kept of a raw log."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import polars as pl

from recmill.features.chain import ColumnInfo
from recmill.recipe.recipe import Recipe


class SplitRows(Protocol):
    """What the evaluation of retrieval reads."""

    @property
    def path(self) -> Path: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def columns(self) -> list[ColumnInfo]: ...
    def num_rows(self, split: str = "train") -> int: ...
    def scan(self, split: str = "train") -> pl.LazyFrame:
        """The split's rows, in order."""
