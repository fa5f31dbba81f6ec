"""Generated files: written under temporary names, renamed when complete, never over a log of other parameters."""

from __future__ import annotations

import errno
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import polars as pl
import pyarrow.parquet as pq

from recmill.artifacts.lock import lock_folder
from recmill.errors import ArtifactError, ResourceError

# Spark, Arrow and our own readers skip names with an underscore in front.
TRUTH_FILE = "_truth.json"

# Rows generated and written at a time: a column of them fits in the cache. Does not change the output.
CHUNK_ROWS = 1 << 15


@dataclass(frozen=True)
class GenerateJob:
    """The arguments of one call of `generate`."""

    rows: int
    seed: int
    options: Mapping[str, Any]
    progress: Callable[[int], None]


class PartialFiles:
    """The files of one run, under other names until `publish`; an error removes them."""

    def __init__(self, into: Path, parameters: Mapping[str, Any]) -> None:
        self.into = into
        self.parameters = dict(parameters)
        self.names: list[str] = []

    def claim(self, names: Sequence[str]) -> None:
        """Reject a folder that has a log of other parameters, or one of these files from elsewhere."""
        existing = self._existing_parameters()
        if existing == self.parameters:
            return
        taken = [name for name in names if (self.into / name).exists()]
        if existing is not None:
            raise ArtifactError(
                f"{self.into} already has a log generated with {_describe(existing)}, not with "
                f"{_describe(self.parameters)}. Choose another folder with --into, or delete this one."
            )
        if taken:
            raise ArtifactError(
                f"{self.into / taken[0]} already exists without a {TRUTH_FILE} beside it, so it was not "
                "generated here. Choose another folder with --into, or move the file away."
            )

    def _existing_parameters(self) -> dict[str, Any] | None:
        truth = self.into / TRUTH_FILE
        if not truth.exists():
            return None
        try:
            parameters = json.loads(truth.read_text(encoding="utf-8"))["parameters"]
        except (ValueError, KeyError, TypeError):
            parameters = None
        return parameters if isinstance(parameters, dict) else {"unreadable": TRUTH_FILE}

    def path(self, name: str) -> Path:
        """Where to write `name` until it is complete."""
        if name not in self.names:
            self.names.append(name)
        return self.into / f"_{name}.partial"

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A binary file to write; names that end in .gz are compressed."""
        with self.path(name).open("wb") as raw:
            if not name.endswith(".gz"):
                yield raw
                return
            # No name and no time in the header: equal rows must give equal bytes.
            with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
                yield cast(IO[bytes], packed)

    def publish(self, truth: Mapping[str, Any]) -> tuple[Path, ...]:
        """Rename every file to its own name."""
        content = {**truth, "parameters": self.parameters, "files": sorted(self.names)}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        self.path(TRUTH_FILE).write_text(text, encoding="utf-8")
        # The truth goes first: after a kill between two renames, the same command may still run again.
        for name in sorted(self.names, key=lambda name: name != TRUTH_FILE):
            self.path(name).replace(self.into / name)
        return tuple(self.into / name for name in self.names if name != TRUTH_FILE)

    def discard(self) -> None:
        for name in self.names:
            self.path(name).unlink(missing_ok=True)


@contextmanager
def open_output(into: Path, parameters: Mapping[str, Any]) -> Iterator[PartialFiles]:
    """The files of a run in `into`; no partial file remains, however the block ends."""
    output = PartialFiles(into, parameters)
    try:
        with lock_folder(into):
            try:
                yield output
            finally:
                output.discard()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceError(f"The disk of {into} is full. Free space or generate fewer rows.") from error
        raise ArtifactError(f"Cannot write to {into}: {error.strerror or error}.") from error


def write_rows(
    file: IO[bytes],
    frame: pl.DataFrame,
    separator: str,
    *,
    header: bool = False,
    quotes: Literal["necessary", "never"] = "never",
) -> None:
    """Append one chunk of rows as delimited text; nulls become empty fields, floats are prices."""
    text = io.BytesIO()
    frame.write_csv(text, separator=separator, include_header=header, quote_style=quotes, float_precision=2)
    file.write(text.getbuffer())


def write_table(output: PartialFiles, name: str, frame: pl.DataFrame) -> None:
    """Write one small comma-separated table with a header."""
    with output.open(name) as file:
        write_rows(file, frame, ",", header=True, quotes="necessary")


@contextmanager
def parquet_writer(path: Path) -> Iterator[Callable[[pl.DataFrame], None]]:
    """A function that appends a frame to a Parquet file as one row group."""
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None

        def write(frame: pl.DataFrame) -> None:
            nonlocal writer
            table = frame.to_arrow()
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
            writer.write_table(table)

        yield write


def chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of consecutive runs of at most `step` rows."""
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _describe(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in parameters.items() if value not in (None, False))
