"""docs/features.md: each row of its tables is run, and every step and row operation is there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from feature_fitting import transformed

from recmill.recipe.recipe import ROW_OPERATIONS
from recmill.recipe.steps import STEPS

PAGE = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
EXAMPLES = re.findall(r"^\| [\w, ]*\| `(.+?)` \| `(\[.*?\])` \| `(\[.*?\])` \|", PAGE, re.MULTILINE)
KINDS = {int: "int", float: "float", str: "text"}


def kind_of(value: Any) -> str:
    return f"list of {kind_of(value[0])}" if isinstance(value, list) else KINDS[type(value)]


def test_the_tables_hold_examples() -> None:
    assert len(EXAMPLES) == len(re.findall(r"^\|.*\| `\[", PAGE, re.MULTILINE)) > 20


@pytest.mark.parametrize(("written", "values", "features"), EXAMPLES)
def test_an_example_on_the_page_is_right(written: str, values: str, features: str) -> None:
    steps = tomllib.loads(f"steps = [{written}]")["steps"]
    given = json.loads(values)
    assert transformed(kind_of(given[0]), steps, given) == json.loads(features)


def test_every_step_and_row_operation_is_on_the_page() -> None:
    headings = re.findall(r"^(?:\| |\*\*)([\w, ]+)", PAGE, re.MULTILINE)
    described = {name for heading in headings for name in re.findall(r"\w+", heading)}
    assert (STEPS.keys() | ROW_OPERATIONS.keys()) <= described


def test_the_row_operations_on_the_page_are_toml() -> None:
    written = re.findall(r"^\| (\w+) \| `(\w+ = .+?)` \|", PAGE, re.MULTILINE)
    assert {name for name, _ in written} == ROW_OPERATIONS.keys()
    for name, text in written:
        assert list(tomllib.loads(text)) == [name]
