"""The pages of a server: the console at `/`, a demo shop at `/shop`. Plain files with nothing to build or download."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = "index.html"
# A page may run scripts of this server and call this server, and nothing else: nothing inline. Item images may come
# from the URLs in the item columns.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' https: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # always revalidate; the ETag keeps the answer short
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def routes() -> list[Route]:
    """Both pages, and their files below `/console/` and `/shop/`. All files are read at startup, none per request."""
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

    # Declared async, because Starlette runs sync handlers on a thread.
    async def answer(request: Request) -> Response:
        known = [
            one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")
        ]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer
