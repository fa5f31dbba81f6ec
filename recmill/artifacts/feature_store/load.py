"""Fill a store with rows of a bundle, or raw rows of a Parquet file, in chunks. An interrupted load can resume."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts.bundle.entities import Side
from recmill.artifacts.feature_store.config import LoadConfig
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.dataset.batch import Batch, collate
from recmill.errors import ArtifactError, RecmillError
from recmill.reporting.progress import Progress

if TYPE_CHECKING:
    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.bundle.entities import Entities

ROWS_PER_CHUNK = 1_000
Chunk = tuple[pl.DataFrame, Batch]


@dataclass(frozen=True)
class LoadResult:
    """The result of loading one side."""

    side: Side
    num_rows: int  # written now
    num_skipped: int  # written by an earlier load
    seconds: float


class _Progress(msgspec.Struct):
    """Progress of loading one side, kept in the store."""

    source: str
    rows: int


def sides_to_load(bundle: Bundle, side: Side | Literal["both"]) -> tuple[Side, ...]:
    """The requested side; by default, both that the bundle has."""
    if side != "both":
        return (side,)
    sides: tuple[tuple[Side, Entities | None], ...] = (("user", bundle.users), ("item", bundle.items))
    return tuple(name for name, rows in sides if rows is not None)


def load(
    store: RedisStore,
    bundle: Bundle,
    sides: tuple[Side, ...],
    parquet: Path | None = None,
    rows_per_second: float | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[LoadResult]:
    """Write every user or item, the changes of deltas, then the bundle's version under `<prefix>:loaded`.

    With `resume`, rows that an earlier load of the same bundle and file has written are skipped.
    """
    loaded = [
        _load_side(store, bundle, side, parquet, rows_per_second, resume, progress or Progress(quiet=True))
        for side in sides
    ]
    store.set_num_deltas(bundle.version, _load_deltas(store, bundle, sides))
    store.set_value(store.loaded_key, bundle.version.encode())
    return loaded


def load_at(
    features: str, bundle: Bundle, config: LoadConfig, progress: Progress | None = None
) -> tuple[str, list[LoadResult]]:
    """`load` for the address of a store; returns the address without a password, and the results."""
    if config.parquet is not None and config.side == "both":
        raise RecmillError('A Parquet file holds rows of one side: "user" or "item".')
    store = RedisStore(features, bundle, config.prefix, timeout_seconds=10.0, ttl_seconds=config.ttl)
    try:
        sides = sides_to_load(bundle, config.side)
        loaded = load(store, bundle, sides, config.parquet, config.rate, config.resume, progress)
    finally:
        store.close()
    return str(store.servers.address), loaded


def _load_side(
    store: RedisStore,
    bundle: Bundle,
    side: Side,
    parquet: Path | None,
    rows_per_second: float | None,
    resume: bool,
    progress: Progress,
) -> LoadResult:
    began = time.monotonic()
    rows = ParquetEntities(bundle, side, parquet) if parquet is not None else BundleEntities(bundle, side)
    key = f"{store.prefix}:loading:{side}".encode()
    source = f"{bundle.version} {rows.name}"
    skipped = done = _rows_done(store, key, source) if resume else 0
    pace = Pace(rows_per_second)
    # The rate limit applies to each burst too.
    size = (
        ROWS_PER_CHUNK if rows_per_second is None else max(1, min(ROWS_PER_CHUNK, int(rows_per_second / 10)))
    )
    with progress.stage(f"load {side}s", len(rows)) as stage:
        stage.advance(done, 0)
        for raw, batch in rows.chunks(done, size):
            pace.wait(batch.size)
            done += batch.size
            store.put_rows(side, raw, batch, [(key, msgspec.msgpack.encode(_Progress(source, done)))])
            stage.advance(batch.size, batch.size)
    return LoadResult(side, done - skipped, skipped, time.monotonic() - began)


def _load_deltas(store: RedisStore, bundle: Bundle, sides: tuple[Side, ...]) -> int:
    """Write the changes of deltas since the export, up to the first incomplete one; returns their number."""
    from recmill.artifacts.bundle.delta import Delta, deltas_folder

    number, folder = 0, deltas_folder(bundle.path.parent, bundle.version)
    while (path := folder / f"{number + 1:06d}").is_dir():
        try:
            changes = Delta.open(path).changes()
        except ArtifactError:
            break  # servers refuse it too
        for side, raw in (("user", changes.users), ("item", changes.items)):
            if side in sides and raw is not None:
                _put_raw(store, bundle, "user" if side == "user" else "item", raw)
        number += 1
    return number


def _put_raw(store: RedisStore, bundle: Bundle, side: Side, raw: pl.DataFrame) -> None:
    features = bundle.entities(side).layout.features
    for rows in raw.iter_slices(ROWS_PER_CHUNK):
        store.put(side, rows, bundle.plan.apply(rows, labels=False, only=features))


def _rows_done(store: RedisStore, key: bytes, source: str) -> int:
    value = store.value(key)
    try:
        done = msgspec.msgpack.decode(value, type=_Progress) if value is not None else None
    except msgspec.MsgspecError:
        done = None
    return done.rows if done is not None and done.source == source else 0


class BundleEntities:
    """The rows of one side of a bundle, in the order of their indices."""

    name = "bundle"

    def __init__(self, bundle: Bundle, side: Side) -> None:
        self._entities = bundle.entities(side)

    def __len__(self) -> int:
        return len(self._entities)

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        for first in range(start, len(self), size):
            places = np.arange(first, min(first + size, len(self)))
            yield self._entities.raw(places), self._entities.features(places)


class ParquetEntities:
    """Raw rows of a Parquet file, transformed by the bundle's Plan. An absent column is missing in every row."""

    def __init__(self, bundle: Bundle, side: Side, path: Path) -> None:
        self._entities = bundle.entities(side)
        self._plan = bundle.plan
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from None
        self.name = _digest_of(path)
        id_column = self._entities.id_column
        columns = self._file.schema_arrow.names
        if id_column not in columns:
            raise ArtifactError(
                f'{path} has no column "{id_column}", the id of {side}s; it has: {", ".join(columns)}.'
            )
        self._columns = [name for name in self._entities.raw_schema if name in columns]
        self._path = path

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def chunks(self, start: int, size: int) -> Iterator[Chunk]:
        skip = start
        for records in self._file.iter_batches(size, columns=self._columns, use_threads=False):
            if skip >= records.num_rows:
                skip -= records.num_rows
                continue
            rows = pl.from_arrow(records.slice(skip))
            assert isinstance(rows, pl.DataFrame)
            skip = 0
            yield self._chunk_of(rows)

    def _chunk_of(self, rows: pl.DataFrame) -> Chunk:
        entities = self._entities
        raw = _with_schema(rows, entities, self._path)
        if raw[entities.id_column].null_count():
            raise ArtifactError(f'{self._path} has rows without "{entities.id_column}", the id.')
        features = self._plan.apply(raw, labels=False, only=entities.layout.features)
        return raw, collate(features, entities.layout, with_labels=False)


def _with_schema(rows: pl.DataFrame, entities: Entities, path: Path) -> pl.DataFrame:
    return pl.DataFrame([_column(rows, name, dtype, path) for name, dtype in entities.raw_schema.items()])


def _column(rows: pl.DataFrame, name: str, dtype: pl.DataType, path: Path) -> pl.Series:
    """A column in the bundle's type, or nulls. Polars' own error would quote values, which may be a user's."""
    if name not in rows.columns:
        return pl.Series(name, [None], dtype).new_from_index(0, rows.height)
    try:
        return rows[name].cast(dtype)
    except pl.exceptions.PolarsError:
        raise ArtifactError(
            f'{path} does not have the types of the bundle: column "{name}" is {rows.schema[name]} there, and some of '
            f"its values are no {dtype}. Write the file with the log's own types."
        ) from None


def _digest_of(path: Path) -> str:
    """A digest that distinguishes files: of the size and the last bytes, where Parquet has its footer."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - (1 << 20)))
        return f"{size} {hashlib.sha256(file.read()).hexdigest()[:16]}"


class Pace:
    """Keeps a rate over the whole run, without bursts after a pause."""

    def __init__(self, rows_per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds_per_row = 1 / rows_per_second if rows_per_second else 0.0
        self._sleep = sleep
        self._next_at = time.monotonic()

    def wait(self, num_rows: int) -> None:
        """Wait until these rows may be written."""
        now = time.monotonic()
        if now < self._next_at:
            self._sleep(self._next_at - now)
        self._next_at = max(now, self._next_at) + num_rows * self._seconds_per_row
