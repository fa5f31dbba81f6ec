"""Servers of a small shop's bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        own = {"bundle": bundles, "http_port": 0, "grpc_port": 0, "threads": 2, "deadline_seconds": 30}
        settings = ServeConfig(**{**own, **changes})
        running.append(in_thread(settings))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(start: Start) -> Running:
    """A server with default settings. Tests must not change its items."""
    return start()


CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 60_000  # a page on a busy machine takes its time


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_in_browser(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page at a URL; afterwards nothing must have gone wrong inside of it."""
    contexts, problems = [], []

    def open_in_browser(url: str, token: str | None = None, **context: Any) -> Any:
        contexts.append(browser.new_context(**context))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Security" in said.text else None)
        if token is not None:
            page.add_init_script(f"if (!sessionStorage.length) sessionStorage.setItem('token', '{token}')")
        page.goto(url)
        return page

    yield open_in_browser
    for context in contexts:
        context.close()
    assert problems == []
