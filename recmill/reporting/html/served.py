"""The section about served lists: first of all whether they beat simpler baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recmill.reporting.html.content import Axis, BarChart, Fact, Heights, ReportTable, Section

_SHOWN = ("recall@10", "ndcg@10", "hit@10", "mrr@10", "recall@50")


def served_verdict(served: Mapping[str, Any]) -> str:
    """One sentence: is the list better than most popular, and than the best of the other baselines?"""
    baselines = served["baselines"]
    others = [name for name in baselines if name != "popular"]
    best = max(others, key=lambda name: baselines[name]["recall@10"], default=None)
    popular = _compared(served, "popular", "the most popular items")
    beside = "" if best is None else f", and {_compared(served, best, best)}"
    return (
        f"The served list is {popular}{beside}: recall@10 for {served['users']:,} users of {served['split']}."
    )


def _compared(served: Mapping[str, Any], name: str, shown: str) -> str:
    base = served["baselines"][name]["recall@10"]
    mean, margin = served["differences"][name]
    if abs(mean) <= margin:
        return f"as good as {shown} within what can be told ({mean:+.4f} ± {margin:.4f})"
    word = "better" if mean > 0 else "worse"
    by = f"{abs(mean) / base:.0%} ± {margin / base:.0%}" if base else f"{abs(mean):.4f} ± {margin:.4f}"
    return f"{word} than {shown} by {by}"


def served_facts(served: Mapping[str, Any]) -> tuple[Fact, ...]:
    margin = served["metrics"]["recall@10_margin"]
    where = f"± {margin:.4f}, {served['users']:,} users of {served['split']}"
    popular = served["baselines"]["popular"]["recall@10"]
    return (
        Fact("served recall@10", served["metrics"]["recall@10"], where),
        Fact("most popular, recall@10", popular, "the same users"),
    )


def served_sections(served: Mapping[str, Any]) -> tuple[Section, ...]:
    """Lists next to baselines, by group of users, by stage, and the fitted parameters of recall."""
    metrics, names = served["metrics"], [name for name in _SHOWN if name in served["metrics"]]
    lists = {"served": metrics, **served["baselines"]}
    mean, margin = served["differences"]["popular"]
    text = (
        "Lists of held-out users by the pipeline that will serve them, "
        f"as of the rows before {served['split']}. "
        f"Recall@10 differs from most popular by {mean:+.4f} (95% interval ± {margin:.4f}, paired by user)."
    )
    left_out = "   ".join(f"{name} {number:,}" for name, number in served["left_out"].items())
    beside = ReportTable(
        ("list", *names),
        tuple((name, *(values.get(one, 0.0) for one in names)) for name, values in lists.items()),
    )
    groups = ReportTable(
        ("users", "number", *names),
        tuple(
            (name, values["users"], *(values.get(one, 0.0) for one in names))
            for name, values in served["segments"].items()
        ),
    )
    chart = BarChart(
        "Recall@10 of the served list and of baselines",
        Axis("recall@10", low=0),
        tuple(lists),
        (Heights("recall@10", tuple(values["recall@10"] for values in lists.values())),),
    )
    return (
        Section("Served list", (text, f"Left out: {left_out}."), charts=(chart,), tables=(beside, groups)),
        Section(
            "Served list: stages and channels", (_channels(served["recall"]),), tables=(_stages(served),)
        ),
    )


def _stages(served: Mapping[str, Any]) -> ReportTable:
    rows = [*served["stages"].items(), *served["facts"].items()]
    return ReportTable(("relevant items that are still there, and what is shown", ""), tuple(rows))


def _channels(recall: Mapping[str, Any]) -> str:
    weights = recall["fusion"]["weights"]
    used = ", ".join(f"{name} {value:g}" for name, value in weights.items())
    return f"Weights of channels, fitted on eval: {used}. A channel without a weight added nothing there."
