"""What a server does while clients misbehave, a process of it hangs, or it is told to end. Every answer is checked.

    python benchmarks/chaos_transport.py --shop runs/quickstart [--connections 2000] [--seconds 6] [--only flood,drain]

takes what `recmill run quickstart` left, starts real servers on this machine and prints one line for each trial:
faults made, requests tried, answers right or wrong, refusals by status, requests lost (sent, and never answered),
clients that found no listener (after SIGTERM), health probes answered, and the slowest answer. It exits with 1 when an
answer was wrong, or a request or health probe lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from chaos import NUM_USERS, Expected, K, Outcome, Trials, run_trials

from recmill.stages.bench.serve.server import BenchServer, Usage, start_server
from recmill.stages.bench.serve.transports import split_address
from recmill.stages.serve.proto import recmill_pb2 as pb

DEADLINE = 5.0
RECOMMEND = "/recmill.v1.Recommender/Recommend"
HEALTH = "/grpc.health.v1.Health/Check"


@dataclass
class Trial:
    """What became of the requests of one trial."""

    name: str
    faults: int = 0
    found: Counter[str] = field(default_factory=Counter)
    health: Counter[bool] = field(default_factory=Counter)
    slowest: float = 0.0
    slowest_health: float = 0.0
    memory: list[float] = field(default_factory=list)
    stopped_at: float = -math.inf  # when a process stood still: it may have had what was sent before

    def outcome(self) -> Outcome:
        lost = self.found["lost"] + self.health[False]
        return Outcome(self.line(), self.found.total(), self.found["wrong"], lost)

    def line(self) -> str:
        words = "   ".join(f"{name} {self.found[name]:,}" for name in ("right", "wrong", "lost"))
        others = "".join(
            f"   {name} {count:,}"
            for name, count in self.found.most_common()
            if name not in ("right", "wrong", "lost")
        )
        health = f"health {self.health[True]}/{self.health.total()}"
        memory = f"   {self.memory[0]:,.0f} -> {max(self.memory):,.0f} MB" if self.memory else ""
        return (
            f"{self.name:14s} faults {self.faults:,}   tries {self.found.total():,}   {words}{others}   {health}"
            f"   slowest {self.slowest * 1000:,.0f} ms, health {self.slowest_health * 1000:,.0f} ms{memory}"
        )


# clients


class Client(threading.Thread, ABC):
    """Some clients that ask at a rate until they are told to stop."""

    def __init__(
        self, trial: Trial, expected: Expected, server: BenchServer, rate: float, num_clients: int
    ) -> None:
        super().__init__(daemon=True)
        self.trial, self.expected, self.server = trial, expected, server
        self.rate, self.num_clients = rate, num_clients
        self.is_over = False

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self.num_clients)))

    async def _client(self, number: int) -> None:
        ask = self.asker()
        await asyncio.sleep(number / self.rate)
        while not self.is_over:
            began, user = time.monotonic(), self.expected.users[number % NUM_USERS]
            word = await ask(user)
            self.trial.found[word] += 1
            self.trial.slowest = max(self.trial.slowest, time.monotonic() - began)
            number += self.num_clients
            await asyncio.sleep(max(0.001, began + self.num_clients / self.rate - time.monotonic()))

    @abstractmethod
    def asker(self) -> Callable:
        """What sends one request over this transport and waits for its answer."""


class HttpClient(Client):
    """HTTP clients that keep their connection, or open a fresh one for each request."""

    is_fresh = False

    def asker(self) -> Callable:
        held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

        async def ask(user: str) -> str:
            # As every pool does: a connection that ended while it was idle is not used.
            if held and held[0][0].at_eof():
                held.pop()[1].close()
            if not held:
                try:
                    held.append(await asyncio.open_connection(*split_address(str(self.server.http))))
                except OSError:
                    return "no listener"
            try:
                async with asyncio.timeout(DEADLINE):
                    status, headers, body = await exchange(*held[0], recommend_text(user, self.is_fresh))
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                held.pop()[1].close()
                return "lost"
            if self.is_fresh or "connection: close" in headers:
                held.pop()[1].close()
            return self.word(user, status, body)

        return ask

    def word(self, user: str, status: int, body: bytes) -> str:
        if status != 200:
            return f"refused {status}"
        items = {item["id"]: item["score"] for item in json.loads(body)["items"]}
        wanted = self.expected.items[user]
        is_right = items.keys() == wanted.keys() and all(abs(items[id] - wanted[id]) < 1e-5 for id in items)
        return "right" if is_right else "wrong"


class FreshHttpClient(HttpClient):
    is_fresh = True


class RetryingHttpClient(FreshHttpClient):
    """Asks once more, on a new connection, when the process that stands still may have had its request.

    What is sent after the stop cannot have reached that process, so it must be answered the first time.
    """

    def asker(self) -> Callable:
        ask = super().asker()

        async def ask_again(user: str) -> str:
            sent_at, word = time.monotonic(), await ask(user)
            if word != "lost" or sent_at > self.trial.stopped_at:
                return word
            again = await ask(user)
            return "right when asked again" if again == "right" else again

        return ask_again


# Calls that are sent while a server shuts down, before the client has its GOAWAY, may be cancelled.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "recmill.v1.Recommender", "method": "Recommend"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["CANCELLED", "UNAVAILABLE"],
            },
        }
    ]
}


class GrpcClient(Client):
    """Each client has a channel of its own, with the retries of docs/serve.md: the library makes them."""

    def asker(self) -> Callable:
        channel = grpc.aio.insecure_channel(
            str(self.server.grpc),
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_reconnect_backoff_ms", 200),
                ("grpc.service_config", json.dumps(_RETRIES)),
            ],
        )
        call = channel.unary_unary(RECOMMEND)

        async def ask(user: str) -> str:
            try:
                body = await call(self.expected.request(user), timeout=DEADLINE)
            except grpc.aio.AioRpcError as error:
                return grpc_word(error)
            return "right" if self.expected.is_right(user, body, Counter(), True) else "wrong"

        return ask


def grpc_word(error: grpc.aio.AioRpcError) -> str:
    details = (error.details() or "").lower()
    if error.code() == grpc.StatusCode.UNAVAILABLE and "connect" in details and "reset" not in details:
        return "no listener"
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "refused RESOURCE_EXHAUSTED"
    return f"lost ({error.code().name} {details[:80]})" if os.environ.get("WHY") else "lost"


def recommend_text(user: str, is_last: bool) -> bytes:
    body = json.dumps({"user": user, "k": K}).encode()
    connection = "close" if is_last else "keep-alive"
    return (
        f"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: {connection}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, str, bytes]:
    """Status, headers and body of the answer."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), head, await reader.readexactly(length)


class Probe(threading.Thread):
    """Asks both transports for their health several times a second, on new connections, as a kubelet would."""

    def __init__(self, trial: Trial, server: BenchServer) -> None:
        super().__init__(daemon=True)
        self.trial, self.server, self.is_over = trial, server, False

    def run(self) -> None:
        while not self.is_over:
            for is_well in (self._http, self._grpc):
                began = time.monotonic()
                self.trial.health[is_well()] += 1
                self.trial.slowest_health = max(self.trial.slowest_health, time.monotonic() - began)
            if usage := Usage.of(self.server):
                self.trial.memory.append(usage.resident_bytes / 1e6)
            time.sleep(0.25)

    def _http(self) -> bool:
        try:
            with socket.create_connection(split_address(str(self.server.http)), timeout=3) as connection:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return b" 200 " in connection.recv(1_000)[:20]
        except OSError:
            return False

    def _grpc(self) -> bool:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        with grpc.insecure_channel(str(self.server.grpc), options) as channel:
            try:
                channel.unary_unary(HEALTH)(b"", timeout=3, wait_for_ready=True)
            except grpc.RpcError:
                return False
        return True


@dataclass
class Scene:
    bundles: Path
    expected: Expected
    connections: int
    seconds: float
    rate: float

    def run(
        self,
        name: str,
        server: BenchServer,
        fault: Callable[[Trial], object],
        kinds: tuple[type[Client], ...] = (HttpClient, GrpcClient),
        num_clients: int = 4,
        with_health: bool = True,
    ) -> Trial:
        """Load a server while faults are made."""
        trial = Trial(name)
        clients = [kind(trial, self.expected, server, self.rate, num_clients) for kind in kinds]
        threads: list[Client | Probe] = [*clients, *([Probe(trial, server)] if with_health else [])]
        for thread in threads:
            thread.start()
        try:
            time.sleep(min(2.0, self.seconds / 3))
            fault(trial)
        finally:
            for thread in threads:
                thread.is_over = True
            for thread in threads:
                thread.join()
        return trial


# trials


def flood(scene: Scene) -> Iterator[Trial]:
    """Connections that say nothing, on each transport in turn; one server takes few connections and one takes many."""
    for number in (300, scene.connections * 2):
        with start_server(scene.bundles, ["--max-connections", str(number)]) as server:
            for transport in ("http", "grpc"):

                def fault(trial: Trial, transport: str = transport) -> None:
                    address = split_address(str(getattr(server, transport)))
                    with contextlib.ExitStack() as held:
                        for _ in range(scene.connections):
                            held.enter_context(socket.create_connection(address, timeout=10))
                            trial.faults += 1
                        time.sleep(scene.seconds)

                yield scene.run(f"flood {transport} {number}", server, fault)


def trickle(scene: Scene) -> Iterator[Trial]:
    """Requests whose head or body comes a byte at a time."""
    beginnings = (
        b"GET / HTTP/1.1\r\na: ",
        b"POST /v1/recommend HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n",
    )

    def fault(trial: Trial) -> None:
        connections = []
        for number in range(scene.connections // 4):
            connections.append(socket.create_connection(split_address(str(server.http)), timeout=10))
            connections[-1].sendall(beginnings[number % 2])
        end = time.monotonic() + 2 * scene.seconds
        while time.monotonic() < end:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"a")
                    trial.faults += 1
            time.sleep(0.5)
        for connection in connections:
            connection.close()

    with start_server(scene.bundles) as server:
        yield scene.run("trickle", server, fault)


def headers(scene: Scene) -> Iterator[Trial]:
    """Heads of 32 MB, in one header and in many."""

    def fault(trial: Trial) -> None:
        end = time.monotonic() + scene.seconds
        while time.monotonic() < end:
            for part in (b"a" * 65_536, b"a: b\r\n" * 10_000):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(split_address(str(server.http)), timeout=10) as connection,
                ):
                    trial.faults += 1
                    connection.sendall(b"GET / HTTP/1.1\r\na: ")
                    for _ in range(500):
                        connection.sendall(part)
            time.sleep(0.1)

    with start_server(scene.bundles) as server:
        yield scene.run("headers", server, fault)


def stopped(scene: Scene) -> Iterator[Trial]:
    """SIGSTOP for one of two processes: what it had accepted must be asked again, everything else is answered."""

    def fault(trial: Trial) -> None:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSTOP)
        while state_of(int(children[0])) not in "TZ":
            time.sleep(0.001)
        trial.stopped_at = time.monotonic()
        trial.faults += 1
        end = time.monotonic() + 60
        while Path(f"/proc/{children[0]}").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(scene.seconds)

    with start_server(scene.bundles, ["--processes", "2", "--threads", "1"]) as server:
        yield scene.run("stopped", server, fault, (RetryingHttpClient,), with_health=False)


def drain(scene: Scene) -> Iterator[Trial]:
    """SIGTERM under load, for each kind of client and for two processes."""
    kinds: dict[str, type[Client]] = {"keep": HttpClient, "fresh": FreshHttpClient, "grpc": GrpcClient}
    for name, kind in kinds.items():
        for flags in ([], ["--processes", "2"]):
            with start_server(scene.bundles, ["--threads", "1", *flags]) as server:

                def fault(trial: Trial, server: BenchServer = server) -> None:
                    os.kill(int(server.pid or 0), signal.SIGTERM)
                    trial.faults += 1
                    end = time.monotonic() + 30
                    while is_running(int(server.pid or 0)) and time.monotonic() < end:
                        time.sleep(0.05)

                title = f"drain {name} {len(flags) or 1}"
                yield scene.run(title, server, fault, (kind,), num_clients=16, with_health=False)


def large(scene: Scene) -> Iterator[Trial]:
    """Messages of 15 MB on each transport, one after the other."""
    ids = pb.RecommendRequest(queries=[pb.Query(exclude=[pb.Id(text=f"i{i}") for i in range(1_500_000)])])
    message = ids.SerializeToString()[: 15 << 20]
    body = json.dumps({"exclude": [f"i{number}" for number in range(1_300_000)]}).encode()[: 15 << 20]
    head = b"POST /v1/recommend HTTP/1.1\r\ncontent-type: application/json\r\nconnection: close\r\n"

    def over_grpc() -> None:
        with grpc.insecure_channel(str(server.grpc)) as channel, contextlib.suppress(grpc.RpcError):
            channel.unary_unary(RECOMMEND)(message, timeout=20)

    def over_http() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(str(server.http)), timeout=20) as connection,
        ):
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            connection.recv(1_000)

    for name, send in (("grpc", over_grpc), ("http", over_http)):

        def fault(trial: Trial, send: Callable[[], None] = send) -> None:
            end = time.monotonic() + scene.seconds
            while time.monotonic() < end:
                send()
                trial.faults += 1
                time.sleep(0.2)

        with start_server(scene.bundles) as server:
            yield scene.run(f"large {name}", server, fault)


TRIALS = {
    "flood": flood,
    "trickle": trickle,
    "headers": headers,
    "stopped": stopped,
    "drain": drain,
    "large": large,
}


def is_running(pid: int) -> bool:
    return state_of(pid) != "Z"


def state_of(pid: int) -> str:
    """As ps shows it; a process that is gone is a zombie too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def trials_of(scene: Scene) -> Trials:
    def bind(trial: Callable[[Scene], Iterator[Trial]]) -> Callable[[], Iterable[Outcome]]:
        def run() -> Iterator[Outcome]:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return (found.outcome() for found in trial(scene))

        return run

    return {name: bind(trial) for name, trial in TRIALS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shop", type=Path, required=True, help="what `recmill run quickstart --into` was given"
    )
    parser.add_argument("--connections", type=int, default=2_000, help="of a flood (default: 2000)")
    parser.add_argument("--seconds", type=float, default=6, help="of each trial, about (default: 6)")
    parser.add_argument("--rate", type=float, default=40, help="requests a second by each kind of client")
    parser.add_argument("--only", default=",".join(TRIALS), help="names of trials with commas between")
    given = parser.parse_args()
    bundles = given.shop / "bundle"
    scene = Scene(bundles, Expected(bundles), given.connections, given.seconds, given.rate)
    return run_trials(trials_of(scene), given.only)


if __name__ == "__main__":
    sys.exit(main())
