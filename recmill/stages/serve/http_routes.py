"""The HTTP transport: JSON in, JSON out. Its endpoints are those of the table of calls."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from recmill.errors import BadRequest, NotFound, ServingError
from recmill.stages.serve import calls as c
from recmill.stages.serve import inference
from recmill.stages.serve import messages as m
from recmill.stages.serve import tensorflow_serving as tfs
from recmill.stages.serve.limits import Limits, decode_json
from recmill.stages.serve.proto.convert import plain_value

JSON = "application/json"


class TooLarge(ServingError):
    """The body is larger than the limit."""

    http_status, grpc_code = 413, "RESOURCE_EXHAUSTED"


class WrongContent(ServingError):
    """The body has an unsupported content type or encoding."""

    http_status = 415


class TooSlow(ServingError):
    """The body did not arrive in time."""

    http_status = 408


class _Peek(msgspec.Struct):
    """Detects whether a body holds several queries, without parsing them."""

    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_peek = msgspec.json.Decoder(_Peek)


class HttpApp:
    """Routes over a dispatcher; `app` is the ASGI application."""

    def __init__(
        self, dispatcher: c.CallDispatcher, scoring: inference.Scoring, more_routes: Sequence[BaseRoute] = ()
    ) -> None:
        self.dispatcher = dispatcher
        self.scoring = scoring
        self._decoders = {
            kind: msgspec.json.Decoder(kind)
            for call in c.CALLS.values()
            for kind in (call.takes, call.takes_many)
            if kind is not None
        }
        self._openapi: tuple[str, bytes] | None = None
        self.app = Starlette(
            routes=[*self._routes(), *more_routes],
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        )
        self.app.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        own = [
            Route(path, self._endpoint(call, method), methods=[method])
            for call in c.CALLS.values()
            if call.endpoint is not None
            for method, path in [call.endpoint]
        ]
        model = "/v2/models/{name}"
        version = model + "/versions/{version}"
        return [
            *own,
            Route("/v1/live", self._authorized("live", self._live), methods=["GET"]),
            Route("/metrics", self._authorized("metrics", self._metrics), methods=["GET"]),
            Route("/openapi.json", self._public("openapi", self._openapi_document), methods=["GET"]),
            Route("/health/live", self._public("health", _alive), methods=["GET"]),
            Route("/health/ready", self._public("health", self._ready), methods=["GET"]),
            Route("/v2", self._authorized("status", self._server), methods=["GET"]),
            Route("/v2/health/live", self._public("health", _alive), methods=["GET"]),
            Route("/v2/health/ready", self._public("health", self._ready), methods=["GET"]),
            *(
                Route(path, self._authorized("status", self._model), methods=["GET"])
                for path in (model, version)
            ),
            *(
                Route(f"{path}/ready", self._authorized("ready", self._model_ready), methods=["GET"])
                for path in (model, version)
            ),
            *(
                Route(f"{path}/infer", self._authorized("infer", self._infer), methods=["POST"])
                for path in (model, version)
            ),
            *self._tensorflow_serving(),
        ]

    def _tensorflow_serving(self) -> list[Route]:
        paths = ("/v1/models/{name}", "/v1/models/{name}/versions/{step:int}")
        return [
            Route(path + tail, self._authorized(name, handler), methods=[method])
            for path in paths
            for tail, name, handler, method in (
                (":{method}", "infer", self._tensorflow_infer, "POST"),
                ("", "status", self._tensorflow_status, "GET"),
                ("/metadata", "status", self._tensorflow_metadata, "GET"),
            )
        ]

    # every handler: authorization, errors, metrics

    def _endpoint(self, call: c.ServerCall, method: str) -> Handler:
        async def answer(request: Request) -> tuple[Response, Any]:
            self.dispatcher.check_offered(call.name, call.roles, call.is_change)
            is_many, requests = await self._requests(request, call, method)
            answers = [answer for answer, _ in await self.dispatcher.answer(call, requests)]
            body = call.answers_many(answers=answers) if is_many and call.answers_many else answers[0]
            return _json(body), c.for_metrics(answers)

        return self._observed(call.name, answer, lambda request: self._permit(request, call.scope))

    def _authorized(self, name: str, answer: Callable[[Request], Awaitable[Response]]) -> Handler:
        return self._observed(name, _without_answer(answer), lambda request: self._permit(request, "read"))

    def _public(self, name: str, answer: Callable[[Request], Awaitable[Response]]) -> Handler:
        return self._observed(name, _without_answer(answer), lambda request: None)

    def _permit(self, request: Request, scope: Any) -> None:
        self.dispatcher.permit(request.headers.get("authorization"), scope)

    def _observed(
        self,
        name: str,
        answer: Callable[[Request], Awaitable[tuple[Response, Any]]],
        permit: Callable[[Request], None],
    ) -> Handler:
        async def handle(request: Request) -> Response:
            began, answered = time.perf_counter(), None
            try:
                permit(request)
                response, answered = await answer(request)
            except Exception as error:
                response = _refusal(c.call_error(error))
            self.dispatcher.observe(
                "http",
                name,
                response.status_code,
                time.perf_counter() - began,
                answered,
                request.headers.get("traceparent"),
            )
            return response

        return handle

    # reading

    async def _requests(self, request: Request, call: c.ServerCall, method: str) -> tuple[bool, list[Any]]:
        """Whether the client sent a batch, and its requests."""
        if method == "GET":
            return False, self._checked([_from_query(request, call.takes)])
        _check_content(request, (JSON,))
        body = await read_body(request, self.dispatcher.limits)
        return await self.dispatcher.read(len(body), lambda: self._parsed(body, call))

    def _parsed(self, body: bytes, call: c.ServerCall) -> tuple[bool, list[Any]]:
        limits = self.dispatcher.limits
        limits.check_json(body)
        if call.takes_many is not None and decode_json(_peek, body).queries is not msgspec.UNSET:
            many = decode_json(self._decoders[call.takes_many], body).queries
            limits.check_number(len(many), "queries")
            return True, self._checked(many)
        one = decode_json(self._decoders[call.takes], body)
        if call.batch and call.takes_many is None:
            limits.check_number(len(getattr(one, call.batch)), call.batch)
        return False, self._checked([one])

    def _checked(self, requests: list[Any]) -> list[Any]:
        for request in requests:
            self.dispatcher.limits.check(request)
        return requests

    # other answers

    async def _live(self, request: Request) -> Response:
        return _json(self.dispatcher.telemetry.live())

    async def _metrics(self, request: Request) -> Response:
        from recmill.stages.serve.telemetry import CONTENT_TYPE

        text = await asyncio.to_thread(self.dispatcher.telemetry.metrics)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _ready(self, request: Request) -> Response:
        return _json({"ready": self.dispatcher.is_ready}, 200 if self.dispatcher.is_ready else 503)

    async def _openapi_document(self, request: Request) -> Response:
        from recmill.stages.serve.openapi import document

        bundle = self.dispatcher.service.bundle
        if self._openapi is None or self._openapi[0] != bundle.version:
            schema = document(
                bundle, self.dispatcher.limits, self.dispatcher.role, self.dispatcher.tokens is not None
            )
            self._openapi = bundle.version, msgspec.json.encode(schema)
        return Response(self._openapi[1], media_type=JSON)

    async def _server(self, request: Request) -> Response:
        return _json(self.scoring.server())

    async def _model(self, request: Request) -> Response:
        return _json(self.scoring.model(**request.path_params))

    async def _model_ready(self, request: Request) -> Response:
        ready = self.scoring.is_ready(**request.path_params)
        return _json(inference.Readiness(name=inference.MODEL, ready=ready), 200 if ready else 503)

    async def _infer(self, request: Request) -> Response:
        self.scoring.model(**request.path_params)  # checks that the model exists before the body is read
        _check_content(request, (JSON, "application/octet-stream", ""))
        body = await read_body(request, self.dispatcher.limits)
        header_length = request.headers.get("inference-header-content-length")
        limits = self.dispatcher.limits
        rows = await self.dispatcher.read(
            len(body), lambda: inference.rows_from_http(body, header_length, limits)
        )
        name, version = request.path_params["name"], request.path_params.get("version", "")
        answered_by, outputs = await self.scoring.score(name, version, rows)
        num_bytes = sum(scores.nbytes for scores in outputs.values())
        content, headers = await self.dispatcher.read(
            num_bytes, lambda: inference.http_answer(answered_by, rows, outputs)
        )
        return Response(content, headers=headers)

    # TensorFlow Serving's REST API

    async def _tensorflow_status(self, request: Request) -> Response:
        return _json(tfs.rest_status(self._tensorflow_version(request)))

    async def _tensorflow_metadata(self, request: Request) -> Response:
        self._tensorflow_version(request)
        return _json(tfs.rest_metadata(self.scoring, request.path_params["name"]))

    def _tensorflow_version(self, request: Request) -> str:
        """The served version, if it is the one that the path names."""
        query = _model_query(request)
        version = self.scoring.model(query.name).versions[0]
        tfs.check_step(query, tfs.step_of(version))
        return version

    async def _tensorflow_infer(self, request: Request) -> Response:
        method = request.path_params["method"]
        if method not in tfs.REST_METHODS:
            raise NotFound(f'There is no method "{method[:60]}"; expected {", ".join(tfs.REST_METHODS)}.')
        self._tensorflow_version(request)  # checks that the model exists before the body is read
        body = await read_body(request, self.dispatcher.limits)
        limits = self.dispatcher.limits
        by_row, frame = await self.dispatcher.read(len(body), lambda: tfs.read_rest(body, method, limits))
        answer = await tfs.predict(self.scoring, _model_query(request), frame)
        return await self.dispatcher.read(len(body), lambda: _json(tfs.rest_answer(method, by_row, answer)))


Handler = Callable[[Request], Awaitable[Response]]


def _model_query(request: Request) -> tfs.ModelQuery:
    return tfs.ModelQuery(request.path_params["name"], request.path_params.get("step"))


def _without_answer(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[tuple[Response, None]]]:
    async def both(request: Request) -> tuple[Response, None]:
        return await answer(request), None

    return both


async def _alive(request: Request) -> Response:
    return _json({"live": True})


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, decompressed; raises when it is too large or too slow."""
    max_bytes = limits.max_body
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:18]) > max_bytes:
        raise TooLarge(f"The body has {int(length):,} bytes; at most {max_bytes:,} are read.")
    try:
        async with asyncio.timeout(limits.send_seconds):
            return await _stream(request, max_bytes)
    except TimeoutError:
        raise TooSlow(f"The body did not arrive within {limits.send_seconds:g} s.") from None
    except ClientDisconnect:
        raise BadRequest("The connection ended before the body did.") from None


async def _stream(request: Request, max_bytes: int) -> bytes:
    decompress = _decompressor(request.headers.get("content-encoding", "identity").lower())
    parts, total = [], 0
    async for chunk in request.stream():
        part = chunk if decompress is None else _decompressed(decompress, chunk, max_bytes - total)
        total += len(part)
        if total > max_bytes:
            raise TooLarge(f"The body has more than {max_bytes:,} bytes.")
        parts.append(part)
    return b"".join(parts)


def _decompressor(encoding: str) -> Any:
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "deflate"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32)  # takes both
    raise WrongContent(
        f"Content-Encoding {encoding[:40]!r} is not supported; expected gzip, deflate or none."
    )


def _decompressed(decompress: Any, chunk: bytes, room: int) -> bytes:
    try:
        return bytes(decompress.decompress(chunk, max(1, room + 1)))
    except zlib.error:
        raise BadRequest("The body is not compressed as its Content-Encoding declares.") from None


def _check_content(request: Request, kinds: Sequence[str]) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise WrongContent(f"Content-Type must be {kinds[0]}, got {kind[:60] or 'none'}.")


def _from_query(request: Request, kind: type[m.Message]) -> Any:
    given = request.query_params
    if len(given.multi_items()) != len(given):
        raise BadRequest("A parameter occurs twice.")
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}.") from None


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=plain_value), status, media_type=JSON)


def _refusal(error: c.CallError) -> Response:
    response = _json(m.Refusal(error=error.message), error.http_status)
    if error.http_status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after_seconds is not None:
        response.headers["retry-after"] = str(error.retry_after_seconds)
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        refused = c.call_error(NotFound("Nothing is at this path. GET /openapi.json lists all paths."))
    else:
        refused = c.CallError(
            error.status_code, "INVALID_ARGUMENT", _REASONS.get(error.status_code, "Not possible.")
        )
    response = _refusal(refused)
    for name, value in (error.headers or _NO_HEADERS).items():
        response.headers[name] = value
    return response


_NO_HEADERS: Mapping[str, str] = {}
_REASONS = {405: "This path does not take this method; the header Allow lists those it takes."}


async def _internal_error(request: Request, error: Exception) -> Response:
    return _refusal(c.call_error(error))
