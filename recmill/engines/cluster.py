"""The engine for clusters, written once over two primitives that Ray and Spark each implement.

Tasks anywhere in the cluster process the parts of a frame; rows that must meet are sent to buckets through the
cluster's own shuffle, many of them in one Arrow payload. Results that a task leaves for later are files under `work`,
which all machines share, written aside and renamed: tasks may run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.artifacts.work import check_file, file_checksum, read_record, write_record
from recmill.engines.engine import (
    Answers,
    BucketOf,
    Engine,
    Frame,
    MapFunction,
    Order,
    Partition,
    Question,
    StoredTable,
    Task,
    merged,
    record_of,
)
from recmill.engines.shards import Format, ShardRecord
from recmill.engines.spill import read_frames, write_frames
from recmill.errors import ResourceError
from recmill.features.kernels import Array, CountOptions, ExtractedValues, Measurements
from recmill.recipe.recipe import SPLITS
from recmill.reporting.progress import Progress

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")
Report = Callable[[int], None]
Scatter = Callable[[int, Iterator[pl.DataFrame]], Iterator[tuple[int, pl.DataFrame]]]
Gather = Callable[[int, Iterator[pl.DataFrame]], R]


class Cluster(Protocol):
    """Runs functions on a cluster. A RecmillError raised by one ends the job and is re-raised here unchanged.

    Functions and parts are pickled once for a call; a function that is lost with its process runs again.
    """

    name: str

    def parallelism(self) -> int:
        """Number of concurrent tasks in the whole cluster."""

    def each(self, parts: Sequence[P], function: Callable[[int, P], R], report: Report) -> list[R]:
        """Call function(number, part) for each part; small results in the order of parts.

        Calls `report(number)` here as each part ends.
        """

    def exchange(
        self,
        parts: Sequence[P],
        scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]],
        num_buckets: int,
        gather: Gather[R],
        report: Report,
    ) -> list[R]:
        """The shuffle: frames that scatter(number, part) yields for a bucket go to one call gather(bucket, frames).

        Frames arrive in any order, streamed; gather is called for empty buckets too. Calls `report(number)` here as
        the scatter of each part ends. Small results in the order of buckets.
        """

    def close(self) -> None: ...


class ClusterEngine(Engine):
    """Runs on a cluster. `memory` bounds this process and each task; `work` is shared by all machines."""

    leaves_tables_on_disk = True

    def __init__(
        self, cluster: Cluster, work: Path, memory: int = 2 << 30, progress: Progress | None = None
    ) -> None:
        super().__init__(work.absolute(), memory, progress)
        self.cluster = cluster
        self._num_collected = 0
        self._num_measured = 0

    def close(self) -> None:
        self.cluster.close()

    @property
    def tasks_at_once(self) -> int:
        return self.cluster.parallelism()

    @property
    def memory_per_task(self) -> int:
        return self.memory

    def run(self, frame: Frame, title: str, task: Task[T]) -> list[T]:
        with self.progress.stage(title, frame.num_bytes) as stage:
            return self.cluster.each(
                range(len(frame.parts)),
                partial(_run_part, frame, task),
                lambda number: stage.advance(frame.parts[number].num_bytes, 0),
            )

    def exchange(
        self, frame: Frame, title: str, scatter: Scatter, num_buckets: int, gather: Gather[R]
    ) -> list[R]:
        """Scatter each part's batches to buckets, and gather each bucket."""
        with self.progress.stage(title, frame.num_bytes) as stage:
            return self.cluster.exchange(
                range(len(frame.parts)),
                partial(_scatter_part, frame, scatter),
                num_buckets,
                gather,
                lambda number: stage.advance(frame.parts[number].num_bytes, 0),
            )

    def collect(self, frame: Frame) -> pl.DataFrame:
        """Collect all rows. Their size is known before this process reads the first of them."""
        self._num_collected += 1
        folder = self.work / "collected" / f"{self._num_collected:04d}"
        found = self.run(frame, "collect", partial(_store_rows, folder))
        num_bytes = sum(rows.num_bytes for rows in found)
        if num_bytes > self.memory // 2:
            raise ResourceError(
                f"A step needs {sum(rows.num_rows for rows in found):,} rows ({num_bytes >> 20:,} MB), more than half "
                f"of --memory ({self.memory >> 20:,} MB). Raise --memory, or group by a column with fewer values."
            )
        frames = [frame for rows in found for frame in rows.read()]
        return pl.concat(frames) if frames else pl.DataFrame()

    def measure(
        self,
        frame: Frame,
        extract: Callable[[pl.DataFrame], ExtractedValues],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measurements:
        from recmill.engines import counting  # imports this module

        self._num_measured += 1
        folder = self.work / "counts" / f"{self._num_measured:04d}"
        return counting.measure(self, frame, extract, counts, title, folder)

    def join(
        self,
        frame: Frame,
        tables: Mapping[str, StoredTable],
        questions: Sequence[Question],
        function: Callable[[Answers], MapFunction],
        stage: str,
    ) -> Frame:
        from recmill.engines.join import join  # imports this module

        return join(self, frame, tables, questions, function, stage)

    def write(
        self,
        frame: Frame,
        into: Path,
        order: Order,
        seed: int,
        format: Format = "parquet",
        folders: Sequence[str] = SPLITS,
        held_out_first: bool = False,
    ) -> list[ShardRecord]:
        shards = super().write(frame, into.absolute(), order, seed, format, folders, held_out_first)
        _check_visible([into / shard.file for shard in shards])
        return shards

    def _scatter(
        self, frame: Frame, stage: str, bucket_of: BucketOf, buckets: int, function: MapFunction, title: str
    ) -> tuple[Partition, ...]:
        """Shuffle rows into a file for each bucket, except buckets that an earlier run finished."""
        records = [record_of(self.work, f"bucket-{stage}", bucket) for bucket in range(buckets)]
        missing = [bucket for bucket in range(buckets) if not records[bucket].exists()]
        if missing:
            slot = np.full(buckets, -1)
            slot[missing] = np.arange(len(missing))
            scatter = partial(_cut_part, bucket_of, slot, self._chunk_bytes())
            gather = partial(
                _store_bucket, self.work / stage, [records[bucket] for bucket in missing], missing
            )
            self.exchange(frame, title, scatter, len(missing), gather)
        stored = [StoredRows.of(read_record(record)) for record in records]
        _check_visible([rows.path for rows in stored if rows.num_rows])
        return tuple(StoredPart(rows, function) for rows in stored)


# tasks


def _run_part(frame: Frame, task: Task[T], number: int, part: int) -> T:
    return task(part, frame.batches(frame.parts[part]))


def _scatter_part(
    frame: Frame, scatter: Scatter, number: int, part: int
) -> Iterator[tuple[int, pl.DataFrame]]:
    return scatter(part, frame.batches(frame.parts[part]))


@dataclass(frozen=True)
class StoredRows:
    """Rows in a file, which is absent when there are no rows."""

    path: Path
    num_rows: int
    num_bytes: int
    checksum: str

    def read(self) -> Iterator[pl.DataFrame]:
        if self.num_rows:
            check_file(self.path, self.checksum)
            yield from read_frames(self.path)

    @classmethod
    def store(cls, path: Path, frames: Iterator[pl.DataFrame]) -> StoredRows:
        path.parent.mkdir(parents=True, exist_ok=True)
        num_rows, num_bytes = write_frames(frames, path)
        return cls(path, num_rows, num_bytes, file_checksum(path) if num_rows else "")

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> StoredRows:
        return cls(Path(saved["path"]), saved["rows"], saved["bytes"], saved["checksum"])

    def saved(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            "checksum": self.checksum,
        }


@dataclass(frozen=True)
class StoredPart:
    """One bucket of shuffled rows; `function` receives all of it at once."""

    rows: StoredRows
    function: MapFunction

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes

    def read(self) -> Iterator[pl.DataFrame]:
        frames = list(self.rows.read())
        if frames:
            yield self.function(pl.concat(frames))


def _store_rows(folder: Path, number: int, batches: Iterator[pl.DataFrame]) -> StoredRows:
    return StoredRows.store(folder / f"{number:06d}.arrow", batches)


def _cut_part(
    bucket_of: BucketOf, slot: Array, piece_bytes: int, number: int, batches: Iterator[pl.DataFrame]
) -> Iterator[tuple[int, pl.DataFrame]]:
    for rows in merged(batches, piece_bytes):
        yield from cut(rows, slot[bucket_of(rows)])


def cut(rows: pl.DataFrame, buckets: Array) -> Iterator[tuple[int, pl.DataFrame]]:
    """Split rows by bucket number, keeping their order inside a bucket; rows of bucket -1 are dropped."""
    order = np.argsort(buckets, kind="stable")
    found, starts = np.unique(buckets[order], return_index=True)
    by_bucket = rows[order]
    for bucket, (start, stop) in zip(found, pairwise([*starts, len(order)]), strict=True):
        if bucket >= 0:
            yield int(bucket), by_bucket.slice(start, stop - start)


def _store_bucket(
    folder: Path, records: list[Path], buckets: list[int], slot: int, frames: Iterator[pl.DataFrame]
) -> None:
    rows = StoredRows.store(folder / f"bucket-{buckets[slot]:06d}.arrow", frames)
    write_record(records[slot], rows.saved())


def _check_visible(files: Sequence[Path]) -> None:
    for file in files:
        if not file.exists():
            raise ResourceError(
                f"A task wrote {file}, but it is not visible here. --into must lie on a file system that all machines "
                "of the cluster share, under the same path."
            )


# the wire format


def encode(rows: pl.DataFrame) -> bytes:
    """Encode rows as one payload: a compressed Arrow IPC stream."""
    table = rows.to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def decode(payload: Any) -> pl.DataFrame:
    """Decode a payload: bytes, or an Arrow buffer that is read in place."""
    with pa.ipc.open_stream(payload) as stream:
        rows = pl.from_arrow(stream.read_all())
    assert isinstance(rows, pl.DataFrame)
    return rows
