"""Several processes of one server on the same ports: started, watched, replaced and drained together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from recmill.errors import RecmillError
from recmill.serve.server import (
    Ready,
    ServerError,
    Settings,
    bound,
    first_of,
    log_to_stderr,
    run_loop,
    serve,
    stop_on_signals,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before a process that ended is started again
_BEAT_SECONDS, _SILENT_SECONDS = (
    0.5,
    5,
)  # between signs of life of a process, and without any before it is killed
_logger = logging.getLogger("recmill.serve")


async def supervise(settings: Settings, say: Callable[[Ready], None]) -> int:
    """Keep so many processes on the same ports. One that ends is started again; SIGTERM drains all."""
    from recmill.serve.telemetry import shared_by_processes

    stop = stop_on_signals()
    with contextlib.ExitStack() as held:
        # Bound but not listening: the ports are ours, and connections go to the processes alone.
        ports = [
            held.enter_context(bound(settings.host, port, True)).getsockname()[1]
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
            await first_of(stop.wait(), *keepers)
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
        await first_of(together, self.stop.wait(), *keepers)
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
            "recmill.serve.supervisor",
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
        watching = asyncio.ensure_future(self._kill_when_silent(number, process))
        code = await self._ended(process)
        watching.cancel()
        forget_process(process.pid, self.folder)
        return bool(line), code

    async def _kill_when_silent(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Kill a process whose event loop stands still: the kernel would go on to give it connections.

        Seconds are counted, not compared with a clock, so that a pause of this process is none of the other's.
        """
        assert process.stdout is not None
        silent_seconds = 0
        while silent_seconds < _SILENT_SECONDS:
            try:
                if not await asyncio.wait_for(process.stdout.readline(), 1.0):
                    return
                silent_seconds = 0
            except TimeoutError:
                silent_seconds += 1
        _logger.warning("process %d gave no sign of life for %d s and is killed", number, silent_seconds)
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


def settings_to_json(settings: Settings) -> bytes:
    return msgspec.json.encode(settings, enc_hook=str)


def settings_from_json(text: bytes) -> Settings:
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))


async def _serve_as_child(settings: Settings) -> int:
    """Serve for a parent: ready is one line of JSON for it, and its end is ours."""
    stop, loop = stop_on_signals(), asyncio.get_running_loop()

    def parent_ended() -> None:
        loop.remove_reader(sys.stdin.fileno())
        stop.set()

    loop.add_reader(sys.stdin.fileno(), parent_ended)  # the parent keeps our input open as long as it lives

    beating: list[asyncio.Task[None]] = []

    def say(ready: Ready) -> None:
        print(msgspec.json.encode(ready).decode(), flush=True)
        beating.append(asyncio.create_task(_beat()))

    try:
        return await serve(settings, say, stop)
    finally:
        for task in beating:
            task.cancel()


async def _beat() -> None:
    """Tell the parent, again and again, that the event loop of this process turns."""
    os.set_blocking(sys.stdout.fileno(), False)
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        with contextlib.suppress(BlockingIOError):  # the parent does not read now
            os.write(sys.stdout.fileno(), b"\n")


def _child() -> int:
    log_to_stderr()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as parent:
        settings = settings_from_json(parent.readline())
    try:
        return run_loop(_serve_as_child(settings))
    except RecmillError as error:
        print(f"recmill: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_child())
