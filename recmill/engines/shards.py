"""Writing shards: one file per part and split, written atomically; as Parquet, or as rows of int32."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts.manifest import unique_aside
from recmill.dataset.shard import checksums_of
from recmill.features.kernels import RowDigest
from recmill.recipe.recipe import COPY, POSITION, SPLIT, SPLITS

Format = Literal["parquet", "int32"]
ROWS_PER_GROUP = 1 << 16
ROWS_PER_SHARD = 1 << 22
# Plain pages: a dictionary costs more than it saves for ids, and nobody queries ranges of them.
PARQUET: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": False,
    "write_statistics": False,
    "write_batch_size": ROWS_PER_GROUP,
}


@dataclass(frozen=True)
class ShardRecord:
    """One file of a Table."""

    split: str
    file: str
    rows: int
    num_bytes: int
    digest: str
    checksums: tuple[str, ...] = ()  # of the bytes of Parquet files


def forget_unfinished(into: Path, folders: Iterable[str]) -> None:
    """Remove temporary files of killed writers; their tasks run again."""
    for folder in folders:
        for file in (into / folder).glob("*.partial"):
            file.unlink(missing_ok=True)


class ShardWriter:
    """Splits batches by split and appends them to a file for each; a long part gets several files.

    `folders` names the directory of each value of the split.
    """

    def __init__(self, into: Path, number: int, format: Format, folders: Sequence[str] = SPLITS) -> None:
        self.into = into
        self.number = number
        self.format: Format = format
        self.folders = folders
        self.open: dict[str, _OpenShard] = {}
        self.finished: list[ShardRecord] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self.open.values():
            shard.abandon()

    def add(self, batch: pl.DataFrame) -> None:
        splits = batch[SPLIT].to_numpy()
        rows = batch.drop([name for name in (POSITION, SPLIT, COPY) if name in batch.columns])
        for index, split in enumerate(self.folders):
            chosen = splits == index
            if chosen.any():
                self._shard(split).add(rows if chosen.all() else rows.filter(chosen))

    def _shard(self, split: str) -> _OpenShard:
        if split in self.open and self.open[split].digest.rows >= ROWS_PER_SHARD:
            self._finish(split)
        if split not in self.open:
            kind = {"parquet": _ParquetShard, "int32": _Int32Shard}[self.format]
            piece = sum(shard.split == split for shard in self.finished)
            name = f"shard-{self.number:05d}-{piece:03d}.{self.format}"
            self.open[split] = kind(self.into, split, name)
        return self.open[split]

    def _finish(self, split: str) -> None:
        self.finished.append(self.open[split].finish())
        del self.open[split]

    def finish(self) -> list[ShardRecord]:
        for split in list(self.open):
            self._finish(split)
        return self.finished


class _OpenShard(ABC):
    """A temporary file that is renamed when it is finished."""

    def __init__(self, into: Path, split: str, file: str) -> None:
        (into / split).mkdir(parents=True, exist_ok=True)
        self.split = split
        self.file = f"{split}/{file}"
        self.path = into / split / file
        self.aside = unique_aside(self.path)  # a lost task may still be writing when its replacement does
        self.held: list[pl.DataFrame] = []
        self.num_held = 0
        self.digest = RowDigest()
        self.sink = pa.OSFile(str(self.aside), "wb")  # written without the GIL

    @abstractmethod
    def write(self, rows: pl.DataFrame) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """Write the footer, if the format has one."""

    def add(self, rows: pl.DataFrame) -> None:
        self.digest += RowDigest.of(rows)
        self.held.append(rows)
        self.num_held += rows.height
        if self.num_held >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self.held:
            self.write(pl.concat(self.held))
            self.held, self.num_held = [], 0

    def finish(self) -> ShardRecord:
        self._flush()
        self.end()
        self.sink.close()
        size, checksums = self.aside.stat().st_size, self.checksums()
        os.replace(self.aside, self.path)
        return ShardRecord(self.split, self.file, self.digest.rows, size, self.digest.hex(), checksums)

    def checksums(self) -> tuple[str, ...]:
        """Checksums of the finished file's bytes, if its readers verify them."""
        return ()

    def abandon(self) -> None:
        self.sink.close()
        self.aside.unlink(missing_ok=True)


class _ParquetShard(_OpenShard):
    writer: Any = None

    def write(self, rows: pl.DataFrame) -> None:
        table = rows.to_arrow()
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.sink, table.schema, **PARQUET)
        self.writer.write_table(table, row_group_size=table.num_rows)

    def end(self) -> None:
        self.writer.close()

    def checksums(self) -> tuple[str, ...]:
        return checksums_of(self.aside)


class _Int32Shard(_OpenShard):
    """Rows as plain little-endian int32, column after column within a row."""

    def write(self, rows: pl.DataFrame) -> None:
        self.sink.write(np.ascontiguousarray(rows.cast(pl.Int32).to_numpy(), dtype="<i4").tobytes())

    def end(self) -> None:
        """There is no footer."""
