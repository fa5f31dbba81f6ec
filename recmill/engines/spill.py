"""Rows cut into buckets on disk: how counting, grouping and ordering go beyond memory.

A spill file is an Arrow IPC file with one record batch for each bucket, so that bucket b of many files can be
read without touching the others.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.kernels import Array


def write_buckets(frame: pl.DataFrame, buckets: Array, num_buckets: int, path: Path) -> None:
    """Write rows by bucket number, keeping their order inside a bucket. The file appears whole or not at all."""
    order = np.argsort(buckets, kind="stable")
    table = frame[order].to_arrow().combine_chunks()
    bounds = np.searchsorted(buckets[order], np.arange(num_buckets + 1))
    aside = path.with_name(path.name + ".partial")
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
        # Plain reads: a memory map would count as memory of ours while the pages stay.
        with pa.OSFile(str(path), "rb") as file:
            batches.append(pa.ipc.open_file(file).get_batch(bucket))
    frame = pl.from_arrow(pa.Table.from_batches(batches))
    assert isinstance(frame, pl.DataFrame)
    return frame
