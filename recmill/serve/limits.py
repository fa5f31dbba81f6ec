"""How much a server takes on: sizes of requests, a bounded queue before a few threads, small requests in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from recmill.errors import BadRequest, Overloaded, TooLate
from recmill.serve.messages import MAX_CANDIDATES, MAX_K

Result = TypeVar("Result")
Request = TypeVar("Request")

MAX_IDS = 10_000  # in one list of a request
MAX_TEXT = 1_000  # characters of one text in a request
MAX_CHANNELS = 100
MAX_JSON_VALUES = 500_000  # in one body: nothing else can be done while JSON is read
MAX_DEADLINE_MS = 600_000.0
IDS = {("Event", "user"), ("Event", "item"), ("NewItem", "id")}  # that cannot be empty
INTEGERS = (-(2**63), 2**63 - 1)
_NEW_WEIGHT = 0.1  # of the latest call in the running mean of how long calls take
_USABLE = 0.7  # of the time that is left: estimates are means, and the way back takes time too
_TICK_SECONDS = 0.01
_MANY = 8  # requests that wait for each thread
_BEHIND = 0.02  # seconds that the loop may be late while many wait; beyond, it would only read requests


class QueueFull(Overloaded):
    """There is no room, or a request would wait longer than it may."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class Limits:
    """The largest request that is looked at, and the longest that one may wait."""

    max_body: int = 16 << 20
    max_k: int = MAX_K
    max_candidates: int = MAX_CANDIDATES
    max_batch: int = 100  # queries, events or new items in one call
    max_waiting: int = 1_000
    max_wait_seconds: float = 0.1
    deadline_seconds: float = 1.0  # of a request that brings none
    max_connections: int | None = None  # of each transport; none: as many as there are files for
    max_header: int = 64 << 10  # bytes
    send_seconds: float = 10.0  # that the head of a request may take to come, and its body
    idle_seconds: float = 75.0  # that a connection without a request stays open

    def range_of(self, request: str, name: str) -> tuple[int, int] | None:
        """Smallest and largest value of a field of a kind of request, if it has bounds."""
        if name == "k":
            return 1, self.max_candidates if request == "Recall" else self.max_k
        return {"candidates": (1, self.max_candidates), "limit": (1, MAX_IDS)}.get(name)

    def longest(self) -> dict[str, int]:
        """The most values that lists of requests hold, by name of the field."""
        return {"items": self.max_candidates, "channels": MAX_CHANNELS}

    def check(self, request: msgspec.Struct) -> None:
        """Raises BadRequest, with the name of the field, when a request asks for too much."""
        for name in request.__struct_fields__:
            value = getattr(request, name)
            if bounds := self.range_of(type(request).__name__, name):
                _check_range(name, value, *bounds)
            elif name == "deadline_ms" and value is not None and not 0 < value <= MAX_DEADLINE_MS:
                raise BadRequest(
                    f"deadline_ms must be above 0 and at most {MAX_DEADLINE_MS:,.0f}, got {value}."
                )
            elif isinstance(value, list):
                self._check_list(name, value)
            elif value == "" and (type(request).__name__, name) in IDS:
                raise BadRequest(f"{name} must not be empty.")
            else:
                _check_value(name, value)

    def check_number(self, number: int, what: str) -> None:
        """Raises BadRequest when a call holds no or too many of something."""
        if not 1 <= number <= self.max_batch:
            raise BadRequest(f"{what} must hold 1 to {self.max_batch:,} values, got {number:,}.")

    def check_json(self, text: bytes) -> None:
        """Raises BadRequest when a body holds so many values that reading them would hold up other requests."""
        if text.count(b",") >= MAX_JSON_VALUES:
            raise BadRequest(
                f"The JSON holds more than {MAX_JSON_VALUES:,} values. Send fewer at once, or tensors as bytes."
            )

    def _check_list(self, name: str, values: list[Any]) -> None:
        longest = self.longest().get(name, MAX_IDS)
        if len(values) > longest:
            raise BadRequest(f"{name} must hold at most {longest:,} values, got {len(values):,}.")
        for value in values:
            if isinstance(value, msgspec.Struct):
                self.check(value)
            else:
                _check_value(name, value)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be a whole number from {low} to {high:,}, got {value}.")


def _check_value(name: str, value: Any) -> None:
    if type(value) is int and not INTEGERS[0] <= value <= INTEGERS[1]:
        raise BadRequest(f"{name} must fit into 64 bits, got a number of {len(str(abs(value)))} digits.")
    if type(value) is str and len(value) > MAX_TEXT:
        raise BadRequest(f"{name} must be a text of at most {MAX_TEXT:,} characters, got {len(value):,}.")


class Admission:
    """A few worker threads behind a queue that refuses at once what it could not answer in time.

    How long a call would wait is known from how long such calls took lately. Call it from one event loop.
    """

    def __init__(self, threads: int, max_waiting: int, max_wait_seconds: float, name: str = "answer") -> None:
        self.threads = threads
        self.max_waiting = max_waiting
        self.max_wait_seconds = max_wait_seconds
        self._workers = ThreadPoolExecutor(threads, f"recmill-{name}")
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}  # recent mean of each kind of call
        self._waiting = 0
        self._running = 0
        self._waiting_seconds = 0.0  # that the waiting calls will take
        self._running_seconds = 0.0
        self._lag = _Lag()
        # While the loop is behind, one thread at a time works: more of them would only keep Python from the loop.
        self._alone = threading.Lock()

    async def run(self, kind: str, work: Callable[[], Result], deadline: float | None = None) -> Result:
        """Do one piece of work on a worker thread; raises Overloaded or TooLate instead of keeping anyone waiting."""
        return (await self.run_all(kind, [work], deadline))[0]

    async def run_all(
        self, kind: str, works: Sequence[Callable[[], Result]], deadline: float | None = None
    ) -> list[Result]:
        """Do several pieces side by side, all of them or none. `deadline` is a time of `time.monotonic`."""
        estimate = self._admit(kind, len(works), deadline)
        jobs = [self._workers.submit(self._timed, _Job(kind, work, deadline, estimate)) for work in works]
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return list(await asyncio.gather(*map(asyncio.wrap_future, jobs)))
        except TimeoutError:
            raise TooLate("The deadline passed before the answer was there.") from None
        finally:
            self._forget(sum(job.cancel() for job in jobs), estimate)

    @property
    def length(self) -> int:
        """Calls that wait or are at work."""
        return self._waiting + self._running

    def wait_seconds(self) -> float:
        """How long a call that comes now would wait in the queue."""
        if not self._waiting and self._running < self.threads:
            return 0.0
        return (self._waiting_seconds + self._running_seconds / 2) / self.threads

    def check_room(self, kind: str, number: int, deadline: float | None) -> None:
        """Raises what `run_all` would raise now."""
        wait, lag = self.wait_seconds(), self._lag.seconds()
        left = math.inf if deadline is None else deadline - time.monotonic()
        if self._waiting + number > self.max_waiting:
            raise self._refusal(
                f"{self._waiting:,} requests are waiting, which is all there is room for", wait
            )
        if lag > _BEHIND and self._waiting >= _MANY * self.threads:
            raise self._refusal(f"the server is {lag * 1000:.0f} ms behind", wait)
        if wait > self.max_wait_seconds:
            raise self._refusal(f"a request would wait {wait * 1000:.0f} ms now", wait)
        if wait and wait + self._seconds.get(kind, 0.0) > _USABLE * left:
            raise self._refusal(
                f"the deadline cannot be met: a request would wait {wait * 1000:.0f} ms", wait
            )

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _admit(self, kind: str, number: int, deadline: float | None) -> float:
        with self._lock:
            self.check_room(kind, number, deadline)
            estimate = self._seconds.get(kind, 0.0)
            self._waiting += number
            self._waiting_seconds += number * estimate
        return estimate

    def _refusal(self, reason: str, wait: float) -> QueueFull:
        seconds = max(1, math.ceil(wait))
        return QueueFull(f"Overloaded: {reason}. Come back in {seconds} s.", seconds)

    def _forget(self, cancelled: int, estimate: float) -> None:
        if cancelled:
            with self._lock:
                self._waiting -= cancelled
                self._waiting_seconds -= cancelled * estimate

    def _timed(self, job: _Job) -> Any:
        began = time.monotonic()
        with self._lock:
            self._waiting -= 1
            self._running += 1
            self._waiting_seconds -= job.estimate
            self._running_seconds += job.estimate
        try:
            if job.deadline is not None and began > job.deadline:
                raise TooLate("The deadline passed while the request was waiting.")
            with self._alone if self._lag.seconds() > _BEHIND else contextlib.nullcontext():
                result = job.work()
            self._learn(job.kind, time.monotonic() - began)
            return result
        except Exception:
            raise
        except BaseException as error:  # what native code raises when it panics is no Exception
            raise RuntimeError(f"{job.kind} panicked") from error
        finally:
            with self._lock:
                self._running -= 1
                self._running_seconds -= job.estimate

    def _learn(self, kind: str, seconds: float) -> None:
        with self._lock:
            before = self._seconds.get(kind, seconds)
            self._seconds[kind] = before + _NEW_WEIGHT * (seconds - before)


@dataclass(frozen=True)
class _Job:
    kind: str
    work: Callable[[], Any]
    deadline: float | None
    estimate: float


class _Lag:
    """How late the event loop is: what a busy server adds to every answer, before and after its work."""

    def __init__(self) -> None:
        self._due: float | None = None  # when the next tick should be
        self._last = 0.0

    def seconds(self) -> float:
        """The lateness of the last tick, or of the one that is due."""
        if self._due is None:
            self._tick()
        assert self._due is not None
        return max(self._last, time.monotonic() - self._due)

    def _tick(self) -> None:
        now = time.monotonic()
        self._last = 0.0 if self._due is None else now - self._due
        self._due = now + _TICK_SECONDS
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)


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
