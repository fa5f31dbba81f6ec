"""The small shop's bundle, and a ranker that is smaller still."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from shop import Shop

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from small_logs import trained_clicks  # noqa: E402

from recmill.artifacts.bundle.bundle import Bundle  # noqa: E402
from recmill.artifacts.checkpoint.checkpoint import Checkpoint  # noqa: E402
from recmill.stages.export.export import export  # noqa: E402
from recmill.stages.export.find_log import find_log  # noqa: E402


@pytest.fixture(scope="session")
def bundle(shop: Shop) -> Bundle:
    """The shop as exported, with rows as they were trained. Tests must not change its files."""
    return Bundle.open(shop.bundles)


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A ranker so small that it is exported at once."""
    return trained_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="session")
def clicks_exported(clicks: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("clicks_bundles")
    export(clicks, find_log(clicks), into)
    return into


@pytest.fixture
def clicks_bundles(clicks_exported: Path, tmp_path: Path) -> Path:
    """The small ranker's bundle in a folder of its own, which a test may change."""
    return Path(shutil.copytree(clicks_exported, tmp_path / "bundles"))
