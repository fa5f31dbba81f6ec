"""What is to be served: names, numbers and choices, settled for kustomize or left to a chart's values for Helm."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recmill.stages.deploy.dashboard import dashboard
from recmill.stages.deploy.parts import GRPC_PORT, Object, Site, quantity, resources
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.sizing import GB, MB

SERVE = "serve"  # the component that clients ask
ROLES = ("recall", "features", "rank")  # those that it asks when roles run apart
TOKENS, TLS = "/var/run/secrets/recmill/tokens", "/var/run/secrets/recmill/tls"  # where secrets lie
REDIS_PORT = 6379
CPU_PERCENT = 70

_START_SECONDS, _READ_BYTES = (
    120,
    20 * MB,
)  # time to start beside reading the bundle, at so many bytes a second
_EXAMPLE_NODE_PORT = 30080


class ServeParts:
    """Which parts are there. A chart answers the same questions with templates."""

    def __init__(self, chosen: frozenset[str]) -> None:
        self.chosen = chosen

    def when(self, choice: str, then: Sequence[Any], otherwise: Sequence[Any] = ()) -> list[Any]:
        """Items of a list."""
        return list(then if choice in self.chosen else otherwise)

    def fields(self, choice: str, then: Mapping[str, Any]) -> Object:
        """Fields of an object; never its first."""
        return dict(then) if choice in self.chosen else {}

    def pick(self, choice: str, then: str, otherwise: str) -> str:
        return then if choice in self.chosen else otherwise


@dataclass(frozen=True)
class Serving:
    """What is to be served, with every number and name settled or, for a chart, an expression in their place."""

    site: Site
    on: ServeParts
    resources: Any
    redis_memory: Any
    redis_disk: Any
    min_servers: Any
    max_servers: Any
    startup_seconds: Any
    progress_seconds: Any  # after which a rollout counts as stuck
    cpu_percent: Any
    rate: Any  # requests/s of one server
    node_port: Any
    host: str
    ingress_class: str
    tls_secret: str
    token_secret: str
    redis_secret: str
    pull_secret: str
    load_name: str
    dashboard: str

    @classmethod
    def of(cls, site: Site, chosen: frozenset[str]) -> Serving:
        asked, sizing = site.settings.serve, site.sizing
        startup = startup_seconds(sizing.bundle_bytes)
        return cls(
            site=site,
            on=ServeParts(chosen),
            resources=resources(sizing.serve),
            redis_memory=quantity(sizing.redis_bytes),
            redis_disk=quantity(redis_disk_bytes(sizing.redis_bytes)),
            min_servers=sizing.replicas,
            max_servers=max_servers(site),
            startup_seconds=startup,
            progress_seconds=startup + 600,
            cpu_percent=asked.hpa.target or CPU_PERCENT,
            rate=str(asked.hpa.target or rate_of_a_server(site)),
            node_port=asked.node_port or _EXAMPLE_NODE_PORT,
            host=asked.ingress.host or f"{site.name}.example.com",
            ingress_class=asked.ingress.class_name or "",
            tls_secret=asked.tls_secret or f"{site.name}-tls",
            token_secret=asked.token_secret or f"{site.name}-tokens",
            redis_secret=site.settings.redis.auth_secret or f"{site.name}-redis",
            pull_secret=site.settings.image.pull_secret or "",
            load_name=f"{site.name}-load",
            dashboard=json.dumps(dashboard(), indent=1) + "\n",
        )

    @property
    def scheme(self) -> str:
        return self.on.pick("tls", "HTTPS", "HTTP")

    def service(self, component: str) -> str:
        return f"{self.site.name}-{component}"

    def peers(self, role: str) -> str:
        """Address of all servers of a role: a name with one address for each."""
        return f"{self.service(role)}:{GRPC_PORT}"


def startup_seconds(bundle_bytes: int) -> int:
    """How long a server may take to read its bundle, from slow storage, and to warm up."""
    return _START_SECONDS + math.ceil(bundle_bytes / _READ_BYTES)


def redis_disk_bytes(memory: int) -> int:
    """Its log, and the shorter one that it is rewritten to."""
    return math.ceil(3 * memory / GB) * GB


def rate_of_a_server(site: Site) -> int:
    return max(1, math.floor(site.sizing.requests_per_core * site.sizing.serve.cpus))


def max_servers(site: Site) -> int:
    """Storage that one node mounts is no place for more servers than were asked for."""
    times = 1 if site.settings.storage.access == "ReadWriteOnce" else 3
    return site.settings.serve.max_replicas or times * site.sizing.replicas


def chosen(settings: DeployConfig) -> frozenset[str]:
    """What the settings ask for. Who comes from outside the cluster always shows a token."""
    serve = settings.serve
    asked = {
        "split": serve.split,
        "redis": settings.redis.enabled,
        "monitoring": settings.monitoring.enabled,
        "ingress": serve.ingress.host,
        "ingress_class": serve.ingress.class_name,
        "nodeport": serve.node_port,
        "tokens": serve.token_secret or serve.ingress.host or serve.node_port,
        "tls": serve.tls_secret,
        "rate": serve.hpa.metric == "rate",
        "pull_secret": settings.image.pull_secret,
        "storage_class": settings.storage.class_name,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)
