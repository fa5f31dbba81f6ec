"""Transports to outside, and what Prometheus and Grafana are told."""

from __future__ import annotations

from recmill.stages.deploy.parts import Object
from recmill.stages.deploy.serve_network import in_components, ours
from recmill.stages.deploy.serve_pods import GRPC, HTTP
from recmill.stages.deploy.serving import ROLES, SERVE, Serving


def ingress(serving: Serving) -> list[Object]:
    name, on = serving.service(SERVE), serving.on
    backend = {"service": {"name": name, "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    to_tls = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "Ingress",
            "metadata": {**serving.site.metadata(SERVE), **on.fields("tls", {"annotations": to_tls})},
            "spec": {
                "tls": [{"hosts": [serving.host], "secretName": serving.tls_secret}],
                "rules": [{"host": serving.host, "http": {"paths": [path]}}],
                **on.fields("ingress_class", {"ingressClassName": serving.ingress_class}),
            },
        }
    ]


def node_port(serving: Serving) -> list[Object]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": serving.site.metadata("nodeport"),
            "spec": {
                "type": "NodePort",
                "selector": serving.site.selector(SERVE),
                "ports": [
                    {**HTTP, "targetPort": "http", "nodePort": serving.node_port},
                    {**GRPC, "targetPort": "grpc"},
                ],
            },
        }
    ]


def monitoring(serving: Serving) -> list[Object]:
    return [service_monitor(serving), _dashboard_map(serving)]


def service_monitor(serving: Serving) -> Object:
    """Each pod is asked once: of the Services with these labels, one of each component has the port."""
    on, site = serving.on, serving.site
    ca = {"secret": {"name": serving.tls_secret, "key": "ca.crt"}}
    token = {"type": "Bearer", "credentials": {"name": serving.token_secret, "key": "read-token"}}
    components = [SERVE, *on.when("split", ROLES)]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": site.metadata("monitoring"),
        "spec": {
            "jobLabel": "app.kubernetes.io/instance",
            "selector": {"matchLabels": ours(serving), "matchExpressions": [in_components(components)]},
            "endpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "interval": "15s",
                    "scheme": on.pick("tls", "https", "http"),
                    **on.fields("tls", {"tlsConfig": {"ca": ca, "serverName": serving.service(SERVE)}}),
                    **on.fields("tokens", {"authorization": token}),
                }
            ],
        },
    }


def _dashboard_map(serving: Serving) -> Object:
    metadata = serving.site.metadata("dashboard")
    metadata["labels"] = {**metadata["labels"], "grafana_dashboard": "1"}  # what Grafana's sidecar looks for
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"recmill.json": serving.dashboard},
    }
