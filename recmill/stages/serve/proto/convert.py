"""Conversion between protobuf messages and ours. Both transports offer the same fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct

from recmill import _native
from recmill.errors import BadRequest
from recmill.stages.serve import messages as m
from recmill.stages.serve.limits import MAX_IDS
from recmill.stages.serve.proto import recmill_pb2 as pb

Parsed = TypeVar("Parsed", bound=Message)
_ANSWER_TAG = b"\x0a"  # tag of RecommendReply.answers: field 1, with a length
_EXACT = 2**53  # whole numbers up to here are exact as double


def parse(kind: type[Parsed], data: bytes) -> Parsed:
    """Parse a message; raises BadRequest when the bytes are not one."""
    try:
        message: Parsed = kind.FromString(data)
        return message
    except DecodeError:
        raise BadRequest(f"The request is no {kind.DESCRIPTOR.full_name} message.") from None


def id_of(id: pb.Id) -> m.Id | None:
    kind = id.WhichOneof("kind")
    return None if kind is None else id.number if kind == "number" else id.text


def ids_of(ids: Sequence[pb.Id], where: str) -> list[m.Id]:
    if len(ids) > MAX_IDS:
        raise BadRequest(f"{where} must hold at most {MAX_IDS:,} values, got {len(ids):,}.")
    parsed = [id_of(id) for id in ids]
    if None in parsed:
        raise BadRequest(f"{where}[{parsed.index(None)}] is an id with neither text nor number.")
    return parsed  # type: ignore[return-value]


def known_id(id: pb.Id, where: str) -> m.Id:
    return ids_of([id], where)[0]


def to_id(id: m.Id) -> pb.Id:
    return pb.Id(number=id) if isinstance(id, int) else pb.Id(text=id)


def value_of(value: pb.Value, depth: int = 0) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    if kind != "list":
        return getattr(value, kind)
    if depth > 1:
        raise BadRequest("A value is a list of lists of lists; expected lists of values.")
    if len(value.list.values) > MAX_IDS:
        raise BadRequest(f"A list of values must hold at most {MAX_IDS:,}, got {len(value.list.values):,}.")
    return [value_of(one, depth + 1) for one in value.list.values]


def values_of(values: Mapping[str, pb.Value]) -> m.Values:
    return {name: value_of(value) for name, value in values.items()}


def to_value(value: Any) -> pb.Value:
    if value is None:
        return pb.Value()
    if isinstance(value, bool):
        return pb.Value(truth=value)
    if isinstance(value, int):
        return pb.Value(number=value)
    if isinstance(value, float):
        return pb.Value(real=value)
    if isinstance(value, (list, tuple)):
        return pb.Value(list=pb.ValueList(values=map(to_value, value)))
    return pb.Value(text=str(value))


def to_values(values: m.Values) -> dict[str, pb.Value]:
    return {name: to_value(value) for name, value in values.items()}


def _query_fields(query: pb.Query) -> dict[str, Any]:
    return {
        "user": id_of(query.user),
        "context": values_of(query.context),
        "features": values_of(query.features),
        "recent": ids_of(query.recent, "recent"),
    }


def _recall_fields(query: pb.Query, request: pb.RecommendRequest) -> dict[str, Any]:
    return {
        **_query_fields(query),
        **({"k": request.k} if request.k else {}),
        "exclude": ids_of(query.exclude, "exclude"),
        "only": ids_of(query.only, "only") if query.only or query.only_these else None,
        "where": query.where or None,
        "channels": list(query.channels) or None,
        "show_seen": query.show_seen,
        "boost": [m.Boost(where=boost.where, factor=boost.factor) for boost in query.boost],
        "fields": list(request.fields),
        "version": request.version or None,
    }


def recommends_of(request: pb.RecommendRequest) -> list[m.Recommend]:
    more: dict[str, Any] = {
        "trace": request.trace,
        "explain": request.explain,
        "serve_score": request.serve_score or None,
    }
    if request.candidates:
        more["candidates"] = request.candidates
    return [m.Recommend(**_recall_fields(query, request), **more) for query in request.queries]


def recalls_of(request: pb.RecommendRequest) -> list[m.Recall]:
    return [m.Recall(**_recall_fields(query, request)) for query in request.queries]


def similar_of(request: pb.SimilarRequest) -> m.Similar:
    return m.Similar(item=known_id(request.item, "item"), **_item_query_fields(request.query))


def trending_of(request: pb.TrendingRequest) -> m.Trending:
    return m.Trending(**_item_query_fields(request.query))


def _item_query_fields(query: pb.ItemQuery) -> dict[str, Any]:
    return {
        **({"k": query.k} if query.k else {}),
        "exclude": ids_of(query.exclude, "exclude"),
        "where": query.where or None,
        "fields": list(query.fields),
        "version": query.version or None,
    }


def to_item_query(query: m.ItemQuery) -> pb.ItemQuery:
    return pb.ItemQuery(
        k=query.k,
        exclude=map(to_id, query.exclude),
        where=query.where or "",
        fields=query.fields,
        version=query.version or "",
    )


def describe_of(request: pb.DescribeRequest) -> m.Describe:
    return m.Describe(
        **_query_fields(request.query),
        items=[item_of(item) for item in request.items],
        fields=list(request.fields),
        explain=request.explain,
        version=request.version or None,
    )


def rank_of(request: pb.RankRequest | pb.LookupRequest) -> m.Rank:
    version = getattr(request, "version", "") or None
    serve_score = getattr(request, "serve_score", "") or None
    items = ids_of(request.items, "items")
    return m.Rank(**_query_fields(request.query), items=items, version=version, serve_score=serve_score)


def to_query(request: m.Query) -> pb.Query:
    query = pb.Query(
        context=to_values(request.context),
        features=to_values(request.features),
        recent=map(to_id, request.recent),
    )
    if request.user is not None:
        query.user.CopyFrom(to_id(request.user))
    if isinstance(request, m.Recall):
        query.exclude.extend(map(to_id, request.exclude))
        query.only.extend(map(to_id, request.only or []))
        query.only_these = request.only is not None
        query.where = request.where or ""
        query.channels.extend(request.channels or [])
        query.show_seen = request.show_seen
        query.boost.extend(pb.Boost(where=boost.where, factor=boost.factor) for boost in request.boost)
    return query


def answer_bytes(answer: m.Answer) -> bytes:
    """An encoded protobuf Answer; plain items are encoded by native code."""
    items = _native.encode_items(answer.items)
    rest = answer if items is None else msgspec.structs.replace(answer, items=[])
    encoded: bytes = to_answer(rest).SerializeToString()
    return encoded + (items or b"")  # protobuf merges concatenated messages


def replies_bytes(answers: Sequence[bytes]) -> bytes:
    """A RecommendReply of encoded answers."""
    return b"".join(_ANSWER_TAG + _varint(len(answer)) + answer for answer in answers)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def to_answer(answer: m.Answer) -> pb.Answer:
    message = pb.Answer(degraded=answer.degraded, version=answer.version, known=answer.known)
    add = message.items.add  # twice as fast as messages made one by one
    for item in answer.items:
        one = add(score=item.score, channel=item.channel, recall_score=item.recall_score)
        if isinstance(item.id, int):
            one.id.number = item.id
        else:
            one.id.text = item.id
        if item.fields or item.why:
            _describe(one, item)
        if item.boost != 1:
            one.boost = item.boost
    if answer.trace is not None:
        message.trace.CopyFrom(to_trace(answer.trace))
    if answer.ranking is not None:
        message.ranking.share, message.ranking.offset = answer.ranking.share, answer.ranking.offset
    return message


def _describe(found: pb.Item, item: m.Item) -> None:
    for name, value in item.fields.items():
        found.fields[name].CopyFrom(to_value(value))
    found.why = item.why
    for reason in item.because:
        found.because.add(
            id=to_id(reason.id), title=reason.title, channel=reason.channel, weight=reason.weight
        )


def item_of(item: pb.Item) -> m.Item:
    return m.Item(
        id=known_id(item.id, "items"),
        score=item.score,
        channel=item.channel,
        recall_score=item.recall_score,
        fields=values_of(item.fields),
        why=item.why,
        **({"boost": item.boost} if item.boost else {}),
        because=[
            m.Reason(
                id=known_id(reason.id, "because"),
                title=reason.title if reason.HasField("title") else None,
                channel=reason.channel,
                weight=reason.weight,
            )
            for reason in item.because
        ],
    )


def answer_of(answer: pb.Answer) -> m.Answer:
    return m.Answer(
        items=[item_of(item) for item in answer.items],
        known=answer.known,
        degraded=list(answer.degraded),
        version=answer.version,
        ranking=m.RankingPart(share=answer.ranking.share, offset=answer.ranking.offset)
        if answer.HasField("ranking")
        else None,
    )


def to_trace(trace: m.Trace) -> pb.Trace:
    detail = {
        "ranker": trace.ranker,
        "user": trace.user,
        "items": trace.items,
        "user_features": trace.user_features,
        "item_features": trace.item_features,
    }
    return pb.Trace(stage_ms=trace.stages, counts=trace.counts, detail=to_struct(detail))


def to_ranked(ranked: m.RankAnswer) -> pb.RankReply:
    return pb.RankReply(
        scores=ranked.scores,
        tasks={name: pb.TaskScores(scores=scores) for name, scores in ranked.tasks.items()},
        known=ranked.known,
        unknown_items=map(to_id, ranked.unknown_items),
        degraded=ranked.degraded,
        version=ranked.version,
    )


def ranked_of(reply: pb.RankReply) -> m.RankAnswer:
    return m.RankAnswer(
        scores=list(reply.scores),
        tasks={name: list(found.scores) for name, found in reply.tasks.items()},
        degraded=list(reply.degraded),
        version=reply.version,
    )


def to_features(known: m.FeaturesAnswer) -> pb.FeaturesReply:
    return pb.FeaturesReply(
        user=to_struct(known.user) if known.user else None,
        items=map(to_struct, known.items),
        degraded=known.degraded,
        version=known.version,
    )


def to_struct(value: Any) -> Struct:
    """A Struct of any JSON value. Whole numbers that a double cannot represent become text."""
    struct = Struct()
    struct.update(_plain(msgspec.to_builtins(value, enc_hook=plain_value)))
    return struct


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return str(value)
    return value


def plain_value(value: Any) -> Any:
    """Values of frames and arrays as JSON values."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
