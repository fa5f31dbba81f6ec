"""Admission control: a bounded queue before a few worker threads. Late requests are refused at once."""

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

_NEW_WEIGHT = 0.1  # weight of the latest call in the running mean of call durations
# fraction of the time left that may be used: estimates are means, and sending the answer takes time too
_USABLE = 0.7
_TICK_SECONDS = 0.01
_FULL_PER_THREAD = 8  # waiting requests per thread from which lag matters
_EXCLUSIVE_SECONDS = 0.1  # seconds that one thread waits for the others while the event loop lags
_MAX_OVERDUE = 16  # limit of threads with overdue work that were replaced
_SECONDS_TO_END = 5.0  # seconds that shutdown waits for work that hangs
# Seconds that the loop may lag under load; beyond that it would do nothing but read requests.
_MAX_LAG_SECONDS = 0.02


class QueueFull(Overloaded):
    """The queue is full, or the request would wait longer than allowed."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Admission:
    """A few worker threads behind a queue that refuses at once what it cannot answer in time.

    The wait is estimated from the recent duration of such calls. A thread whose work is still running at its deadline
    is replaced by a new one, and ends when that work ends. Use from one event loop only.
    """

    def __init__(self, threads: int, max_waiting: int, max_wait_seconds: float, name: str = "answer") -> None:
        self.threads = threads
        self.max_waiting = max_waiting
        self.max_wait_seconds = max_wait_seconds
        self._name = name
        self._jobs: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._overdue = 0  # threads that were replaced
        self._workers: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}  # recent mean duration by kind of call
        self._waiting = 0
        self._running = 0
        self._waiting_seconds = 0.0  # estimated seconds of work in the queue
        self._running_seconds = 0.0
        self._lag = _Lag()
        # While the event loop lags, only one thread works: more would take the interpreter from the loop.
        self._exclusive = threading.Lock()
        for _ in range(threads):
            self._start_worker()

    async def run(self, kind: str, work: Callable[[], Result], deadline: float | None = None) -> Result:
        """Run a function on a worker thread. Raises Overloaded or TooLate instead of waiting too long."""
        return (await self.run_all(kind, [work], deadline))[0]

    async def run_all(
        self, kind: str, works: Sequence[Callable[[], Result]], deadline: float | None = None
    ) -> list[Result]:
        """Run several functions side by side, all of them or none. `deadline` is a `time.monotonic` time."""
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
                self._replace_thread(job)
            raise TooLate("The deadline passed before the answer was ready.") from None
        finally:
            self._forget(sum(job.cancel() for job in jobs), estimate)

    @property
    def length(self) -> int:
        """Number of calls that are waiting or running."""
        return self._waiting + self._running

    def wait_seconds(self) -> float:
        """Estimated queue wait of a call that arrives now."""
        if not self._waiting and self._running < self.threads:
            return 0.0
        return (self._waiting_seconds + self._running_seconds / 2) / self.threads

    def check_room(self, kind: str, number: int, deadline: float | None) -> None:
        """Raise what `run_all` would raise now."""
        wait, lag = self.wait_seconds(), self._lag.seconds()
        left = math.inf if deadline is None else deadline - time.monotonic()
        if self._waiting + number > self.max_waiting:
            raise self._refusal(f"{self._waiting:,} requests are waiting, which is the limit", wait)
        if lag > _MAX_LAG_SECONDS and self._waiting >= _FULL_PER_THREAD * self.threads:
            raise self._refusal(f"the server is {lag * 1000:.0f} ms behind", wait)
        if wait > self.max_wait_seconds:
            raise self._refusal(f"a request would wait {wait * 1000:.0f} ms now", wait)
        if wait and wait + self._seconds.get(kind, 0.0) > _USABLE * left:
            raise self._refusal(
                f"the deadline cannot be met: a request would wait {wait * 1000:.0f} ms", wait
            )

    def close(self) -> None:
        """Stop the threads when their work is done. Overdue work is not waited for."""
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
        # Daemon threads: work that hangs must not keep the process alive.
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

    def _replace_thread(self, job: _QueuedCall) -> None:
        """Replace the thread that runs this overdue work."""
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
        is_exclusive = self._lag.seconds() > _MAX_LAG_SECONDS and self._exclusive.acquire(
            timeout=_EXCLUSIVE_SECONDS
        )
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
            if is_exclusive:
                self._exclusive.release()
            with self._lock:
                job.is_running = False
                if not job.is_overdue:
                    self._leave(job)

    def _learn(self, kind: str, seconds: float) -> None:
        with self._lock:
            before = self._seconds.get(kind, seconds)
            self._seconds[kind] = before + _NEW_WEIGHT * (seconds - before)


class _QueuedCall:
    """One queued function, and the future of its result in the event loop that waits for it."""

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
        self._claims = [None]  # Whoever pops the item owns the work; a pop is atomic.

    def begin(self) -> bool:
        """Claim the work for the calling thread; False if it was cancelled."""
        self.worker = threading.current_thread()
        return self._claim()

    def end(self, run: Callable[[_QueuedCall], Any]) -> None:
        try:
            result, error = run(self), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody awaits the result
            self._loop.call_soon_threadsafe(self._set, result, error)

    def cancel(self) -> bool:
        """Cancel the work if it has not started; whether that succeeded."""
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
        if self.result.done():  # nobody awaits the result any more
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)


class _Lag:
    """Event loop lag: what a busy server adds to every answer, before and after its work."""

    def __init__(self) -> None:
        self._due: float | None = None  # when the next tick is due
        self._last = 0.0

    def seconds(self) -> float:
        """Lag of the last tick, or of the one that is due."""
        if self._due is None:
            self._tick()
        assert self._due is not None
        return max(self._last, time.monotonic() - self._due)

    def _tick(self) -> None:
        now = time.monotonic()
        self._last = 0.0 if self._due is None else now - self._due
        self._due = now + _TICK_SECONDS
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
