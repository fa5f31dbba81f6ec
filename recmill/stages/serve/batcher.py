"""Small requests that come at about the same time, answered in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from recmill.errors import Overloaded, TooLate
from recmill.stages.serve.limits import Admission

Result = TypeVar("Result")
Request = TypeVar("Request")
Work = Callable[[Sequence[Request]], Sequence[Result]]


class Batcher(Generic[Request, Result]):
    """Small requests that come at about the same time are answered together.

    `compute` takes requests of one `group` (any hashable that says what fits together) and gives as many results.
    Nobody waits when nothing is under way; else at most `wait_seconds`, or until there are `max_rows`.
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
        self._gathering: dict[Any, _Gathering[Request, Result]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, group: Any, num_rows: int, deadline: float | None) -> Result:
        """The result for one request. A request that fails does not take others with it."""
        place: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        gathering = self._gathering.setdefault(group, _Gathering())
        gathering.waiting.append((request, place, deadline))
        gathering.num_rows += num_rows
        if not self._under_way or gathering.num_rows >= self.max_rows:
            self._start(group)
        elif gathering.timer is None:
            gathering.timer = asyncio.get_running_loop().call_later(self.wait_seconds, self._start, group)
        return await place

    def _start(self, group: Any) -> None:
        gathering = self._gathering.pop(group, None)
        if gathering is None:
            return
        if gathering.timer is not None:
            gathering.timer.cancel()
        task = asyncio.ensure_future(self._run(gathering.waiting))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _run(self, waiting: Sequence[_Place[Request, Result]]) -> None:
        waiting = [place for place in waiting if not place[1].done()]
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
        for (_, place, _), result in zip(waiting, results, strict=True):
            if not place.done():
                place.set_result(result)

    async def _fail(self, waiting: Sequence[_Place[Request, Result]], error: Exception) -> None:
        """Whoever is refused is refused with the rest; whatever else went wrong is the fault of one of them."""
        if len(waiting) > 1 and not isinstance(error, Overloaded | TooLate):
            for one in waiting:
                await self._run([one])
        else:
            for _, place, _ in waiting:
                if not place.done():
                    place.set_exception(error)


_Place = tuple[Request, "asyncio.Future[Result]", float | None]


@dataclass
class _Gathering(Generic[Request, Result]):
    waiting: list[tuple[Request, asyncio.Future[Result], float | None]] = field(default_factory=list)
    num_rows: int = 0
    timer: asyncio.TimerHandle | None = None
