"""Metrics of parts of the rows: by device, by country, by anything that the Table has a column of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from recmill.dataset.batch import Array
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.metrics import BinaryMetrics, ScoreSums

MAX_SEGMENTS = 50
NUM_RANGES = 10


@dataclass
class Segments:
    """Sums for each value of one column. Numbers are cut into ranges, ids get the names that they stand for."""

    column: str
    edges: list[float] | None  # of ranges, for numbers
    names: pl.Series | None  # of ids, for vocabularies
    sums: dict[object, ScoreSums] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Table, column: str, split: str) -> Segments:
        schema = table.scan(split).collect_schema()
        if column not in schema or isinstance(schema[column], pl.List):
            known = ", ".join(
                name
                for name, kind in schema.items()
                if not isinstance(kind, pl.List) and not name.startswith("__")
            )
            raise ArtifactError(
                f'Table {table.path} has no column "{column}" to cut rows by; it has: {known}.'
            )
        edges = _edges(table, column, split) if schema[column].is_float() else None
        return cls(column, edges, table.plan.values_of(column))

    def add(self, values: pl.Series, labels: Array, scores: Array) -> None:
        if self.edges is not None:
            values = pl.Series(np.searchsorted(np.array(self.edges), values.to_numpy(), side="right"))
        grouped = pl.DataFrame({"value": values, "row": np.arange(len(values))}).group_by("value").agg("row")
        for value, rows in grouped.iter_rows():
            self.sums.setdefault(value, ScoreSums()).add(labels[rows], scores[rows])

    def metrics(self) -> list[tuple[str, BinaryMetrics]]:
        """The biggest parts, biggest first."""
        order = sorted(self.sums.items(), key=lambda item: (-item[1].num_rows, str(item[0])))
        return [(self._name(value), sums.metrics()) for value, sums in order[:MAX_SEGMENTS]]

    def _name(self, value: object) -> str:
        if self.edges is not None and isinstance(value, int):
            low = f"{self.edges[value - 1]:.4g}" if value else "lowest"
            high = f"{self.edges[value]:.4g}" if value < len(self.edges) else "highest"
            return f"{low} to {high}"
        if self.names is not None and isinstance(value, int):
            return str(self.names[value - 1]) if 1 <= value <= len(self.names) else "unknown"
        return "missing" if value is None else str(value)


def _edges(table: Table, column: str, split: str) -> list[float]:
    shares = [number / NUM_RANGES for number in range(1, NUM_RANGES)]
    wanted = [pl.col(column).quantile(share).alias(str(share)) for share in shares]
    return sorted(set(table.scan(split).select(wanted).collect().row(0)))
