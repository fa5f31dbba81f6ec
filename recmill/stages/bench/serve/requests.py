"""Requests, encoded before the clock starts, and statistics of their answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from recmill.errors import RecmillError
from recmill.stages.bench.serve.arrivals import draw_indices
from recmill.stages.bench.serve.config import ServeBenchConfig, TransportName
from recmill.stages.bench.serve.http1 import post
from recmill.stages.bench.serve.transports import GrpcTransport, HttpTransport, Transport

Id = str | int
Context = dict[str, Any]

_SERVICE = "/recmill.v1.Recommender"
_MAX_REQUESTS = 20_000  # different ones; a longer run repeats them


@dataclass(frozen=True)
class RequestShape:
    """The parameters that all requests share."""

    k: int = 50
    candidates: int = 500
    batch: int = 1
    contexts: tuple[Context, ...] = ()

    def context(self, number: int) -> Context:
        return self.contexts[number % len(self.contexts)] if self.contexts else {}


def shape_of(config: ServeBenchConfig) -> RequestShape:
    """Of the requests of a bench, with the contexts of its file."""
    contexts = read_contexts(config.context) if config.context else ()
    return RequestShape(config.k, config.candidates, config.batch, contexts)


@dataclass
class AnswerStats:
    """Totals over the sampled answers."""

    answers: int = 0
    items: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    num_degraded: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    stages: dict[str, list[float]] = field(default_factory=dict)

    def add(self, answer: Any) -> None:
        self.answers += 1
        self.items += len(answer["items"])
        reasons = answer.get("degraded") or []
        self.num_degraded += bool(reasons)
        self.degraded.update(reasons)
        self.versions[answer.get("version", "")] += 1
        for name, milliseconds in ((answer.get("trace") or {}).get("stages") or {}).items():
            self.stages.setdefault(name, []).append(milliseconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "items_per_answer": round(self.items / max(1, self.answers), 2),
            "degraded_fraction": round(self.num_degraded / self.answers, 4) if self.answers else None,
            "degraded": dict(self.degraded),
            "versions": dict(self.versions),
            "stages_ms": {name: round(fmean(values), 4) for name, values in self.stages.items()},
        }


class GrpcCodec:
    """recmill's own calls as protobuf."""

    def __init__(self, address: str) -> None:
        self.address = address

    def transport(self, method: str, deadline_seconds: float) -> Transport:
        return GrpcTransport(self.address, f"{_SERVICE}/{method}", deadline_seconds)

    def recommend(
        self, users: Sequence[Id], shape: RequestShape, number: int = 0, trace: bool = False
    ) -> bytes:
        from recmill.stages.serve.proto import recmill_pb2 as pb

        queries = [_query(user, shape.context(number)) for user in users]
        request = pb.RecommendRequest(queries=queries, k=shape.k, candidates=shape.candidates, trace=trace)
        return bytes(request.SerializeToString())

    def rank(self, user: Id, items: Sequence[Id], context: Context) -> bytes:
        from recmill.stages.serve.proto import recmill_pb2 as pb

        request = pb.RankRequest(query=_query(user, context), items=list(map(_id, items)))
        return bytes(request.SerializeToString())

    def answers(self, body: bytes) -> list[dict[str, Any]]:
        """Each answer in the layout of the JSON API."""
        from recmill.stages.serve.proto import recmill_pb2 as pb

        reply = pb.RecommendReply.FromString(body)
        return [
            {
                "items": [{"id": getattr(item.id, item.id.WhichOneof("kind"))} for item in answer.items],
                "degraded": list(answer.degraded),
                "version": answer.version,
                "trace": {"stages": dict(answer.trace.stage_ms)} if answer.HasField("trace") else None,
            }
            for answer in reply.answers
        ]

    def scores(self, body: bytes) -> list[float]:
        from recmill.stages.serve.proto import recmill_pb2 as pb

        return list(pb.RankReply.FromString(body).scores)


class HttpCodec:
    """The same calls as JSON."""

    def __init__(self, address: str) -> None:
        self.address = address

    def transport(self, method: str, deadline_seconds: float) -> Transport:
        return HttpTransport(self.address, deadline_seconds)

    def recommend(
        self, users: Sequence[Id], shape: RequestShape, number: int = 0, trace: bool = False
    ) -> bytes:
        common = {
            "k": shape.k,
            "candidates": shape.candidates,
            "context": shape.context(number),
            "trace": trace,
        }
        queries = [{"user": user, **common} for user in users]
        body = queries[0] if len(queries) == 1 else {"queries": queries}
        return post("/v1/recommend", self.address, json.dumps(body).encode())

    def rank(self, user: Id, items: Sequence[Id], context: Context) -> bytes:
        body = {"user": user, "items": list(items), "context": context}
        return post("/v1/rank", self.address, json.dumps(body).encode())

    def answers(self, body: bytes) -> list[dict[str, Any]]:
        answer = json.loads(body)
        return list(answer.get("answers", [answer]))

    def scores(self, body: bytes) -> list[float]:
        return list(json.loads(body)["scores"])


RequestCodec = GrpcCodec | HttpCodec


def codec_for(transport: TransportName, address: str) -> RequestCodec:
    return GrpcCodec(address) if transport == "grpc" else HttpCodec(address)


def _id(value: Id) -> Any:
    from recmill.stages.serve.proto import recmill_pb2 as pb

    return pb.Id(number=value) if isinstance(value, int) else pb.Id(text=value)


def _query(user: Id, context: Context) -> Any:
    from recmill.stages.serve.proto import recmill_pb2 as pb

    return pb.Query(user=_id(user), context={name: _value(value) for name, value in context.items()})


def _value(value: Any) -> Any:
    from recmill.stages.serve.proto import recmill_pb2 as pb

    if isinstance(value, list):
        return pb.Value(list=pb.ValueList(values=[_value(one) for one in value]))
    field_name = {bool: "truth", int: "number", float: "real"}.get(type(value), "text")
    return pb.Value(**{field_name: value})


def make_requests(
    codec: RequestCodec, users: Sequence[Id], shape: RequestShape, number: int, seed: int, zipf: float | None
) -> list[bytes]:
    """Encoded requests of randomly drawn users."""
    number = max(1, min(number, _MAX_REQUESTS))
    indices = draw_indices(len(users), number * shape.batch, seed, zipf).reshape(number, shape.batch)
    return [
        codec.recommend([users[index] for index in row], shape, number)
        for number, row in enumerate(indices.tolist())
    ]


def summarize_answers(codec: RequestCodec, bodies: Iterable[bytes]) -> AnswerStats:
    """Parse sampled answers and add them up."""
    stats = AnswerStats()
    for body in bodies:
        for answer in codec.answers(body):
            stats.add(answer)
    return stats


def read_bundle_users(bundle: Path) -> list[Id]:
    import numpy as np

    from recmill.artifacts.bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    if opened.users is None or not len(opened.users):
        raise RecmillError(f"Bundle {bundle} has no users. Name some: --users FILE.parquet.")
    return list(opened.users.ids(np.arange(len(opened.users))))


def read_users(path: Path) -> list[Id]:
    """The distinct users in column `user` of a Parquet file, or in its first column."""
    import polars as pl

    frame = _read_parquet(path)
    column = frame["user"] if "user" in frame.columns else frame.to_series(0)
    users = column.drop_nulls().unique(maintain_order=True)
    if not len(users):
        raise RecmillError(f"{path} holds no users.")
    return list(users.to_list() if users.dtype.is_integer() else users.cast(pl.String).to_list())


def read_contexts(path: Path) -> tuple[Context, ...]:
    """Raw context columns of requests: rows of a Parquet file, or one JSON object a line."""
    if path.suffix == ".parquet":
        rows = _read_parquet(path).to_dicts()
        return tuple({name: value for name, value in row.items() if value is not None} for row in rows)
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise RecmillError(f"{path} must hold one JSON object a line: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise RecmillError(f"{path} must hold one JSON object a line.")
    return tuple(rows)


def _read_parquet(path: Path) -> Any:
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RecmillError(f"{path} cannot be read as Parquet: {error}") from None
