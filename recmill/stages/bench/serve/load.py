"""Open loop (requests at given times) and closed loop (clients that wait for each answer)."""

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

_KEEP_EVERY = 20  # one answer in so many is parsed after the run
_MIN_WAIT = 20e-6  # seconds; less is not worth a timer


@dataclass
class RequestRecords:
    """Times and outcome of each request, in seconds since the start; `due` is when it should have been sent."""

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
        """The requests that were due in that time."""
        chosen = [index for index, due in enumerate(self.due) if start <= due < end]

        def of(values: list[T]) -> list[T]:
            return [values[index] for index in chosen]

        return RequestRecords(of(self.due), of(self.sent), of(self.done), of(self.problems), self.kept)

    def answered_between(self, start: float, end: float) -> int:
        """How many requests succeeded in that time, whenever they were due."""
        return sum(
            start <= done < end and not problem
            for done, problem in zip(self.done, self.problems, strict=True)
        )

    def latencies(self) -> Array:
        """Seconds from due to done, of successes and timeouts; a refusal is not an answer."""
        good = np.array([problem in ("", "late") for problem in self.problems], dtype=bool)
        seconds: Array = np.subtract(self.done, self.due)[good]
        return seconds

    def send_delays(self) -> Array:
        """Seconds between due and sent: the delay of the generator itself."""
        return np.subtract(self.sent, self.due)


async def open_loop(transport: Transport, requests: Sequence[bytes], due: Array) -> RequestRecords:
    """Send each request when it is due, whether or not earlier ones were answered.

    Latency counts from the due time, so a stall of the server shows in all requests that were due meanwhile
    (no coordinated omission).
    """
    records, times = RequestRecords(), due.tolist()
    loop, finished = asyncio.get_running_loop(), asyncio.Event()
    start = loop.time() + 0.02
    next_index = 0

    def send(number: int) -> None:
        at, sent = times[number], loop.time() - start

        def done(problem: str, body: bytes) -> None:
            records.add(at, sent, loop.time() - start, problem, body)
            if len(records.due) == len(times):
                finished.set()

        transport.send(requests[number % len(requests)], done)

    def tick() -> None:
        nonlocal next_index
        while next_index < len(times) and start + times[next_index] - loop.time() < _MIN_WAIT:
            next_index += 1
            send(next_index - 1)
        if next_index < len(times):
            loop.call_at(start + times[next_index], tick)

    with _gc_disabled():
        if times:
            tick()
            await finished.wait()
    return records


async def closed_loop(
    transport: Transport, requests: Sequence[bytes], clients: int, seconds: float
) -> RequestRecords:
    """`clients` clients, each of which sends its next request when the last one is answered."""
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
                # A dead server refuses at once; without a pause this loop would take the whole core.
                loop.call_later(0.01 if problem == "connection" else 0, send)
            else:
                busy -= 1
                if not busy:
                    finished.set()

        transport.send(request, done)

    with _gc_disabled():
        for _ in range(clients):
            send()
        await finished.wait()
    return records


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """A pause of our own garbage collector would look like a slow server."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads."""
    return time.process_time()
