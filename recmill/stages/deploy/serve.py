"""serve: servers and what stands beside them, as a kustomize base and overlays.

The base has what the settings ask for: manifests/serve/base always, files of manifests/parts by choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from recmill.recipe.kinds import crossed_features
from recmill.recipe.recipe import Recipe
from recmill.recipe.trust import modules_of
from recmill.stages.deploy.context import DeployContext, quantity, resources
from recmill.stages.deploy.settings import DeployConfig, DeployError
from recmill.stages.deploy.sizing import GB, MB
from recmill.stages.deploy.templates import Files, fill, read, render_folder

ROLES = ("recall", "features", "rank")  # servers that `serve` asks when roles run apart
TOKENS_FOLDER, TLS_FOLDER = "/var/run/secrets/recmill/tokens", "/var/run/secrets/recmill/tls"
CPU_PERCENT = 70
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
# Time to start beside reading the bundle, which is read at so many bytes a second.
_START_SECONDS, _READ_BYTES = 120, 20 * MB


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """base: what the settings ask for; overlays: the storage that it mounts."""
    context = DeployContext.of(recipe, settings)
    check(context)
    values = _values(context)
    base = {"servers.yaml": _server(values, context, "serve") + fill(_part("services"), values)}
    for part in ("monitoring", "ingress", "nodeport"):
        if part in enabled_parts(settings):
            base[f"{part}.yaml"] = fill(_part(part), values)
    if settings.redis.enabled:
        redis = "redis" if settings.redis.replicas == 1 else "redis-replicas"
        base["redis.yaml"] = fill(_part(redis) + _part("load"), values)
    if settings.serve.split:
        for role in ROLES:
            server = _server(values, context, role)
            base[f"{role}.yaml"] = server + fill(_part("role"), {**values, "component": role})
        base["roles.yaml"] = fill(_part("roles"), values)
    if settings.publish.url:
        base["storage-network.yaml"] = fill(_part("storage-network"), values)
    files = render_folder("manifests/serve", values)
    files["base/kustomization.yaml"] += "".join(f"  - {name}\n" for name in base)
    files |= {f"base/{name}": text for name, text in base.items()}
    if settings.publish.url:  # servers mount nothing
        return {name: text for name, text in files.items() if not name.startswith("overlays/")}
    return files | context.storage_overlays(folders=["runs"])


def _part(name: str) -> str:
    return read(f"manifests/parts/{name}.yaml")


def _server(values: dict[str, Any], context: DeployContext, component: str) -> str:
    """Deployment, autoscaler and disruption budget of one component."""
    command = serve_command(context, component)
    return fill(_part("server"), {**values, "component": component, "serve_command": command})


# choices


def enabled_parts(settings: DeployConfig) -> frozenset[str]:
    """Optional parts that the settings ask for. A client from outside of the cluster always needs a token."""
    serve = settings.serve
    enabled = {
        "split": serve.split,
        "redis": settings.redis.enabled,
        "monitoring": settings.monitoring.enabled,
        "ingress": serve.ingress.host,
        "nodeport": serve.node_port,
        "tokens": serve.token_secret or serve.ingress.host or serve.node_port,
        "tls": serve.tls_secret,
    }
    return frozenset(name for name, is_enabled in enabled.items() if is_enabled)


def check(context: DeployContext) -> None:
    """Raises when settings and recipe do not go together."""
    settings, servers = context.settings, context.sizing.replicas
    problems = [problem for name in enabled_parts(settings) if (problem := misfit(context.recipe, name))]
    if settings.storage.access == "ReadWriteOnce" and servers > 1 and not settings.publish.url:
        problems.append(
            f"storage.access=ReadWriteOnce lets one node mount the bundles, and this recipe needs {servers} servers. "
            "Add serve.replicas=1, or take ReadWriteMany"
        )
    if max_servers(context) < servers:
        problems.append(f"serve.max_replicas must be at least {servers}, got {settings.serve.max_replicas}")
    if problems:
        raise DeployError("--set", sorted(problems))


def misfit(recipe: Recipe, part: str) -> str | None:
    """Why a recipe cannot be served with this part, if so."""
    scores_rows = not (recipe.log.user and recipe.log.item)
    if part == "redis" and scores_rows:
        return f'redis.enabled needs users and items, and recipe "{recipe.name}" has none: it scores rows'
    if part == "split" and (scores_rows or recipe.retrieval is None or recipe.ranking is None):
        return f'serve.split needs retrieval and ranking of users and items, and recipe "{recipe.name}" lacks some'
    crossed = crossed_features(recipe) if part == "split" else []
    if crossed:
        return (
            f'serve.split lets features and ranking run apart, but feature "{crossed[0]}" looks at users and items '
            "together: leave serve.split out"
        )
    return None


# numbers and names


def _values(context: DeployContext) -> dict[str, Any]:
    serve, sizing, enabled = context.settings.serve, context.sizing, enabled_parts(context.settings)
    tokens, tls = "tokens" in enabled, "tls" in enabled
    by_rate = serve.hpa.metric == "rate"
    startup = startup_seconds(sizing.bundle_bytes)
    replicas, url = context.settings.redis.replicas, context.settings.publish.url
    ports = [_REDIS_PORT] if replicas == 1 else [_REDIS_PORT, _SENTINEL_PORT]
    return {
        **context.values(),
        "runs_folder": None if url else "/runs",
        "runs_claim": None if url else f"{context.name}-runs",
        "cache_folder": "/var/cache/recmill" if url else None,
        "cache_size": quantity(cache_bytes(sizing.bundle_bytes)) if url else None,
        "storage_port": storage_port(url) if url else None,
        "serve_resources": resources(sizing.serve),
        "min_servers": sizing.replicas,
        "max_servers": max_servers(context),
        "cpu_percent": None if by_rate else serve.hpa.target or CPU_PERCENT,
        "rate": str(serve.hpa.target or rate_of_server(context)) if by_rate else None,
        "startup_seconds": startup,
        "progress_seconds": startup + 600,
        "scheme": "HTTPS" if tls else "HTTP",
        "metrics_scheme": "https" if tls else "http",
        "token_secret": (serve.token_secret or f"{context.name}-tokens") if tokens else None,
        "tokens_folder": TOKENS_FOLDER if tokens else None,
        "tls_secret": serve.tls_secret,
        "tls_folder": TLS_FOLDER if tls else None,
        "node_port": serve.node_port,
        "host": serve.ingress.host,
        "ingress_class": serve.ingress.class_name,
        "ingress_secret": serve.tls_secret or f"{context.name}-tls",
        "backend_protocol": "HTTPS" if tls else None,
        "redis_secret": redis_secret(context) if "redis" in enabled else None,
        "redis_replicas": replicas,
        "redis_peers": " ".join(redis_peers(context)),
        "redis_quorum": str(replicas // 2 + 1),
        "redis_ports": [{"protocol": "TCP", "port": port} for port in ports],
        "redis_memory": quantity(sizing.redis_bytes),
        "redis_disk": quantity(redis_disk_bytes(sizing.redis_bytes)),
        "load_command": load_command(context),
        "dashboard": read("chart/files/dashboard.json"),
    }


def redis_secret(context: DeployContext) -> str:
    return context.settings.redis.auth_secret or f"{context.name}-redis"


def startup_seconds(bundle_bytes: int) -> int:
    """How long a server may take to read its bundle, from slow storage, and to warm up."""
    return _START_SECONDS + math.ceil(bundle_bytes / _READ_BYTES)


def redis_disk_bytes(memory: int) -> int:
    """Its log, and the shorter one that it is rewritten to."""
    return math.ceil(3 * memory / GB) * GB


def cache_bytes(bundle_bytes: int) -> int:
    """For the current version, the one before, and the next while it is copied, with their deltas."""
    return math.ceil(4 * bundle_bytes / GB) * GB


def storage_port(url: str) -> int:
    """That the storage answers at: HTTPS, unless the URL names another."""
    options = dict(parse_qsl(urlsplit(url).query))
    port = urlsplit(f"//{options.get('endpoint_override', '')}").port
    return port or (80 if options.get("scheme") == "http" else 443)


def rate_of_server(context: DeployContext) -> int:
    """Requests/s of one server."""
    return max(1, math.floor(context.sizing.requests_per_core * context.sizing.serve.cpus))


def max_servers(context: DeployContext) -> int:
    """Storage that one node mounts is not for more servers than were asked for."""
    times = 1 if context.settings.storage.access == "ReadWriteOnce" else 3
    return context.settings.serve.max_replicas or times * context.sizing.replicas


# commands


def serve_command(context: DeployContext, component: str) -> list[str]:
    enabled = enabled_parts(context.settings)
    command = ["recmill", "serve", "--bundle", context.bundle, "--host", "0.0.0.0", "--http-port", "8080"]
    command += ["--grpc-port", "8081", "--processes", "$(CPUS)", "--drain-seconds", "30"]
    command += [*_role_flags(context, component, enabled), *_trust_flags(context.recipe)]
    if "redis" in enabled:
        command += ["--features", _redis_url(context)]
    if "tokens" in enabled:
        command += ["--token-file", f"{TOKENS_FOLDER}/tokens"]
    if "tls" in enabled:
        command += ["--tls-cert", f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key"]
    if not enabled & {"tokens", "tls"}:
        command.append("--insecure")  # the network policy is what keeps others out
    return command


def _role_flags(context: DeployContext, component: str, enabled: frozenset[str]) -> list[str]:
    if component != "serve":
        return ["--role", component, "--threads", "1"]
    if "split" not in enabled:
        return ["--threads", "1"]  # of each process: Python lets one run at a time
    flags = ["--role", "recommend", "--threads", "16"]  # it waits for others
    for role in ROLES:
        flags += [f"--{role}-at", f"{context.name}-{role}:8081"]
    if "tokens" in enabled:
        flags += ["--peer-token-file", f"{TOKENS_FOLDER}/read-token"]
    return [*flags, "--peer-ca", f"{TLS_FOLDER}/ca.crt"] if "tls" in enabled else flags


def load_command(context: DeployContext) -> list[str]:
    command = ["recmill", "load", "--bundle", context.bundle, "--features", _redis_url(context)]
    return [*command, "--resume", "--quiet", *_trust_flags(context.recipe)]


def _redis_url(context: DeployContext) -> str:
    if context.settings.redis.replicas == 1:
        return f"redis://:$(REDIS_PASSWORD)@{context.name}-redis:{_REDIS_PORT}"
    sentinels = ",".join(f"{peer}:{_SENTINEL_PORT}" for peer in redis_peers(context))
    return f"redis+sentinel://:$(REDIS_PASSWORD)@{sentinels}/features?sentinel_password=$(REDIS_PASSWORD)"


def redis_peers(context: DeployContext) -> list[str]:
    """The name of each replica of Redis."""
    redis = f"{context.name}-redis"
    return [f"{redis}-{number}.{redis}" for number in range(context.settings.redis.replicas)]


def _trust_flags(recipe: Recipe) -> Sequence[str]:
    """Functions that the recipe itself names are the user's own."""
    modules = modules_of(recipe)
    return ["--trust-code", ",".join(modules)] if modules else []
