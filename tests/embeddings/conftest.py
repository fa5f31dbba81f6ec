"""Every promise of a table holds with all records in memory and with all of them on disk."""

from __future__ import annotations

import pytest
from tables import MakeTable, make_in_memory, make_on_disk


@pytest.fixture(params=[make_in_memory, make_on_disk], ids=["memory", "disk"])
def make_table(request: pytest.FixtureRequest) -> MakeTable:
    make: MakeTable = request.param
    return make
