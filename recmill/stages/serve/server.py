"""serve: one event loop with both transports, or several such processes on the same ports.

settings -> service -> dispatcher -> HTTP transport, gRPC transport -> warm-up -> ready ... SIGTERM -> drain -> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recmill.errors import RecmillError, check_installed
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.connections import ConnectionReaper, connections_for, raise_file_limit
from recmill.stages.serve.limits import Limits
from recmill.stages.serve.security import Tls, Tokens, check_address, is_loopback

if TYPE_CHECKING:
    from recmill.stages.serve.grpc_server import GrpcServer
    from recmill.stages.serve.http_server import HttpServer

_SWITCH_SECONDS = 0.0001
_YOUNG_OBJECTS = 20_000  # new objects between two garbage collections: some hundred requests
_logger = logging.getLogger("recmill.serve")


class ServerError(RecmillError):
    """The server, or one of its processes, cannot start."""


@dataclass(frozen=True)
class Ready:
    """The addresses of a server that is ready."""

    http: str
    grpc: str
    version: str
    role: str
    processes: int
    pid: int


def check_config(settings: ServeConfig) -> None:
    """Raise when the server would be open to anyone without --insecure, or files are missing or too few."""
    tls = tls_of(settings)
    check_address(settings.host, tls is not None, settings.token_file is not None, settings.insecure)
    if tls is not None:
        tls.check()
    if settings.token_file is not None:
        Tokens.read(settings.token_file)
    connections_for(settings.max_connections, raise_file_limit())


def tls_of(settings: ServeConfig) -> Tls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def admin_is_open(settings: ServeConfig) -> bool:
    """Whether admin calls need no token: clients are local users or have a certificate."""
    return is_loopback(settings.host) or settings.tls_client_ca is not None


def run(settings: ServeConfig, on_ready: Callable[[Ready], None]) -> int:
    """Serve until SIGTERM or Ctrl-C. Calls `on_ready` once, when the server is ready."""
    check_config(settings)
    check_installed(
        "Serving",
        "starlette",
        "uvicorn",
        "httptools",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "prometheus_client",
    )
    log_to_stderr()
    if settings.token_file is None and not admin_is_open(settings):
        _logger.warning(
            "admin calls (items, rollback) are refused: --host %s can be reached from other machines, and there is "
            "neither --token-file nor --tls-client-ca",
            settings.host,
        )
    if settings.processes == 1:
        return run_loop(serve(settings, on_ready))
    from recmill.stages.serve.supervisor import supervise

    return run_loop(supervise(settings, on_ready))


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("recmill").setLevel(os.environ.get("RECMILL_LOG_LEVEL", "info").upper())


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    # The event loop sheds load, so it must not wait long for threads that hold the interpreter.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


# one process


async def serve(
    settings: ServeConfig,
    on_ready: Callable[[Ready], None],
    stop: asyncio.Event | None = None,
    inherited: socket.socket | None = None,
) -> int:
    """Answer until `stop` is set or SIGTERM arrives, then finish the requests in progress.

    `inherited` is a listening socket for HTTP that several processes share.
    """
    from recmill.stages.serve import console
    from recmill.stages.serve.calls import CallDispatcher
    from recmill.stages.serve.grpc_server import GrpcServer
    from recmill.stages.serve.http_routes import HttpApp
    from recmill.stages.serve.http_server import HttpServer
    from recmill.stages.serve.inference import Scoring
    from recmill.stages.serve.service import Service
    from recmill.stages.serve.telemetry import Telemetry

    stop = stop or stop_on_signals()
    limits, tls = Limits.of(settings), tls_of(settings)
    max_connections = connections_for(settings.max_connections, raise_file_limit())
    shared = settings.processes > 1
    with inherited or bound(settings.host, settings.http_port) as listener:
        telemetry = Telemetry(settings.otlp)
        service = await asyncio.to_thread(Service, settings, telemetry)
        telemetry.watch(service.status)
        tokens = Tokens.read(settings.token_file) if settings.token_file else None
        dispatcher = CallDispatcher(
            service,
            telemetry,
            limits,
            tokens,
            settings.role,
            settings.threads,
            admin_is_open=admin_is_open(settings),
        )
        scoring = Scoring(dispatcher, settings.model_name)
        app = HttpApp(dispatcher, scoring, console.routes()).app
        http = HttpServer(app, limits, max_connections, settings.drain_seconds, tls)
        grpc = GrpcServer(dispatcher, scoring, shared, max_connections)
        grpc_port = grpc.bind(_address(settings.host, settings.grpc_port), tls)
        await grpc.set_ready(False)
        await grpc.server.start()
        answering = asyncio.ensure_future(http.serve(sockets=[listener]))
        reaper = ConnectionReaper([listener.getsockname()[1], grpc_port], max_connections)
        reaping = asyncio.ensure_future(reaper.run())
        try:
            await asyncio.to_thread(service.warm_up)
            spare_garbage_collector()
            await grpc.set_ready(True)
            on_ready(_ready(settings, listener.getsockname()[1], grpc_port, service.bundle.version))
            await first_of(stop.wait(), answering)
        finally:
            dispatcher.is_draining = True
            reaping.cancel()
            await drain(grpc, http, answering, settings.drain_seconds)
            dispatcher.close()
            service.close()
            telemetry.close()
    return 0


def spare_garbage_collector() -> None:
    """Freeze the objects loaded so far: scanning them again and again took a tenth of the request time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


async def drain(grpc: GrpcServer, http: HttpServer, answering: asyncio.Future[None], seconds: float) -> None:
    """Stop accepting, and finish the requests in progress within this many seconds."""
    http.drain()
    await grpc.set_ready(False)
    await asyncio.gather(grpc.server.stop(seconds), asyncio.wait([answering], timeout=seconds + 1))


@contextlib.contextmanager
def bound(host: str, port: int, reuse_port: bool = False) -> Iterator[socket.socket]:
    """A socket bound to this address; with `reuse_port`, other processes of the server may bind it too."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerError(f"--host {host} is not an address of this machine: {error.strerror}.") from None
    with socket.socket(family, kind, protocol) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            found.bind(address)
        except OSError as error:
            raise ServerError(
                f"Port {port} of {host} cannot be used: {error.strerror}. Give another, or 0 for a free one."
            ) from None
        yield found


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ready(settings: ServeConfig, http_port: int, grpc_port: int, version: str) -> Ready:
    scheme = "https" if settings.tls_cert else "http"
    return Ready(
        http=f"{scheme}://{_address(settings.host, http_port)}",
        grpc=_address(settings.host, grpc_port),
        version=version,
        role=settings.role,
        processes=settings.processes,
        pid=os.getpid(),
    )


def stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
