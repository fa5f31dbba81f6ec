"""What tests of deploy share."""

from __future__ import annotations

import pytest

from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import Recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.settings import DeployConfig


@pytest.fixture
def quickstart() -> Recipe:
    return load_recipe("quickstart")


@pytest.fixture
def context(quickstart: Recipe) -> DeployContext:
    """The quickstart recipe with all settings as they are."""
    return DeployContext.of(quickstart, DeployConfig())
