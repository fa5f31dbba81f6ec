"""The engine interface: frames with parts and maps, and how rows are grouped, ordered and written.

An engine only implements how the parts of a frame are run and how rows are moved between buckets; the assignment of
rows to buckets and the format of finished work are common. Functions given to an engine take and return Polars frames
and treat them as immutable values; each may run in another thread, process or machine. Rows carry their position in
the log, so no result depends on how the log was cut or in which order its units ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import polars as pl

from recmill.artifacts.work import damage_is_of_work, read_record, write_record
from recmill.dataset.positions import offset_of
from recmill.dataset.prefetch import prefetch
from recmill.dataset.shard import ShardFile
from recmill.engines.shards import Format, ShardRecord, ShardWriter, forget_unfinished
from recmill.errors import ResourceError
from recmill.features.kernels import (
    Array,
    CountOptions,
    ExtractedValues,
    Measurements,
    hash64,
    hash_positions,
)
from recmill.recipe.recipe import COPY, POSITION, SPLIT, SPLITS
from recmill.reporting.progress import Progress

T = TypeVar("T")
MapFunction = Callable[[pl.DataFrame], pl.DataFrame]
Order = Literal["log", "shuffle", "interleave"]
BucketOf = Callable[[pl.DataFrame], Array]
Answers = Mapping[str, pl.DataFrame]
Question = Callable[[Answers], Callable[[pl.DataFrame], Mapping[str, pl.Series]]]
Task = Callable[[int, Iterator[pl.DataFrame]], T]  # takes a part's number and its batches

MIN_MEMORY = 256 << 20
_USEFUL_BUCKET_BYTES = 1 << 20


class RowSource(Protocol):
    """Rows that can be read unit by unit, in any order, repeatedly."""

    def units(self) -> Sequence[Any]: ...
    def unit_bytes(self, unit: Any) -> int:
        """Approximate size of a unit's rows as text."""

    def first_position(self, unit: Any) -> int: ...
    def max_offset(self) -> int:
        """Approximate largest offset of a position."""

    def read(self, unit: Any) -> Iterator[pl.DataFrame]: ...


class Partition(Protocol):
    """Rows of a frame that one task processes."""

    @property
    def num_bytes(self) -> int: ...
    def read(self) -> Iterator[pl.DataFrame]: ...


@dataclass(frozen=True)
class UnitPart:
    source: RowSource
    unit: Any

    @property
    def num_bytes(self) -> int:
        return self.source.unit_bytes(self.unit)

    def read(self) -> Iterator[pl.DataFrame]:
        return self.source.read(self.unit)


@dataclass(frozen=True)
class Frame:
    """An engine's lazy view of rows: parts, and the functions to apply to each batch of them."""

    parts: tuple[Partition, ...]
    maps: tuple[MapFunction, ...]
    starts: tuple[int, ...]  # positions that cut the log into ranges of about equal size
    max_offset: int
    grouped_by: tuple[str, ...] = ()  # each part is one batch, with all rows of its groups

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def batches(self, part: Partition, ahead: bool = False) -> Iterator[pl.DataFrame]:
        for batch in prefetch(part.read()) if ahead else part.read():
            for function in self.maps:
                batch = function(batch)
            yield batch


class StoredTable(Protocol):
    """A table on disk in runs, which are assigned by `runs_of_values`."""

    @property
    def num_runs(self) -> int: ...
    def run(self, number: int) -> pl.DataFrame:
        """Column value, distinct, and columns with the data of each value."""


class Engine(ABC):
    """Builds, groups and orders frames in one way, and runs their parts on some machine.

    `work` holds unfinished work that a rerun reuses. `memory` bounds one process.
    """

    # tables that do not fit in memory; otherwise they are an error
    leaves_tables_on_disk: ClassVar[bool] = False

    def __init__(self, work: Path, memory: int, progress: Progress | None) -> None:
        if memory < MIN_MEMORY:
            raise ResourceError(
                f"--memory {memory >> 20} MB is too small; the least is {MIN_MEMORY >> 20} MB."
            )
        self.work = work
        self.memory = memory
        self.progress = progress or Progress(quiet=True)
        self._num_groups = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027, most engines hold no resources
        """Release the engine's resources; its files stay."""

    @property
    @abstractmethod
    def tasks_at_once(self) -> int:
        """Number of parts that are processed at the same time."""

    @property
    @abstractmethod
    def memory_per_task(self) -> int: ...

    @abstractmethod
    def run(self, frame: Frame, title: str, task: Task[T]) -> list[T]:
        """Call the task for each part, with its batches; results must be small."""

    @abstractmethod
    def collect(self, frame: Frame) -> pl.DataFrame:
        """Collect all rows, which must be few."""

    @abstractmethod
    def measure(
        self,
        frame: Frame,
        extract: Callable[[pl.DataFrame], ExtractedValues],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measurements:
        """Moments and counts of extracted columns, in one pass. Counting is a shuffle: it may exceed memory."""

    @abstractmethod
    def _scatter(
        self, frame: Frame, stage: str, bucket_of: BucketOf, buckets: int, function: MapFunction, title: str
    ) -> tuple[Partition, ...]:
        """Shuffle rows to buckets; `function` receives each bucket as one batch."""

    # building frames

    def read(self, source: RowSource) -> Frame:
        """A frame of a source's rows."""
        units = source.units()
        starts = tuple(sorted(source.first_position(unit) for unit in units))
        return Frame(tuple(UnitPart(source, unit) for unit in units), (), starts, source.max_offset())

    def map(self, frame: Frame, function: MapFunction) -> Frame:
        """Map rows: each output row depends on one input row, which may also be dropped."""
        return replace(frame, maps=(*frame.maps, function))

    def group(self, frame: Frame, by: Sequence[str], function: MapFunction, title: str) -> Frame:
        """Call `function` with all rows of each group, in log order; several groups per call."""
        if frame.grouped_by == tuple(by):
            return self.map(frame, partial(_in_log_order, function))
        self._num_groups += 1
        stage = f"group-{self._num_groups}"
        buckets = self._kept_number(stage, self._num_buckets(frame))
        bucket_of = partial(_bucket_of_group, tuple(by), buckets)
        parts = self._scatter(frame, stage, bucket_of, buckets, partial(_in_log_order, function), title)
        return replace(frame, parts=parts, maps=(), grouped_by=tuple(by))

    def join(
        self,
        frame: Frame,
        tables: Mapping[str, StoredTable],
        questions: Sequence[Question],
        function: Callable[[Answers], MapFunction],
        stage: str,
    ) -> Frame:
        """Map the batches with `function`, which also receives the rows of tables for a part's values."""
        raise NotImplementedError("this engine leaves no tables on disk")

    def _ordered(self, frame: Frame, order: Order, seed: int, format: Format, held_out_first: bool) -> Frame:
        """The same rows in parts that follow each other in the requested order.

        With `held_out_first`, training rows have parts of their own, after all others: a reader of the unfinished
        Table can evaluate early.
        """
        stage = f"order-{format}"
        buckets = self._kept_number(
            stage, self._num_buckets(frame) if order != "log" else max(1, len(frame.starts))
        )
        key = partial(order_keys, order, seed)
        bounds = _bounds(frame, order, buckets)
        held_out = len(bounds) + 1 if held_out_first else 0
        held_out = self._kept_number(f"held-out-{format}", held_out)
        bucket_of = partial(_bucket_in_order, key, bounds, held_out)
        num_buckets = len(bounds) + 1 + held_out
        parts = self._scatter(frame, stage, bucket_of, num_buckets, partial(_sorted_by, key), "order")
        return replace(frame, parts=parts, maps=(), grouped_by=())

    # running frames

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
        """Write `<into>/<folder>/shard-*`, with a folder for each value of SPLIT.

        Resumable: shards that an earlier call finished are kept. `held_out_first` is for ordered rows.
        """
        if order != "log" or frame.grouped_by:
            frame = self._ordered(frame, order, seed, format, held_out_first)
        forget_unfinished(into, folders)
        task = partial(_write_part, self.work, into, format, tuple(folders), num_held_out(self.work, format))
        shards = [shard for found in self.run(frame, "write", task) for shard in found]
        return sorted(shards, key=lambda shard: (shard.split, shard.file))

    # sizes and records

    def _num_buckets(self, frame: Frame) -> int:
        """Enough buckets to keep all tasks busy and to fit in memory, with room for the transformation."""
        needed = -(-3 * frame.num_bytes * 4 // self.memory_per_task)
        useful = min(4 * self.tasks_at_once, frame.num_bytes // _USEFUL_BUCKET_BYTES)
        return max(1, useful, min(1024, needed))

    def _chunk_bytes(self) -> int:
        return self.memory_per_task // 8

    def _kept_number(self, stage: str, number: int) -> int:
        """The number of buckets that an interrupted run recorded for this stage, or the given one."""
        kept = buckets_of(self.work, stage)
        if not kept.exists():
            write_record(kept, number)
        return int(read_record(kept))


def record_of(work: Path, stage: str, number: int) -> Path:
    """The file whose existence records that this part of this stage is done."""
    return work / "done" / f"{stage}-{number:06d}.json"


def buckets_of(work: Path, stage: str) -> Path:
    """The file with the number of buckets of a stage."""
    return work / f"{stage}.buckets"


def num_held_out(work: Path, format: Format) -> int:
    """The number of parts that hold all held-out rows and no others; they follow as many parts of training rows."""
    kept = buckets_of(work, f"held-out-{format}")
    return int(read_record(kept)) if kept.exists() else 0


def _write_part(
    work: Path,
    into: Path,
    format: Format,
    folders: tuple[str, ...],
    held_out: int,
    number: int,
    batches: Iterator[pl.DataFrame],
) -> list[ShardRecord]:
    # Held-out rows are written first, but training rows have the first numbers.
    number = (number + held_out) % (2 * held_out) if held_out else number
    record = record_of(work, format, number)
    if record.exists():
        return _written(record, into)
    with ShardWriter(into, number, format, folders) as writer:
        for batch in batches:
            writer.add(batch)
        shards = writer.finish()
    files = [into / shard.file for shard in shards if not shard.checksums]
    write_record(record, [asdict(shard) for shard in shards], files)
    return shards


def _written(record: Path, into: Path) -> list[ShardRecord]:
    """The shards of a part that an earlier run wrote."""
    shards = [ShardRecord(**shard) for shard in read_record(record)]
    with damage_is_of_work():
        for shard in shards:
            if shard.checksums:
                ShardFile.of(into, asdict(shard)).verify()
    return shards


# buckets: which rows they get, and how they are processed


def order_keys(order: Order, seed: int, rows: pl.DataFrame) -> Array:
    """A sort key of the Table for each row; ties are broken by position in the log."""
    positions = rows[POSITION].cast(pl.Int64).to_numpy()
    if order == "log":
        return positions.view(np.uint64)
    if order == "interleave":
        return offset_of(positions).view(np.uint64)
    copies = rows[COPY].to_numpy().astype(np.uint64) if COPY in rows.columns else np.uint64(0)
    return hash_positions(rows[POSITION], seed) + copies * np.uint64(0x9E3779B185EBCA87)


def _bounds(frame: Frame, order: Order, buckets: int) -> Array:
    if order == "log":
        return np.asarray(frame.starts[1:], dtype=np.int64).view(np.uint64)
    top = frame.max_offset if order == "interleave" else 1 << 64
    return np.array([top * number // buckets for number in range(1, buckets)], dtype=np.uint64)


def _bucket_in_order(key: BucketOf, bounds: Array, held_out: int, rows: pl.DataFrame) -> Array:
    """The bucket of each row; the first buckets are of held-out rows, if those have their own."""
    buckets = np.searchsorted(bounds, key(rows), side="right")
    return buckets + held_out * (rows[SPLIT].to_numpy() == 0) if held_out else buckets


def _bucket_of_group(by: tuple[str, ...], buckets: int, rows: pl.DataFrame) -> Array:
    combined = np.zeros(rows.height, dtype=np.uint64)
    for name in by:
        key = rows[name] if rows[name].dtype == pl.String else rows[name].cast(pl.Int64)
        combined = combined * np.uint64(0x9E3779B185EBCA87) + hash64(key, 0)
    return (combined % np.uint64(buckets)).astype(np.int64)


def _sorted_by(key: BucketOf, rows: pl.DataFrame) -> pl.DataFrame:
    ties = [name for name in (POSITION, COPY) if name in rows.columns]
    keyed = rows.with_columns(pl.Series("__order", key(rows)))
    return keyed.sort("__order", *ties, maintain_order=True).drop("__order")


def _in_log_order(function: MapFunction, rows: pl.DataFrame) -> pl.DataFrame:
    return function(rows.sort(POSITION, maintain_order=True))


def merged(batches: Iterable[pl.DataFrame], num_bytes: int) -> Iterator[pl.DataFrame]:
    """Merge batches into fewer, larger ones."""
    held: list[pl.DataFrame] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += int(batch.estimated_size())
        if size >= num_bytes:
            yield pl.concat(held)
            held, size = [], 0
    if held:
        yield pl.concat(held)
