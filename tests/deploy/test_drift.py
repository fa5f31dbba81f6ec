"""What is checked in under deploy/ is what `recmill deploy` renders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recmill.recipe.load import load_recipe
from recmill.stages.deploy.checked_in import CHECKED_IN
from recmill.stages.deploy.deploy import RENDERED, render
from recmill.stages.deploy.settings import DeployConfig

ROOT = Path(__file__).parent.parent.parent / "deploy"
AGAIN = "Run: python -m recmill.stages.deploy.checked_in deploy"


@pytest.mark.parametrize(
    ("folder", "recipe", "target"),
    [(folder, recipe, target) for folder, (recipe, targets) in CHECKED_IN.items() for target in targets],
)
def test_checked_in_files_are_what_is_rendered_now(folder: str, recipe: str, target: str) -> None:
    files = render(load_recipe(recipe), target, DeployConfig())
    place = ROOT / folder / target
    there = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert there == {*files, RENDERED}, AGAIN
    different = [name for name, text in files.items() if (place / name).read_bytes() != text.encode()]
    assert different == [], AGAIN
    assert sorted(json.loads((place / RENDERED).read_text())) == sorted(files), AGAIN


def test_nothing_else_lies_beside_them() -> None:
    known = {folder for folder in CHECKED_IN if folder != "."} | set(CHECKED_IN["."][1])
    assert {path.name for path in ROOT.iterdir()} == known
