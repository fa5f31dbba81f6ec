"""The common base of a Table, a checkpoint and a bundle: a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from recmill.errors import ArtifactError
from recmill.features.chain import ColumnInfo
from recmill.features.plan import Plan
from recmill.recipe.kinds import kinds_of_columns
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Feature, Label, Recipe
from recmill.reporting.tables import html_table
from recmill.storage.cache import SHARDS
from recmill.storage.view import opened


class PlanArtifact:
    """An artifact with its recipe, its columns, and their fitted Plan."""

    path: Path
    manifest: Mapping[str, Any]

    def summary(self) -> dict[str, str]:
        """Facts to show first: a word or a number for each name."""
        return {}

    def __repr__(self) -> str:
        facts = "".join(f", {name} {fact}" for name, fact in self.summary().items())
        return f"{type(self).__name__}({str(self.path)!r}{facts})"

    def _repr_html_(self) -> str:
        rows = [("path", str(self.path)), *self.summary().items()]
        return html_table((type(self).__name__, ""), rows)

    @cached_property
    def recipe(self) -> Recipe:
        return recipe_from_dict(self.manifest["recipe"], str(self.path))

    @cached_property
    def columns(self) -> list[ColumnInfo]:
        return [ColumnInfo(**column) for column in self.manifest["columns"]]

    @cached_property
    def plan(self) -> Plan:
        return Plan.read(self.path / "plan")


def plan_at(address: str | Path) -> Plan:
    """The Plan of a Table, of a checkpoint or of a bundle."""
    path = opened(address, streamed=SHARDS)
    inside = path / "plan"
    return Plan.read(inside if inside.is_dir() else path)


def check_plan(plan: Plan, recipe: Recipe) -> None:
    """Check that a Plan fits a recipe's columns and steps; rows and split may differ."""
    for part in ("log", "features", "labels"):
        if getattr(recipe, part) != getattr(plan.recipe, part):
            raise ArtifactError(
                f'The Plan was fitted with another [{part}] than recipe "{recipe.name}" has. '
                "Run `recmill prepare` again."
            )
    found, fitted = kinds_of_columns(recipe), kinds_of_columns(plan.recipe)
    readers: list[Feature | Label] = [*recipe.features, *recipe.labels]
    for column in {name for reader in readers for name in reader.columns}:
        if found[column] != fitted[column]:
            raise ArtifactError(
                f'The Plan reads column "{column}" as {fitted[column]}; with the [[rows]] of recipe "{recipe.name}" '
                f"it is {found[column]}. Run `recmill prepare` again."
            )
