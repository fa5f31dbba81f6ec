"""The two ways to load a server: requests that come when they come, and clients that wait for their answers."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from recmill.stages.bench.serve.transports import Transport

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

_KEEP_EVERY = 20  # answers that are looked at after the run
_LEAST_WAIT = 20e-6  # seconds; less is not worth a timer


@dataclass
class RequestRecords:
    """What became of each request. Times are seconds since the run began; `due` is when it should have been sent."""

    due: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)

    def add(self, due: float, sent: float, done: float, problem: str, body: bytes) -> None:
        if not problem and len(self.due) % _KEEP_EVERY == 0:
            self.kept.append(body)
        self.due.append(due)
        self.sent.append(sent)
        self.done.append(done)
        self.problems.append(problem)

    def due_between(self, start: float, end: float) -> RequestRecords:
        """Those that were due in that time."""
        chosen = [place for place, due in enumerate(self.due) if start <= due < end]

        def of(values: list[T]) -> list[T]:
            return [values[place] for place in chosen]

        return RequestRecords(of(self.due), of(self.sent), of(self.done), of(self.problems), self.kept)

    def answered_between(self, start: float, end: float) -> int:
        """Requests that were answered well in that time, whenever they were due."""
        return sum(
            start <= done < end and not problem
            for done, problem in zip(self.done, self.problems, strict=True)
        )

    def latencies(self) -> Array:
        """Seconds from due to answered, of requests that were answered well or too late; a refusal is no answer."""
        good = np.array([problem in ("", "late") for problem in self.problems], dtype=bool)
        seconds: Array = np.subtract(self.done, self.due)[good]
        return seconds

    def send_delays(self) -> Array:
        """Seconds that the generator itself was late."""
        return np.subtract(self.sent, self.due)


async def open_loop(transport: Transport, requests: Sequence[bytes], due: Array) -> RequestRecords:
    """Send each request when it is due, whatever became of those before: a slow server gets no rest.

    Latencies count from when a request was due, so that time in which the server held everything up is not left out.
    """
    records, times = RequestRecords(), due.tolist()
    loop, finished = asyncio.get_running_loop(), asyncio.Event()
    start = loop.time() + 0.02
    next_one = 0

    def send(number: int) -> None:
        at, sent = times[number], loop.time() - start

        def done(problem: str, body: bytes) -> None:
            records.add(at, sent, loop.time() - start, problem, body)
            if len(records.due) == len(times):
                finished.set()

        transport.send(requests[number % len(requests)], done)

    def tick() -> None:
        nonlocal next_one
        while next_one < len(times) and start + times[next_one] - loop.time() < _LEAST_WAIT:
            next_one += 1
            send(next_one - 1)
        if next_one < len(times):
            loop.call_at(start + times[next_one], tick)

    with _without_pauses():
        if times:
            tick()
            await finished.wait()
    return records


async def closed_loop(
    transport: Transport, requests: Sequence[bytes], clients: int, seconds: float
) -> RequestRecords:
    """`clients` that each send their next request when the last one is answered."""
    records = RequestRecords()
    loop, finished = asyncio.get_running_loop(), asyncio.Event()
    start = loop.time()
    number, busy = 0, clients

    def send() -> None:
        nonlocal number
        sent = loop.time() - start
        request = requests[number % len(requests)]
        number += 1

        def done(problem: str, body: bytes) -> None:
            nonlocal busy
            now = loop.time() - start
            records.add(sent, sent, now, problem, body)
            if now < seconds:
                # A server that is gone refuses at once: asking again at once would only burn the core.
                loop.call_later(0.01 if problem == "connection" else 0, send)
            else:
                busy -= 1
                if not busy:
                    finished.set()

        transport.send(request, done)

    with _without_pauses():
        for _ in range(clients):
            send()
        await finished.wait()
    return records


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Our own collector of garbage would look like a slow server."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_seconds() -> float:
    """Of this process so far, all threads."""
    return time.process_time()
