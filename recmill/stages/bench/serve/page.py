"""The result of bench serve as text and as an HTML page with charts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from recmill.reporting.html.content import (
    Axis,
    Cell,
    Chart,
    Fact,
    Heights,
    HistogramChart,
    LineChart,
    Report,
    ReportTable,
    Section,
    Series,
)
from recmill.reporting.html.environment import environment_section
from recmill.reporting.html.page import write_report
from recmill.reporting.latency import PERCENTILES
from recmill.stages.bench.contest import Result

_COLUMNS = ("load", "requests/s", *PERCENTILES, "max", "refused", "late", "errors")
_BIN_GROWTH = 1.1  # the chart is coarser than the histogram


def describe(result: Result) -> str:
    """The result for people."""
    lines = [
        f"{result['transport']}, k {result['request']['k']} of {result['request']['candidates']} candidates, "
        f"{result['request']['batch']} users a request, deadline {result['deadline_seconds']:g} s; "
        f"{result['machine']['cores']} cores of {result['machine']['processor']}"
    ]
    if result["seconds_to_ready"] is not None:
        lines.append(f"ready after {result['seconds_to_ready']:.2f} s")
    if "generator" in result:
        cost = result["generator"]
        lines.append(
            f"generator alone: {cost['cpu_us_per_request']:.0f} us of CPU a request at {cost['rate']:g}/s, "
            f"p50 {cost['latency']['p50_ms']:.2f} ms against a server that does nothing"
        )
    runs = runs_of(result)
    if runs:
        lines += _written_table(runs)
        lines += _details(runs[-1])
    if "slo" in result:
        lines.append(f"max_rate_at_slo {result['slo']['max_rate_at_slo']:,.1f}/s   ({result['slo']['slo']})")
    if "accuracy" in result:
        lines.append("  ".join(f"{name} {value}" for name, value in result["accuracy"].items()))
    return "\n".join(lines)


def runs_of(result: Result) -> list[Result]:
    """The loads of the config, then the run that confirmed the rate."""
    confirmed = result.get("slo", {}).get("confirmed")
    return [*result.get("loads", []), *([confirmed] if confirmed else [])]


def _row(run: Result) -> tuple[Cell, ...]:
    name = f"{run['clients']} clients" if run["target_rate"] is None else f"{run['target_rate']:,.1f}/s"
    latency = [run["latency"][f"{percentile}_ms"] for percentile in (*PERCENTILES, "max")]
    return (name, run["achieved_rate"], *latency, run["refused"], run["late"], sum(run["errors"].values()))


def _written_table(runs: list[Result]) -> list[str]:
    head = f"{'load':<14}{'requests/s':>11}" + "".join(f"{name:>9}" for name in (*PERCENTILES, "max"))
    lines = [head + f"{'refused':>9}{'late':>6}{'errors':>8}   (ms)"]
    for run in runs:
        name, rate, *latency, refused, late, errors = _row(run)
        times = "".join(f"{'-' if value is None else f'{value:.2f}':>9}" for value in latency)
        lines.append(f"{name:<14}{rate:>11,.1f}{times}{refused:>9}{late:>6}{errors:>8}")
    return lines


def _details(run: Result) -> list[str]:
    server, answers = run["server"], run["answers"]
    stages = server["stages_ms"] or run["traced_stages_ms"]
    lines = []
    if stages:
        lines.append("stages (ms)  " + "  ".join(f"{name} {value:.2f}" for name, value in stages.items()))
    if "cpu_ms_per_request" in server:
        lines.append(
            f"server       {server['cpu_ms_per_request']:.2f} ms of CPU a request, "
            f"{server['resident_bytes'] / 2**20:,.0f} MB resident"
        )
    lines.append(
        f"client       {run['client']['cpu_us_per_request']:.0f} us of CPU a request, "
        f"{run['client']['cpu_cores']:.1%} of a core, sends {run['send_delay']['p99_ms'] or 0:.2f} ms late (p99)"
    )
    if answers["answers"]:
        lines.append(
            f"answers      {answers['items_per_answer']:g} items, {answers['degraded_fraction']:.1%} degraded "
            f"(of {answers['answers']} sampled)"
        )
    return lines


def write_page(path: Path, result: Result) -> None:
    """Latency against rate, the distribution of latencies, times of the stages, all numbers."""
    runs = runs_of(result)
    probes = [
        run
        for run in [*result.get("loads", []), *result.get("slo", {}).get("probes", [])]
        if run["target_rate"]
    ]
    charts: list[Chart] = [
        *([_against_rate(probes)] if probes else []),
        *([_distribution(runs)] if runs else []),
    ]
    sections = [
        Section("Latency", charts=tuple(charts), tables=(_table("Loads, latencies in milliseconds", runs),)),
        _stages_section(runs),
        Section("Every probe", tables=(_probes_table(probes),)),
        environment_section(),
    ]
    write_report(path, Report("recmill bench serve", tuple(_facts(result, runs)), tuple(sections)))


def _facts(result: Result, runs: list[Result]) -> list[Fact]:
    facts = []
    if "slo" in result:
        facts.append(Fact("requests/s at SLO", result["slo"]["max_rate_at_slo"], result["slo"]["slo"]))
    if runs:
        last = runs[-1]
        facts += [Fact("requests/s", last["achieved_rate"]), Fact("p50 ms", last["latency"]["p50_ms"])]
        facts.append(Fact("p99 ms", last["latency"]["p99_ms"]))
        if "resident_bytes" in last["server"]:
            facts.append(Fact("resident MB", round(last["server"]["resident_bytes"] / 2**20)))
            facts.append(Fact("CPU ms a request", last["server"]["cpu_ms_per_request"]))
    facts += [
        Fact(name, value)
        for name, value in result.get("accuracy", {}).items()
        if "@" in name or name == "auc"
    ]
    return facts


def _against_rate(probes: list[Result]) -> LineChart:
    ordered = sorted(probes, key=lambda run: run["target_rate"])

    def series(name: str) -> Series:
        shown = [
            (run["target_rate"], run["latency"][f"{name}_ms"], run.get("violation") or "") for run in ordered
        ]
        points = [point for point in shown if point[1]]
        notes = tuple(note for _, _, note in points)
        return Series(name, tuple(x for x, _, _ in points), tuple(y for _, y, _ in points), notes, dots=True)

    names = [name for name in PERCENTILES if name != "p99.9"]
    return LineChart(
        "Latency against rate",
        Axis("target requests/s", low=0),
        Axis("milliseconds since the request was due", "log"),
        tuple(series(name) for name in names),
    )


def _distribution(runs: list[Result]) -> HistogramChart:
    """Fractions of requests in bins of equal width on a logarithmic axis."""
    shown = runs[-3:]
    edges_of = [edge for run in shown for edge, _ in run["histogram"]] or [1.0]
    edges = [min(edges_of) / _BIN_GROWTH]
    while edges[-1] < max(edges_of):
        edges.append(edges[-1] * _BIN_GROWTH)
    return HistogramChart(
        "Distribution of latencies",
        Axis("milliseconds", "log"),
        Axis("fraction of requests"),
        tuple(edges),
        tuple(Heights(str(_row(run)[0]), _fractions(run["histogram"], edges)) for run in shown),
    )


def _fractions(bins: list[tuple[float, int]], edges: list[float]) -> tuple[float, ...]:
    total = max(1, sum(count for _, count in bins))
    return tuple(
        sum(count for edge, count in bins if low < edge <= high) / total for low, high in pairwise(edges)
    )


def _stages_section(runs: list[Result]) -> Section:
    """Mean times from the server's metrics under load, beside those of single traced requests."""
    last = runs[-1] if runs else {"server": {"stages_ms": {}}, "traced_stages_ms": {}}
    served, traced = last["server"]["stages_ms"], last["traced_stages_ms"]
    rows = tuple((name, served.get(name), traced.get(name)) for name in dict.fromkeys([*served, *traced]))
    return Section(
        "Stages", tables=(ReportTable(("stage", "mean ms under load", "mean ms of traces"), rows),)
    )


def _probes_table(probes: list[Result]) -> ReportTable:
    rows = tuple((*_row(run), run.get("violation", "")) for run in probes)
    return ReportTable((*_COLUMNS, "SLO violation"), rows)


def _table(title: str, runs: list[Result]) -> ReportTable:
    return ReportTable(_COLUMNS, tuple(_row(run) for run in runs), title)
