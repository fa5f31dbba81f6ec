"""What tests of several folders use."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import httpx
import pytest

from recmill.cli import main
from recmill.reporting.machine import available_cores

sys.path.insert(0, str(Path(__file__).parent))
from quick_java import ENVIRONMENT
from shop import Shop, shared_shop

os.environ.update(ENVIRONMENT)
# No test takes the machine's power away, and a bundle has a hundred files to wait for.
os.fsync = lambda descriptor: None
# A machine that does other work for ten seconds makes no test fail.
httpx.get, httpx.post = partial(httpx.get, timeout=60), partial(httpx.post, timeout=60)

Run = Callable[..., tuple[int, str, str]]

# What takes longest starts first, so that no process is left alone with it at the end.
LONGEST_FIRST = (
    "ray",
    "spark",
    "docker",
    "deploy/test_pipeline_runs.py",
    "bench/test_scale.py",
    "coming_from",
    "train",
    "bench/test_bench_train.py",
    "tune",
    "parallel",
    "export",
    "deploy/test_sizing.py",
    "features/test_features_contract.py",
    "launch/test_train_flags.py",
    "bench bundle",
)
# Folders whose tests share what takes long to make. Elsewhere, tests of a file stay together for the same reason.
TOGETHER = ("parallel", "coming_from", "export", "tune", "train")


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, because many tests wait for another program."""
    return available_cores() + 1


def pytest_collection_finish() -> None:
    """Tests are never garbage: searching hundreds of thousands of their objects again and again takes time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests one process of pytest-xdist runs in a row: those that share fixtures, the longest rows first."""
    groups = {item: _group_of(item) for item in items}
    order = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(groups[item], len(order)))


def _group_of(item: pytest.Item) -> str:
    if mark := item.get_closest_marker("xdist_group"):
        return str(mark.args[0])
    item.add_marker(pytest.mark.xdist_group(_group_of_file(item.path)))
    return _group_of_file(item.path)


@cache
def _group_of_file(file: Path) -> str:
    path = file.relative_to(Path(__file__).parent)
    return path.parts[0] if path.parts[0] in TOGETHER else path.as_posix()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines",
        metavar="NAMES",
        help="engines that the suite of tests/engines runs on, such as local,ray (default: all that are installed)",
    )


@pytest.fixture
def recmill(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process: exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # how argparse ends
            code = int(exit.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Shop:
    """A small shop as the commands left it, up to a bundle."""
    base = tmp_path_factory.getbasetemp()
    return shared_shop((base if worker_id == "master" else base.parent) / "small-shop")


@pytest.fixture
def own_bundles(shop: Shop, tmp_path: Path) -> Path:
    """A folder of bundles of one's own, to change."""
    return Path(shutil.copytree(shop.bundles, tmp_path / "bundles"))
