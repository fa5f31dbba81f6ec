"""Where features of users and items are kept: in the bundle's own files, or in Redis."""

from recmill.store.base import Side, Store
from recmill.store.mapped import MappedStore
from recmill.store.redis import RedisStore

__all__ = ["MappedStore", "RedisStore", "Side", "Store"]
