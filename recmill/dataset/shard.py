"""One Parquet file of a Table. Its bytes are verified against checksums before any row is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.dataset.prefetch import prefetch
from recmill.errors import ArtifactError, is_out_of_memory
from recmill.features.kernels import RowDigest, checksum
from recmill.storage.view import available, streamed_size, tail

_MOST_FOOTERS = 64 << 10  # bytes; footers are not longer
_TAIL_BYTES = 8  # bytes at the end of a Parquet file: the length of the footer, and PAR1
_FOOTERS_AT_ONCE = 8
_WHOLE, _FOOTER = -1, -2
# Verified by this process: the file as it was then, and the range of bytes.
_verified: set[tuple[tuple[int, ...], int]] = set()


@dataclass(frozen=True)
class ShardFile:
    """A shard and its record in the manifest. Everything that is read is verified, once per process and file."""

    table: Path
    file: str
    rows: int
    num_bytes: int
    digest: str
    checksums: tuple[
        str, ...
    ] = ()  # checksums of the footer, then of each row group; none in Tables of earlier versions

    @classmethod
    def of(cls, table: Path, record: Mapping[str, Any]) -> ShardFile:
        return cls(
            table,
            str(record["file"]),
            int(record["rows"]),
            int(record["num_bytes"]),
            str(record["digest"]),
            tuple(record.get("checksums", ())),
        )

    @property
    def path(self) -> Path:
        """The local path; a shard of a URL is fetched if necessary."""
        return available(self.table, self.file)

    @property
    def is_streamed(self) -> bool:
        """Whether it is fetched from a URL when it is read."""
        return streamed_size(self.table, self.file) is not None

    def check_recorded_size(self) -> None:
        """Compare the file's size with the recorded one, before anything is read."""
        expected = streamed_size(self.table, self.file)
        if expected is None:
            self.check_size()
        elif expected != self.num_bytes:
            raise self.damaged(f"has {expected:,} bytes, its record says {self.num_bytes:,}")

    def check_size(self) -> None:
        path = self.path
        size = path.stat().st_size if path.is_file() else None
        if size != self.num_bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise self.damaged(f"{found}, its record says {self.num_bytes:,}")

    def metadata(self) -> pq.FileMetaData:
        """The verified footer. For a shard that is not fetched yet, nothing else is read."""
        if self.checksums and (footer := self._distant_footer()) is not None:
            return pq.read_metadata(pa.BufferReader(footer))
        with self._open() as file:
            return file.metadata

    def _distant_footer(self) -> bytes | None:
        """The verified footer of a shard that is not fetched yet."""
        footer = tail(self.table, self.file, _MOST_FOOTERS)
        if footer is None:
            return None
        length = _TAIL_BYTES + int.from_bytes(footer[-_TAIL_BYTES:-4], "little")
        if length > len(footer):
            footer = tail(self.table, self.file, length) or b""
        if checksum(footer[-length:]) != self.checksums[0]:
            raise self._differs()
        return footer[-length:]

    def group_rows(self) -> list[int]:
        """The number of rows of each row group."""
        metadata = self.metadata()
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def read(self, group: int, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Rows of one row group. A missing column is an error."""
        with self._open() as file:
            self._check_columns(file.schema_arrow.names, columns)
            self._verify_group(file.metadata, group)
            table = file.read_row_group(
                group, list(columns) if columns is not None else None, use_threads=False
            )
            rows = pl.from_arrow(table)
            assert isinstance(rows, pl.DataFrame)
            return rows

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """All rows in order, row group by row group."""
        for group in range(self.metadata().num_row_groups):
            yield self.read(group, columns)

    def verify(self) -> None:
        """Verify every byte."""
        with self._open() as file:
            for group in range(file.metadata.num_row_groups):
                self._verify_group(file.metadata, group)

    def damaged(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"Table {self.table} is damaged: {self.file} {what}. "
            "Delete the Table and run `recmill prepare` again."
        )

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        self.check_size()
        try:
            self._once(_FOOTER if self.checksums else _WHOLE, self._verify_footer)
            with pq.ParquetFile(self.path) as file:
                if file.metadata.num_rows != self.rows:
                    raise self.damaged(f"has {file.metadata.num_rows:,} rows, its record says {self.rows:,}")
                yield file
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            if is_out_of_memory(error):
                raise
            raise self.damaged(f"cannot be read: {error}") from None

    def _check_columns(self, names: Sequence[str], columns: Sequence[str] | None) -> None:
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise self.damaged(f"has no column {', '.join(missing)}; it has: {', '.join(names)}")

    def _verify_footer(self) -> None:
        if not self.checksums:  # an earlier version wrote it: rows have a digest, bytes have none
            self._verify_rows()
        elif _checksum(self.path, _footer_start(self.path), self.num_bytes) != self.checksums[0]:
            raise self._differs()

    def _verify_rows(self) -> None:
        rows = pl.from_arrow(pq.read_table(self.path))
        assert isinstance(rows, pl.DataFrame)
        if RowDigest.of(rows) != RowDigest.read({"rows": self.rows, "digest": self.digest}):
            raise self.damaged("does not have the digest of its record")

    def _verify_group(self, metadata: pq.FileMetaData, group: int) -> None:
        def compare() -> None:
            start, end = _span(metadata, group)
            if _checksum(self.path, start, end) != self.checksums[1 + group]:
                raise self._differs()

        if self.checksums:
            self._once(group, compare)

    def _differs(self) -> ArtifactError:
        return self.damaged(
            "does not have the checksum of its record: bytes of it changed since it was written"
        )

    def _once(self, part: int, compare: Callable[[], None]) -> None:
        found = os.stat(self.path)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns), part
        if key not in _verified:
            compare()
            _verified.add(key)


def group_rows_of(shards: Sequence[ShardFile]) -> list[list[int]]:
    """Row counts of all row groups, shard by shard; footers of a URL are read concurrently."""
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
        return list(threads.map(ShardFile.group_rows, shards))


def fetched_ahead(shards: Sequence[ShardFile], depth: int = 2) -> Iterator[ShardFile]:
    """The same shards in order; those of a URL are prefetched while the previous one is read."""

    def fetched() -> Iterator[ShardFile]:
        for shard in shards:
            shard.check_size()
            yield shard

    return prefetch(fetched(), depth)


def checksums_of(path: Path) -> tuple[str, ...]:
    """Checksums of the footer and of each row group of a Parquet file, which cover all of its bytes."""
    metadata = pq.read_metadata(path)
    spans = [_span(metadata, group) for group in range(metadata.num_row_groups)]
    footer = _footer_start(path), path.stat().st_size
    return tuple(_checksum(path, start, end) for start, end in [footer, *spans])


def _span(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """The byte range of a row group, with the bytes between it and the previous one."""
    return _end_of(metadata, group - 1) if group else 0, _end_of(metadata, group)


def _end_of(metadata: pq.FileMetaData, group: int) -> int:
    columns = [metadata.row_group(group).column(number) for number in range(metadata.num_columns)]
    return max(
        int(column.total_compressed_size)
        + int(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
        for column in columns
    )


def _footer_start(path: Path) -> int:
    """The offset of the footer, from the end of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - _TAIL_BYTES))
        length = int.from_bytes(file.read(4), "little")
    return max(0, size - _TAIL_BYTES - length)


def _checksum(path: Path, start: int, end: int) -> str:
    with open(path, "rb") as file:
        file.seek(start)
        return checksum(file.read(end - start))
