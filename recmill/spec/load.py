"""TOML (or Python) -> Recipe. Every problem is reported with its key path, all of them at once."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from recmill.errors import RecipeError
from recmill.spec.check import nearest, owners_of_columns, problems_in
from recmill.spec.recipe import ROW_OPERATIONS, Recipe, RowOperation
from recmill.spec.steps import COMBINING, STEPS, Step

SHIPPED = Path(__file__).parent.parent / "recipes"
_RANGE = re.compile(r"([A-Za-z_][A-Za-z_0-9]*?)(\d+)\.\.(?:([A-Za-z_][A-Za-z_0-9]*?))?(\d+)")


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe that installs with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_recipe(reference: str, overrides: Sequence[str] = ()) -> Recipe:
    """Open a shipped recipe by name, a TOML file by path, or a Python function by `file.py:name` or `module:name`."""
    if ":" in reference and not reference.endswith(".toml"):
        return _load_python(reference, overrides)
    path = _find_toml(reference)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [f"is not valid TOML: {error}"]) from None
    except OSError as error:
        raise RecipeError(str(path), [f"cannot be read: {error.strerror}"]) from None
    source = path.name if path.parent == SHIPPED else str(path)
    for override in overrides:
        _override(raw, override, source)
    return recipe_from_dict(raw, source)


def recipe_from_dict(raw: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Resolve a plain tree, as TOML or `recipe_to_dict` gives it."""
    problems: list[str] = []
    recipe = _convert(Recipe, _expand(raw, problems), "", problems)
    if not problems:
        recipe = _with_owners(recipe)
        problems = problems_in(recipe)
    if problems:
        raise RecipeError(source, problems)
    return recipe  # type: ignore[no-any-return]


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The resolved tree as plain values: what artifacts store. `recipe_from_dict` gives back an equal recipe."""
    return _plain(recipe)  # type: ignore[no-any-return]


def expand_names(names: str | Iterable[str]) -> list[str]:
    """`i1..i3` -> i1, i2, i3; several names or ranges may be separated by commas."""
    parts = names.split(",") if isinstance(names, str) else names
    return [name for part in parts for name in _expand_range(part.strip())]


def _expand_range(name: str) -> list[str]:
    match = _RANGE.fullmatch(name)
    if not match:
        return [name]
    prefix, first, other, last = match.groups()
    if other not in (None, prefix) or int(last) < int(first):
        return [name]
    return [f"{prefix}{number}" for number in range(int(first), int(last) + 1)]


def _find_toml(reference: str) -> Path:
    shipped = shipped_recipes()
    if reference in shipped:
        return shipped[reference]
    path = Path(reference)
    if path.is_dir():
        raise RecipeError(reference, ["is a directory; expected a recipe file (TOML)"])
    if path.exists():
        return path
    raise RecipeError(reference, [f"no such recipe file or shipped recipe{nearest(reference, shipped)}"])


def _load_python(reference: str, overrides: Sequence[str]) -> Recipe:
    if overrides:
        raise RecipeError(reference, ["--set works on TOML recipes; give this function its own parameters"])
    location, name = reference.rsplit(":", 1)
    try:
        made = getattr(_import(location), name)()
    except (ImportError, AttributeError, OSError) as error:
        raise RecipeError(reference, [f"cannot be imported: {error}"]) from None
    if not isinstance(made, Recipe):
        raise RecipeError(reference, [f"must return a recmill Recipe, got {type(made).__name__}"])
    if problems := problems_in(made):
        raise RecipeError(reference, problems)
    return made


def _import(location: str) -> types.ModuleType:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    spec = importlib.util.spec_from_file_location("recmill_user_recipe", location)
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _override(raw: dict[str, Any], override: str, source: str) -> None:
    """`split.held_out=0.2` or `features[0].dim=8`, applied to the tree before it is checked."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(source, [f'--set {override}: expected key=value, for example --set "split.held_out=0.2"'])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    steps = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key)]
    place: Any = raw
    try:
        for step in steps[:-1]:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
        place[steps[-1]] = value
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RecipeError(source, [f"--set {override}: the recipe has no {key}"]) from None


# shorthand -> the full tree


def _expand(raw: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """One entry may cover many columns; afterwards each column, feature and label stands alone."""
    tree = dict(raw)
    for name in ("log", *(["tables"] if isinstance(tree.get("tables"), dict) else [])):
        tree[name] = _expand_columns(tree.get(name), nested=name == "tables")
    for name in ("features", "labels"):
        if isinstance(tree.get(name), (list, tuple)):
            tree[name] = _expand_features(name, tree[name], problems)
    for model in ("ranking", "retrieval"):
        if isinstance(tree.get(model), dict):
            tree[model] = {key: _expand_list(key, value) for key, value in tree[model].items()}
    return tree


def _expand_columns(section: Any, nested: bool) -> Any:
    if not isinstance(section, dict):
        return section
    if nested:
        return {name: _expand_columns(table, False) for name, table in section.items()}
    columns = section.get("columns")
    if not isinstance(columns, (list, tuple)):
        return section
    expanded = [
        {**column, "name": name} if isinstance(column, dict) else column
        for column in columns
        for name in (_names_of(column) if isinstance(column, dict) else [""])
    ]
    return {**section, "columns": expanded}


def _names_of(column: Mapping[str, Any]) -> list[str]:
    name = column.get("name")
    return expand_names(name) if isinstance(name, str) else [name]  # type: ignore[list-item]


def _expand_list(key: str, value: Any) -> Any:
    if key in ("features", "wide", "user", "item") and isinstance(value, (str, list, tuple)):
        return expand_names(value) if all(isinstance(name, str) for name in value) else value
    return value


class _Expanded(list[Any]):
    """A list whose elements remember the key path of the entry they came from."""

    def __init__(self, entries: list[tuple[str, Any]]) -> None:
        super().__init__(entry for _, entry in entries)
        self.paths = [path for path, _ in entries]


def _expand_features(section: str, entries: Sequence[Any], problems: list[str]) -> _Expanded:
    expanded: list[tuple[str, Any]] = []
    for index, entry in enumerate(entries):
        path = f"{section}[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("columns"), (str, list, tuple)):
            expanded.append((path, entry))
            continue
        columns = expand_names(entry["columns"])
        expanded += [(path, one) for one in _split_entry(entry, columns, path, problems)]
    return _Expanded(expanded)


def _split_entry(entry: dict[str, Any], columns: list[str], path: str, problems: list[str]) -> list[Any]:
    name = entry.get("name")
    if _combines(entry.get("steps", ())):
        if name is None:
            problems.append(f"{path}.name is missing: steps that take several columns at once need a name for the result")
        return [{**entry, "columns": columns}]
    if name is not None and len(columns) > 1 and "{column}" not in str(name):
        problems.append(
            f'{path}.name is "{name}" for {len(columns)} columns; write {{column}} into it, '
            "or begin with a step that combines them (cross, pack, expression, function)"
        )
        return []
    template = name if isinstance(name, str) else "{column}"
    return [{**entry, "name": template.replace("{column}", column), "columns": [column]} for column in columns]


def _combines(steps: Any) -> bool:
    if not isinstance(steps, (list, tuple)) or not steps:
        return False
    first = steps[0]
    name = first if isinstance(first, str) else next(iter(first), "") if isinstance(first, dict) else ""
    return STEPS.get(name, Step) in COMBINING


def _with_owners(recipe: Recipe) -> Recipe:
    """A feature belongs to the user or the item when all its columns do, unless the recipe says otherwise."""
    owners = owners_of_columns(recipe)

    def owner(columns: tuple[str, ...]) -> Any:
        found = {owners.get(column, "context") for column in columns}
        return found.pop() if len(found) == 1 else "context"

    features = tuple(
        feature if feature.of != "context" else dataclasses.replace(feature, of=owner(feature.columns))
        for feature in recipe.features
    )
    return dataclasses.replace(recipe, features=features)


# plain values -> dataclasses


def _convert(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """`value` as a `kind`; what does not fit is added to `problems` and replaced by None."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(kind), value, path, problems)
    if origin is Literal:
        return _convert_choice(get_args(kind), value, path, problems)
    if origin is tuple:
        return _convert_list(get_args(kind)[0], value, path, problems)
    if origin is dict:
        return _convert_dict(get_args(kind)[1], value, path, problems)
    if kind is Step:
        return _convert_named("step", STEPS, value, path, problems)
    if kind is RowOperation:
        return _convert_named("row operation", ROW_OPERATIONS, value, path, problems)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, path, problems)
    return _convert_scalar(kind, value, path, problems)


_SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _convert_scalar(kind: type, value: Any, path: str, problems: list[str]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool)):
        return value
    problems.append(f"{path} must be {_SCALARS[kind]}, got {_show(value)}")
    return None


def _convert_union(kinds: tuple[Any, ...], value: Any, path: str, problems: list[str]) -> Any:
    if value is None and type(None) in kinds:
        return None
    options = [kind for kind in kinds if kind is not type(None)]
    if len(options) == 1:
        return _convert(options[0], value, path, problems)
    if isinstance(value, (str, int, float)):
        return value
    problems.append(f"{path} must be text, a number or true/false, got {_show(value)}")
    return None


def _convert_choice(choices: tuple[Any, ...], value: Any, path: str, problems: list[str]) -> Any:
    if value in choices:
        return value
    problems.append(f"{path} must be one of {', '.join(map(str, choices))}; got {_show(value)}")
    return None


def _convert_list(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, str) and kind is str:
        value = [value]
    if not isinstance(value, (list, tuple)):
        problems.append(f"{path} must be a list, got {_show(value)}")
        return ()
    paths = value.paths if isinstance(value, _Expanded) else [f"{path}[{index}]" for index in range(len(value))]
    return tuple(_convert(kind, element, where, problems) for where, element in zip(paths, value, strict=True))


def _convert_dict(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path} must be a table of names, got {_show(value)}")
        return {}
    return {str(key): _convert(kind, element, f"{path}.{key}", problems) for key, element in value.items()}


def _convert_named(what: str, known: Mapping[str, Any], value: Any, path: str, problems: list[str]) -> Any:
    """A step or row operation: `"log"`, `{ fill = 0 }` or `{ fill = { statistic = "mean" } }`."""
    if isinstance(value, str):
        name, options = value, {}
    elif isinstance(value, dict) and len(value) == 1:
        name, options = next(iter(value.items()))
    else:
        problems.append(f"{path} must name one {what}, as text or as a table with one key; got {_show(value)}")
        return None
    if name not in known:
        problems.append(f'{path} has no {what} "{name}"{nearest(name, known)}')
        return None
    kind = known[name]
    if not isinstance(options, dict) or (kind.main == "ids" and "ids" not in options):
        if kind.main is None:
            problems.append(f"{path}.{name} must be a table of parameters, got {_show(options)}")
            return None
        options = {kind.main: options}
    return _convert_dataclass(kind, options, f"{path}.{name}", problems)


def _convert_dataclass(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{path or 'the recipe'} must be a table, got {_show(value)}")
        return None
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            problems.append(f"{prefix}{key} is not a known key{nearest(key, fields)}")
    made: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            made[name] = _convert(hints[name], value[name], f"{prefix}{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name} is missing")
            made[name] = None
    return kind(**made)


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else type(value).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, Step):
        return {type(value).step_name(): _plain_fields(value)}
    if isinstance(value, RowOperation):
        name = next(name for name, kind in ROW_OPERATIONS.items() if kind is type(value))
        return {name: _plain_fields(value)}
    if dataclasses.is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    return value


def _plain_fields(value: Any) -> dict[str, Any]:
    return {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) is not None
    }
