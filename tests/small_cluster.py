"""Clusters without a cluster: the two primitives in this process, or in one of its own, and an engine over them."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import polars as pl

from recmill.engines import counting
from recmill.engines.cluster import Cluster, ClusterEngine, Gather, Report, decode, encode
from recmill.engines.engine import Frame
from recmill.features.kernels import CountOptions, ExtractedValues, Measurements

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class SmallCluster:
    """Runs everything here. Functions arrive as copies, and rows as the bytes that go over the wire."""

    name = "small"

    def parallelism(self) -> int:
        return 2

    def each(self, parts: Sequence[P], function: Callable[[int, P], R], report: Report) -> list[R]:
        there = _copy(function)
        found = []
        for number, part in enumerate(parts):
            found.append(there(number, _copy(part)))
            report(number)
        return found

    def exchange(
        self,
        parts: Sequence[P],
        scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]],
        num_buckets: int,
        gather: Gather[R],
        report: Report,
    ) -> list[R]:
        there, at_bucket = _copy(scatter), _copy(gather)
        payloads: dict[int, list[bytes]] = defaultdict(list)
        for number, part in enumerate(parts):
            for bucket, rows in there(number, _copy(part)):
                assert 0 <= bucket < num_buckets
                payloads[bucket].append(encode(rows))
            report(number)
        return [at_bucket(bucket, map(decode, payloads[bucket])) for bucket in range(num_buckets)]

    def close(self) -> None:
        """Nothing was started."""


def _copy(something: T) -> T:
    return pickle.loads(pickle.dumps(something))  # type: ignore[no-any-return]


class ProcessCluster:
    """Runs everything in another process, so that the memory of this one is the driver's alone."""

    name = "process"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_exchanges = 0
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))

    def parallelism(self) -> int:
        return 2

    def each(self, parts: Sequence[P], function: Callable[[int, P], R], report: Report) -> list[R]:
        return list(self.pool.map(function, range(len(parts)), parts))

    def exchange(
        self,
        parts: Sequence[P],
        scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]],
        num_buckets: int,
        gather: Gather[R],
        report: Report,
    ) -> list[R]:
        self.num_exchanges += 1
        folder = self.folder / str(self.num_exchanges)
        self.each(parts, partial(_send_to_files, folder, scatter), report)
        return self.each(range(num_buckets), partial(_receive_from_files, folder, gather), report)

    def close(self) -> None:
        self.pool.shutdown()


def _send_to_files(
    folder: Path, scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]], number: int, part: P
) -> None:
    for place, (bucket, rows) in enumerate(scatter(number, part)):
        (folder / str(bucket)).mkdir(parents=True, exist_ok=True)
        (folder / str(bucket) / f"{number}-{place}").write_bytes(encode(rows))


def _receive_from_files(folder: Path, gather: Gather[R], number: int, bucket: int) -> R:
    files = sorted((folder / str(bucket)).glob("*"))
    return gather(bucket, (decode(file.read_bytes()) for file in files))


class SizedEngine(ClusterEngine):
    """Counts whose values take up to `small_bytes` come to the driver: with 0 none do, few as they may be."""

    def __init__(
        self,
        work: Path,
        small_bytes: int | None = None,
        cluster: Cluster | None = None,
        task_memory: int = 64 << 20,
    ) -> None:
        super().__init__(cluster or SmallCluster(), work, 256 << 20)
        self.small_bytes = small_bytes
        self.task_memory = task_memory
        self.num_measures = 0

    @property
    def memory_per_task(self) -> int:
        return self.task_memory

    def measure(
        self,
        frame: Frame,
        extract: Callable[[pl.DataFrame], ExtractedValues],
        counts: Mapping[str, CountOptions],
        title: str,
    ) -> Measurements:
        self.num_measures += 1
        folder = self.work / "counts" / str(self.num_measures)
        return counting.measure(self, frame, extract, counts, title, folder, self.small_bytes)
