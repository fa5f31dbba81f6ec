"""Training that follows prepare learns what it would have learned afterwards."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from growing_tables import Replay, small_recipe, weights, write_log

from recmill.dataset.partial_table import Heartbeat
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, LogError, RecmillError
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.prepare.prepare import prepare
from recmill.stages.run.overlap import Preparing, preparing
from recmill.stages.run.run import RunConfig, run
from recmill.stages.train.config import RayTrainConfig, TrainConfig
from recmill.stages.train.partial_table import PartialTableData
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

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
    assert again.results["prepare"].was_there
    assert again.results["train"][0].was_there


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


def test_another_order_is_refused_before_anything_starts(log: Path, tmp_path: Path) -> None:
    with pytest.raises(RecmillError, match=r'table.order "shuffle".*--set table.order=log'):
        run_at_once(log, tmp_path, order="shuffle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.services
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings(
    "ignore:`use_.* is deprecated", "ignore:The `parse_obj` method is deprecated"
)  # Ray's own
def test_spark_prepares_while_ray_trains(
    log: Path, tmp_path: Path, finished: Table, one_after_the_other: dict[str, bytes]
) -> None:

    spark = replace(PREPARE, engine="spark", address="local[1]", spark_conf={"spark.driver.memory": "600m"})
    options = RunConfig(prepare=spark, train=TRAIN, ray=RayTrainConfig(), at_once=True)
    ran = run(small_recipe(), str(log), tmp_path, options)
    assert ran.results["prepare"].table.digest == finished.digest
    assert weights(tmp_path / "checkpoint") == one_after_the_other
