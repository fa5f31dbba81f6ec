"""What goes in and out of a recommender, whatever the transport: in process, HTTP and gRPC all speak in these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec

from recmill.errors import BadRequest
from recmill.reporting.tables import html_table

Id = str | int  # of a user or an item, as the log writes it
Values = dict[str, Any]  # raw columns of the log by name; a missing one is unknown


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name that a message does not have is an error, never ignored."""


class Query(Message, frozen=True, kw_only=True):
    """Who asks.

    `context` holds raw columns of this request (device, hour, ...). `features` holds raw columns of the user that are
    newer than what is stored, or all there is of a new user. `recent` are items the user has just clicked, oldest
    first; they are put behind the stored history.
    """

    user: Id | None = None
    context: Values = {}
    features: Values = {}
    recent: list[Id] = []
    deadline_ms: float | None = None
    version: str | None = None  # this one instead of what serves now: for comparing two


class Recall(Query, frozen=True, kw_only=True):
    """Ask for candidates alone, before ranking.

    `exclude` are never recommended, and nothing but `only` if given. `where` is a condition over the item's raw
    columns, in SQL. `channels` limits recall to some channels.
    """

    k: int = 500
    exclude: list[Id] = []
    only: list[Id] | None = None
    where: str | None = None
    channels: list[str] | None = None
    show_seen: bool = False


class Recommend(Recall, frozen=True, kw_only=True):
    """Ask for the k best items of a user."""

    k: int = 50
    candidates: int = 500
    trace: bool = False


class Rank(Query, frozen=True, kw_only=True):
    """Ask for the chance of a click on each of these items."""

    items: list[Id]


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


class RecommendFields(RecallFields, total=False):
    """Fields of a Recommend as keyword arguments."""

    candidates: int
    trace: bool


Q = TypeVar("Q", bound=Query)


def query_of(kind: type[Q], user: Q | Id | None, fields: Mapping[str, Any]) -> Q:
    """The query itself, or one made of a user and keyword arguments, whose types are checked."""
    if isinstance(user, kind):
        return user
    try:
        # Ids that come out of a frame may be NumPy's.
        return msgspec.convert({"user": getattr(user, "item", lambda: user)(), **fields}, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{kind.__name__.lower()}: {error}. It takes: {', '.join(kind.__struct_fields__)}."
        ) from None


class Features(Message, frozen=True, kw_only=True):
    """Ask what is known of a user and of some items: raw columns and features."""

    user: Id | None = None
    items: list[Id] = []


class Event(Message, frozen=True, kw_only=True):
    """Something a user just did. It joins the user's history; the log and training see it by their own way."""

    user: Id
    item: Id
    values: Values = {}  # other columns of the log, such as the label


class NewItem(Message, frozen=True, kw_only=True):
    """An item and its raw columns. One that is known already is replaced."""

    id: Id
    values: Values = {}


class Item(Message, frozen=True, kw_only=True):
    """One item: the probability of a click, or the fused ranks of its channels when it was not ranked; its origin.

    `recall_score` is what its channel gave, to be compared within the channel alone.
    """

    id: Id
    score: float
    channel: str
    recall_score: float = 0.0


class Answer(Message, frozen=True, kw_only=True):
    """Items, best first. `degraded` says what could not be done in time or at all; empty when all is well.

    `stages` are milliseconds of each stage.
    """

    items: list[Item]
    degraded: list[str] = []
    version: str = ""
    stages: dict[str, float] = {}
    trace: Trace | None = None

    def _repr_html_(self) -> str:
        rows = [(str(item.id), f"{item.score:.4f}", item.channel) for item in self.items]
        return html_table(("item", "score", "channel"), rows)


class Trace(Message, frozen=True, kw_only=True):
    """How an answer came about: milliseconds of each stage, candidates by channel, what the model saw."""

    stages: dict[str, float]
    counts: dict[str, int]
    user: Values = {}  # raw columns as used
    items: list[Values] = []  # raw columns of the recommended items, in their order
    user_features: Values = {}
    item_features: list[Values] = []


class RankAnswer(Message, frozen=True, kw_only=True):
    """Chances of a click, in the order of the items that were asked for."""

    scores: list[float]
    degraded: list[str] = []
    version: str = ""


class EntityFeatures(Message, frozen=True, kw_only=True):
    """What is stored: raw columns and features by name; found is false for an unknown id, which has defaults."""

    id: Id
    found: bool
    values: Values
    features: Values


class FeaturesAnswer(Message, frozen=True, kw_only=True):
    user: EntityFeatures | None
    items: list[EntityFeatures]
    degraded: list[str] = []
    version: str = ""


class Status(Message, frozen=True, kw_only=True):
    """What serves, and since when. `freshness_seconds` is the age of the newest training row that answers know.

    `refused` has the versions and deltas of the folder that are not taken, and why.
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
    store: str | None = None  # why changes have not reached the feature store; null when all have
    refused: dict[str, str] = {}
