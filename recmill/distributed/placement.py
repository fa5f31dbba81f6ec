"""Placement of tables over several training workers: sharded by key, or small ones replicated on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recmill.embeddings.table import OPTIMIZERS, TableSpec

Placement = Literal["sharded", "replicated"]

WIRE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_REQUEST_BYTES = 12  # a key and its count
_HEADER_BYTES = 20  # bytes of a record
_MAX_REPLICA_BYTES = 16 << 20  # bytes of one table


@dataclass(frozen=True)
class TablePlacement:
    """The placement of a table and its cost for one worker: bytes sent per step, memory (None: grows with its keys)."""

    name: str
    num_rows: int | None
    dim: int
    placement: Placement
    wire_bytes: float
    wire_bytes_otherwise: float | None  # None: there is no alternative
    memory_bytes: int | None


def plan_placement(
    specs: Mapping[str, TableSpec],
    keys_per_row: Mapping[str, float],
    batch_size: int,
    num_workers: int,
    wire: str = "float32",
) -> list[TablePlacement]:
    """Choose the cheaper placement for each table, by bytes on the wire. Keys are assumed uniform, the worst case."""
    return [
        _place(name, spec, batch_size / num_workers * keys_per_row[name], num_workers, WIRE_BYTES[wire])
        for name, spec in specs.items()
    ]


def _place(name: str, spec: TableSpec, keys: float, num_workers: int, width: int) -> TablePlacement:
    away = (num_workers - 1) / num_workers
    different = keys if spec.num_rows is None else spec.num_rows * -math.expm1(-keys / spec.num_rows)
    sharded = different * away * (_REQUEST_BYTES + 2 * spec.dim * width)
    if spec.num_rows is None or spec.admit_after > 1:
        return TablePlacement(name, spec.num_rows, spec.dim, "sharded", sharded, None, None)
    replicated = all_reduce_bytes(spec.num_rows * (spec.dim + 1), num_workers)
    memory = spec.num_rows * _record_bytes(spec)
    if replicated < sharded and memory <= _MAX_REPLICA_BYTES:
        return TablePlacement(name, spec.num_rows, spec.dim, "replicated", replicated, sharded, memory)
    part = -(-memory // num_workers)
    return TablePlacement(name, spec.num_rows, spec.dim, "sharded", sharded, replicated, part)


def all_reduce_bytes(num_floats: int, num_workers: int) -> float:
    """Bytes that one worker sends in a ring all_reduce of this many floats."""
    return 2 * (num_workers - 1) / num_workers * num_floats * 4


def _record_bytes(spec: TableSpec) -> int:
    states = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2 * spec.dim, "ftrl": 2 * spec.dim}
    assert spec.optimizer in OPTIMIZERS
    return _HEADER_BYTES + 4 * (spec.dim + states.get(spec.optimizer, spec.dim))


def explain(
    placed: Sequence[TablePlacement], num_workers: int, batch_size: int, num_weights: int
) -> list[str]:
    """The placement, as lines of text."""
    dense = all_reduce_bytes(num_weights, num_workers)
    total = dense + sum(table.wire_bytes for table in placed)
    lines = [
        f"{num_workers} workers, batches of {batch_size:,} rows; bytes are those of one worker, and in one step",
        f"{'table':<28} {'rows':>12} {'dim':>4}  {'placement':<10} {'sent':>10} {'otherwise':>10} {'memory':>10}",
    ]
    for table in placed:
        rows = "any" if table.num_rows is None else f"{table.num_rows:,}"
        otherwise = "" if table.wire_bytes_otherwise is None else _bytes(table.wire_bytes_otherwise)
        memory = "grows" if table.memory_bytes is None else _bytes(table.memory_bytes)
        lines.append(
            f"{table.name:<28} {rows:>12} {table.dim:>4}  {table.placement:<10} {_bytes(table.wire_bytes):>10} "
            f"{otherwise:>10} {memory:>10}"
        )
    lines.append(
        f"{'dense weights':<28} {num_weights:>12,} {'':>4}  {'replicated':<10} {_bytes(dense):>10} {'':>10} "
        f"{_bytes(4 * num_weights):>10}"
    )
    lines.append(f"{'in all':<28} {'':>12} {'':>4}  {'':<10} {_bytes(total):>10}")
    lines.append(f"{total * num_workers / batch_size:,.0f} bytes on the wire for each row")
    return lines


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"
