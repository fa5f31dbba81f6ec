"""serve: one event loop with both doors, or several such processes on the same ports.

settings -> service -> desk -> HTTP door, gRPC door -> warm-up -> ready ... SIGTERM -> drain -> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from recmill.errors import RecmillError
from recmill.serve.limits import Limits
from recmill.serve.security import Tls, Tokens, check_address

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn import Server

    from recmill.serve.grpc_door import GrpcDoor
    from recmill.serve.roles import RemoteStages

_KEEP_ALIVE_SECONDS = 60
_SWITCH_SECONDS = 0.0005
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a process that ended is started again
_logger = logging.getLogger("recmill.serve")


class ServerError(RecmillError):
    """The server cannot start, or a process of it does not."""


@dataclass(frozen=True)
class Settings:
    """Everything that `recmill serve` was told."""

    bundle: Path
    host: str = "127.0.0.1"
    http_port: int = 8080  # 0: any that is free
    grpc_port: int = 8081
    role: str = "all"
    recall_at: tuple[str, ...] = ()
    features_at: tuple[str, ...] = ()
    rank_at: tuple[str, ...] = ()
    features: str | None = None  # URL of a feature store
    prefix: str | None = None  # of its keys
    threads: int | None = None
    processes: int = 1
    watch: bool = True
    canary: tuple[str, float] | None = None
    shadow: str | None = None
    request_log: Path | None = None
    request_log_share: float = 0.01
    otlp: str | None = None
    tls: Tls | None = None
    token_file: Path | None = None
    trust_code: tuple[str, ...] = ()
    insecure: bool = False
    peer_ca: Path | None = None
    peer_token_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0

    def check(self) -> None:
        """Raises when the server would be open to anyone without being told so, or files are missing."""
        check_address(self.host, self.tls is not None, self.token_file is not None, self.insecure)
        if self.tls is not None:
            self.tls.check()
        if self.token_file is not None:
            Tokens.read(self.token_file)

    def stages(self) -> RemoteStages | None:
        """The stages of other processes, when this one has the role that puts them together."""
        if self.role != "recommend":
            return None
        from recmill.serve.roles import Peers, RemoteStages

        shown = self.tls if self.peer_ca else None
        peers = Peers(
            token=self.peer_token_file.read_text(encoding="utf-8").strip() if self.peer_token_file else None,
            ca=self.peer_ca.read_bytes() if self.peer_ca else None,
            key=shown.key.read_bytes() if shown else None,
            certificate=shown.certificate.read_bytes() if shown else None,
        )
        return RemoteStages(self.recall_at, self.features_at, self.rank_at, peers)


@dataclass(frozen=True)
class Ready:
    """Where a server that is ready answers."""

    http: str
    grpc: str
    version: str
    role: str
    processes: int
    pid: int


def run(settings: Settings, say: Callable[[Ready], None]) -> int:
    """Serve until SIGTERM or Ctrl-C; `say` is called once, when the first answers can be asked for."""
    settings.check()
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("recmill").setLevel(logging.INFO)
    main = serve(settings, say) if settings.processes == 1 else supervise(settings, say)
    return _run_loop(main)


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    # The loop refuses what is too much; it must not wait long for threads that answer.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


# one process


async def serve(settings: Settings, say: Callable[[Ready], None], stop: asyncio.Event | None = None) -> int:
    """Answer until `stop` is set or SIGTERM comes, then finish what is under way."""
    from recmill.serve import console
    from recmill.serve.calls import Desk
    from recmill.serve.grpc_door import GrpcDoor
    from recmill.serve.http import HttpDoor
    from recmill.serve.inference import Scoring
    from recmill.serve.service import open_service
    from recmill.serve.telemetry import Telemetry

    stop = stop or _stop_on_signals()
    shared = settings.processes > 1
    with _bound(settings.host, settings.http_port, shared) as listener:
        telemetry = Telemetry(settings.otlp)
        service = await asyncio.to_thread(open_service, settings, telemetry)
        telemetry.watch(service.status)
        tokens = Tokens.read(settings.token_file) if settings.token_file else None
        desk = Desk(service, telemetry, settings.limits, tokens, settings.role, settings.threads)
        scoring = Scoring(desk)
        http = _http_server(HttpDoor(desk, scoring, console.routes()).app, settings)
        grpc = GrpcDoor(desk, scoring, shared)
        grpc_port = grpc.bind(_address(settings.host, settings.grpc_port), settings.tls)
        await grpc.set_ready(False)
        await grpc.server.start()
        answering = asyncio.ensure_future(http.serve(sockets=[listener]))
        try:
            await asyncio.to_thread(service.warm_up)
            await grpc.set_ready(True)
            say(_ready(settings, listener.getsockname()[1], grpc_port, service.bundle.version))
            await _first_of(stop.wait(), answering)
        finally:
            desk.is_draining = True
            await drain(grpc, http, answering, settings.drain_seconds)
            desk.close()
            service.close()
            telemetry.close()
    return 0


async def drain(grpc: GrpcDoor, http: Server, answering: asyncio.Future[None], seconds: float) -> None:
    """Take nothing new, and answer what is under way; after so many seconds, no more."""
    await grpc.set_ready(False)
    http.should_exit = True
    await asyncio.gather(grpc.server.stop(seconds), asyncio.wait([answering], timeout=seconds + 1))


def _http_server(app: ASGIApp, settings: Settings) -> Server:
    import uvicorn

    class Quiet(uvicorn.Server):
        """Signals are ours to handle, for both doors."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Quiet(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
            **(settings.tls.for_uvicorn() if settings.tls else {}),
        )
    )


@contextlib.contextmanager
def _bound(host: str, port: int, shared: bool) -> Iterator[socket.socket]:
    """A socket at this address; `shared`: others of our processes may have it too."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerError(f"--host {host} is no address of this machine: {error.strerror}.") from None
    with socket.socket(family, kind, protocol) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            found.bind(address)
        except OSError as error:
            raise ServerError(
                f"Port {port} of {host} cannot be used: {error.strerror}. Give another, or 0 for any that is free."
            ) from None
        yield found


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ready(settings: Settings, http_port: int, grpc_port: int, version: str) -> Ready:
    scheme = "https" if settings.tls else "http"
    return Ready(
        http=f"{scheme}://{_address(settings.host, http_port)}",
        grpc=_address(settings.host, grpc_port),
        version=version,
        role=settings.role,
        processes=settings.processes,
        pid=os.getpid(),
    )


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


# several processes


async def supervise(settings: Settings, say: Callable[[Ready], None]) -> int:
    """Keep so many processes on the same ports. One that ends is started again; SIGTERM drains all."""
    from recmill.serve.telemetry import shared_by_processes

    stop = _stop_on_signals()
    with contextlib.ExitStack() as held:
        # Bound but not listening: the ports are ours, and connections go to the processes alone.
        ports = [
            held.enter_context(_bound(settings.host, port, True)).getsockname()[1]
            for port in (settings.http_port, settings.grpc_port)
        ]
        folder = held.enter_context(shared_by_processes())
        settings = replace(settings, http_port=ports[0], grpc_port=ports[1])
        group = _Group(settings, folder, stop)
        keepers = [asyncio.ensure_future(group.keep(number)) for number in range(settings.processes)]
        try:
            first = await group.all_ready(keepers)
            if first is not None:
                say(replace(first, pid=os.getpid()))
            await _first_of(stop.wait(), *keepers)
        finally:
            stop.set()
            group.terminate()
            results = await asyncio.gather(*keepers, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return 0


class _Group:
    """The processes of one server."""

    def __init__(self, settings: Settings, folder: Path, stop: asyncio.Event) -> None:
        self.settings = settings
        self.folder = folder
        self.stop = stop
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready: asyncio.Queue[Ready] = asyncio.Queue()

    async def all_ready(self, keepers: Sequence[asyncio.Future[None]]) -> Ready | None:
        """What the first process says once all are ready; none when one gave up, or all are to stop."""
        together = asyncio.ensure_future(self._ready_ones(len(keepers)))
        await _first_of(together, self.stop.wait(), *keepers)
        return together.result()[0] if together.done() and not together.cancelled() else None

    async def _ready_ones(self, number: int) -> list[Ready]:
        return [await self._ready.get() for _ in range(number)]

    async def keep(self, number: int) -> None:
        """Start a process and start it again whenever it ends; one that never got ready is an error."""
        pause, was_ready = _FIRST_PAUSE, False
        while not self.stop.is_set():
            got_ready, code = await self._run_once(number)
            if self.stop.is_set():
                return
            if not (was_ready or got_ready):
                raise ServerError(f"A process of the server ended with code {code} before it was ready.")
            was_ready, pause = True, _FIRST_PAUSE if got_ready else min(_LONGEST_PAUSE, pause * 2)
            _logger.warning(
                "process %d ended with code %s; another is started in %.1f s", number, code, pause
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), pause)

    async def _run_once(self, number: int) -> tuple[bool, int]:
        """Whether it got ready, and the code that it ended with."""
        from recmill.serve.telemetry import forget_process

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "recmill.serve.server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.processes[number] = process
        process.stdin.write(settings_to_json(self.settings) + b"\n")
        line = await process.stdout.readline()
        if line:
            self._ready.put_nowait(msgspec.json.decode(line, type=Ready))
        code = await self._ended(process)
        forget_process(process.pid, self.folder)
        return bool(line), code

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        waiting = asyncio.ensure_future(process.wait())
        await _first_of(waiting, self.stop.wait())
        try:
            return await asyncio.wait_for(
                waiting, self.settings.drain_seconds + 5 if self.stop.is_set() else None
            )
        except TimeoutError:
            process.kill()
            return await process.wait()

    def terminate(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()


def settings_to_json(settings: Settings) -> bytes:
    return msgspec.json.encode(settings, enc_hook=str)


def settings_from_json(text: bytes) -> Settings:
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))


async def _serve_as_child(settings: Settings) -> int:
    """Serve for a parent: ready is one line of JSON for it, and its end is ours."""
    stop, loop = _stop_on_signals(), asyncio.get_running_loop()

    def parent_ended() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    loop.add_reader(sys.stdin.fileno(), parent_ended)  # the parent keeps our input open as long as it lives

    def say(ready: Ready) -> None:
        print(msgspec.json.encode(ready).decode(), flush=True)

    return await serve(settings, say, stop)


def _child() -> int:
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("recmill").setLevel(logging.INFO)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as parent:
        settings = settings_from_json(parent.readline())
    try:
        return _run_loop(_serve_as_child(settings))
    except RecmillError as error:
        print(f"recmill: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_child())
