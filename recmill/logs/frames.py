"""Data from Python callers, as a directory to read a log from.

Frames become Parquet files and paths become links, under the names of the recipe's `files`; a Ray Dataset or Spark
DataFrame becomes a directory of that name. So every stage, engine and process reads them like any other log, and a
stage that reads the log again (export) finds it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from recmill.errors import LogError
from recmill.logs.base import COMPRESSIONS
from recmill.logs.cluster_frames import column_names, column_types, is_cluster_frame, write_cluster_frame
from recmill.logs.columns import explain_missing
from recmill.logs.files import explained, find_files, locate
from recmill.logs.parquet import is_readable
from recmill.recipe.names import nearest
from recmill.recipe.recipe import Join, Log, Recipe, SideTable

LOG = "log"  # the key of the log itself, besides the names of side tables
_ROW_GROUP = 1 << 17  # rows; a log is split between row groups
_MAX_SECONDS = 1_600_000_000  # file times that every file system supports
_EXPECTED = (
    "Expected a directory, a file, a URL, a Polars, pandas or Arrow frame, a Ray Dataset, a Spark DataFrame, a list of "
    'files or frames, or a dict of them such as {"log": events, "items": items}.'
)


def open_data(recipe: Recipe, data: Any, new_folder: Callable[[], Path]) -> str:
    """The directory or URL to read: the given one, or a new folder with the given frames and files."""
    if isinstance(data, (str, os.PathLike)):
        path = os.fspath(data)
        if not isinstance(path, str):
            raise LogError(f"data: got a path of bytes. {_EXPECTED}")
        if not _is_file(path):
            return path
    sources = data if isinstance(data, Mapping) else {LOG: data}
    folder = new_folder()
    for key, spec, given in _by_spec(recipe, sources):
        _add(spec, given, folder, _argument(data, key))
    return str(folder)


def _argument(data: Any, key: str) -> str:
    """The caller's argument, for messages."""
    return f'data["{key}"]' if isinstance(data, Mapping) else "data"


def _by_spec(recipe: Recipe, sources: Mapping[Any, Any]) -> Iterator[tuple[str, Log | SideTable, Any]]:
    """Each source with its section of the recipe. A file name as a key stands for that file of the log."""
    needed = {operation.table for operation in recipe.rows if isinstance(operation, Join)}
    for key in sources:
        if not (key == LOG or key in recipe.tables or _is_named(str(key), recipe.log.files)):
            known = [LOG, *recipe.tables]
            raise LogError(
                f'data: recipe "{recipe.name}" has no "{key}"{nearest(str(key), known)}. '
                "Keys are log and its side tables; for a dict of columns, make a frame: polars.DataFrame(data)."
            )
    has_log = LOG in sources or any(key not in recipe.tables for key in sources)
    missing = [*([] if has_log else [LOG]), *sorted(needed - set(sources))]
    if missing:
        example = ", ".join(f'"{key}": ...' for key in [LOG, *sorted(needed)])
        raise LogError(
            f'data: recipe "{recipe.name}" also reads {" and ".join(missing)}. Give all of it: data={{{example}}}.'
        )
    for key, given in sources.items():
        if key in recipe.tables:
            yield key, recipe.tables[key], given
        else:
            yield key, recipe.log, given if key == LOG else _NamedSource(str(key), given)


class _NamedSource:
    """One file of a log with a given name."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.given = given


def _add(spec: Log | SideTable, given: Any, folder: Path, argument: str) -> None:
    """Add one log or side table to the folder."""
    if isinstance(given, _NamedSource):
        _add_one(spec, given.given, folder / given.name, argument)
        return
    if isinstance(given, (str, os.PathLike)) and not _is_file(os.fspath(given)):
        for file in find_files(spec.files, os.fspath(given)):
            _add_one(spec, file.path, folder / file.name, argument)
        return
    sources = list(given) if isinstance(given, (list, tuple)) else [given]
    if not sources:
        raise LogError(f"{argument}: is an empty list. {_EXPECTED}")
    for number, (name, source) in enumerate(zip(_names(spec, sources, argument), sources, strict=True)):
        where = f"{argument}[{number}]" if isinstance(given, (list, tuple)) else argument
        _add_one(spec, source, folder / name, where)


def _names(spec: Log | SideTable, sources: Sequence[Any], argument: str) -> list[str]:
    """A name for each source that the recipe's patterns match: its own, if they do, or one in their order."""
    own = [Path(source).name if isinstance(source, (str, os.PathLike)) else "" for source in sources]
    if all(name and _is_named(name, spec.files) for name in own) and len(set(own)) == len(own):
        return own
    suffixes = [Path(name).suffix if Path(name).suffix in COMPRESSIONS else "" for name in own]
    if len(spec.files) == len(sources):
        patterns = list(spec.files)
    elif len(spec.files) == 1 and "*" in spec.files[0]:
        patterns = [spec.files[0]] * len(sources)
    else:
        wanted = ", ".join(f'"{pattern}"' for pattern in spec.files)
        raise LogError(
            f"{argument}: has {len(sources)} files or frames; the recipe reads {wanted}. "
            'Concatenate the frames, or load the recipe with a pattern for several files, such as "*.csv".'
        )
    width = len(str(len(sources)))
    filled = [re.sub(r"\*+", f"{number:0{width}}", pattern) for number, pattern in enumerate(patterns)]
    if any(re.search(r"[?\[]", name) for name in filled):
        raise LogError(f'{argument}: give names that match "{spec.files[0]}": data={{"name": ..., ...}}.')
    return [
        name if name.endswith(suffix) else name + suffix
        for name, suffix in zip(filled, suffixes, strict=True)
    ]


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches this name; a name also matches its compressed forms."""
    return any(fnmatchcase(name, pattern + suffix) for pattern in patterns for suffix in ("", *COMPRESSIONS))


def _add_one(spec: Log | SideTable, source: Any, target: Path, argument: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(source, (str, os.PathLike)):
        _write_frame(spec, source, target, argument)
        return
    path = os.fspath(source)
    if "://" in path:
        filesystem, inner = locate(path)
        with explained(path), filesystem.open_input_file(inner) as remote, target.open("wb") as copy:
            shutil.copyfileobj(remote, copy)
    elif os.path.isfile(path):
        target.symlink_to(os.path.abspath(path))
    else:
        raise LogError(f"{argument}: {path}: no such file.")


def _is_file(path: str) -> bool:
    """Whether a path or URL names an existing file."""
    if "://" not in path:
        return os.path.isfile(path)
    filesystem, inner = locate(path)
    with explained(path):
        return bool(filesystem.get_file_info(inner).type == fs.FileType.File)


# frames


def _write_frame(spec: Log | SideTable, frame: Any, path: Path, argument: str) -> None:
    """Write the declared columns of a frame as Parquet, whatever the file is called."""
    _check_columns(spec, frame, argument)
    names = list(dict.fromkeys(column.name_in_file for column in spec.columns))
    if is_cluster_frame(frame):
        _check_types(spec, column_types(frame, names), argument)
        write_cluster_frame(frame, names, path, argument)
        return
    table = _to_arrow(frame, names, argument)
    _check_types(spec, dict(zip(table.schema.names, table.schema.types, strict=True)), argument)
    _write_table(table, path)


def _check_types(spec: Log | SideTable, types: Mapping[str, pa.DataType], argument: str) -> None:
    for column in spec.columns:
        kind = types.get(column.name_in_file)
        if kind is not None and not is_readable(column, kind):
            raise LogError(
                f'{argument}: column "{column.name_in_file}" is {kind}, which cannot be read as {column.type}. '
                "Change its type in the recipe or in the frame."
            )


def write_all_columns(frame: Any, path: Path, argument: str) -> None:
    """Write every column of a frame as Parquet."""
    names = _column_names(frame, argument)
    if is_cluster_frame(frame):
        write_cluster_frame(frame, names, path, argument)
    else:
        _write_table(_to_arrow(frame, names, argument), path)


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table.replace_schema_metadata(None), path, row_group_size=_ROW_GROUP, compression="lz4")
    # Jobs identify logs by size and time. Equal frames must have equal times, so that a repeated cell finds its
    # earlier results, and different frames must not.
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    time_ns = int.from_bytes(digest[:8], "big") % (_MAX_SECONDS * 10**9)
    os.utime(path, ns=(time_ns, time_ns))


def _check_columns(spec: Log | SideTable, frame: Any, argument: str) -> None:
    names = _column_names(frame, argument)
    for column in spec.columns:
        name = column.name_in_file
        if names.count(name) != 1:
            is_pandas = _is_of(frame, "pandas", "DataFrame")
            index = list(frame.index.names) if is_pandas else []
            hint = " It is the frame's index: call reset_index() first." if name in index else ""
            reason = explain_missing(name, names).replace("the file", "the frame")
            raise LogError(f"{argument}: {reason}{hint}")


def _column_names(frame: Any, argument: str) -> list[str]:
    if is_cluster_frame(frame):
        return column_names(frame, argument)
    if _is_of(frame, "polars", "LazyFrame"):
        return list(frame.collect_schema())
    if isinstance(frame, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return list(frame.schema.names)
    if _is_of(frame, "pandas", "DataFrame"):
        return [str(name) for name in frame.columns]
    if hasattr(frame, "__arrow_c_stream__") and hasattr(frame, "columns"):
        return [str(name) for name in frame.columns]
    kind = type(frame).__name__
    made = " Make a frame of it: polars.DataFrame(...)." if isinstance(frame, (dict, list, tuple)) else ""
    if hasattr(frame, "to_spark"):
        made = " A frame of pyspark.pandas has an order of its own: call to_spark() on it."
    raise LogError(f"{argument}: got {kind}. {_EXPECTED}{made}")


def _to_arrow(frame: Any, names: list[str], argument: str) -> pa.Table:
    """The columns of a frame, each once; None when it has none."""
    try:
        if _is_of(frame, "pandas", "DataFrame"):
            return pa.Table.from_pandas(frame[names], preserve_index=False)
        if _is_of(frame, "polars", "LazyFrame"):
            frame = frame.select(names).collect()
        if _is_of(frame, "polars", "DataFrame"):
            return frame.select(names).to_arrow()
        if isinstance(frame, (pa.RecordBatchReader, pa.Table)):
            return (frame if isinstance(frame, pa.Table) else frame.read_all()).select(names)
        return pa.table(frame).select(names)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise LogError(
            f"{argument}: the frame cannot be turned into Arrow columns ({reason}). Give each column one type."
        ) from error


def _is_of(value: Any, package: str, name: str) -> bool:
    """Whether a value is an instance of a class, or subclass, of a package that may not be installed."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(value).__mro__
    )
