"""The config of serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from recmill.config import (
    COUNT,
    FRACTION,
    MODULES,
    PORT,
    SIZE,
    Flag,
    ValueKind,
    number_kind,
    parse_fraction,
    show_number,
)

MAX_K = 1_000
MAX_CANDIDATES = 10_000
_DAY = 86_400
_VERSIONS = "versions and what is seen of them"

_SECONDS = number_kind(f"a number of seconds above 0, at most {_DAY}", lambda number: 0 < number <= _DAY, "S")
_DRAIN_SECONDS = number_kind(f"a number of seconds from 0 to {_DAY}", lambda number: 0 <= number <= _DAY, "S")
_MS = number_kind("a number of milliseconds above 0", lambda number: 0 < number <= _DAY * 1_000)
_MILLISECONDS = ValueKind(
    lambda text: _MS.parse(text) / 1_000, "MS", lambda seconds: show_number(seconds * 1_000)
)


def _parse_addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(address.strip() for address in text.split(","))
    for address in addresses:
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal() or not 0 < int(number[:6]) <= 65_535:
            raise ValueError(f"must be host:port, or several with commas between, got {address!r}")
    return addresses


def _parse_canary(text: str) -> tuple[str, float]:
    version, _, fraction = text.rpartition("=")
    if not version:
        raise ValueError(f"must be a version and a fraction such as 0000000100-ab12cd34=5%, got {text}")
    return version, parse_fraction(fraction)


_ADDRESSES = ValueKind(_parse_addresses, "HOST:PORT,...")
_CANARY = ValueKind(_parse_canary, "VERSION=5%")


@dataclass(frozen=True)
class LimitConfig:
    """The largest request that is accepted, and the longest that one may wait."""

    max_body: Annotated[int, Flag("bytes of a request's body", SIZE, group="limits")] = 16 << 20
    max_k: Annotated[int, Flag("items of an answer", group="limits")] = MAX_K
    max_candidates: int = MAX_CANDIDATES
    max_batch: Annotated[int, Flag("queries, events or new items in one call", group="limits")] = 100
    max_waiting: Annotated[int, Flag("requests in the queue", group="limits")] = 1_000
    max_wait_seconds: Annotated[
        float,
        Flag(
            "a request that would wait longer is refused", _MILLISECONDS, name="--max-wait-ms", group="limits"
        ),
    ] = 0.1
    deadline_seconds: Annotated[
        float,
        Flag("of requests that catch_up_version none", _MILLISECONDS, name="--deadline-ms", group="limits"),
    ] = 1.0
    max_connections: Annotated[
        int | None,
        Flag(
            "to each port of a process (default: 10000, or fewer where the limit of open files is low)",
            group="limits",
        ),
    ] = None
    max_header: Annotated[int, Flag("headers of a request", SIZE, group="limits")] = 64 << 10
    send_seconds: float = 10.0  # seconds for the head of a request to arrive, and for its body
    idle_seconds: Annotated[
        float, Flag("a connection without a request is closed after", _SECONDS, group="limits")
    ] = 75.0


@dataclass(frozen=True, kw_only=True)
class ServeConfig(LimitConfig):
    """Everything that `recmill serve` can be configured with."""

    bundle: Path
    bundle_url: str | None = None  # the address that `bundle` was copied from, if it is a copy

    host: Annotated[
        str, Flag("address to bind (default: 127.0.0.1, this machine alone)", metavar="HOST", group="where")
    ] = "127.0.0.1"
    http_port: Annotated[int, Flag("0: a free one", PORT, group="where")] = 8080
    grpc_port: Annotated[int, Flag("0: a free one", PORT, group="where")] = 8081
    threads: Annotated[
        int | None, Flag("that answer (default: the cores this process may use)", COUNT, group="where")
    ] = None
    processes: Annotated[int, Flag("processes on the same ports", group="where")] = 1
    drain_seconds: Annotated[
        float, Flag("longest that SIGTERM waits for requests under way", _DRAIN_SECONDS, group="where")
    ] = 30.0

    role: Annotated[
        Literal["all", "recommend", "recall", "features", "rank"],
        Flag("what this process does", group="stages"),
    ] = "all"
    model_name: Annotated[
        str | None,
        Flag(
            "what clients of TensorFlow Serving or KServe may call the ranking model (default: ranking alone)",
            metavar="NAME",
            group="stages",
        ),
    ] = None
    recall_at: Annotated[
        tuple[str, ...],
        Flag("with --role recommend: gRPC addresses of the recall role", _ADDRESSES, group="stages"),
    ] = ()
    features_at: Annotated[
        tuple[str, ...],
        Flag("with --role recommend: gRPC addresses of the features role", _ADDRESSES, group="stages"),
    ] = ()
    rank_at: Annotated[
        tuple[str, ...],
        Flag("with --role recommend: gRPC addresses of the rank role", _ADDRESSES, group="stages"),
    ] = ()
    peer_token_file: Annotated[
        Path | None, Flag("with --role recommend: the token to send", metavar="FILE", group="stages")
    ] = None
    peer_ca: Annotated[
        Path | None,
        Flag("with --role recommend: use TLS and trust this PEM", metavar="FILE", group="stages"),
    ] = None
    features: Annotated[
        str | None,
        Flag("feature store, such as redis://host:6379 (default: the bundle)", metavar="URL", group="stages"),
    ] = None
    prefix: Annotated[
        str | None,
        Flag(
            "with --features: of its keys, as `recmill load` was given (default: recmill)",
            metavar="P",
            group="stages",
        ),
    ] = None

    events: Annotated[
        str | None,
        Flag(
            "stream that all servers and the trainer share, such as redis://host:6379/shop:events (default: events and "
            "items stay in this server)",
            metavar="URL",
            group="stages",
        ),
    ] = None

    watch: Annotated[
        bool,
        Flag("take new versions and deltas as they appear in the bundle's folder", group=_VERSIONS),
    ] = True
    canary: Annotated[
        tuple[str, float] | None,
        Flag("this version for a fraction of users", _CANARY, group=_VERSIONS),
    ] = None
    shadow: Annotated[
        str | None,
        Flag("ask this version too, and count differences", metavar="VERSION", group=_VERSIONS),
    ] = None
    request_log: Annotated[Path | None, Flag("write sampled requests as Parquet", group=_VERSIONS)] = None
    request_log_share: Annotated[float, Flag("of requests", FRACTION, group=_VERSIONS)] = 0.01
    otlp: Annotated[
        str | None,
        Flag("send OpenTelemetry traces there", metavar="URL", group=_VERSIONS),
    ] = None

    tls_cert: Annotated[
        Path | None, Flag("PEM certificate, for both transports", metavar="FILE", group="safety")
    ] = None
    tls_key: Annotated[Path | None, Flag("its PEM key", metavar="FILE", group="safety")] = None
    tls_client_ca: Annotated[
        Path | None, Flag("clients must show a certificate of this PEM", metavar="FILE", group="safety")
    ] = None
    token_file: Annotated[
        Path | None,
        Flag("lines of `token scope[,scope]`; scopes: read, admin", metavar="FILE", group="safety"),
    ] = None
    trust_code: Annotated[
        tuple[str, ...],
        Flag(
            "modules or packages of functions that the bundle's features may call (default: none)",
            MODULES,
            group="safety",
        ),
    ] = ()
    insecure: Annotated[bool, Flag("bind other addresses without TLS and tokens", group="safety")] = False
