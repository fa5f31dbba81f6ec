"""Pages of a server: the console at `/`, a demo shop at `/shop`. Plain files, nothing to build or to fetch."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = "index.html"
# A page may run what this server gives it, and talk to this server; nothing else, nothing inline. Pictures of items are
# where their column says.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' https: data:; "
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
    """Both pages, and their parts below `/console/` and `/shop/`. Files are read now: requests never reach the disk."""
    console = Path(__file__).parent
    return [*_page_routes(console, "/"), *_page_routes(console.parent / "shop", "/shop")]


def _page_routes(folder: Path, page: str) -> list[Route]:
    files = sorted(file for file in folder.iterdir() if file.suffix in _TYPES)
    paths = [page if file.name == PAGE else f"/{folder.name}/{file.name}" for file in files]
    return [Route(path, _answer_with(file)) for path, file in zip(paths, files, strict=True)]


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
