"""Kinds of columns from the log through row operations and steps, and the owners of columns.

A kind is int, float, bool or text for raw values, id for an integer with a known range, key for a 64-bit key. Lists
are written "list of <kind>".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from recmill.recipe import recipe as r
from recmill.recipe import steps as s

LIST_OF = "list of "
NUMBERS = ("int", "float", "bool")
RAW = (*NUMBERS, "text")
MODEL_READY = (*NUMBERS, "id", "key")
_NUMERIC = (*NUMBERS, "id")
_CATEGORICAL = ("int", "bool", "text", "id")

Part = Literal["user", "item", "context", "crossed"]


class Unfit(Exception):
    """A step cannot take its input; the message continues after the step's name."""


def kind_of(column: r.Column) -> str:
    return {"hex": "int", "time": "float"}.get(column.type, column.type)


def kinds_of_columns(recipe: r.Recipe, before_split: bool = False) -> dict[str, str]:
    """Name -> kind of every column that features may read: those of the log, of side tables and added ones.

    `before_split` excludes columns that depend on which rows train.
    """
    kinds = {column.name: kind_of(column) for column in recipe.log.columns}
    for operation in recipe.rows:
        if not (before_split and r.runs_after_split(operation)):
            kinds.update(added_kinds(recipe, operation, kinds))
    return kinds


def added_kinds(recipe: r.Recipe, operation: r.RowOperation, kinds: Mapping[str, str]) -> dict[str, str]:
    """Name -> kind of the columns that a row operation adds to rows of `kinds`."""
    if isinstance(operation, r.Join) and operation.table in recipe.tables:
        columns = recipe.tables[operation.table].columns
        return {column.name: kind_of(column) for column in columns if column.name != operation.on}
    if isinstance(operation, r.History):
        return {column: LIST_OF + kinds.get(name, "int") for name, column in operation.list_columns.items()}
    if isinstance(operation, r.HistoryNegatives):
        return {f"{operation.history}_negatives": kinds.get(operation.history, "list of int")}
    if isinstance(operation, r.Lag):
        return {f"{name}_lag{operation.shift}": kinds.get(name, "float") for name in operation.columns}
    return {}


def owners_of_columns(recipe: r.Recipe) -> dict[str, r.Owner]:
    """Name -> owner of the column: user, item or context."""
    log = recipe.log
    keys: dict[str | None, r.Owner] = {log.user: "user", log.item: "item"}
    owners: dict[str, r.Owner] = {column.name: keys.get(column.name, column.of) for column in log.columns}
    for operation in recipe.rows:
        if isinstance(operation, r.Join) and operation.table in recipe.tables:
            of_key = keys.get(operation.on, "context")
            for column in recipe.tables[operation.table].columns:
                owners.setdefault(column.name, of_key if column.of == "context" else column.of)
        if isinstance(operation, r.History):
            owners.update(dict.fromkeys(operation.list_columns.values(), "user"))
    return owners


def owner_of(columns: tuple[str, ...], owners: Mapping[str, r.Owner]) -> r.Owner:
    """The owner of a feature: that of its columns, if they have the same one."""
    found = {owners.get(column, "context") for column in columns}
    return found.pop() if len(found) == 1 else "context"


def parts_of_features(recipe: r.Recipe) -> dict[str, Part]:
    """Name -> a feature's part at serving: its owner, or crossed when it reads the item and the user or context."""
    owners = owners_of_columns(recipe)
    parts: dict[str, Part] = {}
    for feature in recipe.features:
        found = {owners.get(column, "context") for column in feature.columns}
        parts[feature.name] = "crossed" if "item" in found and len(found) > 1 else feature.of
    return parts


def crossed_features(recipe: r.Recipe) -> list[str]:
    """The ranker's features that read users and items together."""
    if recipe.ranking is None:
        return []
    names = recipe.ranking.features_among(feature.name for feature in recipe.features)
    parts = parts_of_features(recipe)
    of_trees = recipe.ranking.trees.features if recipe.ranking.trees is not None else ()
    used = dict.fromkeys((*names, *recipe.ranking.wide, *of_trees))
    return [name for name in used if parts[name] == "crossed"]


def kinds_along(feature: r.Feature | r.Label, kinds: Mapping[str, str]) -> list[str]:
    """The kind before the first step (of the first column), and after each step, of a valid feature."""
    current = [kinds[column] for column in feature.columns]
    along = [current[0]]
    for step in feature.steps:
        current = [after(step, current)]
        along += current
    return along


def after(step: s.Step, kinds: list[str]) -> str:
    """The kind that `step` makes of `kinds`; raises Unfit with the reason."""
    special = _SPECIAL.get(type(step))
    return special(step, kinds) if special else _RULES[type(step)].result_for(kinds[0])


# Steps whose output list has the length of the input.
_SAME_LENGTH = (s.Clip, s.Log, s.Add, s.Cast)


def width_of(feature: r.Feature | r.Label) -> int | None:
    """The fixed length of a feature that ends as lists of numbers; None when lengths differ."""
    for step in reversed(feature.steps):
        if isinstance(step, s.OneHot):
            return step.size
        if isinstance(step, s.Pad | s.Mask):
            return step.length
        if isinstance(step, s.Pack):
            return len(feature.columns)
        if not isinstance(step, _SAME_LENGTH):
            return None
    return None


def element_of(kind: str) -> str:
    return kind.removeprefix(LIST_OF)


def is_list(kind: str) -> bool:
    return kind.startswith(LIST_OF)


def describe(kind: str) -> str:
    """A kind in words, as the object of "gets"."""
    words = {
        "id": "ids",
        "key": "64-bit keys",
        "int": "whole numbers",
        "float": "numbers",
        "bool": "true/false",
    }
    element = words.get(element_of(kind), element_of(kind))
    return f"lists of {element}" if is_list(kind) else element


# input and output of each step


@dataclass(frozen=True)
class _Rule:
    """The kinds of elements that a step accepts, single, in lists or both; and its output (None: the same)."""

    needs: str
    elements: tuple[str, ...]
    result: str | None
    lists: Literal["never", "too", "only"] = "never"

    def result_for(self, kind: str) -> str:
        if element_of(kind) not in self.elements or not self._takes(is_list(kind)):
            raise Unfit(f"needs {self.needs}, but gets {describe(kind)}")
        if self.result is None:
            return kind
        return LIST_OF + self.result if self.lists == "too" and is_list(kind) else self.result

    def _takes(self, a_list: bool) -> bool:
        return self.lists == "too" or a_list == (self.lists == "only")


def _number(result: str) -> _Rule:
    return _Rule("one number a row", _NUMERIC, result)


def _numbers(result: str | None) -> _Rule:
    return _Rule("numbers", _NUMERIC, result, lists="too")


def _category(result: str) -> _Rule:
    return _Rule("one whole number or text a row", _CATEGORICAL, result)


def _categories(result: str) -> _Rule:
    return _Rule("whole numbers or text", _CATEGORICAL, result, lists="too")


def _list(
    result: str | None, needs: str = "a list", elements: tuple[str, ...] = (*RAW, "id", "key")
) -> _Rule:
    return _Rule(needs, elements, result, lists="only")


_RULES: dict[type[s.Step], _Rule] = {
    s.Clip: _numbers(None),
    s.Log: _numbers("float"),
    s.Add: _numbers("float"),
    s.Standardise: _number("float"),
    s.MinMax: _number("float"),
    s.Buckets: _numbers("id"),
    s.Quantiles: _number("id"),
    s.DatePart: _Rule("one time stamp a row, as a number", ("int", "float"), "int"),
    s.Map: _categories("id"),
    s.Lookup: _categories("id"),
    s.Hash: _categories("id"),
    s.Key: _categories("key"),
    s.Count: _category("int"),
    s.Frequency: _category("float"),
    s.Target: _category("float"),
    s.Aggregate: _category("float"),
    s.Split: _Rule("text", ("text",), "list of text"),
    s.First: _list(None),
    s.Concat: _list("text", "a list of text", ("text",)),
    s.Length: _list("int"),
    s.Pad: _list(None, "a list of numbers or ids", MODEL_READY),
    s.Mask: _list("list of int"),
    s.OneHot: _Rule("an id", ("int", "bool", "id"), "list of float"),
}


def _fill(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Fill)
    kind = kinds[0]
    if (step.value is None) == (step.statistic is None):
        raise Unfit("needs exactly one of value and statistic")
    if is_list(kind):
        raise Unfit("does not take lists; a missing list is an empty one already")
    if kind in ("id", "key"):
        raise Unfit(f"has nothing to do: {describe(kind)} are never missing")
    if step.statistic is not None:
        if kind not in NUMBERS:
            raise Unfit(f"takes the {step.statistic} of numbers, but gets {describe(kind)}")
        return "float"
    if (kind == "text") != isinstance(step.value, str):
        raise Unfit(f"replaces missing {describe(kind)} by {_shown(step.value)}")
    return "float" if kind == "int" and isinstance(step.value, float) else kind


def _shown(value: s.Value | None) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _cast(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Cast)
    return LIST_OF + step.to if is_list(kinds[0]) else step.to


def _vocabulary(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Vocabulary)
    result = _categories("id").result_for(kinds[0])
    if step.keep == "all":
        return result
    if not is_list(kinds[0]):
        raise Unfit(
            'has keep = "most_frequent", which reduces lists, but gets one value a row; add split before it'
        )
    return "id"


def _cross(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Cross)
    if len(kinds) < 2:
        raise Unfit("needs at least two columns")
    edges = step.edges if step.edges is not None else ((),) * len(kinds)
    if len(edges) != len(kinds):
        raise Unfit(
            f"has {len(edges)} lists of edges for {len(kinds)} columns; an empty list leaves one as it is"
        )
    for kind, cuts in zip(kinds, edges, strict=True):
        if cuts and kind not in NUMBERS:
            raise Unfit(f"has edges for {describe(kind)}; they are for numbers")
        if not cuts and kind not in _CATEGORICAL:
            raise Unfit(f"needs whole numbers or text, but gets {describe(kind)}; give it edges")
    return "text"


def _pack(step: s.Step, kinds: list[str]) -> str:
    if any(map(is_list, kinds)):
        raise Unfit("does not take lists")
    if len(set(kinds)) > 1 and not set(kinds) <= set(NUMBERS):
        raise Unfit(f"needs columns of one kind, but gets {', '.join(map(describe, kinds))}")
    return LIST_OF + ("float" if len(set(kinds)) > 1 else kinds[0])


def _declared(step: s.Step, kinds: list[str]) -> str:
    assert isinstance(step, s.Expression | s.Function)
    return step.type


_SPECIAL: dict[type[s.Step], Callable[[s.Step, list[str]], str]] = {
    s.Fill: _fill,
    s.Cast: _cast,
    s.Vocabulary: _vocabulary,
    s.Cross: _cross,
    s.Pack: _pack,
    s.Expression: _declared,
    s.Function: _declared,
}
