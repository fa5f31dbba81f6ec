"""`recmill serve`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import UsageError, add_command, add_trust_code, positive, share, size

if TYPE_CHECKING:
    from recmill.stages.serve.server import Ready, ServeConfig

ROLES = ("all", "recommend", "recall", "features", "rank")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        _serve,
        "answer over HTTP and gRPC from a bundle",
        """
recmill serve --bundle runs/shop/bundle
recmill serve --bundle runs/shop/bundle --http-port 0 --grpc-port 0 --json
recmill serve --bundle runs/shop/bundle --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem --token-file tokens
recmill serve --bundle runs/shop/bundle --features redis://localhost:6379 --processes 4
recmill serve --bundle runs/shop/bundle --role rank --http-port 8090 --grpc-port 8091
""",
    )
    parser.add_argument("--bundle", required=True, metavar="DIR", help="what `recmill export` wrote")
    parser.add_argument("--json", action="store_true", help="say where it answers as one JSON object")
    _add_addresses(parser)
    _add_stages(parser)
    _add_versions(parser)
    _add_safety(parser)
    _add_limits(parser)


def _add_addresses(parser: Any) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default: this machine alone)")
    group.add_argument(
        "--http-port", type=port, default=8080, metavar="P", help="default: 8080; 0: a free one"
    )
    group.add_argument(
        "--grpc-port", type=port, default=8081, metavar="P", help="default: 8081; 0: a free one"
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="that answer (default: the cores this process may use)"
    )
    group.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="processes on the same ports (default: 1)"
    )
    group.add_argument(
        "--drain-seconds",
        type=seconds,
        default=30.0,
        metavar="S",
        help="longest that SIGTERM waits for requests under way (default: 30)",
    )


def _add_stages(parser: Any) -> None:
    group = parser.add_argument_group("stages")
    group.add_argument("--role", choices=ROLES, default="all", help="what this process does (default: all)")
    for stage in ("recall", "features", "rank"):
        group.add_argument(
            f"--{stage}-at",
            type=addresses,
            default=(),
            metavar="HOST:PORT,...",
            help=f"with --role recommend: gRPC addresses of the {stage} role",
        )
    group.add_argument("--peer-token-file", metavar="FILE", help="with --role recommend: the token to send")
    group.add_argument("--peer-ca", metavar="FILE", help="with --role recommend: use TLS and trust this PEM")
    group.add_argument(
        "--features", metavar="URL", help="feature store, such as redis://host:6379 (default: the bundle)"
    )
    group.add_argument(
        "--prefix",
        metavar="P",
        help="with --features: of its keys, as `recmill load` was given (default: recmill)",
    )


def _add_versions(parser: Any) -> None:
    group = parser.add_argument_group("versions and what is seen of them")
    group.add_argument(
        "--watch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take new versions and deltas as they appear in the bundle's folder (default: yes)",
    )
    group.add_argument(
        "--canary", type=canary, metavar="VERSION=5%", help="this version for a share of users"
    )
    group.add_argument("--shadow", metavar="VERSION", help="ask this version too, and count differences")
    group.add_argument("--request-log", metavar="DIR", help="write sampled requests as Parquet")
    group.add_argument(
        "--request-log-share", type=share, default="1%", metavar="SHARE", help="of requests (default: 1%%)"
    )
    group.add_argument("--otlp", metavar="URL", help="send OpenTelemetry traces there")


def _add_safety(parser: Any) -> None:
    group = parser.add_argument_group("safety")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM certificate, for both transports")
    group.add_argument("--tls-key", metavar="FILE", help="its PEM key")
    group.add_argument("--tls-client-ca", metavar="FILE", help="clients must show a certificate of this PEM")
    group.add_argument(
        "--token-file", metavar="FILE", help="lines of `token scope[,scope]`; scopes: read, admin"
    )
    add_trust_code(group)
    group.add_argument("--insecure", action="store_true", help="bind other addresses without TLS and tokens")


def _add_limits(parser: Any) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--max-body", type=size, default="16MB", metavar="SIZE", help="default: 16MB")
    group.add_argument("--max-k", type=positive, default=1_000, metavar="N", help="default: 1000")
    group.add_argument(
        "--max-batch", type=positive, default=100, metavar="N", help="queries in one call (default: 100)"
    )
    group.add_argument(
        "--max-waiting",
        type=positive,
        default=1_000,
        metavar="N",
        help="requests in the queue (default: 1000)",
    )
    group.add_argument(
        "--max-wait-ms",
        type=duration,
        default=100.0,
        metavar="MS",
        help="a request that would wait longer is refused (default: 100)",
    )
    group.add_argument(
        "--deadline-ms",
        type=duration,
        default=1_000.0,
        metavar="MS",
        help="of requests that bring none (default: 1000)",
    )
    group.add_argument(
        "--max-connections",
        type=positive,
        metavar="N",
        help="to each port of a process (default: 10000, or fewer where the limit of open files is low)",
    )
    group.add_argument(
        "--max-header", type=size, default="64KB", metavar="SIZE", help="headers of a request (default: 64KB)"
    )
    group.add_argument(
        "--idle-seconds",
        type=duration,
        default=75.0,
        metavar="S",
        help="a connection without a request is closed after (default: 75)",
    )


def _serve(parsed: argparse.Namespace) -> int:
    # Requests are answered side by side, one thread each: pools of libraries would only get in each other's way. They
    # read this when they are first imported, which is now.
    for pool in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(pool, "1")
    settings = settings_of(parsed)
    from recmill.stages.serve.server import run

    return run(settings, lambda ready: _say(ready, parsed.json))


def settings_of(parsed: argparse.Namespace) -> ServeConfig:
    """What the flags say; raises UsageError when they do not go together."""
    _check(parsed)
    from recmill.stages.serve.limits import Limits
    from recmill.stages.serve.security import Tls
    from recmill.stages.serve.server import ServeConfig

    return ServeConfig(
        bundle=Path(parsed.bundle),
        host=parsed.host,
        http_port=parsed.http_port,
        grpc_port=parsed.grpc_port,
        role=parsed.role,
        recall_at=parsed.recall_at,
        features_at=parsed.features_at,
        rank_at=parsed.rank_at,
        features=parsed.features,
        prefix=parsed.prefix,
        threads=parsed.threads,
        processes=parsed.processes,
        watch=parsed.watch,
        canary=parsed.canary,
        shadow=parsed.shadow,
        request_log=_path(parsed.request_log),
        request_log_share=parsed.request_log_share,
        otlp=parsed.otlp,
        tls=Tls(Path(parsed.tls_cert), Path(parsed.tls_key), _path(parsed.tls_client_ca))
        if parsed.tls_cert
        else None,
        token_file=_path(parsed.token_file),
        trust_code=parsed.trust_code,
        insecure=parsed.insecure,
        peer_ca=_path(parsed.peer_ca),
        peer_token_file=_path(parsed.peer_token_file),
        limits=Limits(
            max_body=parsed.max_body,
            max_k=parsed.max_k,
            max_batch=parsed.max_batch,
            max_waiting=parsed.max_waiting,
            max_wait_seconds=parsed.max_wait_ms / 1000,
            deadline_seconds=parsed.deadline_ms / 1000,
            max_connections=parsed.max_connections,
            max_header=parsed.max_header,
            idle_seconds=parsed.idle_seconds,
        ),
        drain_seconds=parsed.drain_seconds,
    )


def _check(parsed: argparse.Namespace) -> None:
    stages = {stage: getattr(parsed, f"{stage}_at") for stage in ("recall", "features", "rank")}
    missing = [f"--{stage}-at" for stage, found in stages.items() if not found]
    if parsed.role == "recommend" and missing:
        raise UsageError(f"--role recommend asks other processes: add {', '.join(missing)}.")
    if parsed.role != "recommend" and any(stages.values()):
        raise UsageError("--recall-at, --features-at and --rank-at go with --role recommend.")
    if parsed.prefix and not parsed.features:
        raise UsageError("--prefix goes with --features.")
    if bool(parsed.tls_cert) != bool(parsed.tls_key):
        raise UsageError("--tls-cert and --tls-key go together.")
    if parsed.tls_client_ca and not parsed.tls_cert:
        raise UsageError("--tls-client-ca needs --tls-cert and --tls-key.")


def _say(ready: Ready, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    if as_json:
        print(json.dumps(asdict(ready)), flush=True)
    else:
        more = "" if ready.processes == 1 else f"   {ready.processes} processes"
        print(f"ready  {ready.http}   grpc {ready.grpc}   bundle {ready.version}{more}", flush=True)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text}")
    return int(text)


def addresses(text: str) -> tuple[str, ...]:
    found = tuple(one.strip() for one in text.split(","))
    for one in found:
        host, _, number = one.rpartition(":")
        if not host or not number.isdecimal() or not 0 < int(number[:6]) <= 65_535:
            raise argparse.ArgumentTypeError(
                f"must be host:port, or several with commas between, got {one!r}"
            )
    return found


def canary(text: str) -> tuple[str, float]:
    version, _, part = text.rpartition("=")
    if not version:
        raise argparse.ArgumentTypeError(
            f"must be a version and a share such as 0000000100-ab12cd34=5%, got {text}"
        )
    return version, share(part)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 86_400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text}")
    return found


def duration(text: str) -> float:
    found = seconds(text)
    if not found:
        raise argparse.ArgumentTypeError("must be above 0")
    return found
