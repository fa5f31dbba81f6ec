"""Recipe -> TOML in the style of a hand-written one: without defaults, and with one entry for similar columns."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from recmill.recipe import recipe as r
from recmill.recipe.steps import COMBINING, Step

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d{0,8})")
_WIDE = 100  # a longer list is written one element per line
# Tables with a header of their own; others are written inline.
_HEADED = re.compile(r"tables\.[^.]+|(ranking|retrieval)\.(train|dynamic|tasks)|tune\.space")


def toml_of(recipe: r.Recipe) -> str:
    """The text of a file that loads as this recipe."""
    tree = _given(recipe)
    tree["log"] = _with_columns(recipe.log)
    if recipe.tables:
        tree["tables"] = {name: _with_columns(table) for name, table in recipe.tables.items()}
    tree["features"] = [_entry(alike) for _, alike in groupby(recipe.features, _same_entry)]
    if recipe.labels:
        tree["labels"] = [_given(label) for label in recipe.labels]
    if recipe.rows:
        tree["rows"] = [_named(operation.operation_name(), operation) for operation in recipe.rows]
    lines = [f"{key} = {_value(value)}" for key, value in tree.items() if not _is_section(value)]
    for key in (field.name for field in dataclasses.fields(r.Recipe)):
        if _is_section(tree.get(key)):
            lines += _section(key, tree[key])
    return "\n".join(lines) + "\n"


# to a plain tree without defaults


def _given(value: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    found = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if content is not None and (made is dataclasses.MISSING or content != made):
            found[field.name] = _plain(content)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Step):
        return _named(value.step_name(), value)
    if isinstance(value, r.Choices):
        return _plain(value.values)
    if dataclasses.is_dataclass(value):
        return _given(value)
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, Mapping):
        return {key: _plain(element) for key, element in value.items()}
    return value


def _named(name: str, value: Any) -> Any:
    """`"log"`, `{ fill = 0 }` or `{ fill = { statistic = "mean" } }`."""
    given = _given(value)
    if not given and isinstance(value, Step):
        return name
    if list(given) == [value.main] and not isinstance(given[value.main], dict):
        return {name: given[value.main]}
    return {name: given}


def _with_columns(files: r.Files) -> dict[str, Any]:
    """Merge consecutive entries that differ only in their names."""

    def alike(column: r.Column) -> Any:
        own = None if _PLAIN_NAME.fullmatch(column.name) else column.name
        return {**_given(column), "name": own}

    groups = [list(columns) for _, columns in groupby(files.columns, alike)]
    entries = [{**_given(group[0]), "name": _names([column.name for column in group])} for group in groups]
    return {**_given(files), "columns": entries}


def _same_entry(feature: r.Feature) -> Any:
    """Equal for features that one entry can represent: each has the name of its only column."""
    is_called_so = feature.columns == (feature.name,) and _PLAIN_NAME.fullmatch(feature.name)
    is_one = is_called_so and not isinstance(next(iter(feature.steps), None), COMBINING)
    return feature.steps, feature.of, feature.dim, None if is_one else feature.name


def _entry(alike: Iterable[r.Feature]) -> dict[str, Any]:
    features = list(alike)
    first = features[0]
    named = {} if _same_entry(first)[-1] is None else {"name": first.name}
    columns = [column for feature in features for column in feature.columns]
    rest = {key: value for key, value in _given(first).items() if key not in ("name", "columns")}
    # A feature without an explicit owner would belong to the owner of its columns.
    return {**named, "columns": columns if named else _names(columns), **rest, "of": first.of}


def _names(names: Sequence[str]) -> str:
    """`i1..i13, c1`: consecutive names become ranges."""
    if len(names) == 1:
        return names[0]
    runs: list[list[str]] = []
    for name in names:
        if runs and name == _next_name(runs[-1][-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _next_name(name: str) -> str | None:
    found = _NUMBERED.fullmatch(name)
    return f"{found[1]}{int(found[2]) + 1}" if found and found[1] else None


# from the tree to text


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, dict) for one in value)
    )


def _section(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in value:
            yield f"\n[[{path}]]"
            yield from (f"{_key(key)} = {_value(inner)}" for key, inner in entry.items())
        return
    headed = {key: inner for key, inner in value.items() if _HEADED.fullmatch(f"{path}.{key}")}
    plain = {key: inner for key, inner in value.items() if key not in headed}
    if plain or not headed:
        yield f"\n[{path}]"
    yield from (f"{_key(key)} = {_value(inner)}" for key, inner in plain.items())
    for key, inner in headed.items():
        yield from _section(f"{path}.{_key(key)}", inner)


def _value(value: Any) -> str:
    if isinstance(value, list):
        parts = [_value(element) for element in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= _WIDE else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _inline(value: Any) -> str:
    """Inside braces everything is on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return _value(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
