"""How good written scores are, where labels are known: two columns, file by file, so that nothing large is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TypeAlias

import polars as pl
import pyarrow.parquet as pq

from recmill.metrics import ScoreSums, exact_auc
from recmill.number_metrics import NumberSums
from recmill.reporting.machine import available_cores

Sums: TypeAlias = ScoreSums | NumberSums

MAX_EXACT_ROWS = 5_000_000  # with more, the AUC is that of fine bins, which then differs in the seventh digit


def measure(files: Sequence[Path], is_number: bool = False) -> dict[str, float] | None:
    """Metrics of all rows that have a label, those that are finite; None when no row has one.

    `is_number`: the label is not 0 or 1.
    """
    if not files or "label" not in pq.read_schema(files[0]).names:
        return None
    new_sums = NumberSums if is_number else ScoreSums
    with ThreadPoolExecutor(available_cores()) as pool:
        sums = reduce(add, pool.map(partial(_sums, new_sums), files))
    if not sums.num_rows:
        return None
    metrics = sums.metrics().as_dict()
    if not is_number and sums.num_rows <= MAX_EXACT_ROWS:
        pairs = pl.concat([_pairs(file) for file in files])
        metrics["auc"] = exact_auc(pairs["label"].to_numpy(), pairs["score"].to_numpy())
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _sums(new_sums: Callable[[], Sums], file: Path) -> Sums:
    sums = new_sums()
    pairs = _pairs(file)
    sums.add(pairs["label"].to_numpy(), pairs["score"].to_numpy())
    return sums


def _pairs(file: Path) -> pl.DataFrame:
    return pl.read_parquet(file, columns=["label", "score"]).drop_nulls()
