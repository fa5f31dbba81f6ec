"""The Grafana dashboard: what docs/metrics.md lists, as panels. Works wherever a Prometheus asks the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REQUESTS = "recmill_requests_total"
_WATCHING = "health|metrics|live|ready|status|users|console|openapi"  # methods that only look at the server
_WELL = "2..|3..|OK"
_SHED = "429|504|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED"
_QUANTILES = (0.5, 0.95, 0.99)
_WIDTH, _HEIGHT = 24, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SERVERS = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """A title, what it is about, its queries with their legends, and a unit of Grafana's."""

    title: str
    about: str
    queries: Sequence[tuple[str, str]]
    unit: str
    kind: str = "timeseries"
    width: int = 8


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON."""
    return {
        "uid": "recmill-serving",
        "title": "recmill: serving",
        "tags": ["recmill"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _instance_variable()]},
        "panels": _placed([_drawn(number, panel) for number, panel in enumerate(PANELS, 1)]),
    }


def queries() -> list[str]:
    """Every query of the dashboard, also those of its variables."""
    return [_INSTANCES, *(query for panel in PANELS for query, _ in panel.queries)]


# queries


def _series(metric: str, *conditions: str) -> str:
    return f"{metric}{{{', '.join([_SERVERS, *conditions])}}}"


def _rate(metric: str, by: str, *conditions: str) -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({_series(metric, *conditions)}[$__rate_interval]))"


def _quantile(share: float, metric: str, by: str, *conditions: str) -> str:
    return f"histogram_quantile({share:g}, {_rate(f'{metric}_bucket', by, *conditions)})"


def _quantiles(metric: str, *conditions: str) -> list[tuple[str, str]]:
    return [
        (_quantile(share, metric, "le, method", *conditions), f"{{{{method}}}} p{share * 100:g}")
        for share in _QUANTILES
    ]


def _share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


_INSTANCES = "label_values(recmill_ready, instance)"
_WORK = f'method!~"{_WATCHING}"'

PANELS = (
    Panel(
        "Servers ready",
        "Warm, and not draining.",
        [(f"sum({_series('recmill_ready')})", "ready")],
        "none",
        "stat",
        4,
    ),
    Panel(
        "Freshness",
        "Age of the newest training row that answers know, of the server that knows least.",
        [(f"max({_series('recmill_freshness_seconds')})", "age")],
        "s",
        "stat",
        4,
    ),
    Panel(
        "Items",
        "That can be recommended.",
        [(f"min({_series('recmill_items')})", "items")],
        "none",
        "stat",
        4,
    ),
    Panel(
        "Versions",
        "Which versions servers have: more than one `current` for longer than a minute wants a look.",
        [(f"count by (version, use) ({_series('recmill_version')})", "{{use}} {{version}}")],
        "none",
        "bargauge",
        12,
    ),
    Panel(
        "Requests",
        "Answered and refused, by transport and method.",
        [(_rate(REQUESTS, "transport, method", _WORK), "{{transport}} {{method}}")],
        "reqps",
    ),
    Panel(
        "Errors",
        "Wrong requests and failures; what was shed is in a panel of its own.",
        [
            (
                _rate(REQUESTS, "transport, method, status", f'status!~"{_WELL}|{_SHED}"'),
                "{{transport}} {{method}} {{status}}",
            )
        ],
        "reqps",
    ),
    Panel(
        "Shed",
        "Turned away to protect the rest: overloaded, or too late.",
        [(_rate("recmill_refused_total", "transport, reason"), "{{transport}} {{reason}}")],
        "reqps",
    ),
    Panel("Latency", "Whole requests.", _quantiles("recmill_request_seconds", _WORK), "s"),
    *(
        Panel(
            f"Stages, p{share * 100:g}",
            "Where the time of an answer goes.",
            [(_quantile(share, "recmill_stage_seconds", "le, stage"), "{{stage}}")],
            "s",
        )
        for share in _QUANTILES
    ),
    Panel(
        "Degraded answers",
        "Less than they should be, by reason; and lookups that the feature store failed to answer.",
        [
            (_rate("recmill_degraded_total", "reason"), "{{reason}}"),
            (_rate("recmill_store_errors_total", ""), "store errors"),
        ],
        "reqps",
    ),
    Panel(
        "Queue",
        "Requests waiting or being answered.",
        [(f"sum by (instance) ({_series('recmill_queue_length')})", "{{instance}}")],
        "none",
    ),
    Panel(
        "Deltas and versions",
        "Applied and refused in five minutes; and deltas on top of the current version.",
        [
            (f"sum by (outcome) (increase({_series('recmill_deltas_total')}[5m]))", "deltas {{outcome}}"),
            (f"sum by (outcome) (increase({_series('recmill_swaps_total')}[5m]))", "versions {{outcome}}"),
            (f"max({_series('recmill_deltas_in_version')})", "deltas in version"),
        ],
        "none",
    ),
    Panel(
        "Shadow",
        "Share of shadowed requests that another version answers otherwise.",
        [
            (
                _share(
                    _rate("recmill_shadow_differences_total", ""), _rate("recmill_shadow_requests_total", "")
                ),
                "other",
            )
        ],
        "percentunit",
    ),
    Panel(
        "Request log",
        "Rows written, and dropped because the disk is slow or full.",
        [(_rate("recmill_request_log_rows_total", "outcome"), "{{outcome}}")],
        "cps",
    ),
    Panel(
        "Memory",
        "Resident memory of a server's processes together; files that they map count in each.",
        [(f"sum by (instance) ({_series('process_resident_memory_bytes')})", "{{instance}}")],
        "bytes",
    ),
    Panel(
        "Uptime",
        "Since the server started.",
        [(f"time() - {_series('recmill_started_seconds')}", "{{instance}}")],
        "s",
    ),
)


# Grafana's JSON


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _instance_variable() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": _SOURCE,
        "query": _INSTANCES,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _drawn(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": panel.width, "x": 0, "y": 0},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.kind != "timeseries",
                "range": panel.kind == "timeseries",
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def _placed(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Side by side, in rows."""
    x = y = 0
    for panel in panels:
        place = panel["gridPos"]
        if x + place["w"] > _WIDTH:
            x, y = 0, y + _HEIGHT
        place["x"], place["y"] = x, y
        x += place["w"]
    return panels
