"""Scores, vectors and recall do not depend on where they were made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_criteo import Criteo, read, write_log

from recmill.stages.score.score import ScoreResult

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from engine_confs import CONFS

ON_RAY = pytest.param("ray", marks=pytest.mark.xdist_group("ray"))
ON_SPARK = pytest.param("spark", marks=pytest.mark.xdist_group("spark"))
pytestmark = [pytest.mark.services, pytest.mark.stages]


@pytest.fixture(params=[ON_RAY, ON_SPARK])
def engine(request: pytest.FixtureRequest) -> str:
    """An engine whose cluster runs already, for all tests."""
    CONFS[request.param]()
    return str(request.param)


def test_a_cluster_writes_what_this_machine_writes(
    criteo: Criteo, tmp_path: Path, engine: str, recmill: Any
) -> None:
    log = write_log(tmp_path / "log", criteo.lines[:600])
    asked = ["--bundle", criteo.bundles, "--data", log, "--partitions", 3, "--keep", "c1"]
    on_cluster = ["--engine", engine, "--memory", "300MB"]
    for into, flags in {"here": [], "there": on_cluster}.items():
        code, _, err = recmill("score", *asked, "--into", tmp_path / into, *flags, "--quiet")
        assert code == 0, err
    here, there = ScoreResult.open(tmp_path / "here"), ScoreResult.open(tmp_path / "there")
    assert there.files("scores") == [
        tmp_path / "there" / f.relative_to(here.path) for f in here.files("scores")
    ]
    assert read(there.path).equals(read(here.path))
    assert there.metrics == here.metrics
    assert there.manifest["job"] == here.manifest["job"]
