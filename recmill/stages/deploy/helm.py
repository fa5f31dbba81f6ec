"""helm: the chart, whose templates are the same for every recipe, and the values of one recipe."""

from __future__ import annotations

from typing import Any

from recmill.recipe.recipe import Recipe
from recmill.recipe.trust import modules_of
from recmill.stages.deploy.context import DeployContext, quantity, resources
from recmill.stages.deploy.serve import (
    cache_bytes,
    check,
    max_servers,
    misfit,
    rate_of_server,
    redis_disk_bytes,
    startup_seconds,
    storage_port,
)
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import Files, files_in
from recmill.stages.deploy.yaml import dump

CHART = "recmill"
_HEAD = """\
# Values of recipe {recipe}: what `recmill deploy --set` was told, and what `recmill size` computes.
# An empty text or 0: not set. recmill/values.yaml explains each.
"""


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    """recmill/: the chart; values.yaml: what the settings say, and what `recmill size` computes for the recipe."""
    context = DeployContext.of(recipe, settings)
    check(context)
    chart = {f"{CHART}/{name}": text for name, text in files_in("chart").items()}
    return {"values.yaml": _HEAD.format(recipe=recipe.name) + dump(values(context)), **chart}


def values(context: DeployContext) -> dict[str, Any]:
    """Values by the names that `recmill deploy --set` knows; an empty text or 0 stands for "not set"."""
    settings, sizing = context.settings, context.sizing
    return {
        "name": settings.name or "",
        "user": settings.user,
        "group": settings.group,
        "image": {
            "serve": settings.image.serve,
            "redis": settings.image.redis,
            "pull_policy": settings.image.pull_policy,
            "pull_secret": settings.image.pull_secret or "",
        },
        "storage": {
            "class_name": settings.storage.class_name or "",
            "size": quantity(sizing.runs_bytes),
            "access": settings.storage.access,
            "nfs": {"server": settings.storage.nfs.server, "path": settings.storage.nfs.path},
            "host_path": settings.storage.host_path,
        },
        "publish": {
            "url": settings.publish.url or "",
            "secret": settings.publish.secret or "",
            "port": storage_port(settings.publish.url or ""),
            "cache": quantity(cache_bytes(sizing.bundle_bytes)),
        },
        "serve": _serve_values(context),
        "redis": {
            "enabled": settings.redis.enabled,
            "replicas": settings.redis.replicas,
            "auth_secret": settings.redis.auth_secret or "",
            "memory": quantity(sizing.redis_bytes),
            "disk": quantity(redis_disk_bytes(sizing.redis_bytes)),
        },
        "monitoring": {"enabled": settings.monitoring.enabled},
        "recipe": {
            "trust_code": list(modules_of(context.recipe)),
            "can_split": misfit(context.recipe, "split") is None,
            "can_use_redis": misfit(context.recipe, "redis") is None,
        },
    }


def _serve_values(context: DeployContext) -> dict[str, Any]:
    serve, limits = context.settings.serve, resources(context.sizing.serve)["limits"]
    return {
        "replicas": context.sizing.replicas,
        "max_replicas": max_servers(context),
        "cpus": limits["cpu"],
        "memory": limits["memory"],
        "startup_seconds": startup_seconds(context.sizing.bundle_bytes),
        "split": serve.split,
        "hpa": {
            "metric": serve.hpa.metric,
            "target": serve.hpa.target or 0,
            "requests_per_second": rate_of_server(context),
        },
        "node_port": serve.node_port or 0,
        "ingress": {"host": serve.ingress.host or "", "class_name": serve.ingress.class_name or ""},
        "tls_secret": serve.tls_secret or "",
        "token_secret": serve.token_secret or "",
    }
