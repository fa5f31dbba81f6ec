"""Requests as bytes, made before the clock runs, and what their answers say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from recmill.errors import RecmillError
from recmill.stages.bench.serve.arrivals import drawn_places
from recmill.stages.bench.serve.http1 import post
from recmill.stages.bench.serve.transports import GrpcTransport, HttpTransport, Transport, TransportName

Id = str | int
Context = dict[str, Any]

_SERVICE = "/recmill.v1.Recommender"
_MOST_REQUESTS = 20_000  # different ones; a longer run asks them again


@dataclass(frozen=True)
class RequestShape:
    """What every request asks for."""

    k: int = 50
    candidates: int = 500
    batch: int = 1
    contexts: tuple[Context, ...] = ()

    def context(self, number: int) -> Context:
        return self.contexts[number % len(self.contexts)] if self.contexts else {}


@dataclass
class AnswerStats:
    """What the answers that were looked at said, added up."""

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
            "degraded_share": round(self.num_degraded / self.answers, 4) if self.answers else None,
            "degraded": dict(self.degraded),
            "versions": dict(self.versions),
            "stages_ms": {name: round(fmean(values), 4) for name, values in self.stages.items()},
        }


class Grpc:
    """Our own calls as protobuf."""

    def __init__(self, address: str) -> None:
        self.address = address

    def transport(self, method: str, deadline_seconds: float) -> Transport:
        return GrpcTransport(self.address, f"{_SERVICE}/{method}", deadline_seconds)

    def recommend(
        self, users: Sequence[Id], ask: RequestShape, number: int = 0, trace: bool = False
    ) -> bytes:
        from recmill.stages.serve.proto import recmill_pb2 as pb

        queries = [_query(user, ask.context(number)) for user in users]
        request = pb.RecommendRequest(queries=queries, k=ask.k, candidates=ask.candidates, trace=trace)
        return bytes(request.SerializeToString())

    def rank(self, user: Id, items: Sequence[Id], context: Context) -> bytes:
        from recmill.stages.serve.proto import recmill_pb2 as pb

        request = pb.RankRequest(query=_query(user, context), items=list(map(_id, items)))
        return bytes(request.SerializeToString())

    def answers(self, body: bytes) -> list[dict[str, Any]]:
        """Each answer as HTTP would write it."""
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


class Http:
    """The same calls as JSON."""

    def __init__(self, address: str) -> None:
        self.address = address

    def transport(self, method: str, deadline_seconds: float) -> Transport:
        return HttpTransport(self.address, deadline_seconds)

    def recommend(
        self, users: Sequence[Id], ask: RequestShape, number: int = 0, trace: bool = False
    ) -> bytes:
        common = {"k": ask.k, "candidates": ask.candidates, "context": ask.context(number), "trace": trace}
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


Words = Grpc | Http


def words_of(transport: TransportName, address: str) -> Words:
    return Grpc(address) if transport == "grpc" else Http(address)


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
    words: Words, users: Sequence[Id], ask: RequestShape, number: int, seed: int, zipf: float | None
) -> list[bytes]:
    """Requests of drawn users, ready to be sent."""
    number = max(1, min(number, _MOST_REQUESTS))
    places = drawn_places(len(users), number * ask.batch, seed, zipf).reshape(number, ask.batch)
    return [
        words.recommend([users[place] for place in row], ask, index)
        for index, row in enumerate(places.tolist())
    ]


def look_at(words: Words, bodies: Iterable[bytes]) -> AnswerStats:
    """Parse answers that were kept."""
    seen = AnswerStats()
    for body in bodies:
        for answer in words.answers(body):
            seen.add(answer)
    return seen


def users_of_bundle(bundle: Path) -> list[Id]:
    import numpy as np

    from recmill.artifacts.bundle.bundle import Bundle

    opened = Bundle.open(bundle)
    if opened.users is None or not len(opened.users):
        raise RecmillError(f"Bundle {bundle} knows no users. Give some: --users FILE.parquet.")
    return list(opened.users.ids(np.arange(len(opened.users))))


def users_of_file(path: Path) -> list[Id]:
    """The column `user` of a Parquet file, or its first one; each user once."""
    import polars as pl

    frame = _read_parquet(path)
    column = frame["user"] if "user" in frame.columns else frame.to_series(0)
    users = column.drop_nulls().unique(maintain_order=True)
    if not len(users):
        raise RecmillError(f"{path} holds no users.")
    return list(users.to_list() if users.dtype.is_integer() else users.cast(pl.String).to_list())


def contexts_of_file(path: Path) -> tuple[Context, ...]:
    """Raw context columns of requests: rows of a Parquet file, or JSON objects one a line."""
    if path.suffix == ".parquet":
        rows = _read_parquet(path).to_dicts()
        return tuple({name: value for name, value in row.items() if value is not None} for row in rows)
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise RecmillError(f"{path} must hold one JSON object a line: {error}") from None
    if not all(isinstance(one, dict) for one in found):
        raise RecmillError(f"{path} must hold one JSON object a line.")
    return tuple(found)


def _read_parquet(path: Path) -> Any:
    import polars as pl

    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RecmillError(f"{path} cannot be read as Parquet: {error}") from None
