"""Exchanges between workers: the same through shared memory as through connections, and when a worker is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from processes import together

from recmill.distributed import shared_memory
from recmill.distributed.collectives import GlooGroup
from recmill.distributed.shared_memory import SharedMemoryGroup, share_memory
from recmill.distributed.workers import WorkerLost, Workers

pytestmark = pytest.mark.processes


def check_exchanges(workers: Workers) -> str:
    """Every worker computes what all must have got."""
    size, rank = workers.size, workers.rank
    assert isinstance(workers.steps, SharedMemoryGroup)
    random = np.random.default_rng(1)  # the same on all workers
    for most in (0, 1, 5, 1000, 400_000):  # the last are larger than a ring
        sizes = random.integers(0, most + 1, (size, size))
        rows = [random.random((sizes[worker].sum(), 3), np.float32) for worker in range(size)]
        arriving = workers.steps.all_to_all(rows[rank], sizes[rank], sizes[:, rank])
        values = [random.random(most, np.float32) for worker in range(size)]
        adding = workers.steps.all_reduce(own := values[rank].copy())
        edges = np.concatenate([np.zeros((size, 1), np.int64), np.cumsum(sizes, axis=1)], axis=1)
        expected = [rows[w][edges[w, rank] : edges[w, rank + 1]] for w in range(size)]
        if most != 5:  # in the order in which they began, and in the other
            np.testing.assert_array_equal(arriving.wait(), np.concatenate(expected))
        adding.wait()
        np.testing.assert_allclose(own, np.sum(values, axis=0), rtol=1e-6)
        assert len(set(workers.saving.all_gather(own.tobytes()))) == 1
        np.testing.assert_array_equal(
            arriving.wait() if most == 5 else arriving.out, np.concatenate(expected)
        )
        gathered, numbers = workers.steps.all_gather_rows(rows[rank])
        np.testing.assert_array_equal(gathered, np.concatenate(rows))
        assert numbers.tolist() == sizes.sum(axis=1).tolist()
    return "same"


@pytest.mark.parametrize("size", [2, 3])
def test_rows_and_sums_of_all_workers_go_through_shared_memory(tmp_path, size):
    assert together(tmp_path, size, check_exchanges) == ["same"] * size
    assert not list(Path("/dev/shm").glob("recmill-workers-*"))  # the file has no name any more


def wait_for_one_that_dies(workers: Workers) -> tuple[str, float]:
    """Worker 1 is killed after it has sent something: that arrives, and nothing more."""
    values = np.ones(10, np.float32)
    workers.steps.all_reduce(values).wait()
    sizes = np.ones(workers.size, np.int64)
    if workers.rank == 1:
        workers.steps.all_to_all(values[: workers.size], sizes, sizes)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    workers.steps.all_to_all(values[: workers.size], sizes, sizes).wait()
    try:
        workers.steps.all_reduce(values).wait()
    except WorkerLost as error:
        return str(error), time.monotonic() - began
    return "nobody is missing", 0.0


def test_a_worker_that_dies_is_missed_within_seconds(tmp_path):
    first, killed, last = together(tmp_path, 3, wait_for_one_that_dies)
    assert killed is None
    for message, seconds in (first, last):
        assert "Worker 1 of 3 is gone" in message
        assert seconds < 20


def without_room(workers: Workers) -> list[str]:
    shared_memory._FOLDER = Path("/nowhere") if workers.is_first else Path("/dev/shm")
    groups = [GlooGroup(workers.saving.group)]
    groups[0].members = workers
    values = np.ones(3, np.float32)
    (group,) = share_memory(groups, 10.0)
    group.all_reduce(values).wait()
    return [type(group).__name__, str(values.tolist())]


def test_without_room_for_shared_memory_connections_stay(tmp_path):
    assert together(tmp_path, 2, without_room) == [["GlooGroup", "[2.0, 2.0, 2.0]"]] * 2
