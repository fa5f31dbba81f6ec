"""Differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recmill.artifacts.checkpoint.checkpoints import Checkpoints
from recmill.artifacts.checkpoint.step import StepCheckpoint
from recmill.embeddings.table import Array


def diff(checkpoints: Checkpoints, first: StepCheckpoint, second: StepCheckpoint) -> dict[str, Any]:
    """The differences between two checkpoints: added and removed keys, and how far weights moved."""
    chains = checkpoints.chain(first), checkpoints.chain(second)
    before, after = first.arrays(), second.arrays()
    names = [name for name in after if name.startswith("model.") and name in before]
    tables = {}
    for table in second.manifest["tables"]:
        old, new = (_rows_by_key(chain, table) for chain in chains)
        both = np.intersect1d(old[0], new[0], assume_unique=True)
        moved = np.linalg.norm(
            new[1][np.searchsorted(new[0], both)] - old[1][np.searchsorted(old[0], both)], axis=1
        )
        tables[table] = {
            "added": len(new[0]) - len(both),
            "removed": len(old[0]) - len(both),
            "changed": int((moved > 0).sum()),
            "mean_change": float(moved[moved > 0].mean()) if (moved > 0).any() else 0.0,
        }
    dense = {name.removeprefix("model."): float(np.abs(after[name] - before[name]).mean()) for name in names}
    return {"from": first.step, "to": second.step, "tables": tables, "dense": dense}


def _rows_by_key(chain: Sequence[StepCheckpoint], table: str) -> tuple[Array, Array]:
    """The sorted keys of a table and their rows, from a full checkpoint and its deltas."""
    keys, rows = np.empty(0, np.int64), np.empty((0, chain[0].manifest["tables"][table]["dim"]), np.float32)
    for part in chain:
        removed = part.admission()[f"{table}.removed"]
        pieces = list(part.records(table))
        new = np.concatenate([piece.keys for piece in pieces]) if pieces else keys[:0]
        values = np.concatenate([piece.rows for piece in pieces]) if pieces else rows[:0]
        stays = ~np.isin(keys, np.concatenate([removed, new]))
        keys, rows = np.concatenate([keys[stays], new]), np.concatenate([rows[stays], values])
        order = np.argsort(keys)
        keys, rows = keys[order], rows[order]
    return keys, rows
