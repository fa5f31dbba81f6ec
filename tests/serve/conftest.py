"""A small shop's bundle, made once, and servers of it on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recmill.cli import main


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `recmill serve --bundle` takes. Tests must not change it."""
    into = tmp_path_factory.mktemp("shop")
    few = ["--set", "ranking.train.max_steps=20", "--set", "retrieval.train.max_steps=6", "--threads", 1]
    for arguments in (
        ["generate", "shop", "--rows", 5000, "--into", into / "log"],
        ["prepare", "quickstart", "--data", into / "log", "--into", into / "table"],
        ["train", "quickstart", "--table", into / "table", "--into", into / "checkpoint", *few],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundle"],
    ):
        assert main([*map(str, arguments), "--quiet"]) == 0
    return into / "bundle"


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    http: str
    grpc: str
    version: str
    stop: Callable[[], int]


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def start(bundles: Path) -> Iterator[Start]:
    """Start servers with some settings; all are stopped at the end."""
    from recmill.serve.server import Settings

    running: list[Running] = []

    def start(**changes: Any) -> Running:
        settings = Settings(**{"bundle": bundles, "http_port": 0, "grpc_port": 0, "threads": 2, **changes})
        running.append(_in_thread(settings))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    """A server with default settings. Tests must not change its items."""
    return start()


def _in_thread(settings: Any) -> Running:
    from recmill.serve.server import Ready, serve

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
