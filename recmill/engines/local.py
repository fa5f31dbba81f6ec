"""The default engine: threads of one process over units of the log, with bounded memory, resumable."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from recmill.artifacts.work import read_record, write_record
from recmill.engines.engine import BucketOf, Engine, Frame, MapFunction, Partition, T, Task, merged, record_of
from recmill.engines.spill import read_bucket, write_buckets
from recmill.errors import ResourceError
from recmill.features.kernels import (
    BYTES_FOR_LOOKUP,
    Counter,
    CountOptions,
    ExtractedValues,
    Measurements,
    Moments,
    ValueCounts,
    hash64,
)
from recmill.reporting.machine import available_cores
from recmill.reporting.progress import Progress, ProgressBar

_COUNT_BUCKETS = 64


@dataclass(frozen=True)
class BucketPart:
    """One bucket of spilled rows; `function` receives all of it at once."""

    files: tuple[Path, ...]
    bucket: int
    num_bytes: int
    function: MapFunction

    def read(self) -> Iterator[pl.DataFrame]:
        yield self.function(read_bucket(self.files, self.bucket))


class LocalEngine(Engine):
    """Runs on this machine's cores. `memory` bounds counters and buckets of all threads together."""

    def __init__(
        self, work: Path, workers: int | None = None, memory: int = 2 << 30, progress: Progress | None = None
    ) -> None:
        super().__init__(work, memory, progress)
        self.workers = workers or available_cores()

    @property
    def tasks_at_once(self) -> int:
        return self.workers

    @property
    def memory_per_task(self) -> int:
        return self.memory // self.workers

    def collect(self, frame: Frame) -> pl.DataFrame:
        pieces = self.run(frame, "collect", _all_batches)
        batches = [batch for piece in pieces for batch in piece]
        return pl.concat(batches) if batches else pl.DataFrame()

    def measure(
        self,
        frame: Frame,
        extract: Callable[[pl.DataFrame], ExtractedValues],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measurements:
        counting = _Counting(counts, self.memory // 2, self.work / "counts")
        moments: dict[str, Moments] = {}
        rows = 0
        lock = threading.Lock()

        def task(number: int, batches: Iterator[pl.DataFrame]) -> None:
            nonlocal rows
            for batch in batches:
                found = extract(batch)
                counting.add(found.counts, start=number)
                sums = {name: Moments.of(series) for name, series in found.moments.items()}
                with lock:
                    rows += found.rows
                    for name, value in sums.items():
                        moments[name] = moments.get(name, Moments()) + value

        self.run(frame, title, task)
        return Measurements(rows, moments, counting.finish())

    def _scatter(
        self, frame: Frame, stage: str, bucket_of: BucketOf, buckets: int, function: MapFunction, title: str
    ) -> tuple[Partition, ...]:
        """Spill the rows of each part by bucket; the buckets become the parts of the result."""
        (self.work / stage).mkdir(parents=True, exist_ok=True)
        task = partial(_spill_part, self.work, stage, bucket_of, buckets, self._chunk_bytes())
        files = tuple(file for found in self.run(frame, title, task) for file in found)
        if not files:
            return ()
        size = max(1, frame.num_bytes // buckets)
        return tuple(BucketPart(files, bucket, size, function) for bucket in range(buckets))

    def run(self, frame: Frame, title: str, task: Task[T]) -> list[T]:
        """Run all parts on all cores; the first error stops the rest."""
        # A few unsplittable parts, such as gzip files, leave cores idle: these prefetch and decompress.
        ahead = len(frame.parts) < self.workers

        def watched(number: int, part: Partition) -> T:
            batches = _Watched(frame.batches(part, ahead), part.num_bytes, stage)
            found = task(number, batches)
            batches.end()
            return found

        with (
            self.progress.stage(title, frame.num_bytes) as stage,
            ThreadPoolExecutor(self.workers) as pool,
        ):
            waiting = {pool.submit(watched, number, part): number for number, part in enumerate(frame.parts)}
            results: dict[int, T] = {}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        results[waiting.pop(future)] = future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return [results[number] for number in range(len(frame.parts))]


class _Watched:
    """A part's batches with progress reports; a batch's fraction of the part's bytes is estimated."""

    def __init__(self, batches: Iterator[pl.DataFrame], num_bytes: int, stage: ProgressBar) -> None:
        self.batches = batches
        self.left = num_bytes
        self.stage = stage

    def __iter__(self) -> Iterator[pl.DataFrame]:
        return self

    def __next__(self) -> pl.DataFrame:
        batch = next(self.batches)
        step = min(self.left, int(batch.estimated_size()))
        self.left -= step
        self.stage.advance(step, batch.height)
        return batch

    def end(self) -> None:
        self.stage.advance(self.left, 0)
        self.left = 0


def _all_batches(number: int, batches: Iterator[pl.DataFrame]) -> list[pl.DataFrame]:
    return list(batches)


def _spill_part(
    work: Path,
    stage: str,
    bucket_of: BucketOf,
    buckets: int,
    piece_bytes: int,
    number: int,
    batches: Iterator[pl.DataFrame],
) -> list[Path]:
    folder = work / stage
    record = record_of(work, stage, number)
    if record.exists():
        return [folder / name for name in read_record(record)]
    files: list[Path] = []
    for batch in merged(batches, piece_bytes):
        files.append(folder / f"{number:06d}-{len(files):04d}.arrow")
        write_buckets(batch, bucket_of(batch), buckets, files[-1])
    write_record(record, [file.name for file in files], files)
    return files


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
        # Threads start at different counters, so that they rarely wait for each other.
        names = list(columns)
        for name in names[start % max(1, len(names)) :] + names[: start % max(1, len(names))]:
            for series, positions in columns[name]:
                self.counters[name].add(series, positions)
        self._bound()

    def _bound(self) -> None:
        # A growing counter briefly holds its old and its new table: half of the bound is reserved for that.
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

    def finish(self) -> dict[str, ValueCounts]:
        found = {name: self._finish(name) for name in self.options}
        shutil.rmtree(self.spill, ignore_errors=True)
        return found

    def _finish(self, name: str) -> ValueCounts:
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
        return ValueCounts(frame["value"], frame["count"], firsts, num_values, missing, num_distinct)

    def _check_size(self, name: str, kept: list[pl.DataFrame]) -> None:
        """Check that values that get an id fit into memory, with their lookup and room to sort them."""
        self.num_kept_bytes[name] = sum(int(frame.estimated_size()) for frame in kept) * BYTES_FOR_LOOKUP
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
