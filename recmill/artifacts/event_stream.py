"""Events in a Redis stream: servers write them, every server and the trainer read them in the same order.

redis://[user:password@]host[:port][/db]/STREAM     and the other URLs of feature_store/address.py; their last part is
                                                    the stream's key

STREAM             one entry for each row of the log, a field for each column; or one change of an item
STREAM:items       hash: id of an item -> its latest change and the entry that holds it
{STREAM}:seen:ID   the entry of the event with this client id, so that a repeated event counts once
STREAM:rejected    entries that are not valid rows of the log, under their own ids, with the reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from recmill.artifacts.feature_store.address import Address, Servers
from recmill.artifacts.feature_store.failures import CircuitBreaker, refusal_of
from recmill.errors import StoreError

ITEM, REMOVED = "_item", "_removed"  # the only field of an entry that changes an item

_SEEN_SECONDS = 3_600  # seconds that an event's id is remembered
_KEEP_MS = 3_600_000  # milliseconds that entries stay after they were learned, for servers that lag
_MAX_REJECTED = 10_000
_MAX_SEQUENCE = 1 << 20
_SCHEME = re.compile(r"rediss?(\+sentinel|\+cluster)?://")
# Scripts, so that an entry and its bookkeeping are written atomically.
_ADD_EVENTS = """
local added, at = {}, 2
for number = 2, #KEYS do
  local size, known = tonumber(ARGV[at]), redis.call('GET', KEYS[number])
  if known then
    added[#added + 1] = {known, 0}
  else
    local entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 1, at + size))
    redis.call('SET', KEYS[number], entry, 'EX', ARGV[1])
    added[#added + 1] = {entry, 1}
  end
  at = at + size + 1
end
return added
"""
_CHANGE_ITEMS = """
local entry = '0-0'
for at = 1, #ARGV, 3 do
  entry = redis.call('XADD', KEYS[1], '*', ARGV[at], ARGV[at + 2])
  redis.call('HSET', KEYS[2], ARGV[at + 1], entry .. ' ' .. ARGV[at] .. ' ' .. ARGV[at + 2])
end
return entry
"""


@dataclass(frozen=True)
class Entry:
    """One entry. Its number orders entries like the stream."""

    number: int
    fields: Mapping[str, bytes]

    @property
    def item_change(self) -> bytes | None:
        """The item change in the entry; None for a row of the log."""
        return self.fields.get(ITEM, self.fields.get(REMOVED))


def is_stream(url: str) -> bool:
    """Whether an address is a stream rather than a directory or an object store."""
    return _SCHEME.match(url) is not None


def entry_number(id: bytes | str) -> int:
    """An entry's id, `milliseconds-sequence`, as one number with the same order."""
    text = id.decode() if isinstance(id, bytes) else id
    milliseconds, _, sequence = text.partition("-")
    if int(sequence or 0) >= _MAX_SEQUENCE or int(milliseconds) >= 1 << 43:
        raise StoreError(f"Entry {text} has an id that was not made by XADD *. Let Redis make the ids.")
    return int(milliseconds) * _MAX_SEQUENCE + int(sequence or 0)


def entry_id(number: int) -> str:
    return f"{number // _MAX_SEQUENCE}-{number % _MAX_SEQUENCE}"


def written_at(number: int) -> float:
    """When an entry was written, in seconds since 1970, by the clock of Redis."""
    return number / _MAX_SEQUENCE / 1_000


class EventStream:
    """One stream. Thread-safe; raises StoreError when Redis does not answer in time, and reconnects automatically."""

    def __init__(self, url: str, timeout_seconds: float = 1.0) -> None:
        address, self.key = _parse(url)
        self.servers = Servers(address, timeout_seconds)
        self._timeout = timeout_seconds
        self._breaker = CircuitBreaker()

    def __str__(self) -> str:
        return f"{self.servers.address}/{self.key}"

    # writing

    def add_events(self, events: Mapping[str, Mapping[str, str]]) -> list[tuple[int, bool]]:
        """Append rows of the log by their ids: returns the entry of each, and whether it is new.

        All of them, or none.

        An event whose id was seen within the hour is not added again, so a caller may repeat an unanswered call.
        """
        arguments: list[str | int] = [_SEEN_SECONDS]
        for fields in events.values():
            arguments += [2 * len(fields), *(text for field in fields.items() for text in field)]
        keys = [self.key, *(f"{self._tag}:seen:{id}" for id in events)]
        added = self._run(_ADD_EVENTS, keys, arguments)
        return [(entry_number(entry), bool(is_new)) for entry, is_new in added]

    def change_items(self, changes: Sequence[tuple[str, str, str]]) -> int:
        """Append changes of items, each `(ITEM or REMOVED, id, JSON)`; returns the last entry."""
        arguments = [text for change in changes for text in change]
        return entry_number(self._run(_CHANGE_ITEMS, [self.key, self._items], arguments))

    def _run(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        from redis.exceptions import ConnectionError

        with self._calling("append to the stream", self._breaker):
            try:
                return self.servers.client.eval(script, len(keys), *keys, *arguments)
            except ConnectionError:  # perhaps a connection that a restart has closed. Scripts may run twice.
                return self.servers.client.eval(script, len(keys), *keys, *arguments)

    @property
    def _tag(self) -> str:
        """The prefix of keys that a cluster keeps on the node of the stream."""
        return self.key if "{" in self.key else f"{{{self.key}}}"

    @property
    def _items(self) -> str:
        return f"{self._tag}:items"

    # reading

    def read(self, after: int, count: int, wait_seconds: float = 0.0) -> list[Entry]:
        """The next entries after a given one, at most `count`; waits this long for the first."""
        assert wait_seconds < self._timeout
        block = max(1, int(wait_seconds * 1_000)) if wait_seconds else None
        with self._calling("read the stream"):
            found = self.servers.client.xread({self.key: entry_id(after)}, count=count, block=block)
        return [
            Entry(
                entry_number(id), {name.decode("utf-8", "replace"): value for name, value in fields.items()}
            )
            for _, entries in found or ()
            for id, fields in entries
        ]

    def items(self) -> tuple[list[Entry], int]:
        """The latest change of every changed item, oldest first; and an entry up to which the list is complete."""
        with self._calling("read the items"):
            last = self.servers.client.xrevrange(self.key, count=1)
            changes = self.servers.client.hgetall(self._items).values()
        parts = (change.split(b" ", 2) for change in changes)
        found = [Entry(entry_number(id), {kind.decode(): change}) for id, kind, change in parts]
        return sorted(found, key=lambda entry: entry.number), entry_number(last[0][0]) if last else 0

    # learned entries

    def learned(self, group: str, until: int) -> None:
        """Move a consumer group to this entry, which defines its lag, and drop entries that nobody needs."""
        with self._calling("move the consumer group"):
            client = self.servers.client
            if group not in self._groups():
                client.xgroup_create(self.key, group, id=entry_id(until), mkstream=True)
            client.xgroup_setid(self.key, group, entry_id(until))
            client.xtrim(self.key, minid=entry_id(self._needed_from(until)), approximate=False)

    def _groups(self) -> dict[str, int]:
        """The last acknowledged entry of each consumer group."""
        from redis.exceptions import ResponseError

        try:
            groups = self.servers.client.xinfo_groups(self.key)
        except ResponseError as error:
            if "no such key" in str(error):
                return {}
            raise
        return {group["name"].decode(): self._acknowledged(group) for group in groups}

    def _acknowledged(self, group: Mapping[str, Any]) -> int:
        if not group["pending"]:
            return entry_number(group["last-delivered-id"])
        pending = self.servers.client.xpending(self.key, group["name"])
        return entry_number(pending["min"]) - 1

    def _needed_from(self, until: int) -> int:
        """The first entry to keep: those that some group has not read, and those of the last hour."""
        recent = max(0, until - _KEEP_MS * _MAX_SEQUENCE)
        return min([recent, *(number + 1 for number in self._groups().values())])

    def reject(self, entry: Entry, reason: str) -> None:
        """Store an invalid entry with the reason, once."""
        from redis.exceptions import ResponseError

        fields = {**entry.fields, "_reason": reason}
        with self._calling("keep a rejected entry"):
            try:
                id = entry_id(entry.number)
                self.servers.client.xadd(f"{self._tag}:rejected", fields, id=id, maxlen=_MAX_REJECTED)
            except ResponseError as error:
                if "equal or smaller" not in str(error):  # otherwise it is stored already
                    raise

    def close(self) -> None:
        self.servers.close()

    @contextmanager
    def _calling(self, doing: str, breaker: CircuitBreaker | None = None) -> Iterator[None]:
        """Convert failures of Redis into StoreError; immediately while the circuit breaker is open."""
        from redis.exceptions import RedisClusterException, RedisError

        address = self.servers.address
        if breaker is not None:
            breaker.check(address)
        try:
            yield
        except (RedisError, RedisClusterException, OSError) as error:
            refusal = refusal_of(error)
            if refusal is None and breaker is not None:
                breaker.failed()
            if self.servers.is_cluster:
                self.servers.close()  # its slots may have moved
            if refusal is not None:
                raise StoreError(f"{address} refuses to {doing}: {refusal}") from None
            raise StoreError(f"{address} does not answer: {error}") from error
        if breaker is not None:
            breaker.worked()


def _parse(url: str) -> tuple[Address, str]:
    """An address, and the key after it. Errors quote nothing of the URL: it may hold a password."""
    parts = urlsplit(url)
    path, _, key = parts.path.rpartition("/")
    if not key or key.isdigit():
        raise StoreError(
            "The URL of a stream ends with the stream's key, such as redis://localhost:6379/shop:events."
        )
    return Address.parse(urlunsplit(parts._replace(path=path))), unquote(key)
