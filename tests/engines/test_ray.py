"""Ray's own ways: whose cluster it is, and what is left when we are done."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray_cluster import shared_ray

from recmill.engines.ray import RayCluster
from recmill.errors import RecmillError

FIXTURES = Path(__file__).parents[1] / "fixtures"
DIGEST = "0add8e5d7448b81f091700f0b217b5eb"

pytestmark = [pytest.mark.services, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def shared() -> Any:
    return shared_ray()


def prepare_shop(into: Path, *more: str, **changes: str) -> subprocess.CompletedProcess[str]:
    arguments = [
        "prepare",
        "quickstart",
        "--data",
        str(FIXTURES / "shop"),
        "--into",
        str(into),
        "--engine",
        "ray",
    ]
    command = [sys.executable, "-m", "recmill", *arguments, *more]
    environment = {**os.environ, **changes}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_cluster_of_tests_needs_no_folder_of_another_cluster(shared: Any) -> None:
    default = Path(ray._common.utils.get_default_ray_temp_dir())
    assert default == Path(shared.head_node.get_temp_dir_path())
    assert (default / "ray_current_cluster").read_text() == shared.address


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of what Ray Data sets by itself
def test_a_cluster_that_the_program_uses_already_is_left_alone(tmp_path: Path) -> None:
    before = ray.data.DataContext.get_current()
    cluster = RayCluster(tmp_path)
    assert cluster.parallelism() == 2
    assert cluster.each([1, 2], lambda number, part: part, lambda number: None) == [1, 2]
    cluster.close()
    assert ray.is_initialized()
    assert ray.data.DataContext.get_current() is before


def test_another_address_than_the_one_in_use_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecmillError, match=r"connected to a Ray cluster already; leave out the address"):
        RayCluster(tmp_path, address="127.0.0.1:1")


def test_workers_bound_the_tasks_at_once(tmp_path: Path) -> None:
    cluster = RayCluster(tmp_path, workers=1)
    assert cluster.parallelism() == 1
    running = tmp_path / "running"

    def alone(number: int, part: int) -> bool:
        import time

        running.mkdir()  # which fails when it is there
        time.sleep(0.2)
        running.rmdir()
        return True

    assert cluster.each(list(range(4)), alone, lambda number: None) == [True] * 4


def test_prepare_connects_to_an_address(tmp_path: Path, shared: Any) -> None:
    answer = prepare_shop(tmp_path / "table", "--address", shared.address)
    assert answer.returncode == 0, answer.stderr
    assert f"digest {DIGEST}" in answer.stdout


def test_prepare_starts_a_cluster_where_ray_has_never_run_and_ends_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as new:
        few = ["--workers", "2", "--memory", "512MB", "--quiet"]
        answer = prepare_shop(tmp_path / "table", *few, RAY_TMPDIR=f"{new}/t", HOME=f"{new}/h")
    assert answer.returncode == 0, answer.stderr
    assert f"digest {DIGEST}" in answer.stdout
    assert answer.stderr == ""


def test_a_folder_that_ray_cannot_use_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    answer = prepare_shop(tmp_path / "table", RAY_TMPDIR=str(tmp_path / ("long" * 20)))
    assert answer.returncode == 1
    assert "Ray cannot start on this machine: " in answer.stderr
    assert "Set RAY_TMPDIR to a folder" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_an_address_where_nobody_answers_is_an_error(tmp_path: Path) -> None:
    answer = prepare_shop(tmp_path / "table", "--address", "127.0.0.1:1")
    assert answer.returncode == 1
    assert "No Ray cluster answers at 127.0.0.1:1" in answer.stderr
    assert "Traceback" not in answer.stderr
