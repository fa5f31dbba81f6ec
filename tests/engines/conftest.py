"""One suite for every engine: `pytest tests/engines --engines=local,ray,spark` chooses those that are tested."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "prepare"))

from engine_confs import CONFS, PACKAGES, EngineConf


def chosen(config: pytest.Config) -> list[str]:
    """The engines to test: those asked for, or those whose package is installed."""
    asked = config.getoption("--engines")
    if asked is None:
        return [name for name in CONFS if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])]
    names = [name.strip() for name in str(asked).split(",")]
    if unknown := set(names) - set(CONFS):
        raise pytest.UsageError(f"--engines: there is no {', '.join(unknown)}; there are {', '.join(CONFS)}")
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = chosen(metafunc.config)
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", [_parameter(name) for name in names], indirect=True)
    if "cluster_engine" in metafunc.fixturenames:
        clusters = [_parameter(name) for name in names if name in PACKAGES]
        metafunc.parametrize("cluster_engine", clusters, indirect=True)


def _parameter(name: str) -> Any:
    marks = [pytest.mark.services, pytest.mark.xdist_group(name)] if name in PACKAGES else []
    return pytest.param(name, marks=marks, id=name)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> EngineConf:
    return CONFS[request.param]()


@pytest.fixture
def cluster_engine(request: pytest.FixtureRequest) -> EngineConf:
    """An engine of several processes."""
    return CONFS[request.param]()
