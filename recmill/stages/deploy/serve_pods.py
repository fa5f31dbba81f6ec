"""Servers, roles apart and Redis: pods with their Services, probes and scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recmill.recipe.trust import modules_of
from recmill.stages.deploy.dashboard import REQUESTS
from recmill.stages.deploy.parts import (
    BUNDLES,
    GRPC_PORT,
    HTTP_PORT,
    RECIPE_FOLDER,
    Object,
    Site,
    container,
    pod_spec,
    pod_template,
    volumes,
)
from recmill.stages.deploy.serve_network import from_components, from_prometheus, policy, to_component, to_dns
from recmill.stages.deploy.serving import REDIS_PORT, ROLES, SERVE, TLS, TOKENS, Serving

PRE_STOP_SECONDS, DRAIN_SECONDS, GRACE_SECONDS = 5, 30, 60
HTTP, GRPC = {"name": "http", "port": HTTP_PORT}, {"name": "grpc", "port": GRPC_PORT}
_THREADS = 1  # of each process: Python lets one run at a time
_WAITING_THREADS = 16  # of the role that waits for others
_REDIS_SCRIPT = f"""\
set -eu
umask 077
digest=$(printf %s "$REDISCLI_AUTH" | sha256sum | cut -d ' ' -f 1)
printf 'user default on #%s ~* &* +@all\\n' "$digest" > /tmp/users.conf
exec redis-server /tmp/users.conf --bind 0.0.0.0 --port {REDIS_PORT} --dir /data --appendonly yes --save '' \\
  --maxmemory "$((MEMORY_BYTES / 5 * 4))" --maxmemory-policy noeviction
"""
_REDIS_ANSWERS = f'[ "$(redis-cli -h 127.0.0.1 -p {REDIS_PORT} ping)" = PONG ]'


def servers(serving: Serving) -> list[Object]:
    """The servers that clients ask: everything in one process, or the role that puts the others together."""
    return [
        deployment(serving, SERVE),
        service(serving, SERVE, [HTTP, GRPC]),
        service(serving, SERVE, [GRPC], headless=True, name=f"{serving.service(SERVE)}-headless"),
        autoscaler(serving, SERVE),
        disruption_budget(serving, SERVE),
    ]


def roles(serving: Serving) -> list[Object]:
    found = []
    for role in ROLES:
        found += [
            deployment(serving, role),
            service(serving, role, [HTTP, GRPC], headless=True),
            autoscaler(serving, role),
            disruption_budget(serving, role),
            policy(
                serving,
                role,
                ingress=[from_components(serving, [SERVE], [GRPC_PORT]), *from_prometheus(serving)],
                egress=[to_dns(), *serving.on.when("redis", [to_component(serving, "redis", REDIS_PORT)])],
            ),
        ]
    return found


def deployment(serving: Serving, component: str) -> Object:
    site = serving.site
    made = _without_recipe(
        container(
            site,
            component,
            command(serving, component),
            site.sizing.serve,
            image=site.settings.image.serve,
            runs="read",
            env=[
                _from_limits("CPUS", "limits.cpu"),
                *serving.on.when("redis", [_password(serving, "REDIS_PASSWORD")]),
            ],
            mounts=[
                *serving.on.when("tokens", [{"name": "tokens", "mountPath": TOKENS, "readOnly": True}]),
                *serving.on.when("tls", [{"name": "tls", "mountPath": TLS, "readOnly": True}]),
            ],
            resources=serving.resources,
            ports=[_container_port("http", HTTP_PORT), _container_port("grpc", GRPC_PORT)],
            **probes(serving),
            # Others still send requests until they have heard that this pod ends.
            lifecycle={"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        )
    )
    secrets = [
        *serving.on.when("tokens", [_secret_volume("tokens", serving.token_secret)]),
        *serving.on.when("tls", [_secret_volume("tls", serving.tls_secret)]),
    ]
    spec = pod_spec(
        site,
        [made],
        volumes=[*_volumes(serving), *secrets],
        terminationGracePeriodSeconds=GRACE_SECONDS,
        topologySpreadConstraints=[_spread(site, component, key) for key in _PLACES],
        **_pull_secrets(serving),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": site.metadata(component),
        # How many there are is the autoscaler's to say.
        "spec": {
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": serving.progress_seconds,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": site.selector(component)},
            "template": pod_template(site, component, spec),
        },
    }


def command(serving: Serving, component: str) -> list[str]:
    """Without tokens and TLS the network policy is what keeps others out, so that --insecure is meant."""
    on = serving.on
    if component == SERVE:
        role = on.when("split", _recommend(serving), ["--threads", str(_THREADS)])
    else:
        role = ["--role", component, "--threads", str(_THREADS)]
    return [
        "recmill",
        "serve",
        "--bundle",
        BUNDLES,
        "--host",
        "0.0.0.0",
        "--http-port",
        str(HTTP_PORT),
        "--grpc-port",
        str(GRPC_PORT),
        "--processes",
        "$(CPUS)",
        "--drain-seconds",
        str(DRAIN_SECONDS),
        *role,
        *_trusted(serving),
        *on.when("redis", ["--features", redis_url(serving)]),
        *on.when("tokens", ["--token-file", f"{TOKENS}/tokens"]),
        *on.when("tls", ["--tls-cert", f"{TLS}/tls.crt", "--tls-key", f"{TLS}/tls.key"]),
        *on.when("tokens", [], on.when("tls", [], ["--insecure"])),
    ]


def _trusted(serving: Serving) -> list[str]:
    """Functions that the recipe itself names are the user's own."""
    modules = modules_of(serving.site.recipe)
    return ["--trust-code", ",".join(modules)] if modules else []


def _recommend(serving: Serving) -> list[str]:
    addresses = [part for role in ROLES for part in (f"--{role}-at", serving.peers(role))]
    return [
        "--role",
        "recommend",
        "--threads",
        str(_WAITING_THREADS),
        *addresses,
        *serving.on.when("tokens", ["--peer-token-file", f"{TOKENS}/read-token"]),
        *serving.on.when("tls", ["--peer-ca", f"{TLS}/ca.crt"]),
    ]


def probes(serving: Serving) -> Object:
    """Started once the bundle is read and warm; then ready or not; killed only when it answers nothing at all."""

    def asks(path: str, period: int, failures: Any, timeout: int) -> Object:
        return {
            "httpGet": {"path": path, "port": "http", "scheme": serving.scheme},
            "periodSeconds": period,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": asks("/health/ready", 1, serving.startup_seconds, 1),
        "readinessProbe": asks("/health/ready", 5, 2, 2),
        "livenessProbe": asks("/health/live", 10, 6, 5),
    }


def service(
    serving: Serving, component: str, ports: Sequence[Object], headless: bool = False, name: str | None = None
) -> Object:
    """Headless: its name has the address of each pod, so that gRPC clients balance over them."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": serving.site.metadata(component, name),
        "spec": {
            "type": "ClusterIP",
            **({"clusterIP": "None"} if headless else {}),
            "selector": serving.site.selector(component),
            "ports": [{**port, "targetPort": port["name"]} for port in ports],
        },
    }


def autoscaler(serving: Serving, component: str) -> Object:
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": serving.cpu_percent}}
    rate = {"metric": {"name": REQUESTS}, "target": {"type": "AverageValue", "averageValue": serving.rate}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": serving.site.metadata(component),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": serving.service(component),
            },
            "minReplicas": serving.min_servers,
            "maxReplicas": serving.max_servers,
            "metrics": serving.on.when(
                "rate", [{"type": "Pods", "pods": rate}], [{"type": "Resource", "resource": cpu}]
            ),
        },
    }


def disruption_budget(serving: Serving, component: str) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": serving.site.metadata(component),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": serving.site.selector(component)},
        },
    }


# Redis


def redis(serving: Serving) -> list[Object]:
    clients = serving.on.when("split", [SERVE, *ROLES, "load"], [SERVE, "load"])
    return [
        _redis_set(serving),
        service(serving, "redis", [{"name": "redis", "port": REDIS_PORT}], headless=True),
        policy(serving, "redis", ingress=[from_components(serving, clients, [REDIS_PORT])], egress=[]),
        _load_job(serving),
        policy(serving, "load", ingress=[], egress=[to_dns(), to_component(serving, "redis", REDIS_PORT)]),
    ]


def redis_url(serving: Serving) -> str:
    return f"redis://:$(REDIS_PASSWORD)@{serving.service('redis')}:{REDIS_PORT}"


def _redis_set(serving: Serving) -> Object:
    site = serving.site
    answers = {"exec": {"command": ["sh", "-c", _REDIS_ANSWERS]}, "timeoutSeconds": 3}
    amounts = {"cpu": "1", "memory": serving.redis_memory}
    made = _without_recipe(
        container(
            site,
            "redis",
            ["sh", "-c", _REDIS_SCRIPT],
            site.sizing.serve,
            image=site.settings.image.redis,
            runs="none",
            env=[_password(serving, "REDISCLI_AUTH"), _from_limits("MEMORY_BYTES", "limits.memory")],
            mounts=[{"name": "redis", "mountPath": "/data"}],
            resources={"requests": amounts, "limits": amounts},
            ports=[_container_port("redis", REDIS_PORT)],
            startupProbe={**answers, "periodSeconds": 2, "failureThreshold": 150},  # it reads its log first
            readinessProbe={**answers, "periodSeconds": 5, "failureThreshold": 2},
            livenessProbe={**answers, "periodSeconds": 10, "failureThreshold": 6},
        )
    )
    spec = pod_spec(
        site,
        [made],
        volumes=volumes(site, data=False, runs=False, recipe=False),
        **_pull_secrets(serving),
    )
    claim = {
        "metadata": {"name": "redis"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **serving.on.fields("storage_class", {"storageClassName": site.settings.storage.class_name}),
            "resources": {"requests": {"storage": serving.redis_disk}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": site.metadata("redis"),
        "spec": {
            "serviceName": serving.service("redis"),
            "replicas": 1,
            "selector": {"matchLabels": site.selector("redis")},
            "template": pod_template(site, "redis", spec),
            "volumeClaimTemplates": [claim],
        },
    }


def _load_job(serving: Serving) -> Object:
    """Fills Redis from the bundle; an interrupted load goes on where it was."""
    site = serving.site
    made = _without_recipe(
        container(
            site,
            "load",
            [
                "recmill",
                "load",
                "--bundle",
                BUNDLES,
                "--features",
                redis_url(serving),
                "--resume",
                "--quiet",
                *_trusted(serving),
            ],
            site.sizing.serve,
            image=site.settings.image.serve,
            runs="read",
            env=[_password(serving, "REDIS_PASSWORD")],
            resources=serving.resources,
        )
    )
    spec = pod_spec(
        site,
        [made],
        volumes=_volumes(serving),
        restart_policy="OnFailure",
        **_pull_secrets(serving),
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": site.metadata("load", serving.load_name),
        "spec": {
            "backoffLimit": 6,
            "ttlSecondsAfterFinished": 3600,
            "template": pod_template(site, "load", spec),
        },
    }


# small parts


_PLACES = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


def _spread(site: Site, component: str, key: str) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": site.selector(component)},
    }


def _without_recipe(made: Object) -> Object:
    """A server reads its bundle, which has the recipe."""
    recipe = {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True}
    return {**made, "volumeMounts": [mount for mount in made["volumeMounts"] if mount != recipe]}


def _volumes(serving: Serving) -> list[Object]:
    return volumes(serving.site, data=False, recipe=False)


def _secret_volume(name: str, secret: str) -> Object:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _container_port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _from_limits(name: str, resource: str) -> Object:
    """The container's own limit; cores are rounded up."""
    return {"name": name, "valueFrom": {"resourceFieldRef": {"resource": resource, "divisor": "1"}}}


def _password(serving: Serving, name: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": serving.redis_secret, "key": "password"}}}


def _pull_secrets(serving: Serving) -> Object:
    return serving.on.fields("pull_secret", {"imagePullSecrets": [{"name": serving.pull_secret}]})
