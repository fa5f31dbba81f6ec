"""What tests of scoring share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from small_criteo import Criteo, make_criteo  # noqa: E402


@pytest.fixture(scope="session")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Criteo:
    return make_criteo(tmp_path_factory.mktemp("criteo"))
