"""Scores, vectors and recall do not depend on where they were made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_criteo import Criteo, read, write_log

from recmill.stages.score.score import ScoreResult

ON_RAY = pytest.param("ray", marks=pytest.mark.xdist_group("ray"))
ON_SPARK = pytest.param("spark", marks=pytest.mark.xdist_group("spark"))
pytestmark = [pytest.mark.services, pytest.mark.stages]


def score(*arguments: object) -> None:
    """The command in a process of its own: a cluster must not stay behind in this one."""
    command = [sys.executable, "-m", "recmill", "score", *map(str, arguments), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", [ON_RAY, ON_SPARK])
def test_a_cluster_writes_what_this_machine_writes(criteo: Criteo, tmp_path: Path, engine: str) -> None:
    log = write_log(tmp_path / "log", criteo.lines[:600])
    asked = ["--bundle", criteo.bundles, "--data", log, "--partitions", 3, "--keep", "c1"]
    score(*asked, "--into", tmp_path / "here")
    score(*asked, "--into", tmp_path / "there", "--engine", engine, "--workers", 2, "--memory", "300MB")
    here, there = ScoreResult.open(tmp_path / "here"), ScoreResult.open(tmp_path / "there")
    assert there.files("scores") == [
        tmp_path / "there" / f.relative_to(here.path) for f in here.files("scores")
    ]
    assert read(there.path).equals(read(here.path))
    assert there.metrics == here.metrics
    assert there.manifest["job"] == here.manifest["job"]
