"""What prepare promises on every engine: the same Table, the same errors, and no work done twice."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from engine_confs import EngineConf, LocalConf
from logs_and_recipes import events_recipe, rows_of, write_events
from test_prepare_bad_input import BAD, spoiled
from test_prepare_digest import FIXTURES, GOLDEN, RICH

from recmill.artifacts.work import read_record
from recmill.dataset.table import Table
from recmill.engines import counting, open_engine
from recmill.engines.cluster import ClusterEngine
from recmill.errors import FeatureError, ResourceError, TooManyBadRows
from recmill.features.plan_artifact import plan_at
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import SPLITS, Filter, Recipe
from recmill.stages.prepare.prepare import PrepareResult, prepare


def prepared(engine: EngineConf, recipe: Recipe, data: Path, into: Path, **options: Any) -> PrepareResult:
    return prepare(recipe, str(data), into, engine.options(**options))


def locally(recipe: Recipe, data: Path, into: Path, **options: Any) -> Table:
    return prepared(LocalConf(), recipe, data, into, **options).table


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines(), ids=lambda line: line.split()[1])
def test_digest_of_a_fixture_is_the_golden_one(tmp_path: Path, engine: EngineConf, line: str) -> None:
    fixture, recipe, digest = line.split()
    found = prepared(engine, load_recipe(recipe), FIXTURES / fixture, tmp_path / "table", max_bad=0.0)
    assert found.table.digest == digest
    found.table.verify()


def test_every_kind_of_pass_gives_the_same_rows_in_the_same_order(tmp_path: Path, engine: EngineConf) -> None:
    data = write_events(tmp_path / "log", 300)
    expected = locally(RICH, data, tmp_path / "expected", partitions=1)
    found = prepared(engine, RICH, data, tmp_path / "table", partitions=4).table
    assert found.digest == expected.digest
    assert found.manifest["plan_digest"] == expected.manifest["plan_digest"]
    for split in SPLITS:
        assert rows_of(found, split).equals(rows_of(expected, split))


def test_a_plan_that_is_there_gives_the_same_rows(tmp_path: Path, engine: EngineConf) -> None:
    recipe = replace(
        RICH, rows=(*RICH.rows[:-1], Filter("time >= 150"))
    )  # nothing is left of the first pieces
    data = write_events(tmp_path / "log", 300)
    expected = locally(recipe, data, tmp_path / "expected", partitions=1)
    into, options = tmp_path / "table", engine.options(partitions=4)
    found = prepare(recipe, str(data), into, options, plan=plan_at(expected.path)).table
    assert (found.digest, found.num_rows("train") > 0) == (expected.digest, True)


@pytest.mark.parametrize("order", ["log", "interleave"])
def test_rows_stand_in_the_order_asked_for(tmp_path: Path, engine: EngineConf, order: str) -> None:
    data = write_events(tmp_path / "log", 90, files=3)
    recipe = events_recipe(
        split={"by": "last", "column": "user", "order": "time"}, table={"order": order, "keep": ["time"]}
    )
    expected = locally(recipe, data, tmp_path / "expected")
    found = prepared(engine, recipe, data, tmp_path / "table", partitions=6).table
    assert rows_of(found).equals(rows_of(expected))


def test_vocabularies_that_stay_on_disk_give_the_same_rows(
    tmp_path: Path, cluster_engine: EngineConf, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_events(tmp_path / "log", 300)
    expected = locally(RICH, data, tmp_path / "expected")
    monkeypatch.setattr(counting, "BYTES_FOR_LOOKUP", 1 << 40)  # nothing is small
    found = prepared(cluster_engine, RICH, data, tmp_path / "table", partitions=3).table
    assert found.manifest["plan_digest"] == expected.manifest["plan_digest"]
    assert rows_of(found).equals(rows_of(expected))


def test_bad_rows_are_counted_and_set_aside(tmp_path: Path, engine: EngineConf) -> None:
    data = spoiled(tmp_path / "log", 200)
    found = prepared(engine, events_recipe(), data, tmp_path / "table", max_bad=0.1, partitions=5)
    assert dict(found.tally.reasons) == {reason: 1 for _, reason in BAD}
    assert (found.tally.rows, found.table.num_rows()) == (206, 200)
    files = sorted((tmp_path / "table" / "rejected").iterdir())
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert sorted(record["reason"] for record in records) == sorted(reason for _, reason in BAD)
    assert {file.suffix for file in files} == {".jsonl"}


def test_too_many_bad_rows_is_the_same_error(tmp_path: Path, engine: EngineConf) -> None:
    data = spoiled(tmp_path / "log", 200)
    with pytest.raises(TooManyBadRows) as caught:
        prepared(engine, events_recipe(), data, tmp_path / "table")
    assert "6 of 206 rows (2.91%) are bad, more than --max-bad 0.10% allows" in str(caught.value)
    assert "events0.tsv at" in str(caught.value)


def test_an_error_inside_a_task_is_the_same_error(tmp_path: Path, engine: EngineConf) -> None:
    columns = [{"name": "item", "type": "int"}, {"name": "click", "type": "int"}]
    recipe = events_recipe(
        log={"files": ["log.tsv"], "columns": columns},
        features=[{"columns": "item", "steps": ["vocabulary"]}],
        table={},
    )
    (tmp_path / "log.tsv").write_text("1\t1\n2\t\n")
    with pytest.raises(FeatureError) as caught:
        prepared(engine, recipe, tmp_path, tmp_path / "table")
    assert str(caught.value) == (
        'Label "clicked" is missing in 1 of 2 rows. '
        "Set `required = true` on its column to set such rows aside, or add fill to its steps."
    )


LENGTH: dict[str, Any] = {"function": {"path": "user_functions:length", "type": "int"}}


def text_recipe(*more_steps: str, **changes: Any) -> Recipe:
    """The length of a text by a function of the user's own."""
    columns = [{"name": "text", "type": "text"}, {"name": "number", "type": "int"}]
    tree: dict[str, Any] = {
        "log": {"files": ["log.tsv"], "columns": columns},
        "labels": [],
        "features": [{"columns": "text", "steps": [LENGTH, *more_steps]}],
        "table": {"keep": ["text", "number"]},
    }
    return events_recipe(**{**tree, **changes})


def write_texts(folder: Path, verb: str) -> Path:
    """300 texts, of which the last says what is to happen once."""
    folder.mkdir()
    texts = [f"text {number % 17:0{number % 5}d}" for number in range(299)]
    rows = [f"{text}\t{number}\n" for number, text in enumerate([*texts, f"{verb} {folder.parent / verb}"])]
    (folder / "log.tsv").write_text("".join(rows))
    return folder


def test_an_interrupted_prepare_goes_on_and_keeps_finished_shards(tmp_path: Path, engine: EngineConf) -> None:
    data, into = write_texts(tmp_path / "log", "fail-late"), tmp_path / "table"
    with pytest.raises(FeatureError, match="The user's own function failed"):
        prepared(engine, text_recipe(), data, into, partitions=6)
    records = sorted(into.glob("_work/done/parquet-*.json"))
    shards = [into / shard["file"] for record in records for shard in read_record(record)]
    before = {shard: shard.stat().st_ino for shard in shards}
    assert len(shards) >= 2

    again = prepared(engine, text_recipe(), data, into)
    assert again.went_on
    assert {shard: shard.stat().st_ino for shard in shards} == before
    assert rows_of(again.table)["raw_number"].to_list() == list(range(300))
    again.table.verify()
    assert not list(into.rglob("*.partial"))


def test_rows_that_were_grouped_before_an_interruption_are_not_grouped_again(
    tmp_path: Path, engine: EngineConf
) -> None:
    data, into = write_texts(tmp_path / "log", "fail"), tmp_path / "table"
    recipe = text_recipe(
        rows=[{"dedupe": {"by": ["number"], "order": "number"}}],
        table={"order": "shuffle", "keep": ["number"]},
    )
    with pytest.raises(FeatureError, match="The user's own function failed"):
        prepared(engine, recipe, data, into, partitions=3)
    log = data / "log.tsv"
    stat = log.stat()
    log.write_bytes(b"x" * stat.st_size)  # who reads it again finds nothing but bad rows
    os.utime(log, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    again = prepared(engine, recipe, data, into)
    assert sorted(rows_of(again.table)["raw_number"]) == list(range(300))


@pytest.mark.parametrize("more_steps", [(), ("vocabulary",)], ids=["while writing", "while counting"])
def test_a_task_that_is_killed_runs_again(
    tmp_path: Path, cluster_engine: EngineConf, more_steps: tuple[str, ...]
) -> None:
    data = write_texts(tmp_path / "log", "kill")
    found = prepared(cluster_engine, text_recipe(*more_steps), data, tmp_path / "table", partitions=3)
    assert (tmp_path / "kill").exists()
    expected = locally(text_recipe(*more_steps), data, tmp_path / "expected", partitions=3)
    assert rows_of(found.table).equals(rows_of(expected))


def test_binary_rows_are_the_same(tmp_path: Path, engine: EngineConf) -> None:
    data = FIXTURES / "criteo"
    for name, conf in (("expected", LocalConf()), ("table", engine)):
        prepared(conf, load_recipe("criteo-dlrm"), data, tmp_path / name, partitions=2, binary=True)
    found, expected = (sorted((tmp_path / name / "binary").iterdir()) for name in ("table", "expected"))
    assert [file.name for file in found] == [file.name for file in expected]
    assert [file.read_bytes() for file in found] == [file.read_bytes() for file in expected]


def test_the_driver_gets_few_rows_or_a_clear_error(tmp_path: Path, cluster_engine: EngineConf) -> None:
    class Large:
        """Rows that would not fit into the driver's memory, if it asked for them all."""

        def units(self) -> range:
            return range(2)

        def unit_bytes(self, unit: int) -> int:
            return 1

        first_position = unit_bytes

        def max_offset(self) -> int:
            return 2

        def read(self, unit: int) -> Any:
            for _ in range(5):
                yield pl.DataFrame({"number": pl.repeat(unit, 2_000_000, dtype=pl.Int64, eager=True)})

    options = cluster_engine.options(memory=256 << 20)
    with open_engine(options, tmp_path) as engine:
        assert isinstance(engine, ClusterEngine)
        frame = engine.read(Large())
        with pytest.raises(
            ResourceError, match=r"20,000,000 rows \(152 MB\), more than half of --memory \(256 MB\)"
        ):
            engine.collect(frame)
        few = engine.map(frame, lambda rows: rows.head(1))
        assert engine.collect(few)["number"].to_list() == [0] * 5 + [1] * 5
