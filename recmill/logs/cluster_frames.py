"""Ray Datasets and Spark DataFrames as files of a log, written by tasks of their own cluster.

The rows never come to this process. A frame becomes a directory of Parquet files in its order, with a file _SUCCESS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recmill.errors import LogError, first_line
from recmill.logs.files import FINISHED

_TIMES = "spark.sql.parquet.outputTimestampType"  # by default nanoseconds, in which the year 9999 overflows


def is_cluster_frame(value: Any) -> bool:
    """Whether a value is a Ray Dataset or a Spark DataFrame; imports neither Ray nor Spark."""
    return is_ray(value) or is_spark(value)


def is_ray(value: Any) -> bool:
    return any(kind.__name__ == "Dataset" and _package(kind) == "ray" for kind in type(value).__mro__)


def is_spark(value: Any) -> bool:
    """Whether a value is a DataFrame of Spark or Spark Connect; those of pyspark.pandas are others."""
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.startswith("pyspark.sql.")
        for kind in type(value).__mro__
    )


def is_elsewhere(value: Any) -> bool:
    """Whether tasks that write a frame may run on other machines than this one."""
    if is_ray(value):
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        names = {node["NodeManagerHostname"] for node in nodes if node["Alive"]}
        return names != {socket.gethostname()}
    if is_spark(value):
        session = value.sparkSession
        host = session.client.host if _is_connect(value) else "localhost"
        is_local = str(session.conf.get("spark.master", "")).startswith("local")
        return not is_local or host not in ("localhost", "127.0.0.1", "::1")
    return False


def frames_in(data: Any) -> Iterator[Any]:
    """Each source of a caller's data."""
    for value in data.values() if isinstance(data, Mapping) else [data]:
        yield from value if isinstance(value, (list, tuple)) else [value]


def column_names(frame: Any, argument: str) -> list[str]:
    if is_spark(frame):
        return list(frame.columns)
    with _explained(frame, argument):
        schema = frame.schema()
    if schema is None:
        raise LogError(f"{argument}: the Ray Dataset has no rows and no columns.")
    return [str(name) for name in schema.names]


def column_types(frame: Any, names: list[str]) -> dict[str, pa.DataType]:
    """The Arrow types of columns, as far as they are known before the rows are."""
    if is_ray(frame):
        schema = frame.schema().base_schema
        return {name: schema.field(name).type for name in names} if isinstance(schema, pa.Schema) else {}
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_type

    types = {}
    for field in frame.schema.fields:
        if field.name in names and field.dataType.typeName() == "timestamp":
            types[field.name] = pa.timestamp("us", "UTC")
        elif field.name in names:
            with suppress(PySparkTypeError, AssertionError):  # types of Spark alone, and lists of times
                types[field.name] = to_arrow_type(field.dataType)
    return types


def write_cluster_frame(frame: Any, names: list[str], folder: Path, argument: str) -> None:
    """Write columns of a frame as the Parquet files of a new directory, in the frame's order."""
    with _explained(frame, argument):
        if is_ray(frame):
            _write_ray(frame, names, folder)
        else:
            _write_spark(frame, names, folder, argument)


def _write_ray(frame: Any, names: list[str], folder: Path) -> None:
    from recmill.logs.ray_datasink import ParquetParts

    folder.mkdir()
    chosen = frame.select_columns(names)
    options = chosen.context.execution_options
    kept, options.preserve_order = options.preserve_order, True
    try:
        chosen.write_datasink(ParquetParts(str(folder)))
    finally:
        options.preserve_order = kept
    if not os.listdir(folder):
        types = column_types(frame, names)
        pq.write_table(pa.table({name: pa.nulls(0, types.get(name)) for name in names}), folder / "0.parquet")
    (folder / FINISHED).touch()


def _write_spark(frame: Any, names: list[str], folder: Path, argument: str) -> None:
    package = "pyspark.sql.connect" if _is_connect(frame) else "pyspark.sql"
    functions: Any = import_module(f"{package}.functions")
    observation: Any = import_module(f"{package}.observation").Observation()
    chosen = frame.select(*("`" + name.replace("`", "``") + "`" for name in names))
    counted = chosen.observe(observation, functions.count(functions.lit(1)).alias("rows"))
    settings = frame.sparkSession.conf
    kept = settings.get(_TIMES)
    settings.set(_TIMES, "TIMESTAMP_MICROS")
    try:
        # With its scheme, because the cluster's default file system may be another one.
        counted.write.option("compression", "snappy").parquet(f"file://{folder}")
    finally:
        settings.set(_TIMES, kept)
    wrote = int(observation.get.get("rows", 0))
    found = sum(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
    if found != wrote:
        raise LogError(
            f"{argument}: Spark wrote {wrote:,} rows to {folder}, of which {found:,} are visible here. Its executors "
            "write to disks of their own: results must lie on a file system that all machines share."
        )


@contextmanager
def _explained(frame: Any, argument: str) -> Iterator[None]:
    """Convert errors of Ray, Spark and the user's own functions in their tasks to a LogError."""
    try:
        yield
    except LogError:
        raise
    except Exception as error:
        kind = "Ray Dataset" if is_ray(frame) else "Spark DataFrame"
        raise LogError(f"{argument}: the {kind} cannot be written ({_reason(error).rstrip('.')}).") from error


def _reason(error: Exception) -> str:
    """What a user's function raised in a task, or the first line of another error."""
    raised, is_wrapped, _ = str(error).partition("\n\nThe above exception was the direct cause")
    if is_wrapped:  # the text is all that Ray keeps of it
        return raised.splitlines()[-1]
    cause = getattr(error, "cause", None)  # of Ray
    return first_line(cause if isinstance(cause, Exception) else error)


def _is_connect(frame: Any) -> bool:
    return any("pyspark.sql.connect." in kind.__module__ for kind in type(frame).__mro__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
