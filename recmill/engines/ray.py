"""Ray as a cluster: parts and buckets are tasks of Ray Data, rows go through its hash shuffle as (bucket, bytes).

The functions of a call are stored once in Ray's object store, and unpickled once in each process.
"""

from __future__ import annotations

import logging
import pickle
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.engines.calls import TaskCall, new_call
from recmill.engines.cluster import Gather, Report, decode, encode
from recmill.engines.ray_connection import connected
from recmill.errors import RecmillError, first_line

P = TypeVar("P")
R = TypeVar("R")

_MIN_OBJECT_STORE_BYTES = 128 << 20
_NUM_KEPT = 2  # calls whose functions a process caches: tasks of one may be ending while the next has begun
_RESULT = pa.schema([("number", pa.int64()), ("result", pa.large_binary())])
_SHUFFLED = pa.schema([("bucket", pa.int64()), ("payload", pa.large_binary())])
_ENVIRONMENT = {"POLARS_MAX_THREADS": "1"}  # tasks share the cores already
_BLOCK: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}


class RayCluster:
    """Tasks on Ray. Without an address, a cluster is started on this machine and stopped by `close`.

    An existing connection of the program is reused and left open. `workers` bounds concurrent tasks; `work` is a
    folder that all machines share.
    """

    name = "ray"

    def __init__(
        self, work: Path, address: str | None = None, workers: int | None = None, memory: int = 2 << 30
    ) -> None:
        self._connection = ExitStack()
        self._connection.enter_context(
            connected(
                address,
                workers,
                _ENVIRONMENT,
                object_store_memory=max(_MIN_OBJECT_STORE_BYTES, memory // 4),
                include_dashboard=False,
            )
        )
        self._work = work.absolute()
        self._workers = workers
        self._context = _data_context(workers, memory)

    def parallelism(self) -> int:
        import ray

        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
        return min(cpus, self._workers or cpus)

    def each(self, parts: Sequence[P], function: Callable[[int, P], R], report: Report) -> list[R]:
        if not parts:
            return []
        with self._calling((list(parts), function), len(parts), report) as tasks:
            results = _numbers(len(parts)).map_batches(partial(_run_parts, tasks), **_BLOCK)
            return _collected(results, len(parts))

    def exchange(
        self,
        parts: Sequence[P],
        scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]],
        num_buckets: int,
        gather: Gather[R],
        report: Report,
    ) -> list[R]:
        with self._calling((list(parts), scatter, num_buckets, gather), len(parts), report) as tasks:
            sent = _numbers(max(1, len(parts))).map_batches(partial(_scatter_parts, tasks), **_BLOCK)
            # Blocks are not split further, so that a bucket stays together; few buckets have few rows.
            by_bucket = (
                {"keys": ["bucket"], "num_blocks": num_buckets} if num_buckets > 2 else {"num_blocks": 1}
            )
            buckets = sent.repartition(**by_bucket)
            return _collected(buckets.map_batches(partial(_gather_buckets, tasks), **_BLOCK), num_buckets)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _calling(self, shipped: Any, num_parts: int, report: Report) -> Iterator[_RayCall]:
        """Ship the functions of tasks, report finished parts, and re-raise a task's error unchanged."""
        import ray
        from ray import cloudpickle
        from ray.data import DataContext

        with new_call(self._work) as call, DataContext.current(self._context), _silent():
            try:
                with call.reported(num_parts, report):
                    yield _RayCall(call, uuid.uuid4().hex, ray.put(cloudpickle.dumps(shipped)))  # type: ignore[no-untyped-call]
            except Exception as error:
                if failure := call.failure():
                    raise failure from None
                if isinstance(error, ray.exceptions.RayError):
                    raise _ray_failed(error) from error
                raise


# functions of blocks, which run on the machines of the cluster


_shipped: OrderedDict[str, Any] = OrderedDict()  # by call, in each process


@dataclass(frozen=True)
class _RayCall:
    """What the tasks of one call have in common."""

    call: TaskCall
    key: str
    # A reference to bytes: for an object, Ray would retry for ever when unpickling fails.
    shipped: Any

    def open(self) -> Any:
        import ray

        if self.key not in _shipped:
            while len(_shipped) >= _NUM_KEPT:
                _shipped.popitem(last=False)
            _shipped[self.key] = pickle.loads(ray.get(self.shipped))
        return _shipped[self.key]


def _run_parts(tasks: _RayCall, numbers: pa.Table) -> Iterator[pa.Table]:
    for number in numbers["id"].to_pylist():
        with tasks.call.watched(number):
            parts, function = tasks.open()
            result = function(number, parts[number])
        tasks.call.done(number)
        yield _result(number, result)


def _scatter_parts(tasks: _RayCall, numbers: pa.Table) -> Iterator[pa.Table]:
    for number in numbers["id"].to_pylist():
        with tasks.call.watched(number):
            parts, scatter, num_buckets, _ = tasks.open()
            if number == 0:  # every bucket gets a row, so that gather is called for empty ones too
                yield pa.table([range(num_buckets), [None] * num_buckets], schema=_SHUFFLED)
            if number < len(parts):
                for bucket, frame in scatter(number, parts[number]):
                    yield pa.table([[bucket], [encode(frame)]], schema=_SHUFFLED)
        tasks.call.done(number)


def _gather_buckets(tasks: _RayCall, block: pa.Table) -> Iterator[pa.Table]:
    buckets = block["bucket"].to_numpy()
    for bucket in np.unique(buckets).tolist():
        with tasks.call.watched(bucket):
            *_, gather = tasks.open()
            rows = np.flatnonzero(buckets == bucket).tolist()
            result = gather(bucket, _frames(block["payload"], rows))
        yield _result(bucket, result)


def _frames(payloads: pa.ChunkedArray, rows: list[int]) -> Iterator[pl.DataFrame]:
    for row in rows:
        payload = payloads[row]
        if payload.is_valid:
            yield decode(payload.as_buffer())


def _result(number: int, result: Any) -> pa.Table:
    return pa.table([[number], [pickle.dumps(result)]], schema=_RESULT)


# on the driver


def _numbers(count: int) -> Any:
    """A block for each number, so that each is a task of its own."""
    import ray

    return ray.data.range(count, override_num_blocks=count)


def _collected(results: Any, count: int) -> list[Any]:
    found: dict[int, Any] = {}
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        for number, result in zip(batch["number"].to_pylist(), batch["result"].to_pylist(), strict=True):
            found[number] = pickle.loads(result)
    return [found[number] for number in range(count)]


def _data_context(workers: int | None, memory: int) -> Any:
    """Settings of Ray Data for our calls alone."""
    from ray.data import DataContext, ExecutionResources
    from ray.data.context import ShuffleStrategy

    with warnings.catch_warnings():  # copying it sets options that Ray Data itself deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # shuffles by tasks, which are retried when they are lost
    context.shuffle_strategy = ShuffleStrategy.SHUFFLE_V2
    context.shuffle_compression = "none"  # payloads are compressed
    context.shuffle_input_batch_bytes = memory // 8
    if workers is not None:
        context.execution_options.resource_limits = ExecutionResources(cpu=workers)
    return context


@contextmanager
def _silent() -> Iterator[None]:
    """Silence Ray Data's messages about the end of calls, and about errors that we report ourselves."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _ray_failed(error: Exception) -> RecmillError:
    return RecmillError(f"Ray gave up: {first_line(error)} Run the same command again; it resumes.")
