"""Dynamic batching: score small requests that arrive at about the same time in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from recmill.errors import Overloaded, TooLate
from recmill.stages.serve.admission import Admission

Result = TypeVar("Result")
Request = TypeVar("Request")
Work = Callable[[Sequence[Request]], Sequence[Result]]


class Batcher(Generic[Request, Result]):
    """Scores requests that arrive at about the same time in one batch.

    `compute` takes requests of one `group` (any hashable; requests of equal groups can share a batch) and returns one
    result for each. A request waits only while another batch is running: until `wait_seconds` have passed or
    `max_rows` are waiting.
    """

    def __init__(
        self,
        admission: Admission,
        compute: Work[Request, Result],
        max_rows: int = 4_096,
        wait_seconds: float = 0.001,
    ) -> None:
        self.max_rows = max_rows
        self.wait_seconds = wait_seconds
        self._admission = admission
        self._compute = compute
        self._open: dict[Any, _OpenBatch[Request, Result]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, group: Any, num_rows: int, deadline: float | None) -> Result:
        """The result for one request. A request that fails does not fail others of its batch."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        batch = self._open.setdefault(group, _OpenBatch())
        batch.waiting.append((request, future, deadline))
        batch.num_rows += num_rows
        if not self._under_way or batch.num_rows >= self.max_rows:
            self._start(group)
        elif batch.timer is None:
            batch.timer = asyncio.get_running_loop().call_later(self.wait_seconds, self._start, group)
        return await future

    def _start(self, group: Any) -> None:
        batch = self._open.pop(group, None)
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        task = asyncio.ensure_future(self._run(batch.waiting))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self, waiting: Sequence[_WaitingRequest[Request, Result]]) -> None:
        waiting = [one for one in waiting if not one[1].done()]
        if not waiting:
            return
        deadlines = [deadline for _, _, deadline in waiting if deadline is not None]
        latest = max(deadlines) if len(deadlines) == len(waiting) else None
        requests = [request for request, _, _ in waiting]
        try:
            results = await self._admission.run("score", lambda: self._compute(requests), latest)
        except Exception as error:
            await self._fail(waiting, error)
            return
        for (_, future, _), result in zip(waiting, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _fail(self, waiting: Sequence[_WaitingRequest[Request, Result]], error: Exception) -> None:
        """Report an error: a refusal to all, any other to one request, so each is retried alone."""
        if len(waiting) > 1 and not isinstance(error, Overloaded | TooLate):
            for one in waiting:
                await self._run([one])
        else:
            for _, future, _ in waiting:
                if not future.done():
                    future.set_exception(error)


_WaitingRequest = tuple[Request, "asyncio.Future[Result]", float | None]


@dataclass
class _OpenBatch(Generic[Request, Result]):
    waiting: list[tuple[Request, asyncio.Future[Result], float | None]] = field(default_factory=list)
    num_rows: int = 0
    timer: asyncio.TimerHandle | None = None
