"""Where features of users and items are kept: in the bundle's own files, or in Redis."""

from recmill.store.base import Side, Store
from recmill.store.codec import Rows
from recmill.store.mapped import MappedStore
from recmill.store.redis import DEFAULT_PREFIX, RedisStore

__all__ = ["DEFAULT_PREFIX", "MappedStore", "RedisStore", "Rows", "Side", "Store"]
