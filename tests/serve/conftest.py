"""Servers of a small shop's bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Running, Start, in_thread
from shop import Shop


@pytest.fixture(scope="session")
def bundles(shop: Shop) -> Path:
    """The folder that `recmill serve --bundle` takes. Tests must not change it."""
    return shop.bundles


@pytest.fixture(scope="module")
def start(bundles: Path) -> Iterator[Start]:
    """Start servers with some settings; all are stopped at the end."""
    from recmill.stages.serve.config import ServeConfig

    running: list[Running] = []

    def start(**changes: Any) -> Running:
        settings = ServeConfig(**{"bundle": bundles, "http_port": 0, "grpc_port": 0, "threads": 2, **changes})
        running.append(in_thread(settings))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    """A server with default settings. Tests must not change its items."""
    return start()
