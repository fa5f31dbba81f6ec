"""Addresses of Redis: URLs of single servers, sentinels and clusters, and their clients.

redis://[user:password@]host[:port][/db]                             one server; rediss:// with TLS
redis+sentinel://[user:password@]host:port,host:port/service[/db]    the master of a service, found through sentinels
redis+cluster://[user:password@]host:port,host:port                  a cluster, found through some of its nodes

rediss+sentinel:// and rediss+cluster:// use TLS. Settings after a `?`: ca, cert and key are files for TLS,
sentinel_password is the sentinels' own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from recmill.errors import MissingPackage, StoreError

if TYPE_CHECKING:
    from redis import ConnectionPool

_SCHEME = re.compile(r"redis(?P<tls>s?)(?:\+(?P<kind>sentinel|cluster))?")
_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_TLS_FILES = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
_EXPECTED = (
    "expected redis://host:port/db, redis+sentinel://host:port,host:port/service/db "
    "or redis+cluster://host:port,host:port (rediss for TLS)"
)


@dataclass(frozen=True)
class Address:
    """A parsed URL. Its text never shows a password."""

    kind: str  # single, sentinel, cluster
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls_files: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL. Errors quote nothing of it: it may hold a password."""
        try:
            parts = urlsplit(url)
            return _address_of(parts)
        except (ValueError, TypeError):
            raise StoreError(f"The Redis URL is invalid; {_EXPECTED}.") from None

    def __str__(self) -> str:
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        hosts = ",".join(f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.hosts)
        path = f"/{self.service}" if self.kind == "sentinel" else ""
        return f"{scheme}://{hosts}{path}" + (f"/{self.db}" if self.db else "")


def _address_of(parts: SplitResult) -> Address:
    scheme = _SCHEME.fullmatch(parts.scheme)
    if scheme is None:
        raise ValueError
    kind = scheme["kind"] or "single"
    login, _, addresses = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = path.pop(0) if kind == "sentinel" and path else ""
    settings = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    sentinel_password = settings.pop("sentinel_password", None)
    hosts = tuple(_host(address, _PORTS[kind]) for address in addresses.split(","))
    is_wrong = (
        (kind == "sentinel") != bool(service)
        or (kind == "single" and len(hosts) != 1)
        or len(path) > (0 if kind == "cluster" else 1)
        or not settings.keys() <= _TLS_FILES.keys()
        or bool(parts.fragment)
    )
    if is_wrong:
        raise ValueError
    return Address(
        kind,
        hosts,
        service,
        int(path[0]) if path else 0,
        bool(scheme["tls"]),
        unquote(username) or None,
        unquote(password) or None,
        sentinel_password,
        tuple(settings.items()),
    )


def _host(address: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    if not parts.hostname or parts.username is not None:
        raise ValueError
    return parts.hostname, parts.port or port


class Servers:
    """The Redis servers of an address: one, or those of a cluster. Thread-safe; connects on first use."""

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self.address = address
        self.is_cluster = address.kind == "cluster"
        self._timeout = timeout_seconds
        self._client: Any = None
        self._lock = threading.Lock()

    @property
    def client(self) -> Any:
        """The client; creating that of a cluster needs a live node."""
        with self._lock:
            if self._client is None:
                self._client = _MAKERS[self.address.kind](self.address, self._options())
            return self._client

    @property
    def is_found(self) -> bool:
        """Whether the client exists already."""
        return self._client is not None

    def _options(self) -> dict[str, Any]:
        try:
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingPackage("A feature store or stream in Redis", "redis", "redis") from None
        # The caller retries, within its deadline.
        options: dict[str, Any] = {
            "username": self.address.username,
            "password": self.address.password,
            "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self.address.tls:
            options["ssl"] = True
            options |= {_TLS_FILES[name]: file for name, file in self.address.tls_files}
        return options

    def pool_of(self, key: bytes) -> ConnectionPool:
        """Connections to the server that holds this key."""
        if not self.is_cluster:
            return self.client.connection_pool  # type: ignore[no-any-return]
        client = self.client
        node = client.nodes_manager.get_node_from_slot(client.keyslot(key))
        return client.get_redis_connection(node).connection_pool  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the client; the next use opens a new one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _single(address: Address, options: dict[str, Any]) -> Any:
    from redis import Redis

    (host, port) = address.hosts[0]
    return Redis(host=host, port=port, db=address.db, **options)


def _sentinel(address: Address, options: dict[str, Any]) -> Any:
    from redis import sentinel

    # Sentinels have their own credentials.
    own = {name: value for name, value in options.items() if name not in ("username", "password")}
    own["password"] = address.sentinel_password
    sentinels: Any = sentinel
    return sentinels.Sentinel(address.hosts, sentinel_kwargs=own).master_for(
        address.service, db=address.db, **options
    )


def _cluster(address: Address, options: dict[str, Any]) -> Any:
    from redis import cluster

    clusters: Any = cluster
    nodes = [clusters.ClusterNode(host, port) for host, port in address.hosts]
    return clusters.RedisCluster(startup_nodes=nodes, **options)


_MAKERS: dict[str, Callable[[Address, dict[str, Any]], Any]] = {
    "single": _single,
    "sentinel": _sentinel,
    "cluster": _cluster,
}
