"""Counting on a cluster: one exchange, after which each value's count is in one place and no process holds all.

Tasks count their part and send the counts to buckets by the value's hash. Each bucket sums them, drops rare values
and writes the rest, sorted, as a run on the shared disk. Only statistics return to the driver; it then reads small
counters, and large ones stay on disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path

import polars as pl

from recmill.engines.cluster import ClusterEngine, cut
from recmill.engines.engine import Frame
from recmill.features.kernels import (
    BYTES_FOR_LOOKUP,
    Counter,
    CountOptions,
    ExtractedValues,
    Measurements,
    Moments,
    StoredCounts,
    ValueCounts,
    run_file,
    runs_of_values,
    write_run,
)

_MAX_RUNS = 1024
_USEFUL_RUN_BYTES = 1 << 20
_BYTES_TO_COUNT = 8  # for each byte of the log, when all values are distinct


def measure(
    engine: ClusterEngine,
    frame: Frame,
    extract: Callable[[pl.DataFrame], ExtractedValues],
    counts: Mapping[str, CountOptions],
    title: str,
    folder: Path,
    small_bytes: int | None = None,
) -> Measurements:
    """Moments and counts of the values that `extract` yields for all batches of the frame.

    `folder`, which all tasks share, belongs to this call alone. Counts whose values take more than `small_bytes`
    together, by default an eighth of the memory with their lookups, stay in it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    runs = _Runs(dict(counts), folder, _num_runs(engine, frame) if counts else 0)
    scatter = _CountPart(runs, extract, engine.memory_per_task // 4)
    *merged, summary = engine.exchange(frame, title, scatter, runs.num_runs + 1, _MergeBucket(runs))
    assert isinstance(summary, _Summary)
    stored = {name: _stored(engine, runs, name, summary, merged) for name in counts}
    if small_bytes is None:
        small_bytes = engine.memory // 8 // BYTES_FOR_LOOKUP
    return Measurements(summary.rows, summary.moments, _read_small(stored, small_bytes))


def _num_runs(engine: ClusterEngine, frame: Frame) -> int:
    """Enough runs to keep all tasks busy, and for each to fit in memory."""
    needed = -(-_BYTES_TO_COUNT * frame.num_bytes // engine.memory_per_task)
    useful = min(2 * engine.tasks_at_once, frame.num_bytes // _USEFUL_RUN_BYTES)
    return max(1, useful, min(_MAX_RUNS, needed))


@dataclass(frozen=True)
class _Runs:
    """The counters, and the folders of their runs."""

    counts: Mapping[str, CountOptions]
    folder: Path
    num_runs: int

    def folder_of(self, name: str) -> Path:
        return self.folder / f"{list(self.counts).index(name):04d}"


@dataclass(frozen=True)
class _Summary:
    """The small results: the number of rows, counts of missing values, and moments."""

    rows: int = 0
    missing: Mapping[str, int] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)

    def __add__(self, other: _Summary) -> _Summary:
        missing = {
            name: self.missing.get(name, 0) + other.missing.get(name, 0)
            for name in {**self.missing, **other.missing}
        }
        moments = {
            name: self.moments.get(name, Moments()) + other.moments.get(name, Moments())
            for name in {**self.moments, **other.moments}
        }
        return _Summary(self.rows + other.rows, missing, moments)

    def to_frame(self) -> pl.DataFrame:
        moments = {name: astuple(value) for name, value in self.moments.items()}
        return pl.DataFrame({"summary": [json.dumps([self.rows, self.missing, moments])]})

    @classmethod
    def of_frame(cls, frame: pl.DataFrame) -> _Summary:
        rows, missing, moments = json.loads(frame["summary"][0])
        return cls(rows, missing, {name: Moments(*values) for name, values in moments.items()})


@dataclass(frozen=True)
class _CountPart:
    """Counts the batches of a part; a counter that would exceed its memory is sent and starts anew."""

    runs: _Runs
    extract: Callable[[pl.DataFrame], ExtractedValues]
    memory: int

    def __call__(self, number: int, batches: Iterator[pl.DataFrame]) -> Iterator[tuple[int, pl.DataFrame]]:
        counters = {name: Counter(options) for name, options in self.runs.counts.items()}
        summary = _Summary()
        for batch in batches:
            found = self.extract(batch)
            summary += _Summary(
                found.rows, {}, {name: Moments.of(column) for name, column in found.moments.items()}
            )
            for name, columns in found.counts.items():
                for column, positions in columns:
                    counters[name].add(column, positions)
            for name in sorted(counters, key=lambda name: -counters[name].num_bytes):
                if sum(counter.num_bytes for counter in counters.values()) > self.memory:
                    yield from self._send(counters, name)
        for name in counters:
            yield from self._send(counters, name)
        summary += _Summary(0, {name: counter.num_missing for name, counter in counters.items()})
        yield self.runs.num_runs, summary.to_frame()

    def _send(self, counters: Mapping[str, Counter], name: str) -> Iterator[tuple[int, pl.DataFrame]]:
        counted = counters[name].drain()
        number = list(counters).index(name)
        counted = counted.with_columns(counter=pl.lit(number, dtype=pl.Int32))
        return cut(counted, runs_of_values(counted["value"], self.runs.num_runs))


@dataclass(frozen=True)
class _RunFacts:
    """Facts about one run of one counter."""

    num_values: int
    num_distinct: int
    num_bytes: int


@dataclass(frozen=True)
class _MergeBucket:
    """Sums the counts of all parts for one hash, and writes a run for each counter."""

    runs: _Runs

    def __call__(self, bucket: int, frames: Iterator[pl.DataFrame]) -> _Summary | dict[str, _RunFacts]:
        if bucket == self.runs.num_runs:
            return reduce(add, map(_Summary.of_frame, frames), _Summary())
        names = list(self.runs.counts)
        counters: dict[str, Counter] = {}
        for frame in frames:
            name = names[frame["counter"][0]]
            counter = counters.setdefault(name, Counter(self.runs.counts[name]))
            firsts = frame["first"] if counter.track_first else None
            counter.add_counts(frame["value"], frame["count"], firsts)
        return {name: self._write(name, bucket, counter) for name, counter in counters.items()}

    def _write(self, name: str, bucket: int, counter: Counter) -> _RunFacts:
        counted = counter.drain()
        num_values, num_distinct = int(counted["count"].sum()), counted.height
        counted = counted.filter(pl.col("count") >= self.runs.counts[name].min_count)
        key = "first" if counter.track_first else "count"
        counted = counted.sort(key, "value", descending=[key == "count", False])
        folder = self.runs.folder_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        file = run_file(folder, bucket)
        num_bytes = write_run(counted, file, self.runs.num_runs) if counted.height else 0
        return _RunFacts(num_values, num_distinct, num_bytes)


# on the driver


def _stored(
    engine: ClusterEngine,
    runs: _Runs,
    name: str,
    summary: _Summary,
    merged: Sequence[_Summary | dict[str, _RunFacts]],
) -> StoredCounts:
    facts = [found[name] for found in merged if isinstance(found, dict) and name in found]
    return StoredCounts(
        runs.folder_of(name),
        runs.num_runs,
        runs.counts[name],
        num_values=sum(run.num_values for run in facts),
        num_missing=summary.missing.get(name, 0),
        num_distinct=sum(run.num_distinct for run in facts),
        num_bytes=sum(run.num_bytes for run in facts),
        memory=engine.memory,
    )


def _read_small(
    stored: Mapping[str, StoredCounts], small_bytes: int
) -> dict[str, ValueCounts | StoredCounts]:
    """Load the smallest counters, as many as fit into `small_bytes` together; the others stay on disk."""
    found: dict[str, ValueCounts | StoredCounts] = {}
    large: list[str] = []
    for name, counts in sorted(stored.items(), key=lambda item: item[1].num_bytes):
        if counts.num_bytes > small_bytes:
            large.append(name)
            continue
        small_bytes -= counts.num_bytes
        found[name] = counts.load(name)
        shutil.rmtree(counts.folder, ignore_errors=True)
    return found | {name: replace(stored[name], small_bytes=small_bytes // len(large)) for name in large}
