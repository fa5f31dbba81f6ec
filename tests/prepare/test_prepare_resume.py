"""prepare survives being killed, refuses what is not its own, and never takes half for whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ForkedCommand
from logs_and_recipes import events_recipe, prepared, write_events

from recmill.artifacts.work import read_record, write_record
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, ResourceError
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def criteo(tmp_path_factory) -> Path:
    from recmill.synthetic.generate import generate

    folder = tmp_path_factory.mktemp("criteo")
    generate("criteo", 60_000, 3, folder)
    return folder


COMMAND = ["prepare", "--partitions", "24", "--workers", "1", "--quiet"]


def kill_when(into: Path, num_done: int, command: list[str]) -> list[Path]:
    """Start, wait until so many shards are done, kill -9; the records of what was done."""
    process = ForkedCommand(*command)
    try:
        deadline = time.monotonic() + 60
        while len(list(into.glob("_work/done/parquet-*.json"))) < num_done:
            assert process.poll() is None, "finished before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.communicate()
    return sorted(into.glob("_work/done/parquet-*.json"))


@pytest.mark.processes
@pytest.mark.parametrize("order", ["log", "shuffle"])
def test_killed_and_run_again_it_finishes_without_redoing_shards(tmp_path, criteo, order, recmill):
    into = tmp_path / "table"
    command = [
        *COMMAND,
        "criteo-dlrm",
        "--set",
        f"table.order={order}",
        "--data",
        str(criteo),
        "--into",
        str(into),
    ]
    done = kill_when(into, 3, command)
    shards = {into / shard["file"] for record in done for shard in read_record(record)}
    before = {shard: (shard.stat().st_mtime_ns, shard.stat().st_ino) for shard in shards}
    with pytest.raises(ArtifactError, match="incomplete"):
        Table.open(into)

    again = [*command, "--workers", "2", "--memory", "300MB"]
    code, said, _ = recmill(*again)
    assert code == 0
    assert "went on with unfinished work" in said
    assert {shard: (shard.stat().st_mtime_ns, shard.stat().st_ino) for shard in shards} == before
    recipe = load_recipe("criteo-dlrm", [f"table.order={order}"])
    untouched = prepare(recipe, str(criteo), tmp_path / "untouched", PrepareConfig(partitions=24, workers=1))
    assert Table.open(into).digest == untouched.table.digest
    assert not (into / "_work").exists()
    assert not list(into.rglob("*.partial"))


def test_a_second_run_finds_the_table_and_does_nothing(tmp_path):
    data = write_events(tmp_path / "log", 50)
    first = prepared(events_recipe(), data, tmp_path / "table")
    stamp = (tmp_path / "table" / "manifest.json").stat().st_mtime_ns
    second = prepared(events_recipe(), data, tmp_path / "table")
    assert second.was_complete
    assert second.table.digest == first.table.digest
    assert (tmp_path / "table" / "manifest.json").stat().st_mtime_ns == stamp


def test_a_table_of_another_recipe_is_not_overwritten(tmp_path):
    data = write_events(tmp_path / "log", 50)
    prepared(events_recipe(), data, tmp_path / "table")
    with pytest.raises(ArtifactError, match="another recipe or log"):
        prepared(events_recipe(table={"order": "shuffle"}), data, tmp_path / "table")


@pytest.mark.processes
def test_unfinished_work_for_another_log_is_started_over(tmp_path, criteo):
    into = tmp_path / "table"
    command = [*COMMAND, "criteo-dlrm", "--data", str(criteo), "--into", str(into)]
    kill_when(into, 2, command)
    data = write_events(tmp_path / "log", 50)
    again = prepared(events_recipe(), data, into)
    assert again.table.num_rows() == 50
    again.table.verify()


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    data = write_events(tmp_path / "log", 10)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ArtifactError, match="not empty"):
        prepared(events_recipe(), data, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_into_that_is_a_file_is_an_error(tmp_path):
    data = write_events(tmp_path / "log", 10)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="is a file"):
        prepared(events_recipe(), data, tmp_path / "file")


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip"])
def test_a_damaged_shard_is_detected(tmp_path, damage):
    data = write_events(tmp_path / "log", 2000)
    table = prepared(events_recipe(), data, tmp_path / "table").table
    shard = table.shards()[0]
    if damage == "delete":
        shard.unlink()
    elif damage == "truncate":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        rows = bytearray(shard.read_bytes())
        rows[len(rows) // 3] ^= 0x01
        shard.write_bytes(rows)
    with pytest.raises(ArtifactError, match="is damaged"):
        Table.open(table.path).verify()


def test_a_full_disk_is_a_clear_error_and_the_next_run_resumes(tmp_path, criteo):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    recipe = load_recipe("criteo-dlrm", ["table.order=log"])  # shards are written before the disk is full
    try:
        with pytest.raises(ResourceError, match=r"is full.*it resumes"):
            prepare(recipe, str(criteo), small / "table", PrepareConfig(partitions=24))
        done = len(list((small / "table").glob("_work/done/parquet-*.json")))
        assert done > 0
        subprocess.run(["mount", "-o", "remount,size=200m", str(small)], check=True)
        again = prepare(recipe, str(criteo), small / "table", PrepareConfig(partitions=24))
        assert again.table.num_rows() + again.table.num_rows("eval") + again.table.num_rows("test") == 60_000
        again.table.verify()
    finally:
        subprocess.run(["umount", str(small)], check=True)
        shutil.rmtree(small, ignore_errors=True)


def test_a_job_killed_while_it_publishes_resumes_to_the_same_table(tmp_path, monkeypatch):
    """Interrupted at one call of fsync after the other; only publishing makes such calls."""
    data = write_events(tmp_path / "log", 60)
    with open(data / "events0.tsv", "a") as file:
        file.write("not a row\n")
    features = [
        {"columns": "user", "steps": ["key"]},
        {"columns": "item", "steps": ["key"]},
    ]  # nothing to fit
    recipe, options = events_recipe(features=features), PrepareConfig(workers=1, max_bad=0.1)
    expected = prepare(recipe, str(data), tmp_path / "table", options).table
    calls, fsync = 0, os.fsync

    def interrupting(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupting)
    for stop_at in range(1, 100, 5):
        calls, into = 0, tmp_path / f"table-{stop_at}"
        try:
            prepare(recipe, str(data), into, options)
            break
        except KeyboardInterrupt:
            table = prepare(recipe, str(data), into, options).table
        assert table.digest == expected.digest
        assert {**table.manifest, "seconds": None} == {**expected.manifest, "seconds": None}
        assert table.manifest["rows_read"] == table.num_rows() + 1 == 61
        names = [{file.relative_to(path) for file in path.rglob("*")} for path in (into, expected.path)]
        assert names[0] == names[1]
    assert stop_at > 5


def test_a_job_killed_before_any_rows_are_in_order_resumes_to_the_same_files(tmp_path, monkeypatch):
    """Interrupted between the two records of how many buckets there are."""
    data = write_events(tmp_path / "log", 60)
    split = {"by": "random", "column": "user", "held_out": 0.2}
    recipe = events_recipe(split=split, table={"order": "shuffle"})
    expected = prepare(recipe, str(data), tmp_path / "table", PrepareConfig(workers=1)).table

    def interrupting(path: Path, *content: object) -> None:
        if path.name.startswith("held-out-"):
            raise KeyboardInterrupt
        write_record(path, *content)

    into = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr("recmill.engines.engine.write_record", interrupting)
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, str(data), into, PrepareConfig(workers=1))
    table = prepare(recipe, str(data), into, PrepareConfig(workers=1)).table
    assert table.digest == expected.digest
    names = [{file.relative_to(path) for file in path.rglob("*")} for path in (into, expected.path)]
    assert names[0] == names[1]


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_unfinished_work_that_is_damaged_is_not_used(tmp_path, monkeypatch, damage):
    """One file after the other, as a failing disk or a power cut leaves them."""
    data = write_events(tmp_path / "log", 60)
    with open(data / "events0.tsv", "a") as file:
        file.write("not a row\n")
    split = {"by": "random", "column": "user", "held_out": 0.2}
    recipe = events_recipe(split=split, table={"order": "shuffle"})
    options = PrepareConfig(workers=1, max_bad=0.1)
    expected = prepare(recipe, str(data), tmp_path / "table", options).table
    half = tmp_path / "half"
    with monkeypatch.context() as patch:
        patch.setattr(
            "recmill.stages.prepare.prepare._publish",
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, str(data), half, options)
    files = [path.relative_to(half) for path in half.rglob("*") if path.is_file() and path.name != ".lock"]
    assert len(files) > 10
    for file in files:
        into = tmp_path / str(file).replace("/", "-")
        shutil.copytree(half, into)
        content = bytearray((into / file).read_bytes())
        content[len(content) // 2] ^= 0x80
        (into / file).write_bytes(bytes(content) if damage == "flip" else b"")
        table = prepare(recipe, str(data), into, options).table
        table.verify()
        assert table.digest == expected.digest, file
        assert table.manifest["rows_rejected"] == expected.manifest["rows_rejected"], file
        (aside,) = (into / "rejected").iterdir()
        assert json.loads(aside.read_text())["text"] == "not a row", file


@pytest.mark.processes
def test_prepare_killed_at_calls_of_the_file_system_resumes():
    """A few points of what `benchmarks/chaos_prepare.py` tries at every call."""
    chaos = Path(__file__).parents[2] / "benchmarks" / "chaos_prepare.py"
    said = subprocess.run(
        [sys.executable, chaos, "--stages", "prepare", "--points", "3"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "lost 0" in said.stdout
