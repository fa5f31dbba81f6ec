"""Column profiles of a file: a sample of its rows, and the type and format of each column."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.errors import LogError, first_line
from recmill.logs.base import BadRow, LogFile, open_source
from recmill.logs.files import FINISHED, decompressed, explained, match_pattern, open_bytes
from recmill.logs.sniff import FileFormat, sniff
from recmill.logs.times import parse_times
from recmill.recipe.names import plain_name
from recmill.recipe.recipe import POSITION, Column, SideTable

ColumnType = Literal["int", "float", "text", "bool", "time"]

_SAMPLE_BYTES = 64 << 20
_SAMPLE_ROWS = 2_000_000
_LOOKED_AT = 5_000  # values that time formats are tried on
_INT = r"^-?(0|[1-9]\d{0,17})$"
_POINT_ZERO = r"^-?(0|[1-9]\d{0,14})\.0$"
_FLOAT = r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S%.f", " %I:%M %p", " %I:%M:%S %p")
_DAYS = ("%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%d.%m.%Y", "%m %d, %Y", "%b %d, %Y", "%B %d, %Y")
_WHOLE = (
    "%d %b %Y",
    "%d %B %Y",
    "%a %b %d %H:%M:%S %z %Y",
    "%d/%b/%Y:%H:%M:%S %z",
    "%a, %d %b %Y %H:%M:%S %z",
)
_LOOKS_LIKE_TIME = re.compile(r"\d.*[-/.: ,].*\d")
_LIST_SEPARATORS = ("|", "; ", ";", ", ", ",")


@dataclass(frozen=True)
class ColumnProfile:
    """The type and values of a column, as far as the sample shows."""

    name: str
    type: ColumnType
    values: pl.Series = field(repr=False)  # typed; times as seconds since 1970
    time_formats: tuple[str, ...] = ()  # time formats that fit all values, if it needs one
    list_separator: str = ""
    in_file: str = ""  # its name in the file, if it was renamed

    @cached_property
    def present(self) -> pl.Series:
        return self.values.drop_nulls()

    @cached_property
    def num_unique(self) -> int:
        return int(self.present.n_unique())

    @property
    def plain(self) -> str:
        return plain_name(self.name)

    @property
    def is_number(self) -> bool:
        return self.type in ("int", "float")

    @cached_property
    def bounds(self) -> tuple[float, float]:
        numbers = self.present.cast(pl.Float64)
        return float(numbers.min() or 0.0), float(numbers.max() or 0.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FileProfile:
    """A file, its format, and its columns; columns that no recipe can name are in `left_out`, with the reason."""

    path: str
    form: FileFormat
    columns: tuple[ColumnProfile, ...]
    num_rows: int
    is_whole: bool
    left_out: tuple[str, ...] = ()
    num_bad: int = 0

    @property
    def has_names(self) -> bool:
        """Whether the file has column names of its own."""
        return self.form.header or self.form.format != "delimited"

    def named(self, name: str) -> ColumnProfile | None:
        return next((column for column in self.columns if column.name == name), None)

    def renamed(self, names: dict[str, str]) -> FileProfile:
        """The file with other names for some columns."""
        columns = tuple(
            replace(column, name=names[column.name], in_file=column.name if self.has_names else "")
            if names.get(column.name, column.name) != column.name
            else column
            for column in self.columns
        )
        form = replace(self.form, names=tuple(names.get(name, name) for name in self.form.names))
        return replace(self, columns=columns, form=form)


def profile(
    path: str,
    separator: str | None = None,
    header: bool | None = None,
    known: tuple[str, ...] = (),
    max_bad: float = 0.0,
) -> FileProfile:
    """Sample a file's first rows, up to 64 MB, in the format that is detected."""
    files = _find(path)
    file = files[0]
    form = sniff(file, separator, header, known)
    if form.format == "parquet":
        return _of_parquet(path, files, form)
    if len(files) > 1:
        raise LogError(f"{path}: is a directory of text files. Name them by a pattern in quotes: {path}/*.")
    if form.format == "jsonl":
        return _of_json(path, file, form)
    return _of_delimited(path, file, form, max_bad)


def _find(path: str) -> tuple[LogFile, ...]:
    """The file, or the first of those that a pattern matches, or all in a directory that Spark wrote."""
    folder, name = os.path.split(path.rstrip("/"))
    is_directory = os.path.isdir(path)
    if is_directory and not os.path.isfile(os.path.join(path, FINISHED)):
        raise LogError(
            f'{path}: is a directory. Name a file in it, or a pattern in quotes, such as "{path}/*.csv".'
        )
    files = match_pattern(name, folder or ".")
    if not files:
        raise LogError(f"{path}: no such file.")
    return files if is_directory else files[:1]


# delimited text


def _of_delimited(path: str, file: LogFile, form: FileFormat, max_bad: float) -> FileProfile:
    unusable = {name for name in form.names if not _is_usable(name) or form.names.count(name) > 1}
    names = [name for name in form.names if name not in unusable]
    if not names:
        raise LogError(
            f"{path}: its header has no valid names: {', '.join(form.names[:8])}. Name the columns."
        )
    if unusable and not form.header:
        raise AssertionError("columns without a header are named by us")
    spec = SideTable(
        (file.name,),
        tuple(Column(name, "text") for name in names),
        separator=form.separator,
        header=form.header,
        quote=form.quote,
        escape=form.escape,
        encoding=form.encoding,
    )
    frames, bad, num_rows, is_whole = _read(spec, os.path.dirname(path) or ".", file)
    if not frames or not num_rows:
        raise LogError(f"{path}: has no rows that can be read.")
    if len(bad) > max(max_bad, 0.0) * num_rows:
        first = bad[0]
        raise LogError(
            f"{path}: {len(bad):,} of {num_rows:,} rows are bad; the first, at byte {first.offset:,}, has "
            f"{first.reason}: {_printable(first.text)}. Correct them, or leave them out with --max-bad 5%."
        )
    frame = pl.concat(frames)
    columns = tuple(profile_text(frame[name]) for name in names)
    return FileProfile(
        path,
        form,
        columns,
        frame.height,
        is_whole,
        tuple(dict.fromkeys(_why(n, form) for n in unusable)),
        len(bad),
    )


def _why(name: str, form: FileFormat) -> str:
    shown = f'"{name}"' if name else "a column without a name"
    return f"{shown} (occurs more than once)" if form.names.count(name) > 1 and name else shown


def _is_usable(name: str) -> bool:
    """Whether recipes can use this column name."""
    return (
        bool(name)
        and "," not in name
        and ".." not in name
        and not name.startswith("__")
        and name.isprintable()
    )


def _read(spec: SideTable, folder: str, file: LogFile) -> tuple[list[pl.DataFrame], list[BadRow], int, bool]:
    source = open_source(spec, folder)
    frames, bad = list[pl.DataFrame](), list[BadRow]()
    num_rows = num_bytes = 0
    for unit in source.units(parts=1):
        for batch in source.read(unit):
            frames.append(batch.frame.drop(POSITION))
            bad += batch.bad
            num_rows += batch.num_rows
            num_bytes += int(batch.frame.estimated_size())
            if num_bytes > 2 * _SAMPLE_BYTES or num_rows > _SAMPLE_ROWS:
                return frames, bad, num_rows, False
    return frames, bad, num_rows, True


def _printable(text: bytes) -> str:
    shown = text[:60].decode("utf-8", "replace")
    return '"' + "".join(character if character.isprintable() else "?" for character in shown) + '"'


def profile_text(texts: pl.Series, is_json: bool = False) -> ColumnProfile:
    """The type of text values: numbers, times, booleans, lists or text. Texts of JSON are never numbers."""
    present = texts.drop_nulls()
    unique = present.unique(maintain_order=True) if len(present) > _LOOKED_AT else present
    name = texts.name
    if len(present) and not is_json:
        # pandas writes whole numbers next to missing ones as 17850.0.
        has_points = _all(unique, _POINT_ZERO)
        if has_points or _all(unique, _INT):
            return ColumnProfile(
                name, "int", texts.cast(pl.Float64).cast(pl.Int64) if has_points else texts.cast(pl.Int64)
            )
        if _all(unique, _FLOAT):
            return ColumnProfile(name, "float", texts.cast(pl.Float64))
        if set(unique.head(3).str.to_lowercase()) <= {"true", "false"} and len(unique.unique()) <= 2:
            return ColumnProfile(name, "bool", texts.str.to_lowercase() == "true")
    if len(present) and _LOOKS_LIKE_TIME.search(str(present[0])):
        timed = _profile_times(name, texts, unique.head(_LOOKED_AT))
        if timed is not None:
            return timed
    return ColumnProfile(name, "text", texts, list_separator=_list_separator(unique))


def _all(texts: pl.Series, pattern: str) -> bool:
    return bool(texts.str.contains(pattern).all())


def _profile_times(name: str, texts: pl.Series, looked_at: pl.Series) -> ColumnProfile | None:
    if looked_at.str.contains(_FLOAT).any():
        return None
    fitting = [format for format in ("", *_formats()) if not parse_times(looked_at, format)[1].any()]
    if not fitting:
        return None
    values, unreadable = parse_times(texts, fitting[0])
    if unreadable.any():
        return None
    return ColumnProfile(
        name, "time", values, tuple(fitting[:1] if fitting[0] == "" else _different(looked_at, fitting))
    )


def _formats() -> tuple[str, ...]:
    return tuple(day + clock for day in _DAYS for clock in _CLOCKS) + _WHOLE


def _different(texts: pl.Series, formats: list[str]) -> list[str]:
    """Formats that parse these texts to different times."""
    by_result: dict[tuple[float, ...], str] = {}
    for format in formats:
        by_result.setdefault(tuple(parse_times(texts, format)[0].to_list()), format)
    return list(by_result.values())


def _list_separator(texts: pl.Series) -> str:
    """The separator of a text that is a list, such as `Action|Drama`."""
    for separator in _LIST_SEPARATORS:
        has_several = texts.str.contains(separator, literal=True)
        if len(texts) < 2 or has_several.mean() < 0.2:  # type: ignore[operator]
            continue
        elements = texts.str.split(separator).explode()
        # Sentences have commas too, but their parts do not recur.
        if elements.str.len_chars().mean() < 30 and elements.n_unique() < 0.5 * len(elements):  # type: ignore[operator]
            return separator
    return ""


# typed frames


def _of_parquet(path: str, files: Sequence[LogFile], form: FileFormat) -> FileProfile:
    names: list[str] = []
    frames, all_names, is_whole = list[pl.DataFrame](), dict[str, None](), True
    for file in files:
        num_rows = sum(frame.height for frame in frames)
        if frames and num_rows >= _SAMPLE_ROWS:
            is_whole = False
            break
        with open_bytes(file) as stream, _explained(file, path):
            parquet = pq.ParquetFile(stream)
            names = names or _readable_names(parquet.schema_arrow)
            all_names |= dict.fromkeys(parquet.schema_arrow.names)
            frame = _first_rows(parquet, names, _SAMPLE_ROWS - num_rows)
            is_whole = is_whole and frame.height == parquet.metadata.num_rows
            frames.append(frame)
    frame = pl.concat(frames, how="vertical_relaxed")
    if not frame.height:
        raise LogError(f"{path}: has no rows.")
    columns = tuple(_profile_typed(frame[name]) for name in names)
    left_out = tuple(f'"{name}"' for name in all_names if name not in names)
    return FileProfile(path, replace(form, names=tuple(names)), columns, frame.height, is_whole, left_out)


@contextmanager
def _explained(file: LogFile, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        shown = path if file.name == os.path.basename(path) else file.path
        raise LogError(f"{shown}: is not a whole Parquet file ({first_line(error).rstrip('.')}).") from error


def _first_rows(parquet: pq.ParquetFile, names: list[str], at_least: int) -> pl.DataFrame:
    """At least so many rows, if the file has them."""
    batches, num_rows = [], 0
    for batch in parquet.iter_batches(columns=names):
        batches.append(batch)
        num_rows += len(batch)
        if num_rows >= at_least:
            break
    schema = pa.schema([parquet.schema_arrow.field(name) for name in names])
    return pl.DataFrame(pa.Table.from_batches(batches, schema))


def _readable_names(schema: pa.Schema) -> list[str]:
    def is_readable(kind: pa.DataType) -> bool:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
            return bool(
                pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
            )
        return not bool(pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_time(kind))

    return [
        f.name
        for f in schema
        if is_readable(f.type) and _is_usable(f.name) and schema.names.count(f.name) == 1
    ]


def _of_json(path: str, file: LogFile, form: FileFormat) -> FileProfile:
    with open_bytes(file) as stream, decompressed(stream, file) as text, explained(path):
        content = bytes(text.read(_SAMPLE_BYTES)).removeprefix(b"\xef\xbb\xbf")
    is_whole = len(content) < _SAMPLE_BYTES
    lines = content if is_whole else content[: content.rfind(b"\n")]
    try:
        frame = pl.read_ndjson(io.BytesIO(lines), infer_schema_length=None)
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise LogError(f"{path}: is not one JSON object a line ({first_line(error).rstrip('.')}).") from error
    usable = [name for name in frame.columns if _is_usable(name) and not frame[name].dtype.is_nested()]
    columns = tuple(_profile_typed(frame[name], is_json=True) for name in usable)
    left_out = tuple(f'"{name}"' for name in frame.columns if name not in usable)
    return FileProfile(path, replace(form, names=tuple(usable)), columns, frame.height, is_whole, left_out)


def _profile_typed(values: pl.Series, is_json: bool = False) -> ColumnProfile:
    name, dtype = values.name, values.dtype
    if dtype.is_integer():
        return ColumnProfile(name, "int", values.cast(pl.Int64))
    if dtype.is_float() or dtype.is_decimal():
        numbers = values.cast(pl.Float64).fill_nan(None)
        # pandas writes whole numbers next to missing ones like this.
        is_whole = (
            len(numbers.drop_nulls()) > 0 and bool((numbers.drop_nulls() % 1 == 0).all()) and not is_json
        )
        return ColumnProfile(
            name, "int" if is_whole else "float", numbers.cast(pl.Int64) if is_whole else numbers
        )
    if dtype == pl.Boolean:
        return ColumnProfile(name, "bool", values)
    if dtype.is_temporal():
        return ColumnProfile(name, "time", values.cast(pl.Datetime("us")).dt.epoch("us") / 1e6, ("",))
    if isinstance(dtype, pl.List):
        return ColumnProfile(
            name, "text", values.cast(pl.List(pl.String)).list.join("\t"), list_separator="\t"
        )
    return profile_text(values.cast(pl.String), is_json)
