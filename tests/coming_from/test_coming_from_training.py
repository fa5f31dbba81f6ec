"""The coming-from pages: every setting of theirs is there, loads as shown, and does what its row says."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import typing
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

import pytest
from coming_from_pages import (
    ALL_ROWS,
    BASES,
    CALL,
    CODE,
    KEY,
    ROOT,
    VALUE,
    Part,
    Row,
    flags_of,
    name_of,
    page_text,
    rows_of,
    toml_value,
)
from command_checks import CHECKS
from small_runs import SmallRuns
from their_settings import SHOWN_BY, THEIRS

from recmill.cli import build_parser
from recmill.recipe.load import load_recipe, recipe_to_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.serve.proto import recmill_pb2

pytestmark = pytest.mark.stages


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    return SmallRuns(tmp_path_factory.mktemp("coming_from"))


@pytest.mark.parametrize("page", BASES)
def test_a_page_has_a_row_for_each_of_their_settings(page: str) -> None:
    named = [name for row in rows_of(page) for name in row.theirs]
    assert sorted(named) == sorted(THEIRS[page].split())


@pytest.mark.parametrize("row", ALL_ROWS, ids=str)
def test_what_has_no_counterpart_has_a_reason(row: Row) -> None:
    assert row.codes or row.differs


@pytest.mark.parametrize("page", BASES)
def test_values_on_a_page_load_and_arrive(page: str) -> None:
    """In prose and in the third column too."""
    rows = rows_of(page)
    prose = [line for line in page_text(page).splitlines() if not line.startswith("| ")]
    alone = [code for text in [*prose, *(row.differs for row in rows)] for code in CODE.findall(text)]
    for values in [*(row.values for row in rows), *([code] for code in alone if VALUE.fullmatch(code))]:
        tree = recipe_to_dict(load_recipe(BASES[page], values))
        for key, shown in (
            (value.partition("=")[0], toml_value(value.partition("=")[2])) for value in values
        ):
            if shown is not None and KEY.fullmatch(key):
                assert holds(at(tree, key), shown), (key, shown)


def at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


def holds(found: Any, shown: Any) -> bool:
    """What was loaded has everything that is shown, and may have defaults beside it."""
    if isinstance(shown, dict):
        return all(holds(found[name], value) for name, value in shown.items())
    if isinstance(shown, str) and ".." in shown:
        return len(found) == 26
    return bool(found == shown)


@pytest.mark.parametrize("page", BASES)
def test_keys_named_on_a_page_exist(page: str) -> None:
    for code in CODE.findall(page_text(page)):
        if KEY.fullmatch(code):
            kind: Any = Recipe
            for name in code.split("."):
                kind = field_type(kind, name)


def field_type(kind: Any, name: str) -> Any:
    hints = typing.get_type_hints(kind)
    assert name in hints, f"{kind.__name__} has no {name}"
    options = [hints[name], *typing.get_args(hints[name])]
    return next((option for option in options if dataclasses.is_dataclass(option)), hints[name])


@pytest.mark.parametrize("row", [row for row in ALL_ROWS if row.command], ids=str)
def test_flags_on_a_page_exist(row: Row) -> None:
    assert row.command is not None
    assert set(flags_of(row.command)) <= flags_in_help(tuple(name_of(row.command)))


@cache
def flags_in_help(command: tuple[str, ...]) -> set[str]:
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        build_parser().parse_args([*command, "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", out.getvalue()))


def test_every_mode_of_e2eaiok_may_learn_while_it_prepares() -> None:
    """tests/run/test_overlap.py runs the second one."""
    page = (ROOT / "docs/coming-from-e2eaiok.md").read_text(encoding="utf-8")
    lines = re.findall(r"^recmill (run .*)", page, re.MULTILINE)
    asked = [build_parser().parse_args(shlex.split(line)) for line in lines]
    assert [one.recipe for one in asked] == ["criteo-dlrm", "criteo-small-dlrm", "criteo-full-dlrm"]
    engines = {(getattr(one, "PrepareConfig.engine"), one.train_engine) for one in asked}
    assert engines == {("spark", "ray")}  # at once, then


@pytest.mark.parametrize("page", BASES)
def test_calls_and_metrics_on_a_page_exist(page: str, small: SmallRuns) -> None:
    """In prose and in the third column too."""
    named = {code for code in CODE.findall(page_text(page)) if CALL.fullmatch(code)}
    methods = recmill_pb2.DESCRIPTOR.services_by_name["Recommender"].methods_by_name
    known = {f"rpc {name}" for name in methods}
    known |= set(re.findall(r"^\| `(recmill_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    if any("/" in name for name in named):
        known |= {name for name in named if small.has_path(*name.partition(" ")[::2])}
    assert sorted(named - known) == []


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_row_that_is_shown_elsewhere_is_on_a_page_and_the_test_exists(name: str) -> None:
    assert any(name in (*row.theirs, *(part.name for part in row.parts())) for row in ALL_ROWS)
    file, _, function = SHOWN_BY[name].partition("::")
    assert function in functions_of(file)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ALL_ROWS, ids=str)
def test_every_part_of_a_row_is_exercised_somewhere(row: Row) -> None:
    assert [part.name for part in row.parts() if part.name not in CHECKS and part.name not in SHOWN_BY] == []


def different_parts() -> dict[str, tuple[Row, Part]]:
    """Every part that has a check, once for each recipe and value; places in commands do not count."""
    with_values = ("evaluate", "deploy")
    found: dict[Any, tuple[Row, Part]] = {}
    for row in ALL_ROWS:
        for part in row.parts():
            value = part.value if row.command is None or part.name.startswith(with_values) else ""
            beside = tuple(row.values) if row.command is None else tuple(flags_of(row.command))
            found.setdefault((row.base, part.name, str(value), beside), (row, part))
    return {f"{row}: {part.name}": (row, part) for row, part in found.values() if part.name in CHECKS}


PARTS = different_parts()


@pytest.mark.parametrize(("row", "part"), PARTS.values(), ids=PARTS)
def test_a_row_does_what_it_says(
    small: SmallRuns,
    row: Row,
    part: Part,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    CHECKS[part.name](small, row, part, capsys)
