"""Sizing: the arithmetic is shown, and it agrees with what real runs took."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from recmill.recipe.load import load_recipe, shipped_recipes
from recmill.stages.deploy.model_size import EmbeddedTable, ModelSize, Traffic, seen_at_least
from recmill.stages.deploy.sizing import GB, MB, Sizing, size

ROWS = 60_000


def lines(sizing: Sizing, what: str) -> list[str]:
    return [line for line in sizing.lines() if line.startswith(what)]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_has_a_size(name: str) -> None:
    sizing = size(load_recipe(name))
    for need in (sizing.prepare, sizing.train, sizing.export, sizing.serve):
        assert need.cpus >= 2
        assert 512 * MB <= need.memory < 1000 * GB
    assert sizing.prepare_bound >= 256 * MB
    assert sizing.replicas >= 2
    assert all(" = " in line for line in sizing.lines())


def test_the_arithmetic_is_shown_with_its_numbers() -> None:
    sizing = size(load_recipe("criteo-widedeep"), rows=1_000_000)
    assert lines(sizing, "embedding rows") == [
        "embedding rows         ranking: 26 tables x 1,001 on average = 26,026",
        "embedding rows         ranking, wide: 26 tables x 1,001 on average = 26,026",
    ]
    assert lines(sizing, "Table") == ["Table                  1,000,000 rows x 160 B x 0.55 packed = 83.9 MB"]


def test_dense_weights_are_those_of_the_model_that_was_measured() -> None:
    deeprec = ModelSize(load_recipe("criteo-deeprec"), Traffic())
    assert deeprec.ranking_weights * 6 == pytest.approx(3.033e6, rel=0.02)  # FLOP a sample, benchmarks/
    wide_deep = ModelSize(load_recipe("criteo-widedeep"), Traffic())
    assert wide_deep.ranking_weights * 6 == pytest.approx(9.099e6, rel=0.02)


def test_a_record_of_a_table_is_as_large_as_it_was_measured() -> None:
    table = EmbeddedTable("ranking", "c1", ids=1000, dim=16, optimizer="rowwise_adagrad")
    assert table.memory / table.ids == pytest.approx(88.1 + 21.8, rel=0.05)  # record and index, benchmarks/


def test_more_traffic_needs_more_servers_and_more_rows_more_cores() -> None:
    recipe = load_recipe("criteo-widedeep")
    assert [size(recipe, rate=rate).replicas for rate in (1, 400, 4000)] == [2, 5, 42]
    assert [size(recipe, rows=rows).train.cpus for rows in (10**6, 10**8, 10**9)] == [2, 4, 16]


def test_values_that_must_be_seen_more_often_are_fewer() -> None:
    assert seen_at_least(1) == 1
    assert 1 > seen_at_least(2) > seen_at_least(3) > seen_at_least(10) > 0


def test_users_and_items_that_are_known_are_not_guessed() -> None:
    tables = {
        table.name: table.ids
        for table in ModelSize(load_recipe("quickstart"), Traffic(10**6, 500, 9_000)).tables
    }
    assert (tables["user"], tables["item"]) == (9_001, 501)


# against real runs


@dataclass(frozen=True)
class Ran:
    """A recipe taken through its stages: bytes on disk, and the most memory that each stage had."""

    bytes: dict[str, int]
    memory: dict[str, int]


# A process begins with the peak of the one that started it, so a small one must start what is measured.
MEASURED = """
import os, sys
_, status, used = os.wait4(os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ), 0)
print(used.ru_maxrss * 1024)
sys.exit(status != 0)
"""


def run(*arguments: object) -> int:
    """Bytes of memory that a command had at most."""
    command = [sys.executable, "-c", MEASURED, "-m", "recmill", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout.splitlines()[-1])


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    path = tmp_path_factory.mktemp("criteo")
    log, table, checkpoint, bundles = (path / name for name in ("log", "table", "checkpoint", "bundles"))
    run("generate", "criteo", "--rows", ROWS, "--into", log)
    memory = {
        "prepare": run("prepare", "criteo-dlrm", "--data", log, "--into", table, "--memory", "256MB", "--quiet"),
        "train": run("train", "criteo-dlrm", "--table", table, "--into", checkpoint, "--threads", 2, "--quiet"),
        "export": run("export", "--checkpoint", checkpoint, "--into", bundles, "--quiet"),
    }  # fmt: skip
    places = {"log": log, "table": table, "checkpoint": checkpoint, "bundle": bundles}
    return Ran({name: folder_bytes(place) for name, place in places.items()}, memory)


@pytest.mark.processes
def test_bytes_on_disk_are_right_within_a_factor_of_two(criteo: Ran) -> None:
    sizing = size(load_recipe("criteo-dlrm"), rows=ROWS)
    said = {
        "table": sizing.table_bytes,
        "checkpoint": sizing.checkpoint_bytes,
        "bundle": sizing.bundle_bytes,
    }
    for name, number in said.items():
        assert criteo.bytes[name] / 2 < number < criteo.bytes[name] * 2, name
    assert criteo.bytes["log"] < sizing.log_bytes
    assert sum(said.values()) < sizing.runs_bytes


@pytest.mark.processes
def test_no_stage_would_be_killed_and_none_has_far_too_much(criteo: Ran) -> None:
    sizing = size(load_recipe("criteo-dlrm"), rows=ROWS)
    limits = {
        "prepare": sizing.prepare.memory,
        "train": sizing.train.memory,
        "export": sizing.export.memory,
    }
    for stage, peak in criteo.memory.items():
        print(f"{stage}: {peak / MB:.0f} of {limits[stage] / MB:.0f} MB")
        assert peak < limits[stage], stage
    # The bound of prepare is one that a log of this size does not come near.
    assert all(limits[stage] < 2 * criteo.memory[stage] for stage in ("train", "export"))
