"""Rows on disk between two passes: counting, grouping and ordering beyond memory.

A spill file is an Arrow IPC file with one record batch per bucket, so that bucket b of many files can be read without
touching the others. Files of one bucket's rows, or of consecutive rows, are Arrow IPC files too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.artifacts.manifest import unique_aside
from recmill.features.kernels import Array


def write_buckets(frame: pl.DataFrame, buckets: Array, num_buckets: int, path: Path) -> None:
    """Write rows by bucket number, keeping their order inside a bucket. The file is written atomically."""
    order = np.argsort(buckets, kind="stable")
    table = frame[order].to_arrow().combine_chunks()
    bounds = np.searchsorted(buckets[order], np.arange(num_buckets + 1))
    aside = unique_aside(path)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
        for start, stop in itertools.pairwise(bounds):
            piece = table.slice(start, stop - start).to_batches()
            writer.write_batch(piece[0] if piece else pa.RecordBatch.from_pylist([], schema=table.schema))
    os.replace(aside, path)


def read_bucket(paths: Sequence[Path], bucket: int) -> pl.DataFrame:
    """All rows of one bucket, file by file."""
    batches = []
    for path in paths:
        # Plain reads: a memory map would count as our memory while its pages stay.
        with pa.OSFile(str(path), "rb") as file:
            batches.append(pa.ipc.open_file(file).get_batch(bucket))
    frame = pl.from_arrow(pa.Table.from_batches(batches))
    assert isinstance(frame, pl.DataFrame)
    return frame


def write_frames(frames: Iterable[pl.DataFrame], path: Path) -> tuple[int, int]:
    """Write frames of one schema as they arrive; returns the numbers of rows and bytes. No rows, no file."""
    num_rows = num_bytes = 0
    aside = unique_aside(path)
    writer = None
    try:
        with pa.OSFile(str(aside), "wb") as file:
            for frame in frames:
                if not frame.height:
                    continue
                table = frame.to_arrow().combine_chunks()
                if writer is None:
                    options = pa.ipc.IpcWriteOptions(compression="lz4")
                    writer = pa.ipc.new_file(file, table.schema, options=options)
                writer.write_table(table)
                num_rows += frame.height
                num_bytes += int(frame.estimated_size())
            if writer is not None:
                writer.close()
        if num_rows:
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return num_rows, num_bytes


def read_frames(path: Path) -> Iterator[pl.DataFrame]:
    """Read the output of `write_frames`, batch by batch."""
    with pa.OSFile(str(path), "rb") as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            frame = pl.from_arrow(pa.Table.from_batches([reader.get_batch(number)]))
            assert isinstance(frame, pl.DataFrame)
            yield frame
