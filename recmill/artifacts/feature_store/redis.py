"""Features in Redis: one compact row for each user and item, many fetched at once, within a deadline."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import polars as pl

from recmill.artifacts.bundle.entities import Side
from recmill.artifacts.bundle.entity_ids import Id
from recmill.artifacts.feature_store.address import Address, Servers
from recmill.artifacts.feature_store.codec import CodedRows, RawCodec, RowCodec
from recmill.artifacts.feature_store.connections import Connections, Exchange
from recmill.artifacts.feature_store.failures import CircuitBreaker, refusal_of
from recmill.artifacts.feature_store.writes import WriteQueue
from recmill.dataset.batch import Batch, collate
from recmill.errors import StoreError

if TYPE_CHECKING:
    from redis import ConnectionPool

    from recmill.artifacts.bundle.bundle import Bundle

DEFAULT_PREFIX = "recmill"
_NUM_BUCKETS = 64  # of a cluster: keys of one bucket are on one node, so that one command fetches many
_KEYS_PER_COMMAND = 1_000  # Redis executes one command at a time, so long ones delay all clients
_PROBE_SECONDS = 0.25
_LOADED_SECONDS = 1.0  # how long `is_loaded` is cached
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


class RedisStore:
    """Rows written by `recmill load`, by id.

    StoreError when Redis does not answer in time; reconnects automatically.
    """

    def __init__(
        self,
        url: str,
        bundle: Bundle,
        prefix: str = DEFAULT_PREFIX,
        timeout_seconds: float = 1.0,
        ttl_seconds: int | None = None,
    ) -> None:
        """`timeout_seconds` bounds connecting and writing; reading is bounded by each call's deadline too."""
        if not _PREFIX.fullmatch(prefix):
            raise StoreError(f'A key prefix is made of letters, digits and "_.:-", got "{prefix}".')
        self.prefix = prefix
        self.ttl_seconds = ttl_seconds
        self.servers = Servers(Address.parse(url), timeout_seconds)
        self._bundle = bundle
        self._codecs: dict[Side, RowCodec] = {}
        self._raw_codecs: dict[Side, RawCodec] = {}
        self._is_loaded, self._ask_loaded_at = False, 0.0
        self._connections = Connections(self.servers)
        self._breaker = CircuitBreaker(self._probe)
        self._writes = WriteQueue()

    def get(self, side: Side, ids: Sequence[Id], deadline_seconds: float) -> CodedRows:
        """Features in the order of the ids; defaults for unknown ids."""
        codec = self.codec(side)
        return codec.decode(self._fetch(self.keys(side, "f", ids), deadline_seconds))

    def raw(self, side: Side, id: Id, deadline_seconds: float) -> dict[str, Any] | None:
        """Raw columns by name; None for an unknown id."""
        (row,) = self._fetch(self.keys(side, "r", [id]), deadline_seconds)
        return self._raw_codec(side).decode(row)

    def is_loaded(self, deadline_seconds: float) -> bool:
        """Whether `recmill load` has finished and its last key still exists; checked at most once per second."""
        now = time.monotonic()
        if now >= self._ask_loaded_at:
            (version,) = self._fetch([self.loaded_key], deadline_seconds)
            self._is_loaded, self._ask_loaded_at = version is not None, now + _LOADED_SECONDS
        return self._is_loaded

    def put(self, side: Side, raw: pl.DataFrame, features: pl.DataFrame) -> None:
        """Write rows: raw columns with the id, and their features by the Plan. Known ones are replaced."""
        layout = self.codec(side).layout
        self.put_rows(side, raw, collate(features, layout, with_labels=False))

    def put_rows(
        self, side: Side, raw: pl.DataFrame, batch: Batch, also: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Write rows, and then the values `also` without a time to live, in one pipeline."""
        ids = raw[self._bundle.entities(side).id_column].to_list()
        features = self.codec(side).encode(batch)
        columns = self._raw_codec(side).encode(raw.iter_rows(named=True))
        with self._calling(f"write {side}s, keys {self.prefix}:{side}:*"):
            pipeline = self.servers.client.pipeline(transaction=False)
            for kind, values in (("f", features), ("r", columns)):
                for key, value in zip(self.keys(side, kind, ids), values, strict=True):
                    pipeline.set(key, value, ex=self.ttl_seconds)
            # The client's own errors quote the command, and with it columns of a user.
            for answer in pipeline.execute(raise_on_error=False):
                if isinstance(answer, Exception):
                    raise answer
            for key, value in also:
                self.servers.client.set(key, value)

    def value(self, key: bytes) -> bytes | None:
        """A value of the store itself, such as the loaded version."""
        with self._calling():
            value: bytes | None = self.servers.client.get(key)
            return value

    def set_value(self, key: bytes, value: bytes) -> None:
        with self._calling(f"write {key.decode()}"):
            self.servers.client.set(key, value)

    def loaded(self) -> str | None:
        """The version of the bundle that was loaded last; None without a completed load."""
        value = self.value(self.loaded_key)
        return value.decode() if value is not None else None

    @property
    def loaded_key(self) -> bytes:
        return f"{self.prefix}:loaded".encode()

    def later(self, write: Callable[[], None], num_rows: int, wait_seconds: float) -> bool:
        """Queue a write, which is retried until it succeeds; returns whether it succeeded within this time."""
        return self._writes.add(write, num_rows, wait_seconds)

    @property
    def problem(self) -> str | None:
        """Why queued rows have not been written; None when all have."""
        return self._writes.problem

    def num_deltas(self, version: str) -> int:
        """The last delta of a version whose rows were all written since the last load."""
        value = self.value(self._deltas_key(version))
        return int(value) if value is not None and value.isdigit() else 0

    def set_num_deltas(self, version: str, number: int) -> None:
        self.set_value(self._deltas_key(version), b"%d" % number)

    def _deltas_key(self, version: str) -> bytes:
        return f"{self.prefix}:deltas:{version}".encode()

    def close(self) -> None:
        self._writes.close()
        self._connections.close()
        self.servers.close()

    def keys(self, side: Side, kind: str, ids: Sequence[Id]) -> list[bytes]:
        """Keys of the features ("f") or the raw columns ("r") of ids; 7 and "7" are the same."""
        start = f"{self.prefix}:{side}:{kind}:".encode()
        names = [str(id).encode("utf-8", "surrogatepass") for id in ids]
        if not self.servers.is_cluster:
            return [start + name for name in names]
        return [b"%b{%d}:%b" % (start, zlib.crc32(name) % _NUM_BUCKETS, name) for name in names]

    def codec(self, side: Side) -> RowCodec:
        if side not in self._codecs:
            entities = self._bundle.entities(side)
            self._codecs[side] = RowCodec(entities.layout, entities.unknown_row, self._bundle.plan.digest())
        return self._codecs[side]

    def _raw_codec(self, side: Side) -> RawCodec:
        if side not in self._raw_codecs:
            schema = self._bundle.entities(side).raw_schema
            self._raw_codecs[side] = RawCodec(side, [(name, str(dtype)) for name, dtype in schema.items()])
        return self._raw_codecs[side]

    def _fetch(self, keys: Sequence[bytes], seconds: float) -> list[bytes | None]:
        """Values in the order of the keys."""
        self._breaker.check(self.servers.address)
        with self._watched():
            return self._exchange(keys, time.monotonic() + seconds)

    def _probe(self) -> None:
        """Whether Redis answers again, which the circuit breaker learns."""
        with suppress(StoreError), self._watched():
            self._exchange([self.loaded_key], time.monotonic() + _PROBE_SECONDS)

    def _exchange(self, keys: Sequence[bytes], ends_at: float) -> list[bytes | None]:
        """All commands are sent before the first answer is awaited."""
        values: list[bytes | None] = [None] * len(keys)
        with Exchange(self._connections, ends_at) as exchange:
            self._connections.find_servers(ends_at)
            commands = list(self._commands(keys))
            for pool, positions in commands:
                exchange.send(pool, _get_many([keys[position] for position in positions]))
            for pool, positions in commands:
                for position, value in zip(positions, exchange.read(pool), strict=True):
                    values[position] = value
        return values

    def _commands(self, keys: Sequence[bytes]) -> Iterator[tuple[ConnectionPool, Sequence[int]]]:
        """Keys by command and server."""
        if not self.servers.is_cluster:
            for start in range(0, len(keys), _KEYS_PER_COMMAND):
                yield (
                    self.servers.pool_of(keys[start]),
                    range(start, min(len(keys), start + _KEYS_PER_COMMAND)),
                )
            return
        buckets: dict[bytes, list[int]] = {}
        for position, key in enumerate(keys):
            buckets.setdefault(key[key.find(b"{") : key.find(b"}")], []).append(position)
        for positions in buckets.values():
            yield self.servers.pool_of(keys[positions[0]]), positions

    @contextmanager
    def _calling(self, doing: str = "read") -> Iterator[None]:
        """Turns failures of Redis into StoreError; while the circuit breaker is open, at once."""
        self._breaker.check(self.servers.address)
        with self._watched(doing):
            yield

    @contextmanager
    def _watched(self, doing: str = "read") -> Iterator[None]:
        """Turns failures of Redis into StoreError, and tells the circuit breaker."""
        from redis.exceptions import RedisClusterException, RedisError
        from redis.exceptions import TimeoutError as RedisTimeout

        address = self.servers.address
        try:
            yield
        except (RedisTimeout, TimeoutError) as error:
            self._breaker.timed_out()
            raise StoreError(f"{address} did not answer in time.") from error
        except (RedisError, RedisClusterException, OSError) as error:
            refusal = refusal_of(error)
            if refusal is not None:
                self._breaker.worked()
            else:
                self._breaker.failed()
            if self.servers.is_cluster:
                self._rediscover()
            if refusal is not None:
                raise StoreError(f"{address} refuses to {doing}: {refusal}") from None
            raise StoreError(f"{address} does not answer: {error}") from error
        else:
            self._breaker.worked()

    def _rediscover(self) -> None:
        """After a move of cluster slots, discover the nodes again before the next command."""
        self._connections.close_idle()
        self.servers.close()


def _get_many(keys: Sequence[bytes]) -> bytes:
    """An encoded MGET: the client's own encoding takes longer than Redis takes to answer."""
    written = b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])
    return b"*%d\r\n$4\r\nMGET\r\n%b" % (len(keys) + 1, written)
