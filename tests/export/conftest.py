"""A small shop, prepared, trained and evaluated once for all tests of export."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from small_logs import trained_clicks  # noqa: E402

from recmill.bundle import Bundle  # noqa: E402
from recmill.checkpoint import CheckpointFolder  # noqa: E402
from recmill.cli import main  # noqa: E402
from recmill.export import export  # noqa: E402
from recmill.export.find_log import find_log  # noqa: E402


@dataclass(frozen=True)
class Shop:
    """What the commands before export left behind."""

    log: Path
    table: Path
    checkpoint: Path

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder.open(self.checkpoint)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    into = tmp_path_factory.mktemp("shop")
    shop = Shop(into / "log", into / "table", into / "checkpoint")
    _run("generate", "shop", "--rows", 5000, "--into", shop.log)
    _run("prepare", "quickstart", "--data", shop.log, "--into", shop.table)
    few = ["--set", "ranking.train.max_steps=20", "--set", "retrieval.train.max_steps=6", "--threads", 1]
    _run("train", "quickstart", "--table", shop.table, "--into", shop.checkpoint, *few)
    _run("evaluate", "quickstart", "--checkpoint", shop.checkpoint, "--table", shop.table, "--threads", 1)
    return shop


@pytest.fixture(scope="session")
def bundle(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shop as exported, with rows as they were trained. Tests must not change its files."""
    return export(shop.folder, str(shop.log), tmp_path_factory.mktemp("bundles")).bundle


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    """A ranker so small that it is exported at once."""
    return trained_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="session")
def clicks_exported(clicks: CheckpointFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("clicks_bundles")
    export(clicks, find_log(clicks), into)
    return into


@pytest.fixture
def clicks_bundles(clicks_exported: Path, tmp_path: Path) -> Path:
    """The small ranker's bundle in a folder of its own, which a test may change."""
    return Path(shutil.copytree(clicks_exported, tmp_path / "bundles"))


def _run(*arguments: object) -> None:
    main([*map(str, arguments), "--quiet"])
