"""Writes that a store takes late: in their order, again until they succeed, and not without bound."""

from __future__ import annotations

import threading

from redis_servers import wait_until

from recmill.artifacts.feature_store.writes import WriteQueue
from recmill.errors import StoreError


class Target:
    """Where writes go; it can stand still."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.written: list[int] = []

    def write(self, number: int) -> None:
        if not self.is_open.is_set():
            raise StoreError("the store does not answer")
        self.written.append(number)


def test_a_write_is_done_at_once_when_the_store_takes_it() -> None:
    target, queue = Target(), WriteQueue()
    target.is_open.set()
    assert queue.add(lambda: target.write(1), 1, 5.0)
    assert target.written == [1]
    assert queue.problem is None
    queue.close()


def test_writes_that_fail_are_done_later_in_their_order_and_nobody_waits() -> None:
    target, queue = Target(), WriteQueue()
    queue.add(lambda: target.write(0), 1)
    wait_until(lambda: queue.problem is not None, "the first write to fail")
    for number in range(1, 10):
        assert not queue.add(lambda number=number: target.write(number), 1, 60.0)  # type: ignore[misc]
    assert queue.problem == "10 rows wait to be written: the store does not answer"
    target.is_open.set()
    wait_until(lambda: queue.num_rows == 0, "the writes")
    assert target.written == list(range(10))
    assert queue.problem is None
    queue.close()


def test_when_too_many_rows_wait_the_oldest_are_dropped_and_counted() -> None:
    target, queue = Target(), WriteQueue(max_rows=10)
    for number in range(5):
        queue.add(lambda number=number: target.write(number), 4)  # type: ignore[misc]
    assert queue.num_rows == 8
    assert queue.num_dropped == 12
    target.is_open.set()
    wait_until(lambda: queue.num_rows == 0, "the writes")
    assert target.written[-2:] == [3, 4]
    assert queue.problem == "12 rows were not written; run `recmill load`"
    queue.close()


def test_a_write_that_cannot_succeed_does_not_keep_the_others_back() -> None:
    target, queue = Target(), WriteQueue()
    target.is_open.set()
    queue.add(lambda: [].pop(), 1)  # type: ignore[arg-type, return-value]
    assert queue.add(lambda: target.write(1), 1, 5.0)
    assert queue.num_dropped == 1
    queue.close()


def test_closing_writes_what_waits() -> None:
    target, queue = Target(), WriteQueue()
    target.is_open.set()
    for number in range(100):
        queue.add(lambda number=number: target.write(number), 1)  # type: ignore[misc]
    queue.close(5.0)
    assert target.written == list(range(100))
