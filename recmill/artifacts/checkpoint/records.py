"""Records of embedding tables as Arrow files: one line for each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recmill.embeddings.table import Array, KeyRecords, Snapshot


def _schema(dim: int, num_states: int) -> pa.Schema:
    return pa.schema(
        [
            ("key", pa.int64()),
            ("row", pa.list_(pa.float32(), dim)),
            ("state", pa.list_(pa.float32(), num_states)),
            ("count", pa.uint32()),
            ("step", pa.uint32()),
        ]
    )


def write_records(path: Path, snapshot: Snapshot, table: Mapping[str, Any]) -> int:
    """Write all records of a snapshot to an Arrow file; returns their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = _schema(table["dim"], table["num_states"])
    num_keys = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for records in snapshot:
            num_keys += len(records.keys)
            writer.write_batch(_record_batch(records, schema))
    return num_keys


def _record_batch(records: KeyRecords, schema: pa.Schema) -> pa.RecordBatch:
    size = len(records.keys)
    columns = [
        pa.array(records.keys),
        *(
            pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=schema.field(name).type)
            if values.size
            else pa.array([[]] * size, type=schema.field(name).type)
            for name, values in (("row", records.rows), ("state", records.states))
        ),
        pa.array(records.counts),
        pa.array(records.steps),
    ]
    return pa.record_batch(columns, schema=schema)


def read_records(path: Path) -> Iterator[KeyRecords]:
    """The records of a file in chunks; the file is mapped, not read."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
        for number in range(file.num_record_batches):
            yield _records(file.get_batch(number))


def _records(batch: pa.RecordBatch) -> KeyRecords:
    def matrix(name: str) -> Array:
        column = batch.column(name)
        width = column.type.list_size
        values = column.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(values, np.float32).reshape(len(column), width)

    flat = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in ("key", "count", "step")}
    return KeyRecords(flat["key"], matrix("row"), matrix("state"), flat["count"], flat["step"])
