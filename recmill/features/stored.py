"""Vocabularies too large for memory: on disk in id order, and by hash, so that rows can be joined with them.

The counts of such a vocabulary arrive as sorted runs. A chunked merge gives every value its id, so memory is bounded
by the number of runs and not by the number of values. Rows are then transformed with a subset that holds just their
values; the engine looks it up.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts.manifest import write_whole
from recmill.errors import FeatureError
from recmill.features.base import ValueTable
from recmill.features.kernels import (
    Array,
    RowDigest,
    RunReader,
    StoredCounts,
    ValueCounts,
    check_fits,
    read_run,
    run_file,
)

_MAX_SIZE = (1 << 31) - 2  # ids are int32


@dataclass(frozen=True)
class _StoredFacts:
    """Facts about a stored vocabulary that need no read."""

    name: str
    rows: int
    digest: str
    facts: Mapping[str, int]
    is_text: bool
    num_runs: int
    num_bytes: int
    memory: int


class StoredValueTable(ValueTable):
    """A vocabulary on disk. It is loaded on demand, if memory allows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = _StoredFacts(**json.loads(_record_file(folder).read_text(encoding="utf-8")))
        super().__init__(pl.DataFrame(), self.record.facts)

    def __reduce__(self) -> tuple[type[StoredValueTable], tuple[Any, ...]]:
        return StoredValueTable, (self.folder,)

    def __len__(self) -> int:
        return self.record.rows

    @property
    def frame(self) -> pl.DataFrame:
        if not self._frame.width:
            check_fits(self.record.name, self.record.num_bytes, self.record.memory)
            self._frame = pl.read_parquet(_values_file(self.folder))
        return self._frame

    @property
    def is_text(self) -> bool:
        return self.record.is_text

    @property
    def num_runs(self) -> int:
        """The number of runs; `runs_of_values` gives the run of a value."""
        return self.record.num_runs

    def run(self, number: int) -> pl.DataFrame:
        """Columns value, id and count of the values of one run."""
        ids_file = _ids_file(self.folder, number)
        if not ids_file.exists():
            return empty_subset(self.is_text)
        ids = np.fromfile(ids_file, dtype=np.int32)
        rows = read_run(run_file(self.folder, number)).head(len(ids))
        return rows.select("value", pl.Series("id", ids), "count").filter(pl.col("id") > 0)

    def digest(self) -> str:
        return self.record.digest

    def top(self, num: int) -> pl.DataFrame:
        best: list[pl.DataFrame] = []
        with pq.ParquetFile(_values_file(self.folder)) as file:
            for batch in file.iter_batches():
                best = [ValueTable(pl.concat([*best, pl.DataFrame(pl.from_arrow(batch))])).top(num)]
        return best[0] if best else super().top(num)

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        try:
            os.link(_values_file(self.folder), path)
        except OSError:  # another disk, or one without links
            shutil.copyfile(_values_file(self.folder), path)


class SubsetValueTable(ValueTable):
    """The values of a stored vocabulary that occur in some rows: columns value, id and count."""

    def __init__(self, frame: pl.DataFrame, num_rows: int) -> None:
        super().__init__(frame)
        self.num_rows = num_rows
        self._ids = pl.concat([pl.Series("id", [0], dtype=pl.Int32), frame["id"]])

    def __reduce__(self) -> tuple[type[SubsetValueTable], tuple[Any, ...]]:
        return SubsetValueTable, (self.frame, self.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def ids_at(self, row_numbers: pl.Series) -> pl.Series:
        return self._ids.gather(row_numbers.cast(pl.UInt32)).alias(row_numbers.name)


def empty_subset(is_text: bool) -> pl.DataFrame:
    """The subset for rows that have no value of the vocabulary."""
    return pl.DataFrame(
        schema={"value": pl.String() if is_text else pl.Int64(), "id": pl.Int32(), "count": pl.Int64()}
    )


def _ids_file(folder: Path, number: int) -> Path:
    """The ids of a run's values, row by row; 0 for values without one, and nothing after the last id."""
    return folder / f"{number:05d}.ids"


def _values_file(folder: Path) -> Path:
    return folder / "values.parquet"


def _record_file(folder: Path) -> Path:
    return folder / "values.json"


# from counts to ids


def learn_stored(
    counts: StoredCounts, name: str, min_count: int = 1, max_size: int | None = None
) -> ValueTable:
    """The vocabulary of stored counts, in the memory of a chunk of each run.

    It stays on disk, unless `max_size` or `min_count` made it small.
    """
    with _VocabularyWriter(counts.folder, counts.options.is_text) as values:
        for rows in merge_runs(counts):
            ids = _next_ids(values.num_rows, (rows["count"] >= min_count).to_numpy(), max_size)
            _append_ids(counts.folder, rows["run"].to_numpy(), ids)
            values.add(rows.select("value", "count").filter(ids > 0))
            if max_size is not None and values.num_rows >= max_size:
                break
    facts = facts_of(counts, values.num_known)
    if values.num_bytes <= counts.small_bytes:
        return ValueTable(pl.read_parquet(_values_file(counts.folder)), facts)
    record = _StoredFacts(
        name,
        values.num_rows,
        values.digest.hex(),
        facts,
        counts.options.is_text,
        counts.num_runs,
        values.num_bytes,
        counts.memory,
    )
    write_whole(_record_file(counts.folder), json.dumps(asdict(record)))
    return StoredValueTable(counts.folder)


class _VocabularyWriter:
    """Writes the Parquet file of a vocabulary in id order, with running totals."""

    def __init__(self, folder: Path, is_text: bool) -> None:
        columns = {"value": pa.large_string() if is_text else pa.int64(), "count": pa.int64()}
        self.schema = pa.schema(columns)
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        self.writer = pq.ParquetWriter(_values_file(folder), self.schema, **options)
        self.num_rows = self.num_bytes = self.num_known = 0
        self.digest = RowDigest()

    def __enter__(self) -> _VocabularyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def add(self, rows: pl.DataFrame) -> None:
        if self.num_rows + rows.height > _MAX_SIZE:
            raise FeatureError(
                f"A vocabulary holds at most {_MAX_SIZE:,} values; raise min_count, set max_size, or use key."
            )
        self.digest += RowDigest.of(rows.with_row_index("__id", offset=self.num_rows))
        table = rows.to_arrow().cast(self.schema)
        self.writer.write_table(table)
        self.num_rows += rows.height
        self.num_bytes += table.nbytes
        self.num_known += int(rows["count"].sum())


def facts_of(counts: ValueCounts | StoredCounts, num_known: int) -> dict[str, int]:
    """Facts for `--explain`: the number of values, and how many of them got an id."""
    return {
        "values": counts.num_values,
        "missing": counts.num_missing,
        "distinct": counts.num_distinct,
        "known": num_known,
    }


def _next_ids(num_given: int, is_kept: Array, max_size: int | None) -> Array:
    """The next ids for the kept rows; 0 for the others."""
    ids = np.where(is_kept, num_given + np.cumsum(is_kept), 0)
    return ids if max_size is None else np.where(ids > max_size, 0, ids)


def _append_ids(folder: Path, runs: Array, ids: Array) -> None:
    """Append ids to each run. Merging keeps the order of a run's rows, so its ids arrive in that order."""
    order = np.argsort(runs, kind="stable")
    present, starts = np.unique(runs[order], return_index=True)
    for run, of_run in zip(present, np.split(ids[order], starts[1:]), strict=True):
        # Opened for each chunk: there may be more runs than file descriptors.
        with open(_ids_file(folder, int(run)), "ab") as file:
            file.write(of_run.astype(np.int32).tobytes())


class _SortedRun:
    """A sorted run, read chunk by chunk."""

    def __init__(self, path: Path, number: int) -> None:
        self.reader = RunReader(path)
        self.number = number
        self.is_read = False
        self.held: list[pl.DataFrame] = []

    def fill(self) -> bool:
        """Buffer more than a chunk, so that a merge step advances by about one; False when all was taken."""
        while len(self.held) < 2 and not self.is_read:
            chunk = self.reader.read_chunk()
            self.is_read = chunk is None
            if chunk is not None:
                self.held.append(chunk.with_columns(run=pl.lit(self.number, dtype=pl.Int32)))
        return bool(self.held)

    def take(self, is_next: pl.Expr) -> pl.DataFrame:
        """Remove the first rows from the buffer."""
        num_next = [int(chunk.select(is_next.sum()).item()) for chunk in self.held]
        taken = [chunk.head(num) for chunk, num in zip(self.held, num_next, strict=True)]
        left = [chunk.slice(num) for chunk, num in zip(self.held, num_next, strict=True)]
        self.held = [chunk for chunk in left if chunk.height]
        return pl.concat(taken)


def merge_runs(counts: StoredCounts) -> Iterator[pl.DataFrame]:
    """All rows of all runs in order, chunk by chunk, with the index of their run."""
    key = "first" if counts.options.track_first else "count"
    descending = [key == "count", False]
    runs = [_SortedRun(file, number) for number, file in counts.runs()]
    while runs := [run for run in runs if run.fill()]:
        # Beyond the first of their last rows, runs may have rows that are not read yet.
        ends = [run.held[-1].tail(1).select(key, "value") for run in runs if not run.is_read]
        end = pl.concat(ends).sort(key, "value", descending=descending).row(0) if ends else None
        is_next = _is_at_or_before(key, *end) if end else pl.col(key).is_not_null()
        yield pl.concat([run.take(is_next) for run in runs]).sort(key, "value", descending=descending)


def _is_at_or_before(key: str, key_end: int, value_end: Any) -> pl.Expr:
    column = pl.col(key)
    before: pl.Expr = column > key_end if key == "count" else column < key_end
    in_tie: pl.Expr = (column == key_end) & (pl.col("value") <= value_end)
    return before | in_tie
