"""Sections made from small known results."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from html_check import Document

from recmill.metrics import ScoreSums
from recmill.reporting.html.content import Report, Section
from recmill.reporting.html.environment import cpu, environment, environment_section
from recmill.reporting.html.page import page
from recmill.reporting.html.sections import (
    ranking_sections,
    recipe_section,
    retrieval_sections,
    score_histogram,
    tables_section,
    tradeoff_chart,
    training_sections,
)


def sums_of(labels, scores):
    sums = ScoreSums()
    sums.add(np.array(labels), np.array(scores))
    return sums


SMALL = sums_of([1, 0, 1, 0], [0.8, 0.4, 0.6, 0.2])


def facts_of(section):
    return {fact.name: fact.value for fact in section.facts}


def charts_of(section):
    return {chart.title: chart for chart in section.charts}


def test_ranking_shows_metrics_and_four_charts():
    (section,) = ranking_sections(SMALL)
    facts = facts_of(section)
    assert (facts["AUC"], facts["PR AUC"], facts["rows"], facts["positive rate"]) == (1.0, 1.0, 4, 0.5)
    charts = charts_of(section)
    assert list(charts) == ["ROC", "Precision and recall", "Calibration", "Scores of positives and negatives"]
    roc = charts["ROC"].series[0]
    assert (roc.x[0], roc.y[0]) == (0, 0)
    assert (roc.x[-1], roc.y[-1]) == (1, 1)
    assert charts["ROC"].diagonal == "chance"


def test_precision_is_the_share_of_positives_among_the_shown():
    (section,) = ranking_sections(sums_of([1, 0, 1, 0], [0.8, 0.6, 0.4, 0.2]))
    model, chance = charts_of(section)["Precision and recall"].series
    assert list(zip(model.x, model.y, strict=True)) == [(0.5, 1.0), (1.0, 2 / 3)]
    assert chance.y == (0.5, 0.5)


def test_calibration_points_carry_their_rows():
    (section,) = ranking_sections(sums_of([1, 0, 0, 0], [0.25] * 4))
    (series,) = charts_of(section)["Calibration"].series
    assert series.x == (pytest.approx(0.25, abs=1e-3),)
    assert series.y == (0.25,)
    assert series.notes == ("4 rows",)
    assert section.tables[0].rows == ((pytest.approx(0.25, abs=1e-3), 0.25, 4),)


def test_score_histograms_are_shares_of_each_class():
    histogram = score_histogram(sums_of([1] * 10 + [0] * 90, [0.9] * 10 + [0.1] * 45 + [0.2] * 45))
    positives, negatives = (np.array(series.values) for series in histogram.series)
    assert positives.sum() == pytest.approx(1)
    assert negatives.sum() == pytest.approx(1)
    assert sorted(negatives[negatives > 0].tolist()) == [0.5, 0.5]
    assert len(positives) == len(histogram.edges) - 1
    (bin_of_positives,) = np.flatnonzero(positives)
    assert histogram.edges[bin_of_positives] <= 0.9 <= histogram.edges[bin_of_positives + 1]


def test_one_far_score_does_not_stretch_the_histogram():
    random = np.random.default_rng(1)
    scores = np.append(random.uniform(0.2, 0.8, 10_000), 1e-7)
    histogram = score_histogram(sums_of(np.arange(10_001) % 2, scores))
    assert histogram.edges[0] > 0.1
    assert sum(histogram.series[0].values) + sum(histogram.series[1].values) == pytest.approx(2)


def test_segments_are_listed_by_size_and_one_class_has_no_auc():
    small, empty = sums_of([1, 0], [0.75, 0.25]).metrics(), sums_of([0], [0.25]).metrics()
    segments = ranking_sections(SMALL, {"country": {"nl": empty, "de": SMALL.metrics(), "fr": small}})[1]
    (table,) = segments.tables
    assert [row[:2] for row in table.rows] == [("de", 4), ("fr", 2), ("nl", 1)]
    assert [row[3] for row in table.rows] == [1.0, 1.0, None]


def test_only_the_largest_segments_are_listed():
    metrics = SMALL.metrics()
    (_, segments) = ranking_sections(SMALL, {"user": {f"{user:03}": metrics for user in range(200)}})
    assert len(segments.tables[0].rows) == 50
    assert segments.tables[0].title == "By user, the 50 largest of 200"


@pytest.mark.parametrize(
    "sums", [ScoreSums(), sums_of([1, 1], [0.5, 0.5]), sums_of([0], [0.0]), sums_of([1], [1.0]), SMALL]
)
def test_degenerate_results_still_make_a_page(sums):
    Document(page(Report("Run", sections=ranking_sections(sums))))


def test_training_draws_known_names_together_and_unknown_ones_apart():
    (section,) = training_sections(
        [
            {"step": 1, "time_ms": 5, "loss": 0.7, "recall@5": 0.1, "recall@10": 0.2},
            {"step": 2, "time_ms": 9, "loss": 0.5, "log_loss": 0.6, "auc": 0.75, "learning_rate": 0.1},
        ]
    )
    charts = charts_of(section)
    assert {title: [series.name for series in chart.series] for title, chart in charts.items()} == {
        "Loss": ["training", "held-out"],
        "AUC": ["ROC AUC"],
        "recall": ["recall@5", "recall@10"],
        "learning rate": ["learning_rate"],
    }
    training, held_out = charts["Loss"].series
    assert (training.x, training.y) == ((1.0, 2.0), (0.7, 0.5))
    assert (held_out.x, held_out.y) == ((2.0,), (0.6,))
    assert facts_of(section)["steps"] == 2
    assert facts_of(section)["recall@10"] == 0.2


def test_a_null_in_the_history_is_a_gap():
    (section,) = training_sections(
        [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"event": "stop", "step": 2}]
    )
    (series,) = charts_of(section)["Loss"].series
    assert series.x == (1.0, 2.0)
    assert math.isnan(series.y[1])


def test_a_run_without_steps_says_so():
    assert training_sections([]) == (Section("Training", ("No steps were logged.",)),)


def test_retrieval_shows_means_with_margins_and_curves_over_cutoffs():
    (section,) = retrieval_sections({"recall@5": 0.1, "recall@10": 0.2, "mrr@10": 0.3}, {"recall@5": 0.01})
    assert section.tables[0].rows == (
        ("recall@5", 0.1, 0.01),
        ("recall@10", 0.2, None),
        ("mrr@10", 0.3, None),
    )
    (chart,) = section.charts
    assert [(series.name, series.x, series.y) for series in chart.series] == [
        ("recall", (5.0, 10.0), (0.1, 0.2))
    ]


def test_contestants_are_compared_on_what_both_have():
    means, others = (
        {"recall@10": 0.2, "mrr@10": 0.3},
        {"most popular": {"recall@10": 0.1}, "best": {"ndcg@10": 0.9}},
    )
    section = retrieval_sections(means, {"recall@10": 0.02}, others)[1]
    (chart,) = section.charts
    assert chart.labels == ("recall@10",)
    assert [series.name for series in chart.series] == ["this run", "most popular", "best"]
    assert chart.series[0].margins == (0.02,)
    assert section.tables[0].columns == ("metric", "this run", "most popular", "best")
    assert section.tables[0].rows == (
        ("recall@10", 0.2, 0.1, None),
        ("mrr@10", 0.3, None, None),
        ("ndcg@10", None, None, 0.9),
    )
    Document(page(Report("Run", sections=(section,))))


def test_embedding_tables_are_rows_with_every_column_there_is():
    (table,) = tables_section([{"table": "C1", "keys": 5}, {"table": "C2", "hit_rate": 0.5}]).tables
    assert table.columns == ("table", "keys", "hit rate")
    assert table.rows == (("C1", 5, None), ("C2", None, 0.5))
    assert tables_section([]) == Section("Embedding tables", ("There are none.",))


def test_a_recipe_is_shown_as_it_is():
    assert recipe_section("[log]\n") == Section("Recipe", code="[log]\n")


def test_the_environment_names_versions_processor_and_date():
    found = environment()
    assert {"recmill", "Python", "numpy", "processor", "cores", "SIMD", "date"} <= set(found)
    assert found["numpy"] == np.__version__
    assert [row[0] for row in environment_section().tables[0].rows] == list(found)


def test_the_processor_is_read_as_linux_tells_it(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\n")
    assert cpu(info) == ("Fast CPU", frozenset({"fpu", "avx2", "fma"}))
    assert cpu(tmp_path / "missing")[1] == frozenset()


def test_all_of_a_report_is_frozen():
    section = recipe_section("")
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.code = "other"


def test_trials_are_points_and_the_front_is_a_line_through_the_unbeaten():
    trials = [(10.0, 0.8, "a"), (4.0, 0.79, "b"), (6.0, 0.78, "c")]
    chart = tradeoff_chart("auc", "seconds", trials, trials[:2], trials[:1])
    front, points, own = chart.series
    assert (front.x, front.y, front.line) == ((4.0, 10.0), (0.79, 0.8), True)
    assert (points.x, points.line, own.name) == ((10.0, 4.0, 6.0), False, "recipe as it was")
    html = page(Report("x", sections=(Section("y", charts=(chart,)),)))
    Document(html)
    assert html.count('<path class="line') == 2  # one of them in the legend
    # Two of the front, three trials, the recipe itself, and two in the legend.
    assert html.count('<circle class="dot') == 8


def test_a_search_without_an_end_draws_nothing():
    assert "no data" in page(
        Report("x", sections=(Section("y", charts=(tradeoff_chart("auc", "seconds", [], []),)),))
    )
