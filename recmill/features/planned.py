"""What a Table, a checkpoint and a bundle have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.spec.load import recipe_from_dict
from recmill.spec.recipe import Recipe


class Planned:
    """An artifact with the recipe that it was made by, its columns, and the Plan that was fitted for them."""

    path: Path
    manifest: Mapping[str, Any]

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_from_dict(self.manifest["recipe"], str(self.path))

    @cached_property
    def columns(self) -> list[ColumnInfo]:
        return [ColumnInfo(**column) for column in self.manifest["columns"]]

    @cached_property
    def plan(self) -> Plan:
        return Plan.read(self.path / "plan")
