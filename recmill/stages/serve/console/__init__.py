"""The console: a page at `/` that shows what is recommended and why. Plain files, nothing to build or to fetch."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = "index.html"
# The page may run and load what this server gives it, and talk to this server; nothing else, nothing inline.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time; the tag makes the answer short
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def routes() -> list[Route]:
    """The page at `/` and its parts below `/console/`. Files are read now, so requests never reach the disk."""
    files = sorted(file for file in Path(__file__).parent.iterdir() if file.suffix in _TYPES)
    return [
        Route("/" if file.name == PAGE else f"/console/{file.name}", _answer_with(file)) for file in files
    ]


def _answer_with(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "Content-Type": _TYPES[file.suffix], "ETag": tag}

    # Declared async, or Starlette would take a thread for it.
    async def answer(request: Request) -> Response:
        known = [
            one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")
        ]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer
