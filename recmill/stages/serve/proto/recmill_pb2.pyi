# ruff: noqa
# mypy: ignore-errors
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Id(_message.Message):
    __slots__ = ("text", "number")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: int
    def __init__(self, text: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("text", "number", "real", "truth", "list")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: int
    real: float
    truth: bool
    list: ValueList
    def __init__(self, text: _Optional[str] = ..., number: _Optional[int] = ..., real: _Optional[float] = ..., truth: _Optional[bool] = ..., list: _Optional[_Union[ValueList, _Mapping]] = ...) -> None: ...

class ValueList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("user", "context", "features", "recent", "exclude", "only", "only_these", "where", "channels", "show_seen", "boost")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    USER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    ONLY_THESE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    SHOW_SEEN_FIELD_NUMBER: _ClassVar[int]
    BOOST_FIELD_NUMBER: _ClassVar[int]
    user: Id
    context: _containers.MessageMap[str, Value]
    features: _containers.MessageMap[str, Value]
    recent: _containers.RepeatedCompositeFieldContainer[Id]
    exclude: _containers.RepeatedCompositeFieldContainer[Id]
    only: _containers.RepeatedCompositeFieldContainer[Id]
    only_these: bool
    where: str
    channels: _containers.RepeatedScalarFieldContainer[str]
    show_seen: bool
    boost: _containers.RepeatedCompositeFieldContainer[Boost]
    def __init__(self, user: _Optional[_Union[Id, _Mapping]] = ..., context: _Optional[_Mapping[str, Value]] = ..., features: _Optional[_Mapping[str, Value]] = ..., recent: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., exclude: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., only: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., only_these: _Optional[bool] = ..., where: _Optional[str] = ..., channels: _Optional[_Iterable[str]] = ..., show_seen: _Optional[bool] = ..., boost: _Optional[_Iterable[_Union[Boost, _Mapping]]] = ...) -> None: ...

class Boost(_message.Message):
    __slots__ = ("where", "factor")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    where: str
    factor: float
    def __init__(self, where: _Optional[str] = ..., factor: _Optional[float] = ...) -> None: ...

class RecommendRequest(_message.Message):
    __slots__ = ("queries", "k", "candidates", "trace", "version", "fields", "explain", "serve_score")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    SERVE_SCORE_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    k: int
    candidates: int
    trace: bool
    version: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    explain: bool
    serve_score: str
    def __init__(self, queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ..., k: _Optional[int] = ..., candidates: _Optional[int] = ..., trace: _Optional[bool] = ..., version: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., explain: _Optional[bool] = ..., serve_score: _Optional[str] = ...) -> None: ...

class SimilarRequest(_message.Message):
    __slots__ = ("item", "query")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    item: Id
    query: ItemQuery
    def __init__(self, item: _Optional[_Union[Id, _Mapping]] = ..., query: _Optional[_Union[ItemQuery, _Mapping]] = ...) -> None: ...

class TrendingRequest(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: ItemQuery
    def __init__(self, query: _Optional[_Union[ItemQuery, _Mapping]] = ...) -> None: ...

class ItemQuery(_message.Message):
    __slots__ = ("k", "exclude", "where", "fields", "version")
    K_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    k: int
    exclude: _containers.RepeatedCompositeFieldContainer[Id]
    where: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    version: str
    def __init__(self, k: _Optional[int] = ..., exclude: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., where: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("query", "items", "fields", "explain", "version")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    query: Query
    items: _containers.RepeatedCompositeFieldContainer[Item]
    fields: _containers.RepeatedScalarFieldContainer[str]
    explain: bool
    version: str
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., fields: _Optional[_Iterable[str]] = ..., explain: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("id", "score", "channel", "recall_score", "fields", "why", "because", "boost")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    RECALL_SCORE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    BOOST_FIELD_NUMBER: _ClassVar[int]
    id: Id
    score: float
    channel: str
    recall_score: float
    fields: _containers.MessageMap[str, Value]
    why: str
    because: _containers.RepeatedCompositeFieldContainer[Reason]
    boost: float
    def __init__(self, id: _Optional[_Union[Id, _Mapping]] = ..., score: _Optional[float] = ..., channel: _Optional[str] = ..., recall_score: _Optional[float] = ..., fields: _Optional[_Mapping[str, Value]] = ..., why: _Optional[str] = ..., because: _Optional[_Iterable[_Union[Reason, _Mapping]]] = ..., boost: _Optional[float] = ...) -> None: ...

class Reason(_message.Message):
    __slots__ = ("id", "title", "channel", "weight")
    ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    id: Id
    title: str
    channel: str
    weight: float
    def __init__(self, id: _Optional[_Union[Id, _Mapping]] = ..., title: _Optional[str] = ..., channel: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("items", "degraded", "trace", "version", "ranking", "known")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    trace: Trace
    version: str
    ranking: RankingPart
    known: bool
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., degraded: _Optional[_Iterable[str]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., version: _Optional[str] = ..., ranking: _Optional[_Union[RankingPart, _Mapping]] = ..., known: _Optional[bool] = ...) -> None: ...

class RankingPart(_message.Message):
    __slots__ = ("share", "offset")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    share: float
    offset: float
    def __init__(self, share: _Optional[float] = ..., offset: _Optional[float] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("stage_ms", "counts", "detail")
    class StageMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STAGE_MS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    stage_ms: _containers.ScalarMap[str, float]
    counts: _containers.ScalarMap[str, int]
    detail: _struct_pb2.Struct
    def __init__(self, stage_ms: _Optional[_Mapping[str, float]] = ..., counts: _Optional[_Mapping[str, int]] = ..., detail: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class RecommendReply(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class RankRequest(_message.Message):
    __slots__ = ("query", "items", "version", "serve_score")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVE_SCORE_FIELD_NUMBER: _ClassVar[int]
    query: Query
    items: _containers.RepeatedCompositeFieldContainer[Id]
    version: str
    serve_score: str
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., version: _Optional[str] = ..., serve_score: _Optional[str] = ...) -> None: ...

class RankReply(_message.Message):
    __slots__ = ("scores", "degraded", "version", "known", "unknown_items", "tasks")
    class TasksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TaskScores
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TaskScores, _Mapping]] = ...) -> None: ...
    SCORES_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    version: str
    known: bool
    unknown_items: _containers.RepeatedCompositeFieldContainer[Id]
    tasks: _containers.MessageMap[str, TaskScores]
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., degraded: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., known: _Optional[bool] = ..., unknown_items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ..., tasks: _Optional[_Mapping[str, TaskScores]] = ...) -> None: ...

class TaskScores(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scores: _Optional[_Iterable[float]] = ...) -> None: ...

class FeaturesRequest(_message.Message):
    __slots__ = ("user", "items")
    USER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    user: Id
    items: _containers.RepeatedCompositeFieldContainer[Id]
    def __init__(self, user: _Optional[_Union[Id, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ...) -> None: ...

class FeaturesReply(_message.Message):
    __slots__ = ("user", "items", "degraded", "version")
    USER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    user: _struct_pb2.Struct
    items: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Struct]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    version: str
    def __init__(self, user: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., items: _Optional[_Iterable[_Union[_struct_pb2.Struct, _Mapping]]] = ..., degraded: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("query", "items")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    query: Query
    items: _containers.RepeatedCompositeFieldContainer[Id]
    def __init__(self, query: _Optional[_Union[Query, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("user", "items", "degraded", "version", "known", "unknown_items")
    USER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    user: bytes
    items: _containers.RepeatedScalarFieldContainer[bytes]
    degraded: _containers.RepeatedScalarFieldContainer[str]
    version: str
    known: bool
    unknown_items: _containers.RepeatedCompositeFieldContainer[Id]
    def __init__(self, user: _Optional[bytes] = ..., items: _Optional[_Iterable[bytes]] = ..., degraded: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., known: _Optional[bool] = ..., unknown_items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ...) -> None: ...

class RankRowsRequest(_message.Message):
    __slots__ = ("user", "items", "context", "version", "serve_score")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    USER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVE_SCORE_FIELD_NUMBER: _ClassVar[int]
    user: bytes
    items: _containers.RepeatedScalarFieldContainer[bytes]
    context: _containers.MessageMap[str, Value]
    version: str
    serve_score: str
    def __init__(self, user: _Optional[bytes] = ..., items: _Optional[_Iterable[bytes]] = ..., context: _Optional[_Mapping[str, Value]] = ..., version: _Optional[str] = ..., serve_score: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("user", "item", "values", "id")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    USER_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    user: Id
    item: Id
    values: _containers.MessageMap[str, Value]
    id: str
    def __init__(self, user: _Optional[_Union[Id, _Mapping]] = ..., item: _Optional[_Union[Id, _Mapping]] = ..., values: _Optional[_Mapping[str, Value]] = ..., id: _Optional[str] = ...) -> None: ...

class AddEventsRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class NewItem(_message.Message):
    __slots__ = ("id", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    id: Id
    values: _containers.MessageMap[str, Value]
    def __init__(self, id: _Optional[_Union[Id, _Mapping]] = ..., values: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class AddItemsRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[NewItem]
    def __init__(self, items: _Optional[_Iterable[_Union[NewItem, _Mapping]]] = ...) -> None: ...

class RemoveItemsRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Id]
    def __init__(self, items: _Optional[_Iterable[_Union[Id, _Mapping]]] = ...) -> None: ...

class Changed(_message.Message):
    __slots__ = ("number", "version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: str
    def __init__(self, number: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _struct_pb2.Struct
    def __init__(self, status: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...
