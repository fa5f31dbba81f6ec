"""What was changed in a shard after prepare wrote it is noticed before any row of it is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from recmill.artifacts.manifest import read_manifest, write_manifest
from recmill.dataset.loader import Batches
from recmill.dataset.partial_table import PartialTable, PartialTableBatches
from recmill.dataset.shard import checksums_of
from recmill.dataset.table import Table
from recmill.engines import shards
from recmill.errors import ArtifactError
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare
from recmill.stages.score.sources import TableRows
from recmill.synthetic.generate import generate

NUM_FLIPS = 25


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    folder = tmp_path_factory.mktemp("shop")
    generate("shop", 700, 1, folder / "log")
    recipe = load_recipe("quickstart", ['table.keep=["time"]', "table.order=log"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "ROWS_PER_GROUP", 137)
        return prepare(recipe, str(folder / "log"), folder / "table", PrepareConfig(partitions=1)).table


@pytest.fixture
def copy(table, tmp_path) -> Table:
    shutil.copytree(table.path, tmp_path / "table")
    return Table.open(tmp_path / "table")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))


def change_record(table: Table, **facts) -> Table:
    """As if the record of the training shard had always been like that."""
    manifest = read_manifest(table.path, "table")
    next(shard for shard in manifest["shards"] if shard["split"] == "train").update(facts)
    write_manifest(table.path, "table", manifest)
    return Table.open(table.path)


def rewrite(table: Table, change) -> Table:
    """Another shard in the place of the first, with a record that fits."""
    path = table.shards()[0]
    change(pl.read_parquet(path)).write_parquet(path)
    return change_record(table, num_bytes=path.stat().st_size, checksums=checksums_of(path))


READERS = {
    "batches": lambda table: list(Batches(table, 64).read()),
    "batches of positives": lambda table: list(Batches(table, 64, where="click").read()),
    "growing table": lambda table: list(PartialTableBatches(PartialTable(table.path), 64).read()),
    "scan": lambda table: table.scan().collect(),
    "score": lambda table: [
        list(rows.read(unit)) for rows in [TableRows.of(table, ["train"], ["click"])] for unit in rows.units()
    ],
    "verify": lambda table: table.verify(),
}


@pytest.mark.parametrize("reader", READERS)
def test_any_flipped_bit_is_noticed_by_every_reader(copy, reader):
    path, draw = copy.shards()[0], random.Random(reader)
    whole = path.read_bytes()
    READERS[reader](copy)
    for _ in range(NUM_FLIPS):
        path.write_bytes(whole)
        flip(path, draw.randrange(8 * len(whole)))
        with pytest.raises(ArtifactError, match=r"train/shard-00000-000.parquet .*recmill prepare"):
            READERS[reader](copy)


def test_flips_are_noticed_in_tables_of_earlier_versions_too(copy):
    old = change_record(copy, checksums=())
    path = old.shards()[0]
    READERS["batches"](old)
    flip(path, 8 * 2000)
    with pytest.raises(ArtifactError, match="is damaged"):
        READERS["batches"](old)


def test_a_file_is_compared_once(copy, monkeypatch):
    READERS["batches"](copy)
    monkeypatch.setattr("recmill.dataset.shard._checksum", lambda *span: pytest.fail("compared again"))
    READERS["batches"](copy)


def test_a_missing_shard_is_an_error_of_its_own(copy):
    batches = Batches(copy, 64)
    copy.shards()[0].unlink()
    with pytest.raises(ArtifactError, match=r"shard-00000-000.parquet is missing.*recmill prepare"):
        list(batches.read())


def test_a_truncated_shard_is_an_error_of_its_own(copy):
    batches = Batches(copy, 64)
    path = copy.shards()[0]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"has 1,000 bytes, its record says"):
        list(batches.read())


def test_a_dropped_column_is_named(copy):
    table = rewrite(copy, lambda rows: rows.drop("item_id"))
    with pytest.raises(ArtifactError, match=r"has no column item_id; it has: .*click"):
        READERS["batches"](table)


def test_a_column_of_another_type_is_named(copy):
    table = rewrite(copy, lambda rows: rows.with_columns(pl.col("item_id").cast(pl.String)))
    with pytest.raises(ArtifactError, match=r'has String in column "item_id", expected ids'):
        READERS["batches"](table)


def test_rows_that_are_gone_are_noticed_even_if_all_else_fits(copy):
    with pytest.raises(ArtifactError, match=r"rows, its record says"):
        READERS["batches"](rewrite(copy, lambda rows: rows.head(20)))


def test_every_byte_of_a_shard_has_a_checksum(table):
    for shard in table.files():
        assert len(shard.checksums) == 1 + pq.ParquetFile(shard.path).num_row_groups
