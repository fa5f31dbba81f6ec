"""The Table: prepared rows on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from recmill.artifact import read_manifest
from recmill.errors import ArtifactError
from recmill.features.planned import Planned
from recmill.kernels import RowDigest
from recmill.spec.recipe import SPLITS


@dataclass(frozen=True)
class Table(Planned):
    """Prepared rows: Parquet shards plus a manifest and the Plan that made them. Immutable once published."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Table:
        """Open a published Table and check that its shards are there and have the right size."""
        path = Path(path)
        table = cls(path, read_manifest(path, "table"))
        for shard in table.manifest["shards"]:
            file = path / shard["file"]
            size = file.stat().st_size if file.is_file() else None
            if size != shard["num_bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise ArtifactError(
                    f"Table {path} is damaged: {shard['file']} {found}, its record says {shard['num_bytes']:,}. "
                    "Delete the Table and run `recmill prepare` again."
                )
        return table

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    def num_rows(self, split: str = "train") -> int:
        return sum(int(shard["rows"]) for shard in self.manifest["shards"] if shard["split"] == split)

    def shards(self, split: str = "train") -> list[Path]:
        """The split's Parquet files in row order."""
        return [self.path / shard["file"] for shard in self.manifest["shards"] if shard["split"] == split]

    def scan(self, split: str = "train") -> pl.LazyFrame:
        """The split's rows, in order, as a lazy Polars frame."""
        if split not in SPLITS:
            raise ArtifactError(f'Table {self.path} has no split "{split}"; known: {", ".join(SPLITS)}.')
        shards = self.shards(split)
        if not shards:
            raise ArtifactError(f"Table {self.path} has no {split} rows; its recipe holds none out.")
        return pl.scan_parquet(shards)

    def verify(self) -> None:
        """Read every shard and compare it with its digest."""
        for shard in self.manifest["shards"]:
            try:
                found = RowDigest.of(pl.read_parquet(self.path / shard["file"]))
            except (pl.exceptions.PolarsError, OSError) as error:
                raise ArtifactError(
                    f"Table {self.path} is damaged: {shard['file']} cannot be read: {error}"
                ) from None
            if found != RowDigest.read(shard):
                raise ArtifactError(
                    f"Table {self.path} is damaged: {shard['file']} does not have the digest of its record."
                )


def table_digest(shards: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Digest of all rows with their splits, whatever their order, shards, engine or partitioning."""
    sums: dict[str, RowDigest] = {}
    for shard in shards:
        sums[shard["split"]] = sums.get(shard["split"], RowDigest()) + RowDigest.read(shard)
    content = [sorted(columns), sorted((split, found.rows, found.hex()) for split, found in sums.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
