"""Who may talk to whom: nobody, but for what is needed."""

from __future__ import annotations

from collections.abc import Sequence

from recmill.stages.deploy.parts import GRPC_PORT, HTTP_PORT, Object
from recmill.stages.deploy.serving import REDIS_PORT, ROLES, SERVE, Serving

MONITORING_NAMESPACE = "monitoring"  # where Prometheus runs


def network(serving: Serving) -> list[Object]:
    """Nobody may, but for what the other policies allow."""
    on, site = serving.on, serving.site
    components = [
        SERVE,
        *on.when("split", ROLES),
        *on.when("redis", ["redis", "load"]),
    ]
    selected = {"matchLabels": ours(serving), "matchExpressions": [in_components(components)]}
    deny = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": site.metadata("deny"),
        "spec": {"podSelector": selected, "policyTypes": ["Ingress", "Egress"]},
    }
    ports = _ports([HTTP_PORT, GRPC_PORT])
    may_ask = [
        {"from": [{"podSelector": {}}], "ports": ports},  # of the same namespace
        *on.when("ingress", [{"from": [{"namespaceSelector": {}}], "ports": _ports([HTTP_PORT])}]),
        *on.when("nodeport", [{"ports": ports}]),
        *from_prometheus(serving),
    ]
    asks = [
        to_dns(),
        *on.when("redis", [to_component(serving, "redis", REDIS_PORT)]),
        *on.when("split", [to_component(serving, role, GRPC_PORT) for role in ROLES]),
    ]
    return [deny, policy(serving, SERVE, may_ask, asks)]


def policy(serving: Serving, component: str, ingress: list[Object], egress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": serving.site.metadata(component),
        "spec": {
            "podSelector": {"matchLabels": serving.site.selector(component)},
            "policyTypes": ["Ingress", "Egress"],
            **({"ingress": ingress} if ingress else {}),
            **({"egress": egress} if egress else {}),
        },
    }


def _ports(numbers: Sequence[int], protocol: str = "TCP") -> list[Object]:
    return [{"protocol": protocol, "port": number} for number in numbers]


def in_components(components: Sequence[str]) -> Object:
    return {"key": "app.kubernetes.io/component", "operator": "In", "values": list(components)}


def from_components(serving: Serving, components: Sequence[str], ports: Sequence[int]) -> Object:
    peer = {"matchLabels": ours(serving), "matchExpressions": [in_components(components)]}
    return {"from": [{"podSelector": peer}], "ports": _ports(ports)}


def from_prometheus(serving: Serving) -> list[Object]:
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": MONITORING_NAMESPACE}}
    return serving.on.when(
        "monitoring", [{"from": [{"namespaceSelector": namespace}], "ports": _ports([HTTP_PORT])}]
    )


def to_component(serving: Serving, component: str, port: int) -> Object:
    peer = {"matchLabels": serving.site.selector(component)}
    return {"to": [{"podSelector": peer}], "ports": _ports([port])}


def to_dns() -> Object:
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    return {"to": [{"namespaceSelector": namespace}], "ports": [*_ports([53], "UDP"), *_ports([53])]}


def ours(serving: Serving) -> dict[str, str]:
    """The labels of all components of this app."""
    selector = serving.site.selector(SERVE)
    return {name: value for name, value in selector.items() if not name.endswith("/component")}
