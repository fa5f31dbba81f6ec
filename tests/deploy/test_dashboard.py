"""Dashboard, autoscaler and ServiceMonitor ask for what a running server tells."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from rendered import base_objects, named
from shop import Shop

from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.templates import read

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
from servers import Running, in_thread

OF_PROMETHEUS = {"instance", "job", "le"}  # labels that no server adds itself
FUNCTIONS = {
    "sum",
    "max",
    "min",
    "count",
    "by",
    "rate",
    "increase",
    "histogram_quantile",
    "label_values",
    "time",
}
ENDINGS = ("_bucket", "_count", "_sum", "")


def dashboard() -> Any:
    return json.loads(read("chart/files/dashboard.json"))


def queries() -> list[str]:
    """Every query of the panels."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def server(shop: Shop) -> Iterator[Running]:
    from recmill.stages.serve.config import ServeConfig as ServerSettings

    running = in_thread(ServerSettings(bundle=shop.bundles, http_port=0, grpc_port=0, threads=1))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def scraped(server: Running) -> str:
    httpx.post(f"{server.http}/v1/recommend", json={"user": "u1", "k": 3}).raise_for_status()
    return httpx.get(f"{server.http}/metrics").text


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every metric, as the server's own telemetry writes them once something has happened."""
    from recmill.stages.serve.messages import Answer, Status
    from recmill.stages.serve.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.watch(
        lambda: Status(
            version="a",
            recipe="quickstart",
            role="all",
            ready=True,
            previous="b",
            canary=None,
            versions=[],
            models=[],
            channels=[],
            manifest={},
            num_items=1,
            num_users=1,
            deltas=0,
            started_at=0.0,
            freshness_seconds=1.0,
        )
    )
    answer = Answer(items=[], degraded=["late: 3 ms"], version="a")
    telemetry.observe("http", "recommend", 200, 0.01, answer, {"recall": 1.0})
    telemetry.observe("http", "recommend", 429, 0.01)
    telemetry.delta(True)
    telemetry.swap(True)
    telemetry.logged("written", 1)
    found: dict[str, set[str]] = {}
    for family in families(telemetry.metrics().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def selectors(query: str) -> list[tuple[str, dict[str, str]]]:
    """Metric names of a query with their conditions; whatever else has a name must be a function or a label."""
    quoted = re.sub(r'"(\\.|[^"\\])*"', lambda text: '"' + re.sub(r"\W", "_", text[0][1:-1]) + '"', query)
    found = []
    for name, inside in re.findall(r"([a-zA-Z_:][\w:]*)\{([^{}]*)\}", quoted):
        pairs = [re.fullmatch(r'\s*(\w+)(=~|!~|!=|=)"(\w*)"\s*', part) for part in inside.split(",")]
        assert all(pairs), f"{query}: cannot read {inside}"
        found.append((name, {pair[1]: pair[2] for pair in pairs if pair}))
    return found


def grouped(query: str) -> set[str]:
    return {label.strip() for inside in re.findall(r"\bby \(([^)]*)\)", query) for label in inside.split(",")}


def is_balanced(query: str) -> bool:
    closing, waiting = {")": "(", "]": "[", "}": "{"}, []
    for sign in re.sub(r'"[^"]*"', "", query):
        if sign in closing.values():
            waiting.append(sign)
        elif sign in closing and (not waiting or waiting.pop() != closing[sign]):
            return False
    return not waiting


def is_told(metric: str, text: str) -> bool:
    """Whether the server declares it; some have no sample before something happened."""
    return any(
        re.search(rf"^# TYPE {re.escape(metric.removesuffix(ending))} ", text, re.MULTILINE) is not None
        for ending in ENDINGS
        if metric.endswith(ending)
    )


@pytest.mark.processes
def test_every_query_names_metrics_that_a_running_server_tells(scraped: str) -> None:
    asked = {name for query in queries() for name, _ in selectors(query)}
    assert len(asked) >= 18
    assert {name for name in asked if not is_told(name, scraped)} == set()
    (variable,) = (one["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query")
    (metric,) = re.findall(r"label_values\((\w+), instance\)", variable)
    assert is_told(metric, scraped)


def test_a_metric_that_no_server_tells_is_seen(scraped: str) -> None:
    assert not is_told("recmill_requets_total", scraped)
    assert not is_told("recmill_requests_bucket", scraped)


def test_every_query_is_well_formed_and_names_labels_that_its_metrics_have(
    labels: dict[str, set[str]],
) -> None:
    for query in queries():
        assert is_balanced(query), query
        asked = selectors(query)
        assert asked, query
        for metric, conditions in asked:
            known = labels[metric] | OF_PROMETHEUS
            assert conditions.keys() | grouped(query) <= known, query
        rest = re.sub(r'"[^"]*"|\{[^{}]*\}|\[[^\]]*\]|by \([^)]*\)', "", query)
        words = set(re.findall(r"[a-zA-Z_]\w*", rest))
        assert words <= FUNCTIONS | {metric for metric, _ in asked}, query


def test_counters_are_asked_for_their_rate_and_histograms_for_their_buckets() -> None:
    for query in queries():
        for metric, _ in selectors(query):
            if metric.endswith(("_total", "_bucket")):
                assert re.search(rf"(rate|increase)\({metric}{{", query), query
            else:
                assert f"rate({metric}" not in query


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= (grouped(target["expr"]) or {"instance"}), panel["title"]


def test_the_dashboard_that_is_deployed_is_that_of_the_package(quickstart: Recipe) -> None:
    objects = base_objects(quickstart, "serve", "monitoring.enabled=true")
    (text,) = named(objects, "ConfigMap", "quickstart-dashboard")["data"].values()
    assert json.loads(text) == dashboard()


def test_the_dashboard_shows_what_was_asked_for() -> None:
    titles = {panel["title"] for panel in dashboard()["panels"]}
    assert {"Requests", "Errors", "Latency", "Degraded answers", "Shed", "Queue", "Memory"} <= titles
    assert {"Stages, p50", "Stages, p95", "Stages, p99", "Versions", "Deltas and versions"} <= titles


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.processes
def test_the_autoscaler_and_prometheus_ask_for_what_the_server_has(
    quickstart: Recipe, server: Running, scraped: str
) -> None:
    objects = base_objects(quickstart, "serve", "serve.hpa.metric=rate", "monitoring.enabled=true")
    (metric,) = named(objects, "HorizontalPodAutoscaler", "quickstart-serve")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "recmill_requests_total"
    assert is_told("recmill_requests_total", scraped)
    (endpoint,) = named(objects, "ServiceMonitor", "quickstart-monitoring")["spec"]["endpoints"]
    assert httpx.get(server.http + endpoint["path"]).status_code == 200
