"""Training that follows prepare learns what it would have learned afterwards."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from growing_tables import Replay, plain, small_recipe, weights, write_log

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.work import write_record
from recmill.cli import main
from recmill.dataset.loader import Batches
from recmill.dataset.partial_table import Heartbeat
from recmill.dataset.table import Table
from recmill.engines import engine
from recmill.errors import ArtifactError, LogError, RecmillError
from recmill.reporting.tracking import JSONL_FILE
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.prepare.prepare import prepare
from recmill.stages.run.overlap import Preparing, preparing
from recmill.stages.run.run import RunConfig, run
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.partial_table import PartialTableData
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train
from recmill.synthetic.generate import generate

pytestmark = [pytest.mark.processes, pytest.mark.stages]
PREPARE = PrepareConfig(partitions=8)
TRAIN = TrainConfig(threads=1, resume=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("overlap") / "log")


@pytest.fixture(scope="module")
def finished(log: Path) -> Table:
    return prepare(small_recipe(), str(log), log.parent / "table", PREPARE).table


@pytest.fixture(scope="module")
def one_after_the_other(finished: Table, log: Path) -> dict[str, bytes]:
    train(small_recipe(), TableData(finished), log.parent / "checkpoint", TRAIN)
    return weights(log.parent / "checkpoint")


def test_training_beside_prepare_gives_the_same_bits(
    log: Path, tmp_path: Path, one_after_the_other: dict[str, bytes]
) -> None:
    with preparing(small_recipe(), str(log), tmp_path / "table", PREPARE) as job:
        source = PartialTableData(tmp_path / "table", str(log))
        train(small_recipe(), source, tmp_path / "checkpoint", TRAIN)
        prepared = job.result()
    assert prepared.table.num_rows() == 960
    assert weights(tmp_path / "checkpoint") == one_after_the_other
    assert not Heartbeat(tmp_path / "table").path.exists()


def test_a_run_that_stopped_in_the_first_epoch_goes_on_with_the_finished_table(
    finished: Table, tmp_path: Path, one_after_the_other: dict[str, bytes]
) -> None:
    replay = Replay(finished, tmp_path / "table")
    for number in range(4):
        replay.write_part(number)
    recipe = small_recipe(saving={"every_steps": 2})
    with pytest.raises(ArtifactError, match="did not grow"):
        train(
            recipe, PartialTableData(tmp_path / "table", patience_seconds=0.3), tmp_path / "checkpoint", TRAIN
        )
    for number in range(4, len(replay.parts)):
        replay.write_part(number)
    replay.finish()
    (trained,) = train(recipe, PartialTableData(tmp_path / "table"), tmp_path / "checkpoint", TRAIN)
    assert trained.resumed_from
    assert weights(tmp_path / "checkpoint") == one_after_the_other


def run_at_once(log: Path, into: Path, **changes: Any) -> Any:
    options = RunConfig(prepare=PREPARE, train=TRAIN, at_once=True)
    return run(small_recipe(**changes), str(log), into, options)


def test_a_run_at_once_does_every_stage_and_nothing_twice(
    log: Path, tmp_path: Path, one_after_the_other: dict[str, bytes]
) -> None:
    ran = run_at_once(log, tmp_path)
    assert {"prepare", "train", "evaluate"} <= set(ran.results)
    assert weights(tmp_path / "checkpoint") == one_after_the_other
    again = run_at_once(log, tmp_path)
    assert again.results["prepare"].was_complete
    assert again.results["train"][0].was_complete


def test_an_error_of_prepare_is_the_error_of_the_run(log: Path, tmp_path: Path) -> None:
    data = write_log(tmp_path / "log", 100)
    (data / "events0.tsv").write_text("nonsense\n" * 100)
    with pytest.raises(LogError, match=r"rows \(100.00%\) are bad"):
        run_at_once(data, tmp_path / "run")


def test_a_killed_prepare_ends_the_run_and_the_next_one_goes_on(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_after_the_other: dict[str, bytes]
) -> None:
    begin = Preparing.__init__

    def begin_and_die(self: Preparing, *arguments: Any) -> None:
        begin(self, *arguments)
        os.kill(self._process.pid or 0, signal.SIGKILL)

    monkeypatch.setattr(Preparing, "__init__", begin_and_die)
    with pytest.raises(RecmillError, match=r"prepare was killed \(exit code -9\)"):
        run_at_once(log, tmp_path)
    monkeypatch.undo()
    run_at_once(log, tmp_path)
    assert weights(tmp_path / "checkpoint") == one_after_the_other


@pytest.mark.parametrize("order", ["shuffle", "interleave"])
def test_rows_that_are_put_in_order_are_trained_on_while_they_are_written(
    log: Path, tmp_path: Path, order: str
) -> None:
    recipe = small_recipe(order, evaluations=4)
    table = prepare(recipe, str(log), tmp_path / "table", PREPARE).table
    train(recipe, TableData(table), tmp_path / "afterwards", TRAIN)
    with preparing(recipe, str(log), tmp_path / "growing", PREPARE):
        source = PartialTableData(tmp_path / "growing", str(log))
        train(recipe, source, tmp_path / "beside", TRAIN)
    assert weights(tmp_path / "beside") == weights(tmp_path / "afterwards")
    assert history(tmp_path / "beside") == history(tmp_path / "afterwards")


def history(folder: Path) -> list[Any]:
    """What each evaluation found."""
    lines = (folder / "ranking" / JSONL_FILE).read_text().splitlines()
    return [(line["step"], line["auc"]) for line in map(json.loads, lines) if "auc" in line]


@pytest.mark.parametrize("order", ["shuffle", "interleave"])
def test_evaluations_wait_for_the_rows_held_out_and_not_for_the_table(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(engine, "_USEFUL_BUCKET_BYTES", 4_000)
    recipe = small_recipe(order, epochs=1, evaluations=1)
    table = prepare(recipe, str(log), tmp_path / "finished", PREPARE).table
    replay = Replay(table, tmp_path / "table")
    held_out = [number for number, shards in replay.parts.items() if {s["split"] for s in shards} == {"eval"}]
    assert len(held_out) > 1
    assert min(held_out) > max(number for number in replay.parts if number not in held_out)
    for number in held_out:
        replay.write_part(number)
    for number in {*range(max(held_out) + 1)} - {*replay.parts}:  # of buckets that are empty
        replay.write_part(number)
    write_record(replay.work / "held-out-parquet.buckets", (max(held_out) + 1) // 2)
    source = PartialTableData(tmp_path / "table", patience_seconds=0.3)
    found = source.growing.held_out("eval")
    assert found.num_rows("eval") == table.num_rows("eval") == 240
    expected = [plain(batch) for batch, _ in Batches(table, 100, "eval").read()]
    assert [plain(batch) for batch, _ in Batches(found, 100, "eval").read()] == expected
    with pytest.raises(ArtifactError, match="did not grow"):
        train(recipe, source, tmp_path / "checkpoint", TRAIN)


@pytest.mark.services
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings(
    "ignore:`use_.* is deprecated", "ignore:The `parse_obj` method is deprecated"
)  # Ray's own
def test_the_walk_through_of_e2eaiok_is_one_command_from_compressed_days_to_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of docs/coming-from-e2eaiok.md, on clusters of this machine and with a model of a few numbers."""
    days = tmp_path / "days"
    for day in (0, 1, 2, 3, 23):
        generate("criteo", 300, day, tmp_path / str(day))
        days.mkdir(exist_ok=True)
        (days / f"day_{day}.gz").write_bytes(gzip.compress((tmp_path / str(day) / "train.txt").read_bytes()))
    page = (Path(__file__).parents[2] / "docs/coming-from-e2eaiok.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^recmill (run criteo-small-dlrm .*)", page, re.MULTILINE)
    for theirs, ours in {
        "--data /shared/criteo": f"--data {days}",
        "--into /shared/run": f"--into {tmp_path}/run",
        "spark://head:7077": "local[1]",
        " --train-address auto --workers 4": " --workers 1",
    }.items():
        assert theirs in command
        command = command.replace(theirs, ours)
    small = ["embedding_dim=4", "bottom=[8, 4]", "top=[8]", "train.batch_size=64", "train.evaluations=3"]
    changes = [word for key in small for word in ("--set", f"ranking.{key}")]
    asked = [
        *shlex.split(command),
        *changes,
        "--spark-conf",
        "spark.driver.memory=600m",
        "--threads",
        "1",
        "--json",
    ]
    assert main(asked) == 0, capsys.readouterr()
    table = Table.open(tmp_path / "run" / "table")
    assert [table.num_rows(split) for split in ("train", "eval", "test")] == [1200, 150, 150]
    assert table.recipe.table.order == "interleave"
    alone = prepare(table.recipe, str(days), tmp_path / "table").table
    assert alone.digest == table.digest
    train(table.recipe, TableData(alone), tmp_path / "checkpoint", TRAIN)
    assert weights(tmp_path / "run" / "checkpoint") == weights(tmp_path / "checkpoint")
    assert history(tmp_path / "run" / "checkpoint") == history(tmp_path / "checkpoint")
    assert Bundle.open(tmp_path / "run" / "bundle").manifest["recipe"]["name"] == "criteo-small-dlrm"
