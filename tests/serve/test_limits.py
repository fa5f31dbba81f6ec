"""The queue refuses what it could not answer in time; limits name the field."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from recmill.errors import BadRequest, Overloaded, TooLate
from recmill.stages.serve.admission import Admission, QueueFull
from recmill.stages.serve.batcher import Batcher
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.messages import ItemIds, NewItem, NewItems, Rank, Recall, Recommend


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


async def taught(admission: Admission, seconds: float) -> None:
    """Let it learn that calls take this long."""
    await admission.run("call", lambda: time.sleep(seconds))


def test_a_free_thread_answers_whatever_the_deadline() -> None:
    async def main() -> int:
        admission = Admission(1, 10, 1.0)
        await taught(admission, 0.4)
        return await admission.run("call", lambda: 4, time.monotonic() + 0.3)

    assert run(main()) == 4


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async def main() -> None:
        admission, go = Admission(1, 10, 1.0), threading.Event()
        await taught(admission, 0.1)
        busy = [asyncio.ensure_future(admission.run("call", go.wait)) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="deadline cannot be met"):
            await admission.run("call", lambda: None, time.monotonic() + 0.1)
        go.set()
        await asyncio.gather(*busy)
        assert admission.length == 0

    run(main())


def test_a_long_queue_is_refused_and_says_when_to_come_back() -> None:
    async def main() -> QueueFull:
        admission, go = Admission(1, max_waiting=100, max_wait_seconds=0.12), threading.Event()
        await taught(admission, 0.1)
        busy = []
        for _ in range(2):
            busy.append(asyncio.ensure_future(admission.run("call", go.wait)))
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFull) as refusal:
            await admission.run("call", lambda: None)
        go.set()
        await asyncio.gather(*busy)
        return refusal.value

    assert run(main()).retry_after_seconds == 1


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        admission, go = Admission(1, max_waiting=2, max_wait_seconds=10), threading.Event()
        waiting = [asyncio.ensure_future(admission.run("call", go.wait)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="which is the limit"):
            await admission.run_all("call", [go.wait, go.wait])
        go.set()
        await asyncio.gather(*waiting)
        assert admission.length == 0

    run(main())


def test_what_expired_while_waiting_is_not_worked_on() -> None:
    async def main() -> None:
        admission, go, done = Admission(1, 10, 10), threading.Event(), list[int]()
        first = asyncio.ensure_future(admission.run("call", go.wait))
        await asyncio.sleep(0.01)
        with pytest.raises(TooLate):
            await admission.run("call", lambda: done.append(1), time.monotonic() + 0.05)
        go.set()
        await first
        await asyncio.sleep(0.05)
        assert done == []
        assert admission.length == 0

    run(main())


def test_an_answer_that_is_not_there_by_the_deadline_is_too_late() -> None:
    async def main() -> float:
        admission, go = Admission(1, 10, 10), threading.Event()
        began = time.monotonic()
        with pytest.raises(TooLate):
            await admission.run("call", lambda: go.wait(60), began + 0.05)
        seconds = time.monotonic() - began
        go.set()
        return seconds

    assert 0.04 < run(main()) < 30


def test_work_that_is_overdue_gives_its_thread_to_others() -> None:
    async def main() -> list[int]:
        admission, go, ended = Admission(1, 10, 10), threading.Event(), threading.Event()

        def hang() -> None:
            go.wait(120)
            ended.set()

        with pytest.raises(TooLate):
            await admission.run("call", hang, time.monotonic() + 0.05)
        assert admission.length == 0
        found = [await admission.run("call", lambda: 1, time.monotonic() + 60) for _ in range(3)]
        assert not ended.is_set()
        go.set()
        assert ended.wait(60)
        admission.close()
        return found

    assert run(main()) == [1, 1, 1]


def test_work_that_hangs_does_not_keep_a_server_from_ending() -> None:
    async def main() -> float:
        admission, go = Admission(1, 10, 10), threading.Event()
        with pytest.raises(TooLate):
            await admission.run("call", lambda: go.wait(60), time.monotonic() + 0.05)
        began = time.monotonic()
        admission.close()
        seconds = time.monotonic() - began
        go.set()
        return seconds

    assert run(main()) < 30


def test_several_pieces_are_done_side_by_side_and_in_order() -> None:
    async def main() -> list[int]:
        admission, both = Admission(2, 10, 10), threading.Barrier(2, timeout=60)

        def work(number: int) -> int:
            both.wait()
            return number

        return await admission.run_all("call", [lambda: work(1), lambda: work(2)])

    assert run(main()) == [1, 2]


def test_a_failure_is_the_callers_and_leaves_the_queue_as_it_was() -> None:
    def fail() -> None:
        raise BadRequest("no")

    async def main() -> None:
        admission = Admission(1, 10, 10)
        with pytest.raises(BadRequest):
            await admission.run("call", fail)
        assert admission.length == 0
        assert await admission.run("call", lambda: 1) == 1

    run(main())


def test_what_is_no_exception_does_not_kill_the_loop() -> None:
    def panic() -> None:
        raise BaseException("native code panicked")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="panicked"):
            await Admission(1, 10, 10).run("call", panic)

    run(main())


def sums(batches: list[int], slow: bool = True) -> Any:
    def compute(requests: list[int]) -> list[int]:
        time.sleep(0.02 if slow else 0)
        batches.append(len(requests))
        if -1 in requests:
            raise BadRequest("minus one")
        return [number + 1 for number in requests]

    return compute


def test_requests_that_come_together_are_answered_together() -> None:
    batches: list[int] = []

    async def main() -> list[int]:
        batcher = Batcher[int, int](Admission(1, 100, 10), sums(batches))
        return await asyncio.gather(*(batcher.answer(number, "ints", 1, None) for number in range(10)))

    assert run(main()) == list(range(1, 11))
    assert batches == [1, 9]


def test_a_batch_holds_one_group_and_no_more_than_its_rows() -> None:
    batches: list[int] = []

    async def main() -> None:
        batcher = Batcher[int, int](Admission(1, 100, 10), sums(batches), max_rows=4)
        first = [batcher.answer(0, "ints", 1, None)]
        same = [batcher.answer(number, "ints", 1, None) for number in range(6)]
        other = [batcher.answer(number, "others", 1, None) for number in range(2)]
        await asyncio.gather(*first, *same, *other)

    run(main())
    assert sorted(batches) == [1, 2, 2, 4]


def test_one_bad_request_does_not_take_others_with_it() -> None:
    async def main() -> list[Any]:
        batcher = Batcher[int, int](Admission(1, 100, 10), sums([]))
        asked = [batcher.answer(number, "ints", 1, None) for number in (5, 6, -1, 7)]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, bad, last = run(main())
    assert (first, second, last) == (6, 7, 8)
    assert isinstance(bad, BadRequest)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Recommend(k=0), "k must be a whole number from 1 to 100, got 0"),
        (Recommend(k=101), "k must be"),
        (Recall(k=10_001), "k must be a whole number from 1 to 10,000"),
        (Recommend(candidates=0), "candidates must be"),
        (Recommend(deadline_ms=0), "deadline_ms must be above 0"),
        (Recommend(user=2**63), "user must fit into 64 bits"),
        (Recommend(recent=[1, -(2**63) - 1]), "recent must fit into 64 bits"),
        (Recommend(exclude=[1] * 10_001), "exclude must hold at most 10,000 values"),
        (Recommend(where="x" * 5_000), "where must be a text of at most 1,000 characters"),
        (Rank(items=["x" * 5_000]), "items must be a text"),
        (NewItems(items=[NewItem(id=2**64)]), "id must fit into 64 bits"),
        (NewItems(items=[NewItem(id="")]), "id must not be empty"),
        (ItemIds(items=[2**64]), "items must fit into 64 bits"),
    ],
)
def test_too_much_is_refused_by_name_of_the_field(request_: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Limits(max_k=100).check(request_)


def test_what_is_within_limits_passes() -> None:
    Limits(max_k=100).check(Recommend(user="ann", k=10, only=["a", 2], deadline_ms=3.5))
