"""Reading ahead changes when items are made, and nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from recmill.dataset.prefetch import prefetch


def test_items_arrive_in_order():
    assert list(prefetch(range(100))) == list(range(100))


def test_an_error_arrives_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("torn")

    ahead = prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="torn"):
        next(ahead)


def test_at_most_depth_items_wait():
    made = []

    def items():
        for number in range(50):
            made.append(number)
            yield number

    ahead = prefetch(items(), depth=3)
    assert next(ahead) == 0
    time.sleep(0.2)
    assert len(made) <= 5
    ahead.close()


def test_closing_early_ends_the_thread():
    before = threading.active_count()
    ahead = prefetch(range(1_000_000))
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
