"""Writing embedding rows of a bundle. See rows.py for the files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from recmill.artifacts.manifest import write_whole
from recmill.embeddings.table import AdmissionState, Array, EmbeddingTable, KeyRecords, TableSpec, as_keys

DTYPES = ("float32", "float16", "int8")
_ROWS_AT_ONCE = 1 << 16
_MOST_INT8 = 127
_MOST_FLOAT16 = float(np.finfo(np.float16).max)


def write_rows(into: Path, table: EmbeddingTable, dtype: str = "float32") -> None:
    """Write all rows of a table to the folder `into`. Counts as a snapshot: the table's next delta builds on it."""
    with table.begin_snapshot() as snapshot:
        write_records(into, table.spec, snapshot, snapshot.waiting.shared_rows, dtype)


def write_records(
    into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], shared_rows: Array, dtype: str = "float32"
) -> None:
    """Write records with distinct keys. Holds no more than one table's rows in memory."""
    if dtype not in DTYPES:
        raise ValueError(f'rows are {", ".join(DTYPES)}, got "{dtype}"')
    into.mkdir(parents=True, exist_ok=True)
    shared_rows = np.asarray(shared_rows, np.float32).reshape(spec.shared_rows, spec.dim)
    if spec.shared_rows:
        np.save(into / "shared.npy", shared_rows)
    if spec.num_rows is None:
        _write_keyed(into, spec, pieces, dtype)
    else:
        _write_bounded(into, spec, pieces, absent_table(spec, shared_rows), dtype)
    write_whole(into / "spec.json", json.dumps(_spec_to_dict(spec), indent=1) + "\n")


def _write_keyed(into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], dtype: str) -> None:
    keys = [np.empty(0, np.int64)]
    rows = [np.empty((0, spec.dim), dtype)]
    scales = [np.empty(0, np.float32)]
    for piece in pieces:
        coded, coded_scales = encode(piece.rows, dtype)
        keys.append(as_keys(piece.keys))
        rows.append(coded)
        if coded_scales is not None:
            scales.append(coded_scales)
    all_keys, order = np.unique(np.concatenate(keys), return_index=True)
    np.save(into / "keys.npy", all_keys)
    _save_in_order(into / "rows.npy", rows, order)
    if dtype == "int8":
        _save_in_order(into / "scales.npy", scales, order)


def _save_in_order(path: Path, pieces: list[Array], order: Array) -> None:
    """Save the concatenated chunks in another order, written part by part."""
    values = np.concatenate(pieces)
    pieces.clear()
    file = open_memmap(path, mode="w+", dtype=values.dtype, shape=(len(order), *values.shape[1:]))
    for start in range(0, len(order), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        file[part] = values[order[part]]
    file.flush()


def _write_bounded(
    into: Path, spec: TableSpec, pieces: Iterable[KeyRecords], absent: EmbeddingTable, dtype: str
) -> None:
    assert spec.num_rows is not None
    rows = open_memmap(into / "rows.npy", mode="w+", dtype=dtype, shape=(spec.num_rows, spec.dim))
    scales = None
    if dtype == "int8":
        scales = open_memmap(into / "scales.npy", mode="w+", dtype=np.float32, shape=(spec.num_rows,))

    def put(keys: Array, values: Array) -> None:
        coded, coded_scales = encode(values, dtype)
        rows[keys] = coded
        if scales is not None:
            scales[keys] = coded_scales

    for start in range(0, spec.num_rows, _ROWS_AT_ONCE):
        keys = np.arange(start, min(start + _ROWS_AT_ONCE, spec.num_rows))
        put(keys, absent.pool(absent.lookup(keys, train=False)))
    for piece in pieces:
        put(piece.keys, piece.rows)
    for file in (rows, scales):
        if file is not None:
            file.flush()


def _spec_to_dict(spec: TableSpec) -> dict[str, object]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {**values, "parameters": dict(spec.parameters)}


def encode(rows: Array, dtype: str) -> tuple[Array, Array | None]:
    """Rows in the stored format; for int8 also the scale of each row, its largest value / 127."""
    if dtype == "float32":
        return np.asarray(rows, np.float32), None
    if dtype == "float16":
        return np.clip(rows, -_MOST_FLOAT16, _MOST_FLOAT16).astype(np.float16), None
    scales = (np.abs(rows).max(axis=1, initial=0) / np.float32(_MOST_INT8)).astype(np.float32)
    steps = np.rint(rows / np.where(scales > 0, scales, np.float32(1))[:, None])
    return np.clip(steps, -_MOST_INT8, _MOST_INT8).astype(np.int8), scales


def absent_table(spec: TableSpec, shared_rows: Array | None) -> EmbeddingTable:
    """An empty table of this spec, where every key reads as absent.

    Only training counts occurrences, so this does not.
    """
    table = EmbeddingTable(replace(spec, bloom_counters=None))
    if spec.shared_rows:
        assert shared_rows is not None
        none = np.empty(0, np.int64)
        states = np.zeros((spec.shared_rows, table.num_states), np.float32)
        table.load_waiting(AdmissionState(none, none, none, none, shared_rows, states))
    return table
