"""The live model, measured on the rows of a new Table, though another Plan made its features."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from recmill.artifacts.bundle.bundle import Bundle, current_of, kept_checkpoint
from recmill.artifacts.bundle.remote import named_at
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import is_published, read_manifest
from recmill.dataset.shard import ShardFile, checksums_of
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.recipe.load import recipe_to_dict
from recmill.recipe.recipe import Recipe
from recmill.storage.objects import ObjectStore, is_url

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Live:
    """The checkpoint that the live model is of, and its step of each model if that is known."""

    folder: Checkpoint
    steps: Mapping[str, int]
    otherwise: str

    def which(self, model: str) -> str:
        return str(self.steps[model]) if model in self.steps else self.otherwise


def find_live(address: str | Path, which: str, allow_none: bool) -> Live | None:
    """A checkpoint, or that of the version that is current where bundles are published.

    None, if that is allowed, when nothing was published yet.
    """
    if is_url(address):
        return _live_under(str(address), which, allow_none)
    path = Path(address)
    if is_published(path) and not _is_bundle(path):
        return Live(Checkpoint.open(path).to_serve(which), {}, which)
    if current_of(path) is None and not is_published(path):
        _check_allowed(path, allow_none)
        return None
    bundle = Bundle.open(path)
    kept = kept_checkpoint(bundle.path.parent, bundle.version)
    made_of = bundle.manifest["checkpoint"]
    folder = kept if is_published(kept) else Path(made_of["path"])
    if not is_published(folder):
        raise ArtifactError(
            f"Version {bundle.version} is live, but its checkpoint is neither at {kept} nor at {folder}. "
            "Publish with `recmill bundle publish --checkpoint DIR`, which keeps it, or name it with --live."
        )
    return Live(Checkpoint.open(folder), made_of["steps"], which)


def _live_under(url: str, which: str, allow_none: bool) -> Live | None:
    """The same of a URL where bundles are published with their checkpoints."""
    version, _ = named_at(url)
    if version is None:
        _check_allowed(url, allow_none)
        return None
    made_of = Bundle.open(url).manifest["checkpoint"]
    return Live(Checkpoint.open(ObjectStore(url).address(f"checkpoints/{version}")), made_of["steps"], which)


def _check_allowed(address: str | Path, allow_none: bool) -> None:
    if not allow_none:
        raise ArtifactError(
            f"{address} holds no live model: neither a checkpoint nor a published version. "
            "Correct --live, or add --allow-no-live for the first model."
        )


def _is_bundle(path: Path) -> bool:
    try:
        read_manifest(path, "bundle")
    except ArtifactError:
        return False
    return True


@contextmanager
def as_planned(live: Checkpoint, table: Table, splits: Sequence[str], beside: Path) -> Iterator[Table]:
    """The same rows with the features of the live model's Plan; a Table that is gone afterwards.

    Made of the raw columns that the Table keeps, unless both have the same Plan.
    """
    if live.columns == table.columns and live.plan.digest() == table.plan.digest():
        yield table
        return
    _check_kept(live, table)
    folder = beside / "live-table.partial"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield _replanned(live, table, splits, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raw_columns(recipe: Recipe) -> list[str]:
    """The columns of rows that features and labels are made of, once each."""
    of_features = [name for feature in recipe.features for name in feature.columns]
    of_labels = [name for label in recipe.labels for name in label.columns]
    return list(dict.fromkeys(of_features + of_labels))


def _check_kept(live: Checkpoint, table: Table) -> None:
    needed = raw_columns(live.recipe)
    missing = [name for name in needed if name not in table.recipe.table.keep]
    if missing:
        raise ArtifactError(
            f"The live model {live.path} has another Plan than Table {table.path}, which does not keep the raw "
            f"columns {', '.join(missing)}. Prepare it with --set 'table.keep={json.dumps(needed)}'."
        )


def _replanned(live: Checkpoint, table: Table, splits: Sequence[str], folder: Path) -> Table:
    live.plan.save(folder / "plan")
    shards = []
    for split in splits:
        for number, source in enumerate(table.files(split)):
            file = folder / f"{split}-{number:05}.parquet"
            rows = _applied(live, source)
            rows.write_parquet(file)
            shards.append(
                {
                    "file": file.name,
                    "split": split,
                    "rows": rows.height,
                    "num_bytes": file.stat().st_size,
                    "digest": "",
                    "checksums": checksums_of(file),
                }
            )
    columns = [asdict(column) for column in live.columns]
    return Table(folder, {"shards": shards, "columns": columns, "recipe": recipe_to_dict(live.recipe)})


def _applied(live: Checkpoint, shard: ShardFile) -> pl.DataFrame:
    """Features of a shard's raw columns. Rows are new to the live model: nothing of them was used to fit its Plan."""
    names = raw_columns(live.recipe)
    stored = pl.concat(shard.frames([f"raw_{name}" for name in names]))
    rows = stored.rename({f"raw_{name}": name for name in names})
    also_kept = [name for name in live.plan.recipe.table.keep if name not in names]
    rows = rows.with_columns(pl.lit(None).alias(name) for name in also_kept)
    return pl.concat([live.plan.apply(part) for part in rows.iter_slices(_ROWS_AT_ONCE)])


def misses_counted(live: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Questions that the live model cannot be asked, for it knows none of their items, count as misses of it."""
    asked, all_of_them = live.get("users"), measured.get("users")
    if not asked or not all_of_them or asked >= all_of_them:
        return dict(live)
    return {name: value * asked / all_of_them if "@" in name else value for name, value in live.items()}
