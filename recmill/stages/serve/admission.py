"""A bounded queue before a few worker threads: what it could not answer in time is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from recmill.errors import Overloaded, TooLate

Result = TypeVar("Result")

_NEW_WEIGHT = 0.1  # of the latest call in the running mean of how long calls take
_USABLE = 0.7  # of the time that is left: estimates are means, and the way back takes time too
_TICK_SECONDS = 0.01
_MANY = 8  # requests that wait for each thread
_ALONE_SECONDS = 0.1  # that one thread waits for the others to finish while the loop is behind
_MAX_OVERDUE = 16  # threads whose work is overdue and that were replaced
_SECONDS_TO_END = 5.0  # that work which hangs is waited for at shutdown
_BEHIND = 0.02  # seconds that the loop may be late while many wait; beyond, it would only read requests


class QueueFull(Overloaded):
    """There is no room, or a request would wait longer than it may."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Admission:
    """A few worker threads behind a queue that refuses at once what it could not answer in time.

    The wait is estimated from how long such calls took lately. Work that still runs at its deadline loses
    its thread to the others: a new one is started, and the old one ends with that work. Call it from one event loop.
    """

    def __init__(self, threads: int, max_waiting: int, max_wait_seconds: float, name: str = "answer") -> None:
        self.threads = threads
        self.max_waiting = max_waiting
        self.max_wait_seconds = max_wait_seconds
        self._name = name
        self._jobs: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._overdue = 0  # threads that others were started for
        self._workers: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}  # recent mean of each kind of call
        self._waiting = 0
        self._running = 0
        self._waiting_seconds = 0.0  # that the waiting calls will take
        self._running_seconds = 0.0
        self._lag = _Lag()
        # While the loop is behind, one thread at a time works: more of them would only keep Python from the loop.
        self._alone = threading.Lock()
        for _ in range(threads):
            self._start_worker()

    async def run(self, kind: str, work: Callable[[], Result], deadline: float | None = None) -> Result:
        """Do one piece of work on a worker thread; raises Overloaded or TooLate instead of waiting too long."""
        return (await self.run_all(kind, [work], deadline))[0]

    async def run_all(
        self, kind: str, works: Sequence[Callable[[], Result]], deadline: float | None = None
    ) -> list[Result]:
        """Do several pieces side by side, all of them or none. `deadline` is a time of `time.monotonic`."""
        estimate = self._admit(kind, len(works), deadline)
        loop = asyncio.get_running_loop()
        jobs = [_QueuedCall(loop, kind, work, deadline, estimate) for work in works]
        for job in jobs:
            self._jobs.put(job)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                if len(jobs) == 1:
                    return [await jobs[0].result]
                return list(await asyncio.gather(*(job.result for job in jobs)))
        except TimeoutError:
            for job in jobs:
                self._give_up(job)
            raise TooLate("The deadline passed before the answer was there.") from None
        finally:
            self._forget(sum(job.cancel() for job in jobs), estimate)

    @property
    def length(self) -> int:
        """Calls that wait or are at work."""
        return self._waiting + self._running

    def wait_seconds(self) -> float:
        """How long a call that arrives now would wait in the queue."""
        if not self._waiting and self._running < self.threads:
            return 0.0
        return (self._waiting_seconds + self._running_seconds / 2) / self.threads

    def check_room(self, kind: str, number: int, deadline: float | None) -> None:
        """Raises what `run_all` would raise now."""
        wait, lag = self.wait_seconds(), self._lag.seconds()
        left = math.inf if deadline is None else deadline - time.monotonic()
        if self._waiting + number > self.max_waiting:
            raise self._refusal(f"{self._waiting:,} requests are waiting, which is the limit", wait)
        if lag > _BEHIND and self._waiting >= _MANY * self.threads:
            raise self._refusal(f"the server is {lag * 1000:.0f} ms behind", wait)
        if wait > self.max_wait_seconds:
            raise self._refusal(f"a request would wait {wait * 1000:.0f} ms now", wait)
        if wait and wait + self._seconds.get(kind, 0.0) > _USABLE * left:
            raise self._refusal(
                f"the deadline cannot be met: a request would wait {wait * 1000:.0f} ms", wait
            )

    def close(self) -> None:
        """End the threads once their work is done; work that is overdue is not waited for."""
        while not self._jobs.empty():
            with contextlib.suppress(queue.Empty):
                if job := self._jobs.get_nowait():
                    job.cancel()
        for _ in range(self.threads):
            self._jobs.put(None)
        end = time.monotonic() + _SECONDS_TO_END
        for worker in list(self._workers):
            worker.join(max(0.0, end - time.monotonic()))

    def _start_worker(self) -> None:
        # A daemon: work that hangs must not keep the process from ending.
        worker = threading.Thread(target=self._work, name=f"recmill-{self._name}", daemon=True)
        self._workers.add(worker)
        worker.start()

    def _work(self) -> None:
        while job := self._jobs.get():
            if job.begin():
                job.end(self._timed)
            if job.is_overdue:
                with self._lock:
                    self._overdue -= 1
                return

    def _give_up(self, job: _QueuedCall) -> None:
        """Start another thread in place of the one that runs this overdue work."""
        with self._lock:
            if not job.is_running or self._overdue >= _MAX_OVERDUE:
                return
            job.is_overdue = True
            self._overdue += 1
            self._leave(job)
            self._workers.discard(job.worker)
        self._start_worker()

    def _leave(self, job: _QueuedCall) -> None:
        self._running -= 1
        self._running_seconds -= job.estimate

    def _admit(self, kind: str, number: int, deadline: float | None) -> float:
        with self._lock:
            self.check_room(kind, number, deadline)
            estimate = self._seconds.get(kind, 0.0)
            self._waiting += number
            self._waiting_seconds += number * estimate
        return estimate

    def _refusal(self, reason: str, wait: float) -> QueueFull:
        seconds = max(1, math.ceil(wait))
        return QueueFull(f"Overloaded: {reason}. Retry in {seconds} s.", seconds)

    def _forget(self, cancelled: int, estimate: float) -> None:
        if cancelled:
            with self._lock:
                self._waiting -= cancelled
                self._waiting_seconds -= cancelled * estimate

    def _timed(self, job: _QueuedCall) -> Any:
        began = time.monotonic()
        with self._lock:
            job.is_running = True
            self._waiting -= 1
            self._running += 1
            self._waiting_seconds -= job.estimate
            self._running_seconds += job.estimate
        is_alone = self._lag.seconds() > _BEHIND and self._alone.acquire(timeout=_ALONE_SECONDS)
        try:
            if job.deadline is not None and time.monotonic() > job.deadline:
                raise TooLate("The deadline passed while the request was waiting.")
            result = job.work()
            self._learn(job.kind, time.monotonic() - began)
            return result
        except Exception:
            raise
        except BaseException as error:  # a panic of native code is not an Exception
            raise RuntimeError(f"{job.kind} panicked") from error
        finally:
            if is_alone:
                self._alone.release()
            with self._lock:
                job.is_running = False
                if not job.is_overdue:
                    self._leave(job)

    def _learn(self, kind: str, seconds: float) -> None:
        with self._lock:
            before = self._seconds.get(kind, seconds)
            self._seconds[kind] = before + _NEW_WEIGHT * (seconds - before)


class _QueuedCall:
    """One piece of work, and the future of its result in the event loop that waits for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        kind: str,
        work: Callable[[], Any],
        deadline: float | None,
        estimate: float,
    ) -> None:
        self.kind, self.work, self.deadline, self.estimate = kind, work, deadline, estimate
        self.result: asyncio.Future[Any] = loop.create_future()
        self.worker = threading.current_thread()
        self.is_running = False
        self.is_overdue = False
        self._loop = loop
        self._claims = [None]  # whoever takes it decides whether the work is done; a pop is atomic

    def begin(self) -> bool:
        """Whether it is still wanted; this thread does it then."""
        self.worker = threading.current_thread()
        return self._claim()

    def end(self, run: Callable[[_QueuedCall], Any]) -> None:
        try:
            result, error = run(self), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, result, error)

    def cancel(self) -> bool:
        """Whether it had not begun, and never will."""
        if not self._claim():
            return False
        self.result.cancel()
        return True

    def _claim(self) -> bool:
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    def _set(self, result: Any, error: Exception | None) -> None:
        if self.result.done():  # nobody waits any more
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)


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
