"""A Table's digest does not depend on partitions, workers, memory, order of files, compression or row order."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events

from recmill.engines import local
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOLDEN = Path(__file__).parent.parent / "golden_digests.txt"

# Every kind of pass: counting, grouping, drawing, ordering.
RICH = events_recipe(
    rows=[
        {"history": {"columns": ["item"], "by": "user", "order": "time", "max_length": 5}},
        {"lag": {"columns": ["price"], "by": "user", "order": "time"}},
        {"negatives": {"label": "click", "per_row": 2, "by": "popularity"}},
    ],
    split={"by": "time", "column": "time", "held_out": 0.2, "halve": True},
    features=[
        {"columns": "user", "steps": [{"vocabulary": {"order": "first_seen"}}]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"name": "recent", "columns": "item_history", "steps": [{"lookup": "item"}]},
        {"name": "item_rate", "columns": "item", "steps": [{"target": {"label": "clicked", "folds": 3}}]},
        {
            "name": "user_price",
            "columns": "user",
            "steps": [{"aggregate": {"column": "price"}}, "standardise"],
        },
        {"columns": "price_lag1", "steps": [{"quantiles": 4}]},
        {"columns": "price", "steps": [{"fill": {"statistic": "median"}}, "min_max"]},
    ],
    table={"order": "shuffle", "keep": ["time", "item"]},
)


@pytest.mark.parametrize("recipe", [events_recipe(), RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("partitions", [2, 7, 50])
def test_partitions_do_not_change_the_digest(tmp_path, recipe, partitions):
    data = write_events(tmp_path / "log", 500)
    whole = prepared(recipe, data, tmp_path / "whole", partitions=1, workers=1).table
    cut = prepared(recipe, data, tmp_path / "cut", partitions=partitions, workers=3).table
    assert cut.digest == whole.digest
    assert cut.manifest["plan_digest"] == whole.manifest["plan_digest"]


def test_shuffled_rows_are_the_same_in_every_partitioning(tmp_path):
    data = write_events(tmp_path / "log", 300)
    one = prepared(RICH, data, tmp_path / "one", partitions=1).table
    seven = prepared(RICH, data, tmp_path / "seven", partitions=7).table
    assert rows_of(one).equals(rows_of(seven))


def test_order_of_rows_does_not_change_the_digest(tmp_path):
    data = write_events(tmp_path / "log", 300, files=3)
    digests = {
        prepared(
            events_recipe(table={"order": order}), data, tmp_path / f"table-{order}", partitions=6
        ).table.digest
        for order in ("log", "shuffle", "interleave")
    }
    assert len(digests) == 1


def test_order_in_which_files_were_made_or_named_in_the_recipe_does_not_matter(tmp_path):
    first = write_events(tmp_path / "first", 90, files=3)
    second = tmp_path / "second"
    second.mkdir()
    for name in ("events2.tsv", "events0.tsv", "events1.tsv"):
        (second / name).write_bytes((first / name).read_bytes())
    listed = events_recipe()
    backwards = events_recipe(log={**_log(), "files": ["events2.tsv", "events1.tsv", "events0.tsv"]})
    assert (
        prepared(listed, first, tmp_path / "a").table.digest
        == prepared(backwards, second, tmp_path / "b").table.digest
    )


def _log() -> dict[str, object]:
    from recmill.recipe.load import recipe_to_dict

    return recipe_to_dict(events_recipe())["log"]


def test_compressed_files_give_the_same_digest(tmp_path):
    plain = write_events(tmp_path / "plain", 200)
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "events0.tsv.gz").write_bytes(gzip.compress((plain / "events0.tsv").read_bytes()))
    recipe = events_recipe(split={"by": "tail", "held_out": 0.25})
    again = events_recipe(split={"by": "tail", "held_out": 0.25}, log={**_log(), "files": ["events0.tsv.gz"]})
    assert (
        prepared(recipe, plain, tmp_path / "a").table.digest
        == prepared(again, packed, tmp_path / "b").table.digest
    )


def test_counting_on_disk_equals_counting_in_memory(tmp_path, monkeypatch):
    data = write_events(tmp_path / "log", 400)
    in_memory = prepared(RICH, data, tmp_path / "in_memory", partitions=5).table
    spills: list[str] = []
    spill = local._Counting._spill

    def counted(self, name):
        spills.append(name)
        spill(self, name)

    monkeypatch.setattr(local._Counting, "_spill", counted)
    # Every counter is over a bound of one byte more than empty ones take.
    monkeypatch.setattr(
        local._Counting,
        "_bound",
        lambda self: [counted(self, name) for name in self.options if self.counters[name]._native.size],
    )
    assert (
        prepared(RICH, data, tmp_path / "on_disk", partitions=5, workers=1).table.digest == in_memory.digest
    )
    assert len(spills) > 10


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines())
def test_digest_of_a_fixture_is_the_golden_one(tmp_path, line):
    fixture, recipe, digest = line.split()
    found = prepare(
        load_recipe(recipe), str(FIXTURES / fixture), tmp_path / "table", PrepareConfig(max_bad=0.0)
    )
    assert found.table.digest == digest
