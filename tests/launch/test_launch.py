"""A run on Ray ends as a run in one process does: the same metrics, and every row learned exactly once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_trainings
from small_trainings import last_state, recipe_of, sightings, write_log

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.errors import LogError, TrainingError
from recmill.recipe.load import recipe_from_dict, tree_of
from recmill.stages.prepare.prepare import PrepareConfig as PrepareOptions
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.config import RayTrainConfig, TrainConfig
from recmill.stages.train.source import LogData, TableData
from recmill.stages.train.train import TrainContext, TrainResult, train
from recmill.stages.train.trainer import TrainProgress

pytestmark = [
    pytest.mark.services,
    pytest.mark.stages,
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("cluster"),
    # Ray's own doing.
    pytest.mark.filterwarnings("ignore:`use_.* is deprecated", "ignore:The `parse_obj` method is deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def _tests_travel_by_value() -> Iterator[None]:
    """Workers of Ray cannot import tests."""
    from ray import cloudpickle

    for module in (sys.modules[__name__], small_trainings):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (sys.modules[__name__], small_trainings):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def table(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("prepared") / "table"
    prepare(recipe_of(), str(log), into, PrepareOptions(partitions=3))
    return into


@pytest.fixture(scope="module")
def alone(table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """What one undisturbed process learns."""
    into = tmp_path_factory.mktemp("alone") / "checkpoint"
    return into, train(recipe_of(), TableData(Table.open(table)), into, TrainConfig(threads=1))[0]


def launched(
    make_source: Any, into: Path, workers: int = 2, recipe: Any = None, **scale: Any
) -> list[TrainResult]:
    from recmill.stages.train.launch import launch

    notes: list[str] = scale.pop("notes", [])
    options = TrainConfig(resume=scale.pop("resume", False))
    context = TrainContext(on_step=scale.pop("on_step", None))
    return launch(
        recipe or recipe_of(),
        make_source,
        into,
        options,
        RayTrainConfig((workers, workers), **scale),
        note=notes.append,
        context=context,
    )


def assert_same(trained: TrainResult, into: Path, alone: tuple[Path, TrainResult]) -> None:
    """Sums of floats differ in their last digits; what was seen how often does not."""
    assert sightings(into) == sightings(alone[0])
    for name in ("samples", "cursor", "stopped_by"):
        assert last_state(into)[name] == last_state(alone[0])[name]
    assert trained.best.metrics["auc"] == pytest.approx(alone[1].best.metrics["auc"], abs=0.01)
    assert trained.best.metrics["log_loss"] == pytest.approx(alone[1].best.metrics["log_loss"], abs=0.002)


def test_the_run_s_numbers_reach_the_metrics_that_ray_s_nodes_offer() -> None:
    import ray

    from recmill.stages.train.launch import Gauges

    pytest.importorskip("opencensus", reason="ray[default] is not installed")
    Gauges("a-run").show(
        "ranking", TrainProgress(7, 9, 448, 0.5, 1e4, 0.25, 1.0, {"auc": 0.8, "recall@10": 0.3})
    )
    names = ("step", "samples", "loss", "samples_per_second", "data_wait", "auc", "recall_at_10")
    wanted = {f"ray_recmill_train_{name}" for name in names}
    found: set[str] = set()
    end = time.monotonic() + 60
    while not wanted <= found and time.monotonic() < end:
        for node in (node for node in ray.nodes() if node["MetricsExportPort"] > 0):
            address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            text = urllib.request.urlopen(address, timeout=5).read().decode()
            found |= set(re.findall(r'^(ray_recmill_train_\w+){[^}]*run="a-run"', text, re.MULTILINE))
        time.sleep(0.5)
    assert wanted <= found


def die_once(marker: Path) -> Callable[[str, TrainProgress], None]:
    """For `on_step`: kills the worker in the middle of the run, the first time."""

    def after_step(model: str, progress: TrainProgress) -> None:
        if progress.step == 13 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return after_step


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_more(
    log: Path, alone: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    """Two workers, fed from the log by tasks on another node, learn what one process learns from a Table."""

    recipe, into, marker, notes = recipe_of(), tmp_path / "checkpoint", tmp_path / "died", []
    trained = launched(
        lambda note: LogData(recipe, str(log), note=note),
        into,
        notes=notes,
        on_step=die_once(marker),
        data_workers=2,
        data_resource="data",
    )[0]
    assert marker.exists()
    assert trained.workers == 2
    assert trained.resumed_from in (5, 10)  # the last may have been under way
    assert notes == ["started again with 2 workers, from the last checkpoint"]
    assert_same(trained, into, alone)


def test_two_towers_learn_from_a_log_with_several_workers_and_data_workers(log: Path, tmp_path: Path) -> None:
    tree = tree_of(recipe_of())
    ranking = tree.pop("ranking")
    towers = {
        "label": "click",
        "user": ["user"],
        "item": ["item"],
        "embedding_dim": 4,
        "train": ranking["train"],
    }
    recipe = recipe_from_dict(
        {**tree, "log": {**tree["log"], "user": "user", "item": "item"}, "retrieval": towers}
    )
    alone = train(recipe, LogData(recipe, str(log)), tmp_path / "alone", TrainConfig(threads=1))[0]
    trained = launched(
        lambda note: LogData(recipe, str(log), note=note),
        tmp_path / "several",
        recipe=recipe,
        data_workers=2,
        data_resource="data",
    )[0]
    assert trained.workers == 2
    for name in ("samples", "cursor", "stopped_by"):
        assert (
            last_state(tmp_path / "several", "retrieval")[name]
            == last_state(tmp_path / "alone", "retrieval")[name]
        )
    assert trained.best.metrics == pytest.approx(alone.best.metrics, abs=0.02)


def test_an_error_of_ours_ends_the_run_at_once_and_arrives_as_itself(table: Path, tmp_path: Path) -> None:
    def make_source(note: Any) -> TableData:
        if rank := os.environ.get("RANK"):
            (tmp_path / f"{rank}-{time.monotonic_ns()}").touch()
            if rank == "1":
                raise LogError("events0.tsv: is not what it was.")
        return TableData(Table.open(table))

    with pytest.raises(LogError, match=r"^events0.tsv: is not what it was\.$"):
        launched(make_source, tmp_path / "checkpoint")
    # Started once: rank 1 always, rank 0 unless the run had already ended before its turn came.
    assert len(list(tmp_path.glob("1-*"))) == 1
    assert len(list(tmp_path.glob("0-*"))) <= 1


def test_losing_workers_too_often_ends_the_run_and_says_how_to_go_on(table: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"more often than --max-failures 0 allows.*--resume"):
        launched(
            lambda note: TableData(Table.open(table)),
            tmp_path / "checkpoint",
            workers=1,
            on_step=die_once(tmp_path / "died"),
            max_failures=0,
        )


def test_a_run_goes_on_with_another_number_of_workers_and_ray_knows_its_checkpoints(
    table: Path, alone: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    import ray.train

    into = tmp_path / "checkpoint"
    source = lambda note=None: TableData(Table.open(table))  # noqa: E731
    train(recipe_of(max_steps=7), source(), into, TrainConfig(threads=1))
    second = launched(source, into, workers=2, recipe=recipe_of(max_steps=31), resume=True)[0]
    assert (second.resumed_from, second.workers) == (7, 2)
    best = Checkpoint.open(into).of("ranking").find("best")
    seen_by_ray = ray.train.Result.from_path(into)
    assert seen_by_ray.get_best_checkpoint("auc", "max").path == str(best.path)
    assert seen_by_ray.metrics["samples"] == second.state.samples
    last = train(recipe_of(), source(), into, TrainConfig(threads=1, resume=True))[0]
    assert last.resumed_from == 31
    assert sightings(into) == sightings(alone[0])
    assert last_state(into)["samples"] == last_state(alone[0])["samples"]
