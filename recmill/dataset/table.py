"""The Table: prepared rows on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from recmill.artifacts.manifest import read_manifest
from recmill.dataset.shard import ShardFile, fetched_ahead
from recmill.errors import ArtifactError
from recmill.features.kernels import RowDigest
from recmill.features.plan_artifact import PlanArtifact
from recmill.recipe.recipe import SPLITS
from recmill.storage.cache import SHARDS
from recmill.storage.view import opened


@dataclass(frozen=True, repr=False)
class Table(PlanArtifact):
    """Prepared rows: Parquet shards plus a manifest and the Plan that made them. Immutable once published."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Table:
        """Open a published Table and check that its shards exist and have the right size.

        Shards of a URL, such as s3://bucket/table, are fetched when they are read.
        """
        folder = opened(path, "table", streamed=SHARDS)
        table = cls(folder, read_manifest(folder, "table"))
        for shard in table.files():
            shard.check_recorded_size()
        return table

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    def num_rows(self, split: str = "train") -> int:
        return sum(int(shard["rows"]) for shard in self.manifest["shards"] if shard["split"] == split)

    def shards(self, split: str = "train") -> list[Path]:
        """The split's Parquet files in row order."""
        return [shard.path for shard in self.files(split)]

    def files(self, split: str | None = None) -> list[ShardFile]:
        """The shards of a split, or all, whose rows are verified as they are read."""
        return [
            ShardFile.of(self.path, shard)
            for shard in self.manifest["shards"]
            if split is None or shard["split"] == split
        ]

    def check_split(self, split: str) -> None:
        """Raise when there are no rows of this split."""
        if split not in SPLITS:
            raise ArtifactError(f'Table {self.path} has no split "{split}"; known: {", ".join(SPLITS)}.')
        if not self.files(split):
            raise ArtifactError(f"Table {self.path} has no {split} rows; its recipe holds none out.")

    def scan(self, split: str = "train") -> pl.LazyFrame:
        """The split's rows, in order, as a lazy Polars frame. Its files are verified first."""
        self.check_split(split)
        for shard in fetched_ahead(self.files(split)):
            shard.verify()
        return pl.scan_parquet(self.shards(split))

    def to_polars(self, split: str = "train") -> pl.DataFrame:
        """The split's rows: features, labels, and the raw columns that the recipe keeps."""
        return self.scan(split).collect()

    def to_arrow(self, split: str = "train") -> pa.Table:
        """The split's rows as a pyarrow Table."""
        return self.to_polars(split).to_arrow()

    def to_pandas(self, split: str = "train") -> Any:
        """The split's rows as a pandas DataFrame."""
        return self.to_arrow(split).to_pandas()

    def summary(self) -> dict[str, str]:
        rows = {f"{split} rows": self.num_rows(split) for split in SPLITS}
        counts = {name: f"{number:,}" for name, number in rows.items() if number}
        return {"recipe": str(self.manifest["recipe"]["name"]), **counts, "digest": self.digest}

    def verify(self) -> None:
        """Verify every shard."""
        for shard in fetched_ahead(self.files()):
            shard.verify()


def table_digest(shards: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Digest of all rows with their splits, independent of order, shards, engine and partitioning."""
    sums: dict[str, RowDigest] = {}
    for shard in shards:
        sums[shard["split"]] = sums.get(shard["split"], RowDigest()) + RowDigest.read(shard)
    content = [sorted(columns), sorted((split, found.rows, found.hex()) for split, found in sums.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
