"""How tasks of Ray Data write a Dataset. Ray's own `write_parquet` does not keep the order of rows within a file."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data.block import BlockAccessor

_ROW_GROUP = 1 << 17  # rows; a log is split between row groups


class ParquetParts(Datasink[None]):
    """Each task writes its blocks, in order, as files that are named by its number."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write(self, blocks: Iterable[Any], ctx: Any) -> None:
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(
                f"{self.folder} is not visible on machine {os.uname().nodename}: results must lie on a file "
                "system that all machines share"
            )
        number, writer = 0, None
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow().replace_schema_metadata(None)
            if not table.num_rows:
                continue
            # Blocks differ in type where only some of them have nulls.
            if writer is not None and writer.schema != table.schema:
                writer.close()
                number, writer = number + 1, None
            writer = writer or _Part(
                f"{self.folder}/part-{ctx.task_idx:06d}-{number:03d}.parquet", table.schema
            )
            writer.write(table)
        if writer is not None:
            writer.close()


class _Part:
    """A file that has its name when it is whole: a task may be killed and run again."""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.schema = schema
        self._path = path
        self._unfinished = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}")
        self._writer = pq.ParquetWriter(self._unfinished, schema, compression="lz4")

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=_ROW_GROUP)

    def close(self) -> None:
        self._writer.close()
        os.replace(self._unfinished, self._path)
