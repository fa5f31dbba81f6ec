"""How a learner spreads work over its threads."""

from __future__ import annotations

import threading
import time

import pytest

from recmill.learner.base import Learner
from recmill.recipe.recipe import Optimizer, Training


def learner(num_threads):
    return Learner(Training(dense=Optimizer("sgd", 0.1), sparse=Optimizer("sgd", 0.1)), num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("slices_per_thread", [1, 2, 3])
def test_slices_come_back_in_the_order_of_their_rows(num_threads, slices_per_thread):
    slices = learner(num_threads).map_slices(lambda rows: rows, 10, slices_per_thread)
    assert [row for rows in slices for row in range(10)[rows]] == list(range(10))
    assert len(slices) == num_threads * slices_per_thread


def test_the_calling_thread_takes_the_first_slice_and_others_the_rest():
    threads = learner(3).map_slices(lambda _: threading.current_thread(), 9)
    assert threads[0] is threading.current_thread()
    assert threads[0] not in threads[1:]


def test_an_error_in_one_slice_waits_for_the_others():
    finished = []

    def work(rows):
        if rows.start == 0:
            raise ValueError("the first slice")
        time.sleep(0.1)
        finished.append(rows)

    with pytest.raises(ValueError, match="the first slice"):
        learner(2).map_slices(work, 4)
    assert finished == [slice(2, 4)]


def test_an_error_of_another_thread_is_raised():
    def work(rows):
        if rows.start > 0:
            raise ValueError("the second slice")

    with pytest.raises(ValueError, match="the second slice"):
        learner(2).map_slices(work, 4)
