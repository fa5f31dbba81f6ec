"""Spark as a cluster: parts run as tasks of `mapInArrow`, buckets are a shuffle of (bucket, bytes).

Only DataFrames are used, so that any session works (local[4], spark://HOST:PORT, yarn, k8s://...), and Spark Connect
(sc://HOST:PORT). The functions of tasks and their records are in a folder that all nodes share.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa

from recmill.engines.calls import TaskCall, new_call
from recmill.engines.cluster import Gather, Report, decode, encode
from recmill.errors import (
    ArtifactError,
    MissingPackage,
    RecmillError,
    ResourceError,
    first_line,
)
from recmill.reporting.machine import available_cores

P = TypeVar("P")
R = TypeVar("R")

_PAYLOAD_BYTES = 4 << 20  # bytes of rows in one row of the shuffle, before compression
_BATCH_BYTES = 16 << 20  # bytes of such rows between Spark and Python
_RESULT = pa.schema([("number", pa.int32()), ("result", pa.binary())])
_SHUFFLED = pa.schema([("bucket", pa.int32()), ("payload", pa.binary())])

# Sent to all buckets when a part ended early: what they get is incomplete, and must not be used. It travels with the
# rows, because another node may see the records of a call late.
_NOT_WHOLE = b""
_SIGNS_OF_LOSS = ("ExecutorLostFailure", "Python worker exited unexpectedly")

# For each session, set for that session alone.
_SESSION = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(_BATCH_BYTES),
    "spark.sql.shuffle.partitions": "8",
}
# For a Spark application that we start.
_APPLICATION = {
    "spark.app.name": "recmill",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.executorEnv.POLARS_MAX_THREADS": "1",  # tasks share the cores already
}
_ON_THIS_MACHINE = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


class SparkCluster:
    """Tasks on Spark. `work` must be a folder that all nodes share; `conf` overrides our settings.

    An active session is reused and left running; one that is started here ends with `close`.
    """

    name = "spark"

    def __init__(
        self,
        work: Path,
        address: str | None = None,
        conf: Mapping[str, str] | None = None,
        memory: int = 2 << 30,
    ) -> None:
        self._work = work.absolute()
        self._work.mkdir(parents=True, exist_ok=True)
        self._log = self._work / "spark.log"  # output of a Spark that is started here
        self._session, self._is_ours = _open_session(address, conf or {}, memory, self._log)
        self._parallelism: int | None = None

    def parallelism(self) -> int:
        if self._parallelism is None:
            # Spark splits a range into one partition per core, unless configured otherwise.
            pieces = self._session.range(1 << 14).selectExpr("spark_partition_id() AS piece").toArrow()
            self._parallelism = len(pieces["piece"].unique())
        return self._parallelism

    def each(self, parts: Sequence[P], function: Callable[[int, P], R], report: Report) -> list[R]:
        """Call function(number, part) for each part, on some node; results in the order of parts."""
        if not parts:
            return []
        with self._calling((list(parts), function), len(parts), report) as tasks:
            results = self._numbers(len(parts)).mapInArrow(
                partial(_run_part, tasks), "number int, result binary"
            )
            return self._collected(tasks, results, len(parts))

    def exchange(
        self,
        parts: Sequence[P],
        scatter: Callable[[int, P], Iterator[tuple[int, pl.DataFrame]]],
        num_buckets: int,
        gather: Gather[R],
        report: Report,
    ) -> list[R]:
        """Frames that scatter yields for a bucket, from all parts, are streamed to one call gather(bucket, frames)."""
        with self._calling((list(parts), scatter, num_buckets, gather), len(parts), report) as tasks:
            sent = self._numbers(max(1, len(parts))).mapInArrow(
                partial(_scatter_part, tasks), "bucket int, payload binary"
            )
            # One partition per bucket: with an explicit number, Spark neither splits nor merges them.
            buckets = sent.repartitionById(num_buckets, "bucket")
            results = buckets.mapInArrow(partial(_gather_bucket, tasks), "number int, result binary")
            return self._collected(tasks, results, num_buckets)

    def close(self) -> None:
        if self._is_ours:
            self._session.stop()

    def _numbers(self, count: int) -> Any:
        return self._session.range(0, count, 1, numPartitions=count)

    @contextmanager
    def _calling(self, shipped: Any, num_parts: int, report: Report) -> Iterator[_SparkCall]:
        with new_call(self._work) as call, self._cancelled_on_error(call.folder.name):
            tasks = _SparkCall.shipping(shipped, call)
            with call.reported(num_parts, report):
                yield tasks

    @contextmanager
    def _cancelled_on_error(self, tag: str) -> Iterator[None]:
        """Cancel the remaining tasks of a call when it ends."""
        self._session.addTag(tag)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # Spark itself may be gone
                self._session.interruptTag(tag)
            raise
        finally:
            with suppress(Exception):
                self._session.removeTag(tag)

    def _collected(self, tasks: _SparkCall, results: Any, count: int) -> list[Any]:
        """The results of all tasks, or the error of one of them."""
        from pyspark.errors import PySparkException

        try:
            table = results.toArrow()
        except PySparkException as error:
            raise tasks.call.failure() or _spark_failed(error, self._log) from None
        found = dict(zip(table["number"].to_pylist(), table["result"].to_pylist(), strict=True))
        if len(found) < count:
            raise tasks.call.failure() or ResourceError(
                "A task failed, but its error record is not visible here. The folder of the output must lie on a "
                "file system that all machines of the cluster share, under the same path."
            )
        return [pickle.loads(found[number]) for number in range(count)]


@dataclass(frozen=True)
class _SparkCall:
    """What each task of a call receives: where its function is stored, and where to write its record."""

    call: TaskCall
    # Of the file with the functions. It travels with Spark's own task, so that a modified file is not run.
    digest: str

    @classmethod
    def shipping(cls, shipped: Any, call: TaskCall) -> _SparkCall:
        content = _pickled(shipped)
        (call.folder / "shipped").write_bytes(content)
        return cls(call, sha256(content).hexdigest())

    def shipped(self) -> Any:
        return _unpickled(self.call.folder / "shipped", self.digest)

    @contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Record one of our errors and end the task normally: a retry would not help."""
        try:
            with self.call.watched(number):
                yield
        except RecmillError:
            (self.call.folder / "given-up").touch()

    def are_given_up(self) -> bool:
        return (self.call.folder / "given-up").exists()


@lru_cache(maxsize=2)
def _unpickled(path: Path, digest: str) -> Any:
    """The functions of a call, read once per process. Tasks of the previous call may still be ending."""
    content = path.read_bytes()
    if sha256(content).hexdigest() != digest:
        raise ArtifactError(
            f"{path} is not what this call wrote: another program changed it, so it is not run. "
            "Check who may write there, and run the same command again; it resumes."
        )
    return pickle.loads(content)


# Functions of Arrow batches for `mapInArrow`, which run on the nodes.


def _run_part(tasks: _SparkCall, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    parts, function = tasks.shipped()
    for number in _numbers_in(batches):
        if tasks.are_given_up():
            return
        with tasks.watched(number):
            result = _pickled(function(number, parts[number]))
            tasks.call.done(number)
            yield _result(number, result)


def _scatter_part(tasks: _SparkCall, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    parts, scatter, num_buckets, _ = tasks.shipped()
    for number in _numbers_in(batches):
        if number == 0:  # every bucket gets a row, so that gather is called for empty ones too
            yield _to_all(num_buckets, None)
        is_whole = number >= len(parts)
        if not is_whole and not tasks.are_given_up():
            with tasks.watched(number):
                yield from _in_batches(
                    (bucket, payload)
                    for bucket, frame in scatter(number, parts[number])
                    for payload in _payloads(frame)
                )
                tasks.call.done(number)
                is_whole = True
        if not is_whole:
            yield _to_all(num_buckets, _NOT_WHOLE)


def _gather_bucket(tasks: _SparkCall, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    parts, *_, gather = tasks.shipped()
    first = next(batches, None)
    if first is None or tasks.are_given_up():
        return
    bucket = int(first["bucket"][0].as_py())
    with tasks.watched(len(parts) + bucket):
        yield _result(bucket, _pickled(gather(bucket, _frames_in(chain([first], batches)))))


def _numbers_in(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _frames_in(batches: Iterable[pa.RecordBatch]) -> Iterator[pl.DataFrame]:
    for batch in batches:
        for payload in batch["payload"]:
            if payload.is_valid and not len(payload.as_buffer()):
                raise RecmillError("A part is missing; its own record has the reason.")
            if payload.is_valid:
                yield decode(payload.as_buffer())


def _in_batches(rows: Iterable[tuple[int, bytes]]) -> Iterator[pa.RecordBatch]:
    """Rows of the shuffle, several at a time within a bound of bytes."""
    held: list[tuple[int, bytes]] = []
    num_bytes = 0
    for row in rows:
        held.append(row)
        num_bytes += len(row[1])
        if num_bytes >= _BATCH_BYTES // 2:
            yield pa.record_batch(list(zip(*held, strict=True)), schema=_SHUFFLED)
            held, num_bytes = [], 0
    if held:
        yield pa.record_batch(list(zip(*held, strict=True)), schema=_SHUFFLED)


def _to_all(num_buckets: int, payload: bytes | None) -> pa.RecordBatch:
    return pa.record_batch([range(num_buckets), [payload] * num_buckets], schema=_SHUFFLED)


def _result(number: int, result: bytes) -> pa.RecordBatch:
    return pa.record_batch([[number], [result]], schema=_RESULT)


def _payloads(frame: pl.DataFrame) -> Iterator[bytes]:
    """A frame as payloads of bounded size."""
    pieces = max(1, -(-int(frame.estimated_size()) // _PAYLOAD_BYTES))
    rows = max(1, -(-frame.height // pieces))
    for start in range(0, max(1, frame.height), rows):
        yield encode(frame.slice(start, rows))


def _pickled(value: Any) -> bytes:
    from pyspark import cloudpickle

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


# on the driver


def _open_session(address: str | None, conf: Mapping[str, str], memory: int, log: Path) -> tuple[Any, bool]:
    """A session with its own settings, and whether we started its application."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise MissingPackage('Engine "spark"', "pyspark", "spark") from None
    address = address or conf.get("spark.master") or os.environ.get("SPARK_REMOTE")
    if address and address.startswith("sc://"):
        return _connected(address, conf), True
    if active := _active_session():
        return _beside(active, address, conf), False
    return _started(address or f"local[{available_cores()}]", conf, memory, log), True


def _active_session() -> Any:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _started(address: str, conf: Mapping[str, str], memory: int, log: Path) -> Any:
    """Start a Spark application. Its output goes to a file, not into ours."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    _check_java()
    if address.startswith("spark://"):
        _check_answers(address, "Spark master")
    ours = {**_APPLICATION, **_SESSION, **_settings_for(address, conf, memory)}
    settings = SparkConf().setAll([*ours.items(), *conf.items(), ("spark.master", address)])
    try:
        gateway = SparkContext._gateway  # this process has one Java process
        if gateway is None:
            with open(log, "ab") as file:
                gateway = launch_gateway(settings, {"stdout": file, "stderr": file})  # type: ignore[no-untyped-call]
        context = SparkContext(conf=settings, gateway=gateway)
        session = SparkSession(context)
    except (PySparkException, Py4JError) as error:
        raise _spark_failed(error, log) from None
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # we report errors ourselves
    own_python = sys.executable if address.startswith("local") else context.pythonExec
    context.pythonExec = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or own_python
    return session


def _settings_for(address: str, conf: Mapping[str, str], memory: int) -> dict[str, str]:
    if address.startswith("local"):
        return _ON_THIS_MACHINE
    # Memory of Python counts as overhead where memory is granted: a container that exceeds it is killed.
    tasks = int(conf.get("spark.executor.cores", "1"))
    return {"spark.executor.memoryOverhead": f"{tasks * memory >> 20}m"}


def _beside(active: Any, address: str | None, conf: Mapping[str, str]) -> Any:
    """A session with its own settings in the running application."""
    running = active.conf.get("spark.master", "")
    if address and address != running:
        raise RecmillError(
            f"A Spark session is active at {running}, but the address given is {address}. "
            "Leave the address out to use that session, or stop it first."
        )
    return _with_settings(active.newSession(), conf)


def _connected(address: str, conf: Mapping[str, str]) -> Any:
    """A session of its own at a Spark Connect server."""
    try:
        from pyspark.sql.connect.session import SparkSession
    except ImportError:
        raise MissingPackage(f'Engine "spark" at {address}', "pyspark[connect]", "spark") from None
    _check_answers(address, "Spark Connect server")
    return _with_settings(SparkSession.builder.remote(address).create(), conf)


def _with_settings(session: Any, conf: Mapping[str, str]) -> Any:
    from pyspark.errors import PySparkException

    for key, value in {**_SESSION, **conf}.items():
        try:
            session.conf.set(key, value)
        except PySparkException as error:
            raise RecmillError(
                f"--spark-conf {key}={value} cannot be set in a Spark application that is running already: "
                f"{first_line(error)} Set it where that application is started."
            ) from None
    return session


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if not shutil.which("java", path=f"{home}/bin" if home else None):
        raise RecmillError(
            f'Engine "spark" needs Java 17 or later, and there is no {home + "/bin/" if home else ""}java. Install it: '
            "apt-get install openjdk-17-jre-headless. Or use a Spark Connect server: --address sc://HOST:PORT"
        )


def _check_answers(address: str, what: str) -> None:
    """Fail fast: Spark itself would retry for minutes."""
    hosts = urlsplit(address).netloc.split(",")
    for host in hosts:
        name, _, port = host.rpartition(":") if ":" in host else (host, "", "15002")
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=10).close()
            return
        except (OSError, ValueError):
            continue
    raise RecmillError(f"No {what} answers at {address}. Start it, or give its address: --address URL")


def _spark_failed(error: Exception, log: Path) -> RecmillError:
    where = f" What Spark said: {log}" if log.exists() else ""
    if any(sign in str(error) for sign in _SIGNS_OF_LOSS):
        return ResourceError(
            "Spark lost the process of a task again and again. Mostly that is memory: lower --memory, or give "
            f"executors more: --spark-conf spark.executor.memoryOverhead=4g.{where}"
        )
    return RecmillError(f"Spark gave up: {first_line(error)}{where}")
