"""Rows move from slow workers to fast ones, and stay where they are when it is only noise."""

from __future__ import annotations

import numpy as np
import pytest

from recmill.dataset.batch import Batch, Keys
from recmill.distributed.slices import SliceSizes


def measure(sizes: SliceSizes, seconds: list[float], steps: int = SliceSizes.EVERY_STEPS) -> None:
    for _ in range(steps):
        sizes.adapt(np.array(seconds, np.float32))


def test_slices_are_equal_at_first():
    assert SliceSizes(4).cut(100) == [25, 25, 25, 25]
    assert SliceSizes(3).cut(2) == [1, 0, 1]
    assert sum(SliceSizes(7).cut(1000)) == 1000


def test_a_slow_worker_gets_fewer_rows():
    sizes = SliceSizes(2)
    measure(sizes, [1.0, 3.0])
    assert sizes.cut(800) == [500, 300]  # half of the way from 400 to 600
    measure(sizes, [1.0, 3.0])
    assert sizes.cut(800) == [550, 250]


def test_noise_moves_nothing():
    sizes = SliceSizes(2)
    random = np.random.default_rng(0)
    for _ in range(200):
        sizes.adapt((1 + 0.1 * random.random(2)).astype(np.float32))
    assert sizes.cut(100) == [50, 50]


def test_a_worker_that_stalls_once_keeps_its_rows():
    sizes = SliceSizes(2)
    measure(sizes, [1.0, 1.0], 15)
    measure(sizes, [1.0, 500.0], 1)
    assert sizes.cut(100) == [50, 50]


def test_a_very_slow_worker_keeps_some_rows():
    sizes = SliceSizes(2)
    for _ in range(20):
        measure(sizes, [1.0, 1e6])
    assert sizes.cut(1000)[1] >= 100


@pytest.mark.parametrize("seconds", [[0.0, 1.0], [1.0, 3.0]])
def test_nothing_moves_when_a_worker_had_no_rows_or_balance_is_off(seconds):
    sizes = SliceSizes(2, balance=seconds[0] == 0.0)
    measure(sizes, seconds)
    assert sizes.cut(100) == [50, 50]


def batch_of(size: int, whole: int | None = None) -> Batch:
    values = np.arange(size)
    return Batch(size, np.zeros((size, 1), np.float32), {"a": Keys(values)}, {}, {"y": np.zeros(size)}, whole)


def test_slices_of_all_workers_are_the_whole_batch():
    parts = [SliceSizes(3).slice_batch(batch_of(10), rank) for rank in range(3)]
    assert np.concatenate([part.keys["a"].values for part in parts]).tolist() == list(range(10))
    assert {part.whole for part in parts} == {10}
    assert sum(part.size for part in parts) == 10


def test_a_slice_is_not_cut_again():
    own = batch_of(4, whole=4)
    assert SliceSizes(2).slice_batch(own, 1) is own
    assert (own.total, batch_of(3, 9).total, batch_of(3).total) == (4, 9, 3)
