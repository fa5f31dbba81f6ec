"""What the load generator draws and counts, without any server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recmill.errors import RecmillError
from recmill.reporting.latency import LatencyHistogram, bin_of
from recmill.stages.bench.serve.arrivals import draw_indices, poisson_times
from recmill.stages.bench.serve.load import RequestRecords
from recmill.stages.bench.serve.server import metrics_delta
from recmill.stages.bench.serve.slo import Slo, highest_rate


def test_arrivals_are_poisson_at_the_asked_rate() -> None:
    times = poisson_times(200, 100, seed=1)
    counts = np.histogram(times, bins=100, range=(0, 100))[0]
    gaps = np.diff(times)
    assert abs(len(times) / 20_000 - 1) < 0.03
    assert 0.6 < counts.var() / counts.mean() < 1.6  # a steady beat would have no variance
    assert abs((gaps < 1 / 200).mean() - (1 - np.exp(-1))) < 0.02
    assert times[0] > 0
    assert times[-1] < 100


def test_equal_seeds_give_equal_arrivals() -> None:
    assert np.array_equal(poisson_times(50, 10, seed=7), poisson_times(50, 10, seed=7))
    assert not np.array_equal(poisson_times(50, 10, seed=7)[:100], poisson_times(50, 10, seed=8)[:100])


def test_users_are_drawn_alike_or_by_how_active_they_are() -> None:
    alike = np.bincount(draw_indices(100, 100_000, seed=0), minlength=100)
    by_zipf = np.bincount(draw_indices(100, 100_000, seed=0, zipf=1.0), minlength=100)
    share_of_first = 1 / (1 / np.arange(1, 101)).sum()
    assert alike.max() / alike.min() < 1.3
    assert abs(by_zipf.max() / 100_000 - share_of_first) < 0.01
    assert np.array_equal(draw_indices(9, 50, 3, 1.2), draw_indices(9, 50, 3, 1.2))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_percentiles_are_within_one_percent_of_the_exact_ones(share: float) -> None:
    seconds = np.random.default_rng(0).lognormal(-5, 1, 50_000)
    exact = np.quantile(seconds, share, method="inverted_cdf")
    assert LatencyHistogram.of(seconds).percentile(share) == pytest.approx(exact, rel=0.01)


def test_the_largest_latency_and_the_mean_are_exact() -> None:
    found = LatencyHistogram.of(np.array([0.001, 0.002, 0.7501])).as_dict()
    assert found["max_ms"] == 750.1
    assert found["mean_ms"] == pytest.approx(251.0333, abs=1e-3)
    assert sum(count for _, count in LatencyHistogram.of(np.array([0.001, 0.002, 0.7501])).bins()) == 3


def test_one_latency_falls_into_the_bin_that_many_fall_into() -> None:
    for seconds in (0.0, 1e-6, 1e-5, 0.0123, 1.0, 59.0, 1e9):
        assert LatencyHistogram.of(np.array([seconds])).counts[bin_of(seconds)] == 1


def test_without_answers_there_is_no_latency() -> None:
    assert set(LatencyHistogram.of(np.zeros(0)).as_dict().values()) == {None}


def test_late_answers_count_as_latencies_and_refusals_do_not() -> None:
    records = RequestRecords([0, 0, 0], [0, 0, 0], [0.1, 1.0, 0.001], ["", "late", "refused"])
    assert records.latencies().tolist() == [0.1, 1.0]


def test_answers_count_when_they_come_and_requests_when_they_are_due() -> None:
    records = RequestRecords([0.5, 1.5, 2.5], [0.5, 1.5, 2.5], [1.2, 2.7, 2.9], ["", "", "refused"])
    assert records.due_between(1.0, 2.0).due == [1.5]
    assert records.answered_between(1.0, 2.0) == 1


def limited_server(limit: float) -> Any:
    """A queue with a known limit: latency grows as 1 / (1 - load), and past the limit answers are missing."""

    def probe(rate: float) -> dict[str, Any]:
        load = rate / limit
        latency = 5 / (1 - load) if load < 1 else 1000.0
        return {
            "target_rate": rate,
            "failed": 0,
            "requests": rate * 10,
            "answered": min(rate, limit) * 10,
            "latency": {"p99_ms": latency},
        }

    return probe


@pytest.mark.parametrize("limit", [3.0, 90.0, 4000.0])
def test_the_search_finds_a_planted_limit(limit: float) -> None:
    found = highest_rate(limited_server(limit), Slo.parse("p99=30ms"))
    assert found.best is not None
    assert (
        limit * 5 / 6 / 1.05 <= found.rate <= limit * 5 / 6
    )  # 5 / (1 - load) = 30 at five sixths of the limit
    assert not found.best["violation"]


def test_a_server_that_never_keeps_the_promise_has_no_rate() -> None:
    found = highest_rate(lambda rate: limited_server(1e9)(rate), Slo.parse("p99=1ms"))
    assert (found.rate, found.best) == (0.0, None)
    assert found.probes[0]["violation"].startswith("p99 5.0")


def test_one_hiccup_of_the_machine_is_not_a_limit() -> None:
    number = 0

    def probe(rate: float) -> dict[str, Any]:
        nonlocal number
        number += 1
        return limited_server(100.0)(rate) | ({"latency": {"p99_ms": 500.0}} if number == 2 else {})

    assert highest_rate(probe, Slo.parse("p99=30ms")).rate > 75


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ({"failed": 3}, "3 requests not answered"),
        ({"answered": 970}, "answered 970 of 1000"),
        ({"answered": 978}, ""),  # three are on their way
        ({"latency": {"p99_ms": 31.0}}, "p99 31.0 ms"),
        ({}, ""),
    ],
)
def test_a_broken_promise_says_why(probe: dict[str, Any], reason: str) -> None:
    good = {"target_rate": 100, "requests": 1000, "answered": 1000, "failed": 0, "latency": {"p99_ms": 29.0}}
    assert Slo.parse("p99 = 30ms").violation(good | probe) == reason


@pytest.mark.parametrize("text", ["p99", "p98=30ms", "p99=30", "p99=-1ms", "p99=1.2.3ms", "p99=0ms", ""])
def test_a_promise_that_cannot_be_read_names_what_could(text: str) -> None:
    with pytest.raises(RecmillError, match="--slo must look like p99=30ms"):
        Slo.parse(text)


def test_stages_are_means_of_what_was_counted_meanwhile() -> None:
    before = {
        'recmill_stage_seconds_sum{stage="rank"}': 1.0,
        'recmill_stage_seconds_count{stage="rank"}': 100.0,
    }
    after = {
        'recmill_stage_seconds_sum{stage="rank"}': 1.5,
        'recmill_stage_seconds_count{stage="rank"}': 200.0,
        'recmill_degraded_total{reason="redis"}': 4.0,
    }
    assert metrics_delta(before, after) == {"stages_ms": {"rank": 5.0}, "degraded": {"redis": 4}}
