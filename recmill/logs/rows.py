"""Row operations that several stages use; most treat one row at a time, so they run wherever rows are read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import polars as pl

from recmill.errors import FeatureError, LogError, ResourceError, TooManyBadRows
from recmill.features.expressions import keep_where
from recmill.features.kernels import hash_positions
from recmill.logs.base import open_source
from recmill.logs.config import DEFAULT_MAX_BAD
from recmill.logs.scan import scan
from recmill.logs.tally import Tally
from recmill.recipe import recipe as r
from recmill.recipe.recipe import POSITION

RowFunction = Callable[[pl.DataFrame], pl.DataFrame]
_logger = logging.getLogger("recmill.logs")
_SIDE_TABLE_SHARE = 4  # fraction of the memory bound, as a divisor, that a side table may take


def row_function(
    recipe: r.Recipe, operation: r.RowOperation, data: str, memory: int, max_bad: float = DEFAULT_MAX_BAD
) -> RowFunction | None:
    """The operation as a function of rows; None when it needs rows other than the given ones."""
    if isinstance(operation, r.Filter):
        return partial(keep_where, operation.sql)
    if isinstance(operation, r.Sample):
        return partial(keep_share, operation)
    if isinstance(operation, r.Join):
        return partial(join_side, read_side_table(recipe, operation, data, memory, max_bad), operation.on)
    return None


def row_functions(
    recipe: r.Recipe, data: str, memory: int, instead: str, max_bad: float = DEFAULT_MAX_BAD
) -> list[RowFunction]:
    """All operations as functions of single rows; `instead` is the advice when one needs other rows."""
    functions = []
    for operation in recipe.rows:
        function = row_function(recipe, operation, data, memory, max_bad)
        if function is None:
            raise FeatureError(
                f'[[rows]] of recipe "{recipe.name}" has {operation.operation_name()}, which needs other rows; '
                f"without a Table, each row is processed alone. {instead}"
            )
        functions.append(function)
    return functions


def keep_share(sample: r.Sample, frame: pl.DataFrame) -> pl.DataFrame:
    share = hash_positions(frame[POSITION], sample.seed).astype(np.float64) / 2.0**64
    return frame.filter(pl.Series(share < sample.fraction))


def read_side_table(
    recipe: r.Recipe, join: r.Join, data: str, memory: int, max_bad: float = DEFAULT_MAX_BAD
) -> pl.DataFrame:
    """Read a whole side table with unique keys. Bad rows are left out, up to the fraction that the log may have too."""
    source = open_source(recipe.tables[join.table], data)
    size = sum(file.size for file in source.files)
    if size > memory // _SIDE_TABLE_SHARE:
        raise ResourceError(
            f"Side table {join.table} has {size >> 20:,} MB, more than a quarter of --memory "
            f"({memory >> 20:,} MB). Raise --memory."
        )
    tally = Tally()
    frames = list(scan(source, source.units(), tally))
    if not tally.rows:
        raise LogError(f"Side table {join.table} is empty: {', '.join(file.name for file in source.files)}.")
    try:
        tally.check(source, max_bad)
    except TooManyBadRows as error:
        raise TooManyBadRows(f"Side table {join.table}: {error}") from None
    if tally.bad:
        _logger.warning("Side table %s: left out %s", join.table, "\n  ".join(tally.describe()))
    frame = pl.concat(frames).drop(POSITION)
    twice = frame.filter(pl.col(join.on).is_duplicated())
    if twice.height:
        raise LogError(
            f'Side table {join.table} has {twice.height:,} rows whose "{join.on}" is not unique, '
            f"such as {twice[join.on][0]!r}."
        )
    return frame


def keep_one(dedupe: r.Dedupe, frame: pl.DataFrame) -> pl.DataFrame:
    """Keep one row for each combination of values; the frame has all rows of a combination."""
    ordered = frame.sort(dedupe.order, POSITION, nulls_last=False)
    return ordered.unique(list(dedupe.by), keep=dedupe.keep, maintain_order=True)


def join_side(side: pl.DataFrame, on: str, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.join(side, on=on, how="left", maintain_order="left")
