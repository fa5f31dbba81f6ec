from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for tests that write the same file over and over."""
    return tmp_path_factory.mktemp("logs")
