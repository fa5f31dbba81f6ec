"""Where features of users and items are kept: in the bundle's own files, or in Redis."""

from recmill.artifacts.feature_store.base import Side, Store
from recmill.artifacts.feature_store.codec import CodedRows
from recmill.artifacts.feature_store.mapped import MappedStore
from recmill.artifacts.feature_store.redis import DEFAULT_PREFIX, RedisStore

__all__ = ["DEFAULT_PREFIX", "CodedRows", "MappedStore", "RedisStore", "Side", "Store"]
