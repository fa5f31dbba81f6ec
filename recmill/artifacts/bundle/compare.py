"""Differences between two bundles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.entities import Entities
from recmill.artifacts.bundle.rows import RowTable
from recmill.embeddings.table import Array

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TableDiff:
    """Rows in only one of two tables, rows that differ, and their mean distance."""

    added: int
    removed: int
    changed: int
    mean_distance: float


@dataclass(frozen=True)
class EntityDiff:
    """Ids in only one of two bundles."""

    added: int
    removed: int


@dataclass(frozen=True)
class Diff:
    """From the left bundle to the right one; pairs are (left, right). Equal values are left out."""

    versions: tuple[str, str]
    recipe: Mapping[str, tuple[Any, Any]]
    evaluation: Mapping[str, tuple[Any, Any]]
    plans: tuple[str, str]
    tables: Mapping[str, TableDiff]
    entities: Mapping[str, EntityDiff]
    num_bytes: tuple[int, int]

    def lines(self) -> list[str]:
        """The differences as lines of text."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"version     {self.versions[0]} -> {self.versions[1]}"
        yield f"size        {self.num_bytes[0]:,} -> {self.num_bytes[1]:,} bytes"
        same = self.plans[0] == self.plans[1]
        yield f"plan        {'the same' if same else f'{self.plans[0][:8]} -> {self.plans[1][:8]}'}"
        for key, (left, right) in self.recipe.items():
            yield f"recipe      {key}: {_short(left)} -> {_short(right)}"
        for key, (left, right) in self.evaluation.items():
            yield f"evaluation  {key}: {_short(left)} -> {_short(right)}"
        for name, change in self.entities.items():
            yield f"{name:<12}{change.added:,} added, {change.removed:,} removed"
        for name, table in self.tables.items():
            moved = f" by {table.mean_distance:.4g} on average" if table.changed else ""
            counts = (
                f"{table.added:,} rows added, {table.removed:,} removed, {table.changed:,} changed{moved}"
            )
            yield f"table       {name}: {counts}"


def diff(left: Bundle, right: Bundle) -> Diff:
    """Compare two bundles, of one recipe or of two."""
    return Diff(
        versions=(left.version, right.version),
        recipe=_changed_values(left.manifest["recipe"], right.manifest["recipe"]),
        evaluation=_changed_values(left.manifest.get("evaluation"), right.manifest.get("evaluation")),
        plans=(_plan_digest(left.path), _plan_digest(right.path)),
        tables=_changed_tables(left, right),
        entities={
            name: change
            for name, ours, theirs in (
                ("items", left.items, right.items),
                ("users", left.users, right.users),
            )
            if (change := _changed_entities(ours, theirs)) != EntityDiff(0, 0)
        },
        num_bytes=(left.num_bytes, right.num_bytes),
    )


def _changed_values(left: Any, right: Any) -> dict[str, tuple[Any, Any]]:
    """Key path -> both values, where they differ; None stands for an absent key."""
    before, after = dict(_leaves(left)), dict(_leaves(right))
    paths = dict.fromkeys([*before, *after])
    return {
        path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)
    }


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{number}]")
    elif path:
        yield path, tree


def _plan_digest(path: Path) -> str:
    """The recorded digest of the plan, without reading its vocabularies."""
    return str(json.loads((path / "plan" / "plan.json").read_text(encoding="utf-8"))["digest"])


def _changed_tables(left: Bundle, right: Bundle) -> dict[str, TableDiff]:
    ours, theirs = _tables(left), _tables(right)
    found = {name: _change(ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    return {name: change for name, change in found.items() if change != TableDiff(0, 0, 0, 0.0)}


def _tables(bundle: Bundle) -> dict[str, RowTable]:
    return {
        f"{collection}/{name}": rows
        for collection in bundle.collections
        for name, rows in bundle.collection(collection).rows.items()
    }


def _change(left: RowTable | None, right: RowTable | None) -> TableDiff:
    before = left.keys if left is not None else np.empty(0, np.int64)
    after = right.keys if right is not None else np.empty(0, np.int64)
    if left is None or right is None or left.dim != right.dim:
        return TableDiff(len(after), len(before), 0, 0.0)
    both = np.intersect1d(before, after, assume_unique=True)
    moved = _distances(left, right, both)
    changed = int((moved > 0).sum())
    mean = float(moved.sum() / changed) if changed else 0.0
    return TableDiff(len(after) - len(both), len(before) - len(both), changed, mean)


def _distances(left: RowTable, right: RowTable, keys: Array) -> Array:
    """The distance between the two rows of each key."""
    parts = [keys[start : start + _ROWS_AT_ONCE] for start in range(0, len(keys), _ROWS_AT_ONCE)]
    found = [np.linalg.norm(right.lookup(part) - left.lookup(part), axis=1) for part in parts]
    return np.concatenate([np.empty(0, np.float32), *found])


def _changed_entities(left: Entities | None, right: Entities | None) -> EntityDiff:
    if left is None or right is None:
        return EntityDiff(len(right or ()), len(left or ()))
    before, after = left.column(left.id_column), right.column(right.id_column)
    if before.dtype != after.dtype:
        return EntityDiff(len(after), len(before))
    common = int(before.is_in(after.implode()).sum())
    return EntityDiff(len(after) - common, len(before) - common)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
