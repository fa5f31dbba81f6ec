"""Ranks that are fed by Ray tasks get the very rows that a plain reader gives, whatever dies on the way."""

from __future__ import annotations

import gzip
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import recipe_of, signature, write_log

from recmill.dataset.batch import Batch, Keys, between, joined
from recmill.dataset.loader import Batches
from recmill.dataset.log_loader import LogBatches
from recmill.dataset.schedule import Cursor
from recmill.errors import LogError
from recmill.features.plan import Plan
from recmill.stages.prepare.prepare import PrepareConfig, prepare

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def readers(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe = recipe_of()
    table = prepare(
        recipe, str(log), tmp_path_factory.mktemp("t") / "table", PrepareConfig(partitions=5)
    ).table
    return {
        "log": LogBatches(recipe, Plan(recipe), str(log), 64),
        "table": Batches(table, 64),
        "shuffled table": Batches(table, 64, seed=3),
    }


def fed(
    reader: Any, world: int, data_workers: int = 2, resource: str | None = None, patience: float = 30.0
) -> list[Any]:
    """A feed for each rank, and the dispatcher."""
    import ray

    from recmill.distributed.data_tasks import DataWorkers
    from recmill.distributed.dispatcher import Dispatcher
    from recmill.stages.train.feed import Feed

    dispatcher = ray.remote(Dispatcher).options(num_cpus=0, max_concurrency=8)
    handle = dispatcher.remote({"train": reader}, world, DataWorkers(data_workers, resource, patience))
    sizes = len(reader.units), reader.batches_per_epoch
    return [Feed(handle, "train", rank, *sizes) for rank in range(world)]


def read_together(feeds: list[Any], cursor: Cursor = Cursor()) -> list[Any]:  # noqa: B008
    """Whole batches, put together of what ranks got at the same time, with cursors."""
    with ThreadPoolExecutor(len(feeds)) as pool:
        batches_of_ranks = list(pool.map(lambda feed: list(feed.read(cursor)), feeds))
    whole = []
    for of_ranks in zip(*batches_of_ranks, strict=True):
        batch = joined([rows for rows, _ in of_ranks])
        assert {rows.whole for rows, _ in of_ranks} == {batch.size}
        assert len({after for _, after in of_ranks}) == 1
        whole.append((signature(batch), of_ranks[0][1]))
    return whole


@pytest.mark.parametrize("kind", ["log", "table", "shuffled table"])
def test_ranks_together_have_every_batch_of_a_plain_reader(readers: dict[str, Any], kind: str) -> None:
    expected = [(signature(batch), after) for batch, after in readers[kind].read(Cursor(1))]
    feeds = fed(readers[kind], world=2)
    assert read_together(feeds, Cursor(1)) == expected
    half = len(expected) // 2
    assert read_together(feeds, expected[half - 1][1]) == expected[half:]


def test_one_rank_alone_gets_whole_batches(readers: dict[str, Any]) -> None:
    expected = [(signature(batch), after) for batch, after in readers["log"].read()]
    assert read_together(fed(readers["log"], world=1)) == expected


def test_a_rank_whose_slice_grows_gets_more_rows_of_the_batches_scheduled_after_that(
    readers: dict[str, Any],
) -> None:
    feeds = fed(readers["log"], world=2)
    feeds[0].slice_sizes = lambda size: [size - size // 4, size // 4]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda feed: [batch.size for batch, _ in feed.read()], feeds)
    assert (first[-2], second[-2]) == (48, 16)
    assert [a + b for a, b in zip(first, second, strict=True)][:-1] == [64] * (len(first) - 1)


def test_tasks_wait_for_the_slowest_rank(readers: dict[str, Any]) -> None:
    import ray

    feeds = fed(readers["log"], world=2, data_workers=1)
    reading = feeds[0].read()
    next(reading)
    time.sleep(1.5)
    assert ray.get(feeds[0].dispatcher.under_way.remote()) <= 1 + 2
    reading.close()


@dataclass
class Unit:
    rows: int


class Scripted:
    """Units of ten rows; what else happens when one is read is the test's."""

    batch_size = 4

    def __init__(self, happens: Any = lambda number: None, num_units: int = 4) -> None:
        self.units = [Unit(10)] * num_units
        self.batches_per_epoch = num_units * 10 // 4
        self.happens = happens

    def order(self, epoch: int) -> list[int]:
        return list(range(len(self.units)))

    def unit(self, number: int, epoch: int) -> Batch:
        self.happens(number)
        rows = np.arange(10 * number, 10 * number + 10)
        return Batch(
            10, rows[:, None].astype(np.float32), {"k": Keys(rows)}, {}, {"y": rows.astype(np.float32)}
        )


@pytest.fixture(autouse=True)
def _scripts_travel_by_value() -> Iterator[None]:
    """Workers of Ray cannot import tests."""
    import sys

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def keys_of(feeds: list[Any]) -> list[int]:
    with ThreadPoolExecutor(len(feeds)) as pool:
        batches_of_ranks = list(pool.map(lambda feed: [batch for batch, _ in feed.read()], feeds))
    return [
        key
        for batches in zip(*batches_of_ranks, strict=True)
        for rows in batches
        for key in rows.keys["k"].values
    ]


def test_a_data_task_that_is_killed_runs_again(tmp_path: Path) -> None:
    def dies_once(number: int) -> None:
        marker = tmp_path / "died"
        if number == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert keys_of(fed(Scripted(dies_once), world=2)) == list(range(40))
    assert (tmp_path / "died").exists()


def test_an_error_of_ours_reaches_every_rank_as_itself() -> None:
    def fails(number: int) -> None:
        if number == 1:
            raise LogError("events.tsv: has changed.")

    for feed in fed(Scripted(fails), world=2):
        with pytest.raises(LogError, match=r"^events.tsv: has changed\.$"):
            list(feed.read())


def test_data_workers_run_on_the_nodes_with_their_resource(tmp_path: Path) -> None:
    import ray

    def note(number: int) -> None:
        (tmp_path / ray.get_runtime_context().get_node_id()).touch()

    assert keys_of(fed(Scripted(note), world=1, resource="data")) == list(range(40))
    data_nodes = [node["NodeID"] for node in ray.nodes() if "data" in node["Resources"]]
    assert [path.name for path in tmp_path.iterdir()] == data_nodes


def test_tasks_do_without_cpus_when_none_comes_free() -> None:
    import ray

    taken = ray.util.placement_group([{"CPU": 1}] * 5)
    try:
        ray.get(taken.ready())
        assert keys_of(fed(Scripted(), world=2, patience=1.0)) == list(range(40))
    finally:
        ray.util.remove_placement_group(taken)


def test_a_source_is_unpacked_once_for_each_process(tmp_path: Path) -> None:
    class Counted(Scripted):
        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__ |= state
            (tmp_path / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    assert keys_of(fed(Counted(num_units=12), world=1, data_workers=1)) == list(range(120))
    pids = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert len(pids) == len(set(pids)) < 12


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_log_counted_by_tasks_is_counted_as_on_threads(log: Path, tmp_path: Path, suffix: str) -> None:
    from recmill.distributed.data_tasks import DataWorkers, OnTasks

    for file in log.iterdir():
        data = file.read_bytes()
        (tmp_path / f"{file.name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    for split in (
        {"by": "time", "column": "item", "held_out": 0.3},
        {"by": "last", "column": "user", "order": "price"},
        {"by": "tail", "held_out": 0.2},
    ):
        recipe = recipe_of(split=split)
        here = LogBatches(recipe, Plan(recipe), str(log), 64)
        recipe = replace(recipe, log=replace(recipe.log, files=("events*",)))
        there = LogBatches(recipe, Plan(recipe), str(tmp_path), 64, each=OnTasks(DataWorkers(2)))
        assert there.log.rows.sum(axis=0).tolist() == here.log.rows.sum(axis=0).tolist()
        assert (there.tally.rows, there.tally.bad) == (here.tally.rows, here.tally.bad)
    (feed,) = fed(there, world=1)
    assert [signature(batch) for batch, _ in feed.read()] == [signature(batch) for batch, _ in here.read()]


def test_between_and_joined_keep_rows_that_nobody_has() -> None:
    batch = Scripted().unit(0, 0)
    assert signature(joined([between(batch, 3, 3), between(batch, 0, 10)])) == signature(batch)
