"""Several processes of one server on the same ports: starts, watches, replaces and drains them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from recmill.errors import RecmillError
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.server import (
    Ready,
    ServerError,
    bound,
    first_of,
    log_to_stderr,
    run_loop,
    serve,
    stop_on_signals,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a process that ended is restarted
_BEAT_SECONDS = 0.5  # seconds between two heartbeats of a process
_SILENT_SECONDS = 5  # without a heartbeat before a process is killed
# Limit before a process is ready: imports and large bundles keep its event loop busy.
_SILENT_START_SECONDS = 60
_logger = logging.getLogger("recmill.serve")


async def supervise(settings: ServeConfig, on_ready: Callable[[Ready], None]) -> int:
    """Keep this many processes on the same ports. A process that ends is restarted; SIGTERM drains all."""
    from recmill.stages.serve.telemetry import shared_by_processes

    stop = stop_on_signals()
    with contextlib.ExitStack() as held:
        # All processes accept HTTP connections from one listening socket: connections that wait when a process hangs
        # or is killed are accepted by another. The gRPC library does not accept a socket from us, so each process has
        # its own queue there; the parent binds that port without listening, to reserve it.
        listener = held.enter_context(bound(settings.host, settings.http_port))
        grpc_socket = held.enter_context(bound(settings.host, settings.grpc_port, reuse_port=True))
        folder = held.enter_context(shared_by_processes())
        ports = [found.getsockname()[1] for found in (listener, grpc_socket)]
        settings = replace(settings, http_port=ports[0], grpc_port=ports[1])
        group = _Group(settings, folder, stop, listener)
        keepers = [asyncio.ensure_future(group.keep_running(number)) for number in range(settings.processes)]
        try:
            first = await group.all_ready(keepers)
            if first is not None:
                on_ready(replace(first, pid=os.getpid()))
            await first_of(stop.wait(), *keepers)
        finally:
            stop.set()
            listener.close()  # the last process that drains closes the socket, after it has emptied its queue
            group.terminate()
            results = await asyncio.gather(*keepers, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return 0


@dataclass
class _Run:
    """How one process ended."""

    got_ready: bool = False
    was_silent: bool = False
    code: int = 0


class _Group:
    """The processes of one server."""

    def __init__(
        self, settings: ServeConfig, folder: Path, stop: asyncio.Event, listener: socket.socket
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.stop = stop
        self.listener = listener
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready: asyncio.Queue[Ready] = asyncio.Queue()

    async def all_ready(self, keepers: Sequence[asyncio.Future[None]]) -> Ready | None:
        """The Ready of the first process once all are ready; None if one gave up or the server stops."""
        together = asyncio.ensure_future(self._ready_ones(len(keepers)))
        await first_of(together, self.stop.wait(), *keepers)
        return together.result()[0] if together.done() and not together.cancelled() else None

    async def _ready_ones(self, number: int) -> list[Ready]:
        return [await self._ready.get() for _ in range(number)]

    async def keep_running(self, number: int) -> None:
        """Start a process and restart it whenever it ends.

        A process that ends by itself before it was ready is an error.
        """
        pause, was_ready = _FIRST_PAUSE, False
        while not self.stop.is_set():
            run = await self._run_once(number)
            if self.stop.is_set():
                return
            was_ready = was_ready or run.got_ready
            if not (was_ready or run.was_silent):
                raise ServerError(f"A process of the server ended with code {run.code} before it was ready.")
            pause = _FIRST_PAUSE if run.got_ready else min(_LONGEST_PAUSE, pause * 2)
            _logger.warning(
                "process %d ended with code %s; another is started in %.1f s", number, run.code, pause
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), pause)

    async def _run_once(self, number: int) -> _Run:
        from recmill.stages.serve.telemetry import forget_process

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "recmill.stages.serve.supervisor",
            str(self.listener.fileno()),
            pass_fds=[self.listener.fileno()],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        self.processes[number] = process
        run = _Run()
        process.stdin.write(settings_to_json(self.settings) + b"\n")
        watching = asyncio.ensure_future(self._watch(number, process, run))
        run.code = await self._ended(process)
        await asyncio.wait([watching], timeout=1)  # seconds for its last output
        watching.cancel()
        forget_process(process.pid, self.folder)
        return run

    async def _watch(self, number: int, process: asyncio.subprocess.Process, run: _Run) -> None:
        """Read the ready line of a process; kill it when its event loop stops sending heartbeats.

        Seconds are counted, not taken from a clock, so that a pause of this process is not charged to the other.
        """
        assert process.stdout is not None
        silent_seconds = 0
        while silent_seconds < (_SILENT_SECONDS if run.got_ready else _SILENT_START_SECONDS):
            try:
                line = await asyncio.wait_for(process.stdout.readline(), 1.0)
            except TimeoutError:
                silent_seconds += 1
                continue
            if not line:
                return
            silent_seconds = 0
            if line.strip():
                run.got_ready = True
                self._ready.put_nowait(msgspec.json.decode(line, type=Ready))
        _logger.warning("process %d sent no heartbeat for %d s and is killed", number, silent_seconds)
        run.was_silent = True
        process.kill()

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        waiting = asyncio.ensure_future(process.wait())
        await first_of(waiting, self.stop.wait())
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


def settings_to_json(settings: ServeConfig) -> bytes:
    return msgspec.json.encode(settings, enc_hook=str)


def settings_from_json(text: bytes) -> ServeConfig:
    return msgspec.json.decode(text, type=ServeConfig, dec_hook=lambda kind, value: kind(value))


async def _serve_as_child(settings: ServeConfig, listener: socket.socket) -> int:
    """Serve as a child process.

    Ready is one line of JSON to the parent, an empty line a heartbeat. The process ends with its parent.
    """
    stop, loop = stop_on_signals(), asyncio.get_running_loop()

    def parent_ended() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    loop.add_reader(sys.stdin.fileno(), parent_ended)  # the parent keeps our stdin open as long as it lives
    os.set_blocking(sys.stdout.fileno(), False)
    beating = asyncio.create_task(_beat())
    try:
        return await serve(
            settings, lambda ready: print(msgspec.json.encode(ready).decode(), flush=True), stop, listener
        )
    finally:
        beating.cancel()


async def _beat() -> None:
    """Send heartbeats to the parent as long as the event loop of this process runs."""
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        with contextlib.suppress(BlockingIOError):  # the parent is not reading now
            os.write(sys.stdout.fileno(), b"\n")


def _child() -> int:
    log_to_stderr()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as parent:
        settings = settings_from_json(parent.readline())
    listener = socket.socket(fileno=int(sys.argv[1]))
    try:
        return run_loop(_serve_as_child(settings, listener))
    except RecmillError as error:
        print(f"recmill: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_child())
