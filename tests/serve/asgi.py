"""A client of an ASGI application in this process: no sockets, one event loop for all its calls."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


class Client:
    def __init__(self, app: Any) -> None:
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self._runner.run(self._client.get(path, **more))

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self._runner.run(self._client.post(path, **more))
