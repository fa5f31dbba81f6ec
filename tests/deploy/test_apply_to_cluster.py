"""`make cluster-test` without a cluster says that nothing was applied; one that does not answer is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def cluster_test(**environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'deploy'}", "KUBECONFIG": "", **environment}
    command = [sys.executable, str(TESTS / "deploy/apply_to_cluster.py")]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.processes
def test_without_a_cluster_it_is_skipped_and_says_so() -> None:
    done = cluster_test()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped  KUBECONFIG names no cluster: nothing was applied.")


@pytest.mark.processes
def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    done = cluster_test(KUBECONFIG=str(tmp_path / "none"))
    assert done.returncode == 1
    assert "kubectl" in done.stderr
