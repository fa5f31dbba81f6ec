"""bench prepare, and scripts of benchmarks/ that compare in process, at sizes that say nothing about speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill.stages.bench.config import PrepareBenchConfig
from recmill.stages.bench.prepare import bench_prepare, describe


@pytest.mark.processes
def test_prepare_is_measured_beside_the_bare_read_and_a_peer(tmp_path: Path) -> None:
    result = bench_prepare(
        PrepareBenchConfig(rows=2000, workers=1, repeat=2, peer=("pandas_script",), data=tmp_path)
    )
    assert list(result["contestants"]) == ["polars_read", "recmill", "pandas_script"]
    assert all(entry["seconds"] >= 0 for entry in result["contestants"].values())
    assert all(entry["peak_mb"] > 10 for entry in result["contestants"].values())
    assert "x bare read" in describe(result)
