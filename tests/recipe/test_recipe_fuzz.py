"""Whatever the tree, the loader gives a Recipe or a RecipeError: never a traceback."""

from __future__ import annotations

import copy
import datetime
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from recmill.errors import RecipeError
from recmill.recipe.load import load_recipe, recipe_from_dict, recipe_to_dict, shipped_recipes
from recmill.recipe.recipe import Recipe

TREES = {name: tomllib.loads(path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()}
FUZZ = examples(80, suppress_health_check=[HealthCheck.too_slow])

ODD = [
    None, True, False, 0, 1, -1, 8, 2**31, 2**63, -(2**80), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "x", "..", "i1..i3", "i3..i1", "i1..i999999999", "a, b,, c", "{column}", "__x", "user_id", "label",
    "é\x00",
    [], {}, [[]], [{}], [None], ["a", 3], {"x": 1}, {"": {}}, {"fill": 0}, {"log": {}, "cast": "int"}, ["key"], "key",
    {"name": "x"}, [{"name": "c1..c3", "type": "int"}], datetime.date(2020, 1, 1), [1, 2, 3], [-1], ["log", "log"],
    {"cross": "_"}, [{"cross": "_"}], [{"pack": {}}, "length"], [{"vocabulary": {"named": "item"}}], {"by": "tail"},
]  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree with every key or index in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def pick(tree: Any, draw: Any) -> tuple[Any, Any]:
    found = list(places(tree))
    return found[draw(st.integers(0, len(found) - 1))]


def mutate(tree: dict[str, Any], draw: Any) -> None:
    container, key = pick(tree, draw)
    action = draw(st.sampled_from(["delete", "rename", "replace", "duplicate", "swap", "wrap", "add"]))
    if action == "delete":
        container.pop(key, None) if isinstance(container, dict) else container.pop(key)
    elif action == "rename" and isinstance(container, dict):
        container[draw(st.sampled_from([f"{key}s", str(key)[:-1], "x", "name", "by"]))] = container.pop(
            key, 0
        )
    elif action == "duplicate" and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif action == "swap":
        other, other_key = pick(tree, draw)
        container[key] = copy.deepcopy(other[other_key])
    elif action == "wrap":
        container[key] = [container.get(key)] if isinstance(container, dict) else {"x": container[key]}
    else:
        container[key] = copy.deepcopy(draw(st.sampled_from(ODD)))


def problems_of(load: Callable[[], Recipe]) -> tuple[str, ...]:
    try:
        recipe = load()
    except RecipeError as error:
        return error.problems
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    return ("none",)


def resolve(load: Callable[[], Recipe]) -> None:
    """A recipe, or problems: at least one, each once, none of them endless."""
    problems = problems_of(load)
    assert problems
    assert all(problem.strip() and len(problem) < 5_000 for problem in problems)
    assert len(set(problems)) == len(problems)


@FUZZ
@given(name=st.sampled_from(sorted(TREES)), data=st.data())
def test_mutated_recipes_give_a_recipe_or_a_recipe_error(name: str, data: Any) -> None:
    tree = copy.deepcopy(TREES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        if tree:
            mutate(tree, data.draw)
    resolve(lambda: recipe_from_dict(tree, "fuzz.toml"))


@FUZZ
@given(
    st.recursive(
        st.sampled_from(ODD),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    )
)
def test_any_plain_value_gives_a_recipe_or_a_recipe_error(tree: Any) -> None:
    resolve(lambda: recipe_from_dict(tree, "fuzz.toml"))


KEYS = st.sampled_from(
    ["split", "features", "[0]", "[3]", ".dim", ".steps", "rows", "log", ".", "²", "x", "columns", "[99]"]
)


@FUZZ
@given(
    name=st.sampled_from(["quickstart", "movielens"]),
    overrides=st.lists(
        st.builds(
            lambda keys, value: f"{''.join(keys)}={value}",
            st.lists(KEYS, max_size=4),
            st.sampled_from([str(value) for value in ODD if "\x00" not in str(value)]),
        )
        | st.text(max_size=12),
        max_size=3,
    ),
)
def test_any_override_gives_a_recipe_or_a_recipe_error(name: str, overrides: list[str]) -> None:
    resolve(lambda: load_recipe(name, overrides))


@given(st.binary(max_size=200))
@examples(30)
def test_any_bytes_in_a_file_give_a_recipe_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError):
        load_recipe(str(path))
