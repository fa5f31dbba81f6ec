"""A tiny Table, and studies of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_study import small_recipe

from recmill.dataset.table import Table
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare.prepare import prepare
from recmill.stages.tune.study import Budget, open_study
from recmill.synthetic.generate import generate


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("tune")
    generate("criteo", 1_500, 1, folder / "log")
    return prepare(small_recipe(), str(folder / "log"), folder / "table").table


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """Open the study of a recipe in the test's folder; trials are made up by the test."""

    def opened(recipe: Recipe, trials: int = 10, **options: Any) -> Any:
        on_end = options.pop("on_end", lambda one: None)
        seed, table = options.pop("seed", 0), options.pop("table", "table 1")
        return open_study(tmp_path / "study", recipe, table, Budget(trials, **options), seed, on_end)

    return opened
