"""Servers in threads of this process, on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    http: str
    grpc: str
    version: str
    stop: Callable[[], int]


Start = Callable[..., Running]


def in_thread(settings: Any) -> Running:
    from recmill.stages.serve.server import Ready, serve

    loop, stop, code = asyncio.new_event_loop(), asyncio.Event(), list[int]()
    ready: list[Ready] = []
    is_ready = threading.Event()

    def say(found: Ready) -> None:
        ready.append(found)
        is_ready.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            code.append(loop.run_until_complete(serve(settings, say, stop)))
        finally:
            is_ready.set()
            loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end() -> int:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        return code[0]

    assert is_ready.wait(60)
    assert ready, "the server did not start"
    return Running(ready[0].http, ready[0].grpc, ready[0].version, end)
