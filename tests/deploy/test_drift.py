"""What is checked in under deploy/ is what `recmill deploy` renders, and the chart has the version of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from recmill import __version__
from recmill.recipe.load import load_recipe
from recmill.stages.deploy.context import DeployContext
from recmill.stages.deploy.examples import EXAMPLES, example
from recmill.stages.deploy.helm import values
from recmill.stages.deploy.settings import DeployConfig
from recmill.stages.deploy.templates import read
from recmill.stages.deploy.yaml import loads

ROOT = Path(__file__).parent.parent.parent / "deploy"
AGAIN = "Run: python -m recmill.stages.deploy.examples deploy"


@pytest.mark.parametrize("target", EXAMPLES)
def test_an_example_is_what_is_rendered_now(target: str) -> None:
    there = {
        path.relative_to(ROOT / target).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / target).rglob("*")
        if path.is_file()
    }
    files = example(target)
    assert there.keys() == files.keys(), AGAIN
    assert [name for name, text in files.items() if there[name] != text] == [], AGAIN


def test_nothing_else_lies_beside_the_examples() -> None:
    assert {path.name for path in ROOT.iterdir()} == set(EXAMPLES)


def test_the_chart_has_the_version_of_the_package() -> None:
    (about,) = loads(read("chart/Chart.yaml"))
    assert about["version"] == about["appVersion"] == __version__


def test_the_chart_comes_with_the_values_of_the_quickstart() -> None:
    (own,) = loads(read("chart/values.yaml"))
    computed = values(DeployContext.of(load_recipe("quickstart"), DeployConfig()))
    assert own["storage"].pop("kind") == "none"
    assert own == computed
