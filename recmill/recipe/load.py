"""Load a recipe from TOML or Python. All problems are reported at once, with their key paths."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import tomllib
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recmill.errors import RecipeError
from recmill.recipe.check import problems_in
from recmill.recipe.convert import Problems, read_recipe, to_plain
from recmill.recipe.expand import expand
from recmill.recipe.kinds import owner_of, owners_of_columns
from recmill.recipe.names import nearest
from recmill.recipe.recipe import Recipe

SHIPPED = Path(__file__).parent / "shipped"
_FUNCTION = re.compile(r"(.+):([A-Za-z_]\w*)")
_NO_VALUE = object()  # of an override: use the default
_KEY = re.compile(r"[^.\[\]]+")


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every shipped recipe."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(reference: str, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """Open a shipped recipe by name, a TOML file by path, or a function by `file.py:name` or `module:name`.

    `overrides` are `key=value` texts, or values by key, applied before anything is checked.
    """
    path = _find_file(reference)
    if path is not None:
        source = path.name if path.parent == SHIPPED else str(path)
        tree = _read_toml(path, source)
    elif called := _FUNCTION.fullmatch(reference):
        source, tree = reference, _call(reference, called[1], called[2])
    else:
        hint = nearest(reference, shipped_recipes())
        raise RecipeError(reference, [f"no such recipe file or shipped recipe{hint}"])
    return recipe_from_dict(override(tree, overrides, source), source)


def override(
    tree: dict[str, Any], overrides: Mapping[str, Any] | Sequence[str], source: str
) -> dict[str, Any]:
    """Change values of a plain tree in place; raises RecipeError with all overrides that fail."""
    if isinstance(overrides, Mapping):
        found = [_set(tree, key, value, f"{key}={value}") for key, value in overrides.items()]
    else:
        found = [_override(tree, text) for text in ([overrides] if isinstance(overrides, str) else overrides)]
    if problems := [problem for problem in found if problem]:
        raise RecipeError(source, list(dict.fromkeys(problems)))
    return tree


def recipe_from_dict(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Resolve a plain tree, from TOML or `recipe_to_dict`."""
    problems = Problems()
    tree = expand(raw, problems) if isinstance(raw, dict) else raw
    recipe, paths = read_recipe(tree, problems)
    if recipe is not None:
        if not problems.broken & {"log", "tables", "rows", "features"}:
            recipe = _with_owners(recipe, tree["features"])
        for problem in problems_in(recipe, paths, problems.broken):
            problems.found[problem] = None
    if recipe is None or problems.found:
        raise RecipeError(source, list(problems.found))
    return recipe


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved tree as plain values, as stored in artifacts; the inverse of `recipe_from_dict`.

    Without [tune]: no artifact depends on the search space.
    """
    tree: dict[str, Any] = to_plain(dataclasses.replace(recipe, tune=None))
    return tree


def _with_owners(recipe: Recipe, entries: Sequence[Mapping[str, Any]]) -> Recipe:
    """A feature whose entry does not name its owner belongs to the owner of its columns."""
    owners = owners_of_columns(recipe)
    features = tuple(
        feature if "of" in entry else dataclasses.replace(feature, of=owner_of(feature.columns, owners))
        for feature, entry in zip(recipe.features, entries, strict=True)
    )
    return dataclasses.replace(recipe, features=features)


# locating a recipe


def _find_file(reference: str) -> Path | None:
    """The TOML file of a source, if it is one."""
    shipped = shipped_recipes()
    if reference in shipped:
        return shipped[reference]
    path = Path(reference)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise RecipeError(reference, [f"cannot be read: {error.strerror}"]) from None
    if is_directory:
        raise RecipeError(reference, ["is a directory; expected a recipe file (TOML)"])
    if exists and path.suffix == ".py":
        raise RecipeError(reference, [f"is Python; name its function too: {reference}:function"])
    return path if exists else None


def _read_toml(path: Path, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(source, [f"is not valid TOML: {error}"]) from None
    except RecursionError:
        raise RecipeError(source, ["is nested too deeply"]) from None
    except OSError as error:
        raise RecipeError(source, [f"cannot be read: {error.strerror}"]) from None


def _call(reference: str, location: str, name: str) -> dict[str, Any]:
    """The tree of the recipe that a function returns, as a Recipe or a dict."""
    try:
        made = getattr(_import(location), name)()
    except Exception as error:  # an error of the user's code is a problem of the recipe, not a crash
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = (
            f" ({line.filename}, line {line.lineno})" if line.filename.endswith(Path(location).name) else ""
        )
        raise RecipeError(reference, [f"failed: {type(error).__name__}: {error}{where}"]) from error
    if isinstance(made, Recipe):
        return tree_of(made)
    if not isinstance(made, dict):
        raise RecipeError(reference, [f"must return a Recipe or a dict, got {type(made).__name__}"])
    return made


def tree_of(recipe: Recipe) -> dict[str, Any]:
    """The plain tree of a recipe built in Python. Owners left at their default are derived, as for TOML."""
    tree: dict[str, Any] = to_plain(recipe)
    for feature in tree["features"] if isinstance(tree.get("features"), list) else ():
        if isinstance(feature, dict) and feature.get("of") == "context":
            del feature["of"]
    return tree


def _import(location: str) -> types.ModuleType:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    spec = importlib.util.spec_from_file_location("recmill_user_recipe", location)
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --set


def _override(tree: dict[str, Any], override: str) -> str | None:
    """Set `split.held_out=0.2` or `features[0].dim=8` in the tree; returns the problem, if there is one.

    A key without a value, `split.seed=`, is removed, so that its default applies.
    """
    key, equals, text = override.partition("=")
    if not equals or not _KEY.findall(key):
        return f'--set {override}: expected key=value, for example --set "split.held_out=0.2"'
    return _set(tree, key, _value_of(text) if text.strip() else _NO_VALUE, override)


def _set(tree: dict[str, Any], key: str, value: Any, override: str) -> str | None:
    keys = _KEY.findall(key)
    place: Any = tree
    for number, name in enumerate(keys):
        last = number == len(keys) - 1
        if isinstance(place, dict):
            if not last:
                place = place.setdefault(name, {})
            elif value is _NO_VALUE:
                place.pop(name, None)
            else:
                place[name] = value
        elif isinstance(place, list) and re.fullmatch(r"\d{1,9}", name) and int(name) < len(place):
            if last:
                place[int(name)] = "" if value is _NO_VALUE else value
            else:
                place = place[int(name)]
        else:
            return f"--set {override}: {_no_such_place(keys[:number], place, name)}"
    return None


def _no_such_place(keys: Sequence[str], place: Any, name: str) -> str:
    where = ".".join(keys)
    if isinstance(place, list):
        return f'{where} is a list of {len(place)}, numbered from 0; it has no "{name}"'
    return f'{where} is a value, not a table; it has no "{name}"'


def _value_of(text: str) -> Any:
    """A TOML value; anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
