"""The same search with its trials on Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_study import FEW_STEPS, SPACE

from recmill.dataset.table import Table

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("ray")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small cluster on this machine, unless one is there."""
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(
            "local", num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False
        )
    yield
    if is_ours:
        ray.shutdown()


def test_a_search_on_ray_gives_what_a_local_one_gives(
    cluster: None, recmill: Any, table: Table, tmp_path: Path
) -> None:
    into = tmp_path / "study"
    overrides = [argument for override in (*FEW_STEPS, SPACE) for argument in ("--set", override)]
    where = ["--table", table.path, "--into", into, "--quiet"]
    code, out, _ = recmill(
        "tune", "criteo-deeprec", *overrides, *where, "--trials", 3, "--jobs", 2, "--engine", "ray"
    )
    assert code == 0, out
    found = [json.loads(line) for line in (into / "trials.jsonl").read_text().splitlines()]
    assert len(found) == 3
    for one in found:
        is_huge = one["values"]["ranking.train.dense.learning_rate"] == 1e30
        assert one["state"] == ("failed" if is_huge else "complete")
        assert "nothing was updated" in one["reason"] if is_huge else len(one["evaluations"]) == 2
    assert (into / "best.toml").is_file()
    assert not (into / "ray").exists()

    # The study is the same file: it goes on here.
    code, out, _ = recmill("tune", "criteo-deeprec", *overrides, *where, "--trials", 4, "--threads", 1)
    assert code == 0, out
    assert len((into / "trials.jsonl").read_text().splitlines()) == 4
