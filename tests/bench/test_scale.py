"""bench scale: the forecast is the arithmetic of docs/scaling.md, and the commands that it times are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.stages.bench.config import ScaleBenchConfig
from recmill.stages.bench.forecast import MachineRates, Network, forecast
from recmill.stages.bench.scale import bench_scale, describe

# 10,000 samples/s alone; 1,000 bytes a sample if no key were at home; a million dense weights.
ALONE = MachineRates(
    samples_per_second=10_000,
    wire_bytes_per_sample=500 + 2 * 4_000_000 / 2048,
    measured_with_workers=2,
    dense_parameters=1_000_000,
    batch_size=2048,
)
FREE = Network(gigabits_per_second=1e9, microseconds_per_message=0)


def test_dense_bytes_are_taken_out_of_what_was_measured() -> None:
    assert ALONE.sparse_bytes_per_sample == pytest.approx(1000)


def test_a_network_that_costs_nothing_scales_perfectly() -> None:
    found = forecast(ALONE, FREE, 512, 2048)
    assert found.samples_per_second == pytest.approx(512 * 10_000, rel=1e-3)
    assert (found.limit, found.efficiency) == ("compute", pytest.approx(1, abs=1e-3))


def test_a_step_is_compute_and_the_bytes_that_nothing_hides() -> None:
    # 1 Gbit/s is 125 MB/s: 1,000 rows of 1,000 bytes, 7 of 8 of them from others, take 7 ms; 7 MB of dense sums 56 ms.
    found = forecast(ALONE, Network(1, 0), 8, 1000)
    assert found.seconds_compute == pytest.approx(0.1)
    assert found.seconds_sparse == pytest.approx(0.007)
    assert found.seconds_dense == pytest.approx(0.056)
    assert found.samples_per_second == pytest.approx(8000 / (0.1 + 0.0035 + 0.056))


def test_small_shares_are_bound_by_the_dense_weights() -> None:
    assert forecast(ALONE, Network(1, 0), 64, 32).limit == "network, dense weights"


@pytest.mark.processes
def test_workers_and_engines_are_measured_by_the_commands_of_users(tmp_path: Path) -> None:
    result = bench_scale(ScaleBenchConfig(rows=3000, repeat=1, engine=("local",), data=tmp_path))
    by_name = {(one["name"], one["threads"], one["reads"]): one for one in result["train"]}
    alone, spread = by_name["one process", 1, "Table"], by_name["torchrun", 1, "Table"]
    assert (alone["workers"], alone["wire_bytes_per_sample"]) == (1, 0)
    assert spread["workers"] > 1
    assert (
        spread["wire_bytes_per_sample"]
        > by_name["torchrun, half floats", 1, "Table"]["wire_bytes_per_sample"]
        > 0
    )
    assert spread["auc"] == pytest.approx(alone["auc"], abs=1e-3)
    assert result["prepare"]["local"]["rows_per_second"]["min"] > 0
    assert [one["workers"] for one in result["forecast"]] == [8, 64, 512] * 2
    assert "forecast for 25 Gbit/s" in describe(result)
