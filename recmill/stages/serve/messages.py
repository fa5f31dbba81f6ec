"""Requests and answers of a recommender, the same in process, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec

from recmill.errors import BadRequest
from recmill.reporting.tables import html_table

Id = str | int  # id of a user or an item, as in the log
Values = dict[str, Any]  # raw columns of the log by name; a missing column has no value


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message. Unknown fields are errors, never ignored."""


class Query(Message, frozen=True, kw_only=True):
    """The user of a request, and its context.

    `context` holds raw columns of this request (device, hour, ...). `features` holds raw columns of the user that
    replace stored ones, or all columns of a new user. `recent` are items the user has just clicked, oldest first;
    they are appended to the stored history.
    """

    user: Id | None = None
    context: Values = {}
    features: Values = {}
    recent: list[Id] = []
    deadline_ms: float | None = None
    version: str | None = None  # answer by this version instead of the current one


class Boost(Message, frozen=True, kw_only=True):
    """Multiply the scores of items that meet a condition over their raw columns; a factor above 1 raises them."""

    where: str
    factor: float


class Recall(Query, frozen=True, kw_only=True):
    """Request candidates without ranking.

    `exclude` are never returned; `only`, if given, limits the answer to these items. `where` is a condition over the
    item's raw columns, in SQL. `channels` limits recall to some channels. `fields` are raw columns to return with
    each item. `boost` changes the order of a Recommend; candidates keep their order and carry the factor.
    """

    k: int = 500
    exclude: list[Id] = []
    only: list[Id] | None = None
    where: str | None = None
    channels: list[str] | None = None
    show_seen: bool = False
    fields: list[str] = []
    boost: list[Boost] = []


class Recommend(Recall, frozen=True, kw_only=True):
    """Request the k best items of a user; with `explain`, each item carries its reason."""

    k: int = 50
    candidates: int = 500
    trace: bool = False
    explain: bool = False
    serve_score: str | None = None  # as in Rank


class ItemQuery(Message, frozen=True, kw_only=True):
    """Request items without a user. `where`, `exclude` and `fields` are those of a Recall."""

    k: int = 10
    exclude: list[Id] = []
    where: str | None = None
    fields: list[str] = []
    deadline_ms: float | None = None
    version: str | None = None


class Similar(ItemQuery, frozen=True, kw_only=True):
    """Request the k items most similar to an item, by co-interactions and by vectors."""

    item: Id


class Trending(ItemQuery, frozen=True, kw_only=True):
    """Request the k items that are most popular lately."""


class Rank(Query, frozen=True, kw_only=True):
    """Request the click probability of each of these items.

    With several tasks, the score is `serve_score`, an expression over them; without one, the recipe's.
    """

    items: list[Id]
    serve_score: str | None = None


class QueryFields(TypedDict, total=False):
    """Fields of a Query as keyword arguments."""

    context: Values
    features: Values
    recent: list[Id]
    deadline_ms: float | None


class RecallFields(QueryFields, total=False):
    """Fields of a Recall as keyword arguments."""

    k: int
    exclude: list[Id]
    only: list[Id] | None
    where: str | None
    channels: list[str] | None
    show_seen: bool
    fields: list[str]
    boost: list[Boost] | list[dict[str, Any]]


class RecommendFields(RecallFields, total=False):
    """Fields of a Recommend as keyword arguments."""

    candidates: int
    trace: bool
    explain: bool
    serve_score: str | None


class ItemQueryFields(TypedDict, total=False):
    """Fields of an ItemQuery as keyword arguments."""

    k: int
    exclude: list[Id]
    where: str | None
    fields: list[str]
    deadline_ms: float | None


Q = TypeVar("Q", bound=Message)


def query_of(kind: type[Q], id: Q | Id | None, fields: Mapping[str, Any], named: str | None = "user") -> Q:
    """The query itself, or one made of an id, if given, and keyword arguments, whose types are checked."""
    if isinstance(id, kind):
        return id
    try:
        # Ids that come out of a frame may be NumPy's.
        given = {named: getattr(id, "item", lambda: id)()} if named else {}
        return msgspec.convert({**given, **fields}, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{kind.__name__.lower()}: {error}. It takes: {', '.join(kind.__struct_fields__)}."
        ) from None


class Features(Message, frozen=True, kw_only=True):
    """Request the stored raw columns and features of a user and of items."""

    user: Id | None = None
    items: list[Id] = []


class Event(Message, frozen=True, kw_only=True):
    """Something a user just did. It is appended to the user's history; with a shared stream, it is also trained on.

    In a stream, events with the same `id` count once, so an event without an answer may be sent again.
    """

    user: Id
    item: Id
    values: Values = {}  # other columns of the log, such as the label
    id: str | None = None


class NewItem(Message, frozen=True, kw_only=True):
    """An item and its raw columns. It replaces an item with the same id."""

    id: Id
    values: Values = {}


class Reason(Message, frozen=True, kw_only=True, gc=False):
    """An item of the user's history that led to a recommended one, by which channel, and its weight (at most 1)."""

    id: Id
    title: str | None = None
    channel: str
    weight: float


class Item(Message, frozen=True, gc=False):
    """One item, its score and the channel that found it.

    The score is fused from the item's ranks, 1 for the first of every channel; it is the click probability when the
    ranker alone decides. `recall_score` is the channel's own score, comparable only within the channel. `boost` is
    the product of the request's boosts that the item meets, and part of its score in a Recommend. `fields` are the
    raw columns that the request names. `why` and `because` answer `explain`: a sentence, and the items of the user's
    history that led to this one.
    """

    id: Id
    score: float
    channel: str
    recall_score: float = 0.0
    fields: Values = {}
    why: str = ""
    because: list[Reason] = []
    boost: float = 1.0


class Describe(Query, frozen=True, kw_only=True):
    """Request fields and reasons for items that were recommended to a user: between roles."""

    items: list[Item]
    fields: list[str] = []
    explain: bool = False


class RankingPart(Message, frozen=True, kw_only=True):
    """The weight of a ranker's order in an item's score, and the offset of its reciprocal ranks.

    With a share of 1, the score is the click probability.
    """

    share: float = 1.0
    offset: float = 60.0


class Answer(Message, frozen=True, kw_only=True):
    """Items, best first. `degraded` lists what failed or was skipped for lack of time; empty if nothing.

    `known` is false when the user, or the item of a Similar, is unknown; so is a request without an id. `stages` are
    milliseconds of each stage; `ranking` is for the role that ranks the recalled items.
    """

    items: list[Item]
    known: bool = True
    degraded: list[str] = []
    version: str = ""
    stages: dict[str, float] = {}
    trace: Trace | None = None
    ranking: RankingPart | None = None

    def _repr_html_(self) -> str:
        rows = [(str(item.id), f"{item.score:.4f}", item.channel) for item in self.items]
        return html_table(("item", "score", "channel"), rows)


class Trace(Message, frozen=True, kw_only=True):
    """How an answer was made: milliseconds of each stage, candidates by channel, inputs of the model."""

    stages: dict[str, float]
    counts: dict[str, int]
    ranker: str = (
        ""  # native float32 or int8 products, or onnxruntime and why; empty when another role ranked
    )
    user: Values = {}  # raw columns as used
    items: list[Values] = []  # raw columns of the recommended items, in their order
    user_features: Values = {}
    item_features: list[Values] = []
    history: list[Values] = []  # raw columns of the user's latest items, latest first


class RankAnswer(Message, frozen=True, kw_only=True):
    """Click probabilities, in the order of the requested items. `known` is about the user.

    With several tasks, `scores` are their `serve_score`, and `tasks` has the probabilities of each.
    """

    scores: list[float]
    tasks: dict[str, list[float]] = {}
    known: bool = True
    unknown_items: list[Id] = []
    degraded: list[str] = []
    version: str = ""


class EntityFeatures(Message, frozen=True, kw_only=True):
    """What is stored: raw columns and features by name. `known` is false for an unknown id, which has defaults."""

    id: Id
    known: bool
    values: Values
    features: Values


class FeaturesAnswer(Message, frozen=True, kw_only=True):
    user: EntityFeatures | None
    items: list[EntityFeatures]
    degraded: list[str] = []
    version: str = ""


class Status(Message, frozen=True, kw_only=True):
    """The served version and the state of the server. `freshness_seconds` is the age of the newest training row.

    `refused` maps refused versions and deltas of the folder to the reason.
    """

    version: str
    previous: str | None
    canary: str | None
    versions: list[str]
    recipe: str
    role: str
    models: list[str]
    channels: list[str]
    num_items: int
    num_users: int
    deltas: int
    started_at: float
    freshness_seconds: float | None
    ready: bool
    manifest: dict[str, Any]
    store: str | None = None  # why changes have not reached the feature store; null if they have
    events: str | None = None  # why the event stream is not read; null if it is
    refused: dict[str, str] = {}


# batches, changes, and what the roles of a split server exchange


class Recommends(Message, frozen=True, kw_only=True):
    """Several users in one call."""

    queries: list[Recommend]


class Recalls(Message, frozen=True, kw_only=True):
    """Candidates for several users in one call."""

    queries: list[Recall]


class Answers(Message, frozen=True, kw_only=True):
    """One answer for each query, in their order."""

    answers: list[Answer]


class Events(Message, frozen=True, kw_only=True):
    """What users just did, oldest first."""

    events: list[Event]


class NewItems(Message, frozen=True, kw_only=True):
    """Items to add or replace."""

    items: list[NewItem]


class ItemIds(Message, frozen=True, kw_only=True):
    """Items to remove."""

    items: list[Id]


class RollBack(Message, frozen=True, kw_only=True):
    """Request to serve an earlier version again; without a name, the one before."""

    version: str | None = None


class Empty(Message, frozen=True, kw_only=True):
    """The request of a call without parameters."""


class UserPrefix(Message, frozen=True, kw_only=True):
    """Request for ids of users that begin with a prefix."""

    prefix: str = ""
    limit: int = 20


class RankRows(Message, frozen=True, kw_only=True):
    """Packed feature rows to rank: between roles."""

    user: bytes
    items: list[bytes]
    context: Values = {}
    serve_score: str | None = None


class ChangeResult(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How many items or events changed, and the version that has them now."""

    number: int
    version: str


class UserIds(Message, frozen=True, kw_only=True):
    """Ids of users, as the log writes them."""

    users: list[Id]


class PackedRows(Message, frozen=True, kw_only=True):
    """Packed feature rows, as in stores; empty for an unknown id."""

    user: bytes
    items: list[bytes]
    known: bool = True
    unknown_items: list[Id] = []
    degraded: list[str] = []
    version: str = ""


class Refusal(Message, frozen=True, kw_only=True):
    """Why a request failed."""

    error: str
