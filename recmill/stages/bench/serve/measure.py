"""One load on one server, and its numbers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recmill.reporting.latency import LatencyHistogram
from recmill.stages.bench.contest import Result
from recmill.stages.bench.serve import echo
from recmill.stages.bench.serve.arrivals import poisson_times
from recmill.stages.bench.serve.load import RequestRecords, closed_loop, cpu_seconds, open_loop
from recmill.stages.bench.serve.requests import AnswerStats, RequestCodec, summarize_answers
from recmill.stages.bench.serve.server import BenchServer, Usage, metrics_delta, read_metrics
from recmill.stages.bench.serve.transports import GrpcTransport, Transport, ask, precise_loop

_ECHO_SECONDS = 2.0
_METRICS_SECONDS = 0.1  # enough to read /metrics
_ECHO_BYTES = 1500  # about 50 items


@dataclass(frozen=True)
class Load:
    """An open loop at `rate` requests a second, or a closed loop of `clients`; `warm_up` seconds are not counted."""

    rate: float | None
    clients: int | None
    seconds: float
    warm_up: float

    @property
    def end(self) -> float:
        return self.warm_up + self.seconds


@dataclass(frozen=True)
class _Snapshot:
    """Counters at the start or the end of the measured time."""

    metrics: dict[str, float]
    server: Usage | None
    client_cpu: float


class LoadGenerator:
    """Sends requests that were encoded beforehand. One event loop runs all loads."""

    def __init__(
        self,
        codec: RequestCodec,
        server: BenchServer,
        requests: Sequence[bytes],
        traced: Sequence[bytes],
        users_per_request: int,
        deadline_seconds: float,
        seed: int = 0,
    ) -> None:
        self.codec, self.server, self.users_per_request = codec, server, users_per_request
        self.requests, self.traced = requests, traced
        self.deadline_seconds, self.seed = deadline_seconds, seed
        self._runner = asyncio.Runner(loop_factory=precise_loop)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    def measure(self, load: Load) -> Result:
        return self._runner.run(self._measure(load))

    async def _measure(self, load: Load) -> Result:
        transport = self.codec.transport("Recommend", self.deadline_seconds)
        await transport.open()
        try:
            records, (first, last), traces = await asyncio.gather(
                self._records(transport, load), self._snapshots(load), self._traces(transport, load)
            )
        finally:
            transport.close()
            await asyncio.sleep(0)  # lets the loop release closed sockets
        counted = records.due_between(load.warm_up, load.end)
        latency = LatencyHistogram.of(counted.latencies())
        answered = records.answered_between(load.warm_up, load.end)
        return {
            **_rates(load, counted, answered, self.users_per_request),
            **_outcomes(counted),
            "latency": latency.as_dict(),
            "histogram": latency.bins(),
            "send_delay": LatencyHistogram.of(counted.send_delays()).as_dict(),
            "answers": summarize_answers(self.codec, records.kept).as_dict(),
            "traced_stages_ms": traces.as_dict()["stages_ms"],
            "server": _server(first, last, answered),
            "client": {
                "cpu_us_per_request": round((last.client_cpu - first.client_cpu) / max(1, answered) * 1e6, 1),
                "cpu_cores": round((last.client_cpu - first.client_cpu) / load.seconds, 4),
            },
        }

    async def _records(self, transport: Transport, load: Load) -> RequestRecords:
        if load.rate is not None:
            return await open_loop(transport, self.requests, poisson_times(load.rate, load.end, self.seed))
        assert load.clients is not None
        return await closed_loop(transport, self.requests, load.clients, load.end)

    async def _snapshots(self, load: Load) -> tuple[_Snapshot, _Snapshot]:
        """Counters at both ends; the server's metrics are read outside of the measured time."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(max(0.0, load.warm_up - _METRICS_SECONDS))
        metrics = await loop.run_in_executor(None, read_metrics, self.server.http)
        await asyncio.sleep(max(0.0, start + load.warm_up - loop.time()))
        first = _Snapshot(metrics, Usage.of(self.server), cpu_seconds())
        await asyncio.sleep(load.seconds)
        used, cpu = Usage.of(self.server), cpu_seconds()
        metrics = await loop.run_in_executor(None, read_metrics, self.server.http)
        return first, _Snapshot(metrics, used, cpu)

    async def _traces(self, transport: Transport, load: Load) -> AnswerStats:
        """One traced request a second, which counts nowhere else: a traced answer is longer."""
        bodies = []
        for number in range(int(load.seconds) if self.traced else 0):
            await asyncio.sleep(load.warm_up + 0.5 if number == 0 else 1.0)
            problem, body = await ask(transport, self.traced[number % len(self.traced)])
            if not problem:
                bodies.append(body)
        return summarize_answers(self.codec, bodies)


def _rates(load: Load, records: RequestRecords, answered: int, users_per_request: int) -> Result:
    number = len(records.due)
    return {
        "loop": "closed" if load.rate is None else "open",
        "target_rate": load.rate,
        "clients": load.clients,
        "seconds": load.seconds,
        "requests": number,
        "answered": answered,
        "offered_rate": round(number / load.seconds, 2),
        "achieved_rate": round(answered / load.seconds, 2),
        "achieved_fraction": round(answered / max(1, number), 4),
        "users_per_second": round(answered * users_per_request / load.seconds, 2),
    }


def _outcomes(records: RequestRecords) -> Result:
    problems = Counter(problem for problem in records.problems if problem)
    return {
        "failed": sum(problems.values()),
        "refused": problems.pop("refused", 0),
        "late": problems.pop("late", 0),
        "errors": dict(problems),
    }


def _server(first: _Snapshot, last: _Snapshot, answered: int) -> Result:
    result = metrics_delta(first.metrics, last.metrics)
    if first.server is not None and last.server is not None:
        cpu = last.server.cpu_seconds - first.server.cpu_seconds
        result["cpu_ms_per_request"] = round(cpu / max(1, answered) * 1e3, 3)
        result["resident_bytes"] = last.server.resident_bytes
    return result


def generator_cost(rate: float, request: bytes) -> Result:
    """CPU time and latency of the generator itself: the same loop and rate against a server that does nothing."""
    command = [sys.executable, "-m", "recmill.stages.bench.serve.echo", str(_ECHO_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with asyncio.Runner(loop_factory=precise_loop) as runner:
                return runner.run(_cost(f"127.0.0.1:{port}", rate, request))
        finally:
            process.kill()


async def _cost(address: str, rate: float, request: bytes) -> Result:
    transport = GrpcTransport(address, echo.METHOD, deadline_seconds=5.0)
    await transport.open()
    await open_loop(transport, [request], poisson_times(rate, 0.5, 0))
    before = cpu_seconds()
    records = await open_loop(transport, [request], poisson_times(rate, _ECHO_SECONDS, 1))
    cpu = cpu_seconds() - before
    transport.close()
    return {
        "rate": rate,
        "cpu_us_per_request": round(cpu / max(1, len(records.due)) * 1e6, 1),
        "latency": LatencyHistogram.of(records.latencies()).as_dict(),
    }
