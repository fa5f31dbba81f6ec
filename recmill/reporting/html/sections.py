"""Sections of the stages' reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recmill.metrics import NUM_BINS, Array, BinaryMetrics, ScoreSums, bin_middles
from recmill.number_metrics import NumberSums
from recmill.reporting.html.content import (
    Axis,
    BarChart,
    Cell,
    Fact,
    Heights,
    HistogramChart,
    LineChart,
    ReportTable,
    Section,
    Series,
)

_MOST_SEGMENT_ROWS = 50
_NUM_SCORE_BINS = 48
_TAIL = 0.0005  # fraction of the rows that may lie beyond each end of the histogram
_NUM_CURVE_POINTS = 200
_OWN_NAMES = {"step", "time_ms"}

# Names in a run's history that share a chart: title -> label of the y axis, and name -> label of its line.
CURVES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Loss": ("log loss", {"loss": "training", "log_loss": "held-out"}),
    "AUC": ("AUC", {"auc": "ROC AUC", "pr_auc": "PR AUC"}),
    "R2": ("R2", {"r2": "held-out"}),
    "Normalised entropy": ("normalised entropy", {"normalised_entropy": "held-out"}),
    "Throughput": ("samples per second", {"samples_per_second": "training"}),
    "Data wait": ("share of the time", {"data_wait": "training"}),
}
_FROM_ZERO = {"Throughput", "Data wait"}


def ranking_sections(
    sums: ScoreSums, segments: Mapping[str, Mapping[str, BinaryMetrics]] | None = None
) -> tuple[Section, ...]:
    """The fit of probabilities to the labels; `segments` are metrics by column and its value."""
    if not sums.num_rows:
        return (Section("Scores", ("No rows were measured.",)),)
    whole = Section(
        "Scores",
        facts=_metric_facts(sums.metrics()),
        charts=(
            roc_chart(sums),
            precision_recall_chart(sums),
            calibration_chart(sums),
            score_histogram(sums),
        ),
        tables=(_calibration_table(sums),),
    )
    tables = tuple(_segment_table(column, values) for column, values in (segments or {}).items())
    return (whole, Section("Segments", tables=tables)) if tables else (whole,)


def number_sections(sums: NumberSums) -> tuple[Section, ...]:
    """The fit of predicted numbers to the labels."""
    if not sums.num_rows:
        return (Section("Predictions", ("No rows were measured.",)),)
    metrics = sums.metrics()
    facts = (
        Fact("R2", metrics.r2, "above 0 beats a constant"),
        Fact("RMSE", metrics.rmse, f"constant: {metrics.constant_rmse:.4g}"),
        Fact("MAE", metrics.mae),
        Fact("rank correlation", metrics.rank_correlation),
        Fact("calibration", metrics.calibration, "predicted / observed"),
        Fact("rows", metrics.rows),
        Fact("mean label", metrics.mean),
    )
    curve = sums.curve()
    predicted, observed, _ = zip(*curve, strict=True)
    chart = LineChart(
        "Predicted and observed",
        Axis("mean prediction"),
        Axis("mean label"),
        (Series("tenths of the rows, by prediction", predicted, observed, dots=True),),
        diagonal="calibrated",
    )
    columns = ("mean prediction", "mean label", "rows")
    table = ReportTable(columns, tuple(curve), "Predictions in numbers", folded=True)
    return (Section("Predictions", facts=facts, charts=(chart,), tables=(table,)),)


def roc_chart(sums: ScoreSums) -> LineChart:
    false, true = sums.roc(_NUM_CURVE_POINTS)
    name = f"model, AUC {sums.auc():.4f}"
    return LineChart(
        "ROC",
        Axis("false positive rate", low=0, high=1),
        Axis("true positive rate", low=0, high=1),
        (Series(name, tuple(false.tolist()), tuple(true.tolist())),),
        diagonal="chance",
        square=True,
    )


def precision_recall_chart(sums: ScoreSums) -> LineChart:
    """Precision over recall, with the precision of a random order as baseline."""
    true, shown = np.cumsum(sums.positives[::-1]), np.cumsum((sums.positives + sums.negatives)[::-1])
    recall = true / max(1, sums.num_positive)
    chosen = np.unique(np.searchsorted(recall, np.linspace(1 / _NUM_CURVE_POINTS, 1, _NUM_CURVE_POINTS)))
    chosen = chosen[chosen < len(recall)]
    precision = true[chosen] / np.maximum(1, shown[chosen])
    rate = sums.num_positive / max(1, sums.num_rows)
    return LineChart(
        "Precision and recall",
        Axis("recall", low=0, high=1),
        Axis("precision", low=0, high=1),
        (
            Series(
                f"model, area {sums.pr_auc():.4f}", tuple(recall[chosen].tolist()), tuple(precision.tolist())
            ),
            Series("chance", (0.0, 1.0), (rate, rate)),
        ),
        square=True,
    )


def calibration_chart(sums: ScoreSums) -> LineChart:
    """Observed over predicted rates, in buckets of about equally many rows."""
    curve = sums.calibration_curve()
    highest = max((max(predicted, observed) for predicted, observed, _ in curve), default=1.0)
    end = min(1.0, highest * 1.05) or 1.0
    points = Series(
        "model",
        tuple(predicted for predicted, _, _ in curve),
        tuple(observed for _, observed, _ in curve),
        tuple(f"{rows:,} rows" for _, _, rows in curve),
        dots=True,
    )
    axes = Axis("predicted rate", low=0, high=end), Axis("observed rate", low=0, high=end)
    return LineChart("Calibration", *axes, (points,), diagonal="perfect", square=True)


def score_histogram(sums: ScoreSums) -> HistogramChart:
    """Distributions of the scores of positives and negatives, as fractions of each class.

    The outer bins hold the tails.
    """
    first, last = _score_range(sums.positives + sums.negatives)
    cuts = np.unique(np.linspace(first, last, _NUM_SCORE_BINS + 1).round().astype(int))
    classes = (("positives", sums.positives), ("negatives", sums.negatives))
    return HistogramChart(
        "Scores of positives and negatives",
        Axis("score", "logit"),
        Axis("share of the class"),
        tuple(bin_middles()[np.minimum(cuts, NUM_BINS - 1)].tolist()),
        tuple(Heights(name, _shares(counts, cuts)) for name, counts in classes),
    )


def _score_range(rows: Array) -> tuple[int, int]:
    """A range that holds nearly all rows, with a little room on both sides."""
    room = NUM_BINS // 128
    total = np.cumsum(rows)
    first, last = np.searchsorted(total, np.array([_TAIL, 1 - _TAIL]) * total[-1])
    return max(0, int(first) - room), min(NUM_BINS, int(last) + 1 + room)


def _shares(counts: Array, cuts: Array) -> tuple[float, ...]:
    inner = counts[cuts[0] : cuts[-1]].copy()
    inner[0] += counts[: cuts[0]].sum()
    inner[-1] += counts[cuts[-1] :].sum()
    shares = np.add.reduceat(inner, cuts[:-1] - cuts[0]) / max(1, int(counts.sum()))
    return tuple(shares.tolist())


def training_sections(history: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """Curves over steps from a run's history; null leaves a gap, and unknown names get their own chart."""
    lines = [line for line in history if "step" in line and "event" not in line]
    if not lines:
        return (Section("Training", ("No steps were logged.",)),)
    names = [name for line in lines for name, value in line.items() if _is_plotted(name, value)]
    groups = _grouped(list(dict.fromkeys(names)))
    charts = tuple(_history_chart(title, label, series, lines) for title, (label, series) in groups.items())
    last = {name: line[name] for line in lines for name in line if _is_plotted(name, line[name])}
    facts = (
        Fact("steps", int(lines[-1]["step"])),
        *(Fact(_spaced(name), value) for name, value in last.items()),
    )
    return (Section("Training", ("The numbers below are the last ones of the run.",), facts, charts),)


def _is_plotted(name: str, value: Any) -> bool:
    return name not in _OWN_NAMES and isinstance(value, int | float) and not isinstance(value, bool)


def _grouped(names: Sequence[str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Chart titles -> axis label and lines: the known ones first, then recall@5 and recall@10 together, and so on."""
    groups: dict[str, tuple[str, dict[str, str]]] = {}
    for title, (label, known) in CURVES.items():
        found = {name: called for name, called in known.items() if name in names}
        if found:
            groups[title] = (label, found)
    for name in names:
        if not any(name in known for _, known in CURVES.values()):
            title = _spaced(_kind(name))
            groups.setdefault(title, (title, {}))[1][name] = name
    return groups


def _history_chart(
    title: str, label: str, series: Mapping[str, str], lines: Sequence[Mapping[str, Any]]
) -> LineChart:
    drawn = []
    for name, called in series.items():
        having = [line for line in lines if name in line]
        steps = tuple(float(line["step"]) for line in having)
        values = tuple(float(line[name]) if line[name] is not None else math.nan for line in having)
        drawn.append(Series(called, steps, values, dots=len(having) <= 40))
    return LineChart(title, Axis("step"), Axis(label, low=0 if title in _FROM_ZERO else None), tuple(drawn))


def retrieval_sections(
    means: Mapping[str, float],
    margins: Mapping[str, float] | None = None,
    comparison: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Section, ...]:
    """Metrics such as recall@10 over users, and those of other contestants by name."""
    margins, comparison = margins or {}, comparison or {}
    table = ReportTable(
        ("metric", "mean over users", "± 95%"),
        tuple((name, float(mean), margins.get(name)) for name, mean in means.items()),
    )
    charts = _cutoff_charts(means)
    ours = Section("Retrieval", charts=charts, tables=(table,))
    return (ours, _comparison_section(means, margins, comparison)) if comparison else (ours,)


def _cutoff_charts(means: Mapping[str, float]) -> tuple[LineChart, ...]:
    """Each metric over its cutoffs; nothing when there is only one cutoff."""
    curves: dict[str, dict[int, float]] = {}
    for name, mean in means.items():
        kind, _, cutoff = name.partition("@")
        if cutoff.isdigit():
            curves.setdefault(kind, {})[int(cutoff)] = float(mean)
    series = tuple(
        Series(kind, tuple(map(float, sorted(curve))), tuple(curve[k] for k in sorted(curve)), dots=True)
        for kind, curve in curves.items()
        if len(curve) > 1
    )
    chart = LineChart("Metrics by cutoff", Axis("items shown (k)"), Axis("mean over users", low=0), series)
    return (chart,) if series else ()


def _comparison_section(
    means: Mapping[str, float], margins: Mapping[str, float], comparison: Mapping[str, Mapping[str, float]]
) -> Section:
    """A chart for each kind of metric that others have too; the table holds all."""
    everyone = {"this run": means, **comparison}
    shared = [name for name in means if any(name in found for found in comparison.values())]
    charts = []
    for kind in dict.fromkeys(map(_kind, shared)):
        labels = tuple(name for name in shared if _kind(name) == kind)
        ours = _heights("this run", means, labels, margins)
        others = tuple(_heights(who, found, labels, {}) for who, found in comparison.items())
        charts.append(
            BarChart(f"Comparison: {_spaced(kind)}", Axis("mean over users"), labels, (ours, *others))
        )
    names = tuple(dict.fromkeys(name for found in everyone.values() for name in found))
    rows = tuple((name, *(found.get(name) for found in everyone.values())) for name in names)
    return Section("Comparison", charts=tuple(charts), tables=(ReportTable(("metric", *everyone), rows),))


def _heights(
    who: str, found: Mapping[str, float], names: Sequence[str], margins: Mapping[str, float]
) -> Heights:
    values = tuple(float(found.get(name, math.nan)) for name in names)
    return Heights(who, values, tuple(float(margins.get(name, 0.0)) for name in names))


def _kind(name: str) -> str:
    """The metric without its cutoff: recall of recall@10."""
    return name.split("@")[0]


def tradeoff_chart(
    quality: str,
    cost: str,
    trials: Sequence[tuple[float, float, str]],
    front: Sequence[tuple[float, float, str]],
    own: Sequence[tuple[float, float, str]] = (),
) -> LineChart:
    """Every trial as a point (cost, quality, text), and a line through the Pareto front.

    `own` is the starting point: the recipe itself.
    """
    series = [_points("front", sorted(front)), _points("trials", trials, line=False)]
    series += [_points("recipe as it was", own, line=False)] if own else []
    title = f"{_spaced(quality)} against {_spaced(cost)}"
    return LineChart(title, Axis(_spaced(cost)), Axis(_spaced(quality)), tuple(series))


def slice_chart(
    key: str, quality: str, trials: Sequence[tuple[float, float, str]], is_log: bool
) -> LineChart:
    """Quality over the values of one key."""
    axis = Axis(key, "log" if is_log else "linear")
    return LineChart(key, axis, Axis(_spaced(quality)), (_points("trials", trials, line=False),))


def _points(name: str, points: Sequence[tuple[float, float, str]], line: bool = True) -> Series:
    x, y, notes = zip(*points, strict=True) if points else ((), (), ())
    return Series(name, tuple(map(float, x)), tuple(map(float, y)), tuple(notes), dots=True, line=line)


def tables_section(statistics: Sequence[Mapping[str, Cell]]) -> Section:
    """Embedding tables, one row each; the columns are the keys in the order they first appear."""
    columns = tuple(dict.fromkeys(name for row in statistics for name in row))
    if not columns:
        return Section("Embedding tables", ("There are none.",))
    rows = tuple(tuple(row.get(name) for name in columns) for row in statistics)
    return Section("Embedding tables", tables=(ReportTable(tuple(map(_spaced, columns)), rows),))


def recipe_section(text: str) -> Section:
    """The recipe of the run."""
    return Section("Recipe", code=text)


def _metric_facts(metrics: BinaryMetrics) -> tuple[Fact, ...]:
    margin = f"± {metrics.auc_margin:.4f} (95%)" if math.isfinite(metrics.auc_margin) else "one class only"
    return (
        Fact("AUC", metrics.auc, margin),
        Fact("PR AUC", metrics.pr_auc),
        Fact("log loss", metrics.log_loss),
        Fact("normalised entropy", metrics.normalised_entropy, "below 1 beats a constant"),
        Fact("calibration", metrics.calibration, "predicted / observed"),
        Fact("accuracy", metrics.accuracy, f"constant: {metrics.constant_accuracy:.4f}"),
        Fact("rows", metrics.rows),
        Fact("positive rate", metrics.positive_rate),
    )


def _calibration_table(sums: ScoreSums) -> ReportTable:
    columns = ("predicted rate", "observed rate", "rows")
    return ReportTable(columns, tuple(sums.calibration_curve()), "Calibration in numbers", folded=True)


def _segment_table(column: str, values: Mapping[str, BinaryMetrics]) -> ReportTable:
    """The largest segments first."""
    columns = (
        column,
        "rows",
        "positive rate",
        "AUC",
        "± 95%",
        "log loss",
        "normalised entropy",
        "calibration",
    )
    ordered = sorted(values.items(), key=lambda pair: (-pair[1].rows, pair[0]))
    rows = tuple(_segment_row(value, metrics) for value, metrics in ordered[:_MOST_SEGMENT_ROWS])
    more = f", the {len(rows)} largest of {len(values):,}" if len(values) > len(rows) else ""
    return ReportTable(columns, rows, f"By {column}{more}")


def _segment_row(value: str, metrics: BinaryMetrics) -> tuple[Cell, ...]:
    """One segment; with one class only it has no AUC."""
    has_auc = math.isfinite(metrics.auc_margin)
    return (
        value,
        metrics.rows,
        metrics.positive_rate,
        metrics.auc if has_auc else None,
        metrics.auc_margin if has_auc else None,
        metrics.log_loss,
        metrics.normalised_entropy,
        metrics.calibration,
    )


def _spaced(name: str) -> str:
    return name.replace("_", " ")
