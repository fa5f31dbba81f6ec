"""docker: an image that trains, a small one that serves without torch, and a stack of containers for a laptop."""

from __future__ import annotations

import json

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.dashboard import dashboard
from recmill.stages.deploy.parts import BUNDLES, GRPC_PORT, HTTP_PORT, RUNS, Files, Object, Site
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.yaml import dumps

PROMETHEUS = "prom/prometheus:v3.5.0"
GRAFANA = "grafana/grafana:12.1.0"
PROMETHEUS_PORT, GRAFANA_PORT, REDIS_PORT = 9090, 3000, 6379

_CONTEXT = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "native", "recmill")
_DOCKERFILE = """\
# syntax=docker/dockerfile:1
# Two images from the root of the source tree:
#   docker build -f deploy/docker/Dockerfile --target train -t {train} .
#   docker build -f deploy/docker/Dockerfile --target serve -t {serve} .
# Versions are those of constraints.txt.
ARG PYTHON=3.11-slim-bookworm

FROM python:${{PYTHON}} AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY native native
COPY recmill recmill
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM wheel AS train-packages
# For Spark: --build-arg EXTRAS=export,ray,spark --build-arg SYSTEM="libgomp1 openjdk-17-jre-headless"
ARG EXTRAS=export,ray
# The plain torch may bring CUDA along; PyTorch's index of CPU builds does not: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/recmill
RUN /opt/recmill/bin/pip install "$(ls /wheels/recmill-*.whl)[${{EXTRAS}}]"

FROM wheel AS serve-packages
RUN python -m venv /opt/recmill
RUN /opt/recmill/bin/pip install "$(ls /wheels/recmill-*.whl)[serve,redis,otel]"

FROM python:${{PYTHON}} AS program
ARG SYSTEM=libgomp1
RUN apt-get update && apt-get install --yes --no-install-recommends ${{SYSTEM}} && rm -rf /var/lib/apt/lists/* \\
    && groupadd --gid {group} recmill \\
    && useradd --uid {user} --gid {group} --home-dir /tmp --no-create-home --shell /usr/sbin/nologin recmill
ENV PATH=/opt/recmill/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
STOPSIGNAL SIGTERM
ENTRYPOINT ["recmill"]

FROM program AS train
COPY --from=train-packages /opt/recmill /opt/recmill
USER {user}:{group}
CMD ["--help"]

FROM program AS serve
COPY --from=serve-packages /opt/recmill /opt/recmill
USER {user}:{group}
EXPOSE {http_port} {grpc_port}
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \\
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:{http_port}/health/ready')"]
# Only this container's own address; say --host, with TLS and tokens or --insecure, to be reached from outside.
CMD ["serve", "--bundle", "{bundles}"]
"""


def render(recipe: Recipe, settings: DeployConfig) -> Files:
    site = Site.of(recipe, settings)
    return {
        "Dockerfile": dockerfile(site),
        "Dockerfile.dockerignore": dockerignore(),
        "docker-compose.yaml": dumps([compose(site)]),
        "prometheus/prometheus.yml": dumps([_prometheus()]),
        "grafana/provisioning/datasources/prometheus.yaml": dumps([_datasources()]),
        "grafana/provisioning/dashboards/recmill.yaml": dumps([_dashboards()]),
        "grafana/dashboards/recmill.json": json.dumps(dashboard(), indent=1) + "\n",
    }


def dockerfile(site: Site) -> str:
    settings = site.settings
    return _DOCKERFILE.format(
        train=settings.image.train,
        serve=settings.image.serve,
        user=settings.user,
        group=settings.group,
        http_port=HTTP_PORT,
        grpc_port=GRPC_PORT,
        bundles=BUNDLES,
    )


def dockerignore() -> str:
    """Nothing but what is copied goes to the builder."""
    return "\n".join(["*", *(f"!{name}" for name in _CONTEXT), "**/__pycache__", "**/*.so"]) + "\n"


def compose(site: Site) -> Object:
    """For a laptop: ports are this machine's alone, so that neither tokens nor TLS are needed."""
    return {
        "name": site.name,
        "services": {
            "redis": _redis(site),
            "load": _load(site),
            "server": _server(site),
            "prometheus": _prometheus_service(),
            "grafana": _grafana_service(),
        },
        "volumes": {"prometheus": {}, "grafana": {}},
    }


def _confined() -> Object:
    return {
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],
    }


def _our_service(site: Site, command: list[str]) -> Object:
    return {
        "image": site.settings.image.serve,
        "build": {
            "context": "${RECMILL_SOURCE:-../..}",
            "dockerfile": "deploy/docker/Dockerfile",
            "target": "serve",
        },
        "command": command,
        "user": f"{site.settings.user}:{site.settings.group}",
        "volumes": [f"${{RECMILL_RUNS:-../../runs/{site.recipe.name}}}:{RUNS}:ro"],
        **_confined(),
    }


def _redis_url() -> str:
    return f"redis://redis:{REDIS_PORT}"


def _load(site: Site) -> Object:
    """Fills Redis and ends."""
    command = ["load", "--bundle", BUNDLES, "--features", _redis_url(), "--quiet"]
    return {
        **_our_service(site, command),
        "healthcheck": {"disable": True},
        "depends_on": {"redis": {"condition": "service_healthy"}},
    }


def _server(site: Site) -> Object:
    command = ["serve", "--bundle", BUNDLES, "--host", "0.0.0.0", "--insecure", "--features", _redis_url()]
    return {
        **_our_service(site, command),
        "restart": "unless-stopped",
        "stop_grace_period": "40s",
        "ports": [f"127.0.0.1:{port}:{port}" for port in (HTTP_PORT, GRPC_PORT)],
        "depends_on": {"load": {"condition": "service_completed_successfully"}},
    }


def _redis(site: Site) -> Object:
    return {
        "image": site.settings.image.redis,
        "command": ["redis-server", "--save", "", "--appendonly", "no"],
        "user": "999:1000",
        "restart": "unless-stopped",
        **_confined(),
        "healthcheck": {
            "test": ["CMD", "redis-cli", "-p", str(REDIS_PORT), "ping"],
            "interval": "2s",
            "timeout": "2s",
            "retries": 15,
        },
    }


def _prometheus_service() -> Object:
    return {
        "image": PROMETHEUS,
        "user": "65534:65534",
        "restart": "unless-stopped",
        "ports": [f"127.0.0.1:{PROMETHEUS_PORT}:{PROMETHEUS_PORT}"],
        "volumes": [
            "./prometheus/prometheus.yml:/etc/prometheus/prometheus.yml:ro",
            "prometheus:/prometheus",
        ],
        **_confined(),
    }


def _grafana_service() -> Object:
    return {
        "image": GRAFANA,
        "user": "472:472",
        "restart": "unless-stopped",
        "ports": [f"127.0.0.1:{GRAFANA_PORT}:{GRAFANA_PORT}"],
        # Everybody on this machine may look, nobody may change.
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        "volumes": [
            "./grafana/provisioning:/etc/grafana/provisioning:ro",
            "./grafana/dashboards:/etc/grafana/dashboards:ro",
            "grafana:/var/lib/grafana",
        ],
        "depends_on": ["prometheus"],
        **_confined(),
    }


def _prometheus() -> Object:
    return {
        "global": {"scrape_interval": "5s"},
        "scrape_configs": [{"job_name": "recmill", "static_configs": [{"targets": [f"server:{HTTP_PORT}"]}]}],
    }


def _datasources() -> Object:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "uid": "prometheus",
                "type": "prometheus",
                "access": "proxy",
                "url": f"http://prometheus:{PROMETHEUS_PORT}",
                "isDefault": True,
            }
        ],
    }


def _dashboards() -> Object:
    return {
        "apiVersion": 1,
        "providers": [{"name": "recmill", "type": "file", "options": {"path": "/etc/grafana/dashboards"}}],
    }
