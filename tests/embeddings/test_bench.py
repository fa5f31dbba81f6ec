"""bench embeddings, at sizes that say nothing about speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tables import FOLDER

from recmill.stages.bench.config import EmbeddingsBenchConfig
from recmill.stages.bench.embeddings import bench_embeddings, describe, zipf_ranks


def test_sizes_beyond_the_bound_go_to_disk() -> None:
    result = bench_embeddings(
        EmbeddingsBenchConfig(
            (2_600, 26_000), batch=52, threads=1, memory=1 << 20, repeat=1, data=Path(FOLDER)
        )
    )
    small, large = result["sizes"]
    assert (small["keys"], small["memory_bound"]) == (2_600, None)
    assert (large["keys"], large["memory_bound"], large["resident_mb"]) == (26_000, 1 << 20, 1)
    assert large["payload_bytes"] == 68
    assert (
        min(large[traffic][act] for traffic in ("zipf", "uniform") for act in ("lookup_ns", "update_ns")) > 0
    )
    assert "26,000    0.0 GB" in describe(result)


def test_zipf_ranks_reach_from_the_first_key_to_the_last() -> None:
    ranks = zipf_ranks(np.random.default_rng(0), 1_000, 100_000)
    counts = np.bincount(ranks, minlength=1_000)
    assert len(counts) == 1_000
    assert counts.min() > 0
    assert 1.6 < counts[0] / counts[1] < 2.6
