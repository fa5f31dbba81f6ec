"""The default engine: threads of one process over pieces of the log, bounded memory, resumable."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import polars as pl

from recmill.ahead import read_ahead
from recmill.artifact import write_whole
from recmill.engines.base import Format, MapFunction, Order, Shard, Source
from recmill.engines.shards import ShardWriter
from recmill.engines.spill import read_bucket, write_buckets
from recmill.errors import ResourceError
from recmill.kernels import (
    Array,
    Counter,
    CountOptions,
    Counts,
    Extracted,
    Measured,
    Moments,
    hash64,
    hash_positions,
)
from recmill.machine import available_cores
from recmill.progress import Progress
from recmill.spec.recipe import COPY, POSITION

T = TypeVar("T")

MIN_MEMORY = 256 << 20
_COUNT_BUCKETS = 64
_OFFSET_BITS = 44
_USEFUL_BUCKET_BYTES = 1 << 20
_BYTES_FOR_LOOKUP = 4  # for each byte of a value and its count: a sorted copy and a lookup table


class Part(Protocol):
    """A piece of a frame that one thread works through."""

    @property
    def num_bytes(self) -> int: ...
    def read(self) -> Iterator[pl.DataFrame]: ...


@dataclass(frozen=True)
class UnitPart:
    source: Source
    unit: Any

    @property
    def num_bytes(self) -> int:
        return self.source.unit_bytes(self.unit)

    def read(self) -> Iterator[pl.DataFrame]:
        return self.source.read(self.unit)


@dataclass(frozen=True)
class BucketPart:
    """One bucket of spilled rows; `function` sees all of it at once."""

    files: tuple[Path, ...]
    bucket: int
    num_bytes: int
    function: MapFunction

    def read(self) -> Iterator[pl.DataFrame]:
        yield self.function(read_bucket(self.files, self.bucket))


@dataclass(frozen=True)
class Frame:
    """Rows to come: parts, and what to do with each batch of them."""

    parts: tuple[Part, ...]
    maps: tuple[MapFunction, ...]
    starts: tuple[int, ...]  # places in the log that cut it into pieces of about equal size
    max_offset: int
    grouped_by: tuple[str, ...] = ()  # each part is one batch, with all rows of every group it holds

    def batches(self, part: Part, ahead: bool) -> Iterator[pl.DataFrame]:
        for batch in read_ahead(part.read()) if ahead else part.read():
            for function in self.maps:
                batch = function(batch)
            yield batch


class LocalEngine:
    """Runs on this machine's cores. `memory` bounds counters and buckets; `work` holds what a rerun can reuse."""

    def __init__(
        self, work: Path, workers: int | None = None, memory: int = 2 << 30, progress: Progress | None = None
    ) -> None:
        if memory < MIN_MEMORY:
            raise ResourceError(
                f"--memory {memory >> 20} MB is too small; the least is {MIN_MEMORY >> 20} MB."
            )
        self.work = work
        self.workers = workers or available_cores()
        self.memory = memory
        self.progress = progress or Progress(quiet=True)
        self._num_groups = 0

    # building frames

    def read(self, source: Source) -> Frame:
        units = source.units()
        starts = tuple(sorted(source.first_position(unit) for unit in units))
        return Frame(tuple(UnitPart(source, unit) for unit in units), (), starts, source.max_offset())

    def map(self, frame: Frame, function: MapFunction) -> Frame:
        return replace(frame, maps=(*frame.maps, function))

    def group(self, frame: Frame, by: Sequence[str], function: MapFunction, title: str) -> Frame:
        if frame.grouped_by == tuple(by):
            return self.map(frame, partial(_in_log_order, function))
        self._num_groups += 1
        stage = f"group-{self._num_groups}"
        buckets = self._kept_number(stage, self._num_buckets(frame))

        def bucket_of(rows: pl.DataFrame) -> Array:
            combined = np.zeros(rows.height, dtype=np.uint64)
            for name in by:
                key = rows[name] if rows[name].dtype == pl.String else rows[name].cast(pl.Int64)
                combined = combined * np.uint64(0x9E3779B185EBCA87) + hash64(key, 0)
            return (combined % np.uint64(buckets)).astype(np.int64)

        parts = self._scatter(frame, stage, bucket_of, buckets, partial(_in_log_order, function), title)
        return replace(frame, parts=parts, maps=(), grouped_by=tuple(by))

    # running them

    def collect(self, frame: Frame) -> pl.DataFrame:
        pieces = self._run(
            frame, "collect", lambda number, part, stage: list(self._watched(frame, part, stage))
        )
        batches = [batch for piece in pieces for batch in piece]
        return pl.concat(batches) if batches else pl.DataFrame()

    def measure(
        self,
        frame: Frame,
        extract: Callable[[pl.DataFrame], Extracted],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measured:
        counting = _Counting(counts, self.memory // 2, self.work / "counts")
        moments: dict[str, Moments] = {}
        rows = 0
        lock = threading.Lock()

        def task(number: int, part: Part, stage: Any) -> None:
            nonlocal rows
            for batch in self._watched(frame, part, stage):
                found = extract(batch)
                counting.add(found.counts, start=number)
                sums = {name: Moments.of(series) for name, series in found.moments.items()}
                with lock:
                    rows += found.rows
                    for name, value in sums.items():
                        moments[name] = moments.get(name, Moments()) + value

        self._run(frame, title, task)
        return Measured(rows, moments, counting.finish())

    def write(
        self, frame: Frame, into: Path, order: Order, seed: int, format: Format = "parquet"
    ) -> list[Shard]:
        if order != "log" or frame.grouped_by:
            frame = self._ordered(frame, order, seed, format)

        def task(number: int, part: Part, stage: Any) -> list[Shard]:
            record = self._record(format, number)
            if record.exists():
                stage.advance(part.num_bytes, 0)
                return [Shard(**shard) for shard in json.loads(record.read_text())]
            with ShardWriter(into, number, format) as writer:
                for batch in self._watched(frame, part, stage):
                    writer.add(batch)
                shards = writer.finish()
            write_whole(record, json.dumps([asdict(shard) for shard in shards]))
            return shards

        shards = [shard for found in self._run(frame, "write", task) for shard in found]
        return sorted(shards, key=lambda shard: (shard.split, shard.file))

    def _ordered(self, frame: Frame, order: Order, seed: int, format: Format) -> Frame:
        """The same rows in parts that follow each other in the order asked for."""
        buckets = self._kept_number(
            f"order-{format}", self._num_buckets(frame) if order != "log" else len(frame.starts)
        )
        key = partial(order_keys, order, seed)
        bounds = self._bounds(frame, order, buckets)

        def bucket_of(rows: pl.DataFrame) -> Array:
            return np.searchsorted(bounds, key(rows), side="right")

        parts = self._scatter(
            frame, f"order-{format}", bucket_of, len(bounds) + 1, partial(_sorted_by, key), "order"
        )
        return replace(frame, parts=parts, maps=(), grouped_by=())

    def _bounds(self, frame: Frame, order: Order, buckets: int) -> Array:
        if order == "log":
            return np.asarray(frame.starts[1:], dtype=np.int64).view(np.uint64)
        top = frame.max_offset if order == "interleave" else 1 << 64
        return np.array([top * number // buckets for number in range(1, buckets)], dtype=np.uint64)

    def _scatter(
        self,
        frame: Frame,
        stage_name: str,
        bucket_of: Callable[[pl.DataFrame], Array],
        buckets: int,
        function: MapFunction,
        title: str,
    ) -> tuple[Part, ...]:
        """Spill the rows of each part by bucket; the buckets become the parts of what follows."""
        folder = self.work / stage_name
        folder.mkdir(parents=True, exist_ok=True)

        def task(number: int, part: Part, stage: Any) -> list[Path]:
            record = self._record(stage_name, number)
            if record.exists():
                stage.advance(part.num_bytes, 0)
                return [folder / name for name in json.loads(record.read_text())]
            files: list[Path] = []
            for batch in _merged(self._watched(frame, part, stage), self._piece_bytes()):
                files.append(folder / f"{number:06d}-{len(files):04d}.arrow")
                write_buckets(batch, bucket_of(batch), buckets, files[-1])
            write_whole(record, json.dumps([file.name for file in files]))
            return files

        files = tuple(file for found in self._run(frame, title, task) for file in found)
        if not files:
            return ()
        size = max(1, sum(part.num_bytes for part in frame.parts) // buckets)
        return tuple(BucketPart(files, bucket, size, function) for bucket in range(buckets))

    def _num_buckets(self, frame: Frame) -> int:
        """Enough to keep all workers busy and to let each hold one, with room for its transformation."""
        num_bytes = sum(part.num_bytes for part in frame.parts)
        needed = -(-3 * num_bytes * 4 * self.workers // self.memory)
        useful = min(4 * self.workers, num_bytes // _USEFUL_BUCKET_BYTES)
        return max(1, useful, min(1024, needed))

    def _kept_number(self, stage: str, number: int) -> int:
        """The number of buckets that an interrupted run began this stage with, or the one given."""
        kept = self.work / f"{stage}.buckets"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, str(number))
        return int(kept.read_text())

    def _piece_bytes(self) -> int:
        return self.memory // (8 * self.workers)

    def _record(self, stage: str, number: int) -> Path:
        """The file whose presence says that this part of this stage is done."""
        return self.work / "done" / f"{stage}-{number:06d}.json"

    def _watched(self, frame: Frame, part: Part, stage: Any) -> Iterator[pl.DataFrame]:
        """The part's batches, reported as they go by; a batch's share of the part's bytes is estimated."""
        reported = 0
        # A few parts that cannot be cut, such as gzip files, leave cores idle: these read and decompress.
        for batch in frame.batches(part, ahead=len(frame.parts) < self.workers):
            step = min(part.num_bytes - reported, int(batch.estimated_size()))
            reported += step
            stage.advance(step, batch.height)
            yield batch
        stage.advance(part.num_bytes - reported, 0)

    def _run(self, frame: Frame, title: str, task: Callable[[int, Part, Any], T]) -> list[T]:
        """Work through all parts on all cores; the first error stops the rest."""
        (self.work / "done").mkdir(parents=True, exist_ok=True)
        total = sum(part.num_bytes for part in frame.parts)
        with self.progress.stage(title, total) as stage, ThreadPoolExecutor(self.workers) as pool:
            waiting = {
                pool.submit(task, number, part, stage): number for number, part in enumerate(frame.parts)
            }
            results: dict[int, T] = {}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        results[waiting.pop(future)] = future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return [results[number] for number in range(len(frame.parts))]


class _Counting:
    """Counters of one pass, shared by all threads; the largest goes to disk when together they exceed the bound."""

    def __init__(self, options: Mapping[str, CountOptions], memory: int, spill: Path) -> None:
        self.options = options
        self.counters = {name: Counter(option) for name, option in options.items()}
        self.memory = memory
        self.spill = spill
        self.files: dict[str, list[Path]] = {name: [] for name in options}
        self.num_kept_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        shutil.rmtree(spill, ignore_errors=True)

    def add(self, columns: Mapping[str, list[tuple[pl.Series, pl.Series]]], start: int) -> None:
        # Threads begin at different counters, so that they seldom wait for each other.
        names = list(columns)
        for name in names[start % max(1, len(names)) :] + names[: start % max(1, len(names))]:
            for series, positions in columns[name]:
                self.counters[name].add(series, positions)
        self._bound()

    def _bound(self) -> None:
        # A counter that grows holds its old and its new table for a moment: half of the bound is for that.
        with self._lock:
            while sum(counter.num_bytes for counter in self.counters.values()) > self.memory // 2:
                name = max(self.counters, key=lambda name: self.counters[name].num_bytes)
                self._spill(name)

    def _spill(self, name: str) -> None:
        self.spill.mkdir(parents=True, exist_ok=True)
        frame = self.counters[name].drain()
        path = self.spill / f"{list(self.options).index(name):04d}-{len(self.files[name]):06d}.arrow"
        buckets = (hash64(frame["value"], 1) % np.uint64(_COUNT_BUCKETS)).astype(np.int64)
        write_buckets(frame, buckets, _COUNT_BUCKETS, path)
        self.files[name].append(path)

    def finish(self) -> dict[str, Counts]:
        found = {name: self._finish(name) for name in self.options}
        shutil.rmtree(self.spill, ignore_errors=True)
        return found

    def _finish(self, name: str) -> Counts:
        option = self.options[name]
        missing = self.counters[name].num_missing
        if self.files[name]:
            self._spill(name)
        num_values = num_distinct = 0
        kept: list[pl.DataFrame] = []
        for frame in self._buckets(name):
            num_values += int(frame["count"].sum())
            num_distinct += frame.height
            kept.append(frame.filter(pl.col("count") >= option.min_count) if option.min_count > 1 else frame)
            self._check_size(name, kept)
        frame = pl.concat(kept)
        firsts = frame["first"] if option.track_first else None
        return Counts(frame["value"], frame["count"], firsts, num_values, missing, num_distinct)

    def _check_size(self, name: str, kept: list[pl.DataFrame]) -> None:
        """Values that get an id must fit into memory, with their lookup and room to sort them."""
        self.num_kept_bytes[name] = sum(int(frame.estimated_size()) for frame in kept) * _BYTES_FOR_LOOKUP
        if sum(self.num_kept_bytes.values()) > self.memory * 2:
            raise ResourceError(
                f'Values that get an id need more than --memory ({self.memory * 2 >> 20:,} MB), "{name}" most of all. '
                "Raise --memory, raise min_count or set max_size, or use hash or key instead of vocabulary."
            )

    def _buckets(self, name: str) -> Iterable[pl.DataFrame]:
        if not self.files[name]:
            yield self.counters[name].drain()
            return
        for bucket in range(_COUNT_BUCKETS):
            merged = Counter(self.options[name])
            frame = read_bucket(self.files[name], bucket)
            merged.add_counts(
                frame["value"], frame["count"], frame["first"] if "first" in frame.columns else None
            )
            yield merged.drain()


def order_keys(order: Order, seed: int, rows: pl.DataFrame) -> Array:
    """A number for each row by which the Table is sorted; ties are broken by place in the log."""
    positions = rows[POSITION].cast(pl.Int64).to_numpy()
    if order == "log":
        return positions.view(np.uint64)
    if order == "interleave":
        return (positions & ((1 << _OFFSET_BITS) - 1)).view(np.uint64)
    copies = rows[COPY].to_numpy().astype(np.uint64) if COPY in rows.columns else np.uint64(0)
    return hash_positions(rows[POSITION], seed) + copies * np.uint64(0x9E3779B185EBCA87)


def _sorted_by(key: Callable[[pl.DataFrame], Array], rows: pl.DataFrame) -> pl.DataFrame:
    ties = [name for name in (POSITION, COPY) if name in rows.columns]
    keyed = rows.with_columns(pl.Series("__order", key(rows)))
    return keyed.sort("__order", *ties, maintain_order=True).drop("__order")


def _in_log_order(function: MapFunction, rows: pl.DataFrame) -> pl.DataFrame:
    return function(rows.sort(POSITION, maintain_order=True))


def _merged(batches: Iterable[pl.DataFrame], num_bytes: int) -> Iterator[pl.DataFrame]:
    """Fewer, larger batches."""
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
