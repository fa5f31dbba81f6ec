"""Conversion between plain values, as in TOML and JSON, and the recipe's dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from recmill.recipe.names import EXPANDED, expand_names, nearest
from recmill.recipe.numbers import Bounds
from recmill.recipe.recipe import ROW_OPERATIONS, Choices, Dimension, Range, Recipe, RowOperation
from recmill.recipe.steps import STEPS, Step

_SCALARS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_INT64 = range(-(2**63), 2**63)


Paths = Mapping[str, Sequence[str]]  # section -> key path in the file of each of its entries


def paths_of(paths: Paths, section: str, entries: Sequence[object]) -> Sequence[str]:
    """Key paths of a section's entries; their numbers when nothing else is known."""
    return paths.get(section) or [f"{section}[{index}]" for index in range(len(entries))]


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Types of a dataclass's fields, cached: evaluating them per table would dominate parsing."""
    return get_type_hints(kind, include_extras=True)


def default_of(kind: type, name: str) -> object:
    """The value of a field that the recipe does not set."""
    return next(field.default for field in dataclasses.fields(kind) if field.name == name)


class Problems:
    """Distinct problems of a recipe in order of discovery, and the sections that are unreliable because of them."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.count = 0
        self.broken: set[str] = set()

    def add(self, path: str, what: str) -> Any:
        """Add a problem, such as `split.held_out must be ...`: the key path, then the rest of the sentence.

        Returns None.
        """
        self.note(path, what)
        self.count += 1  # also when an entry for many columns has the same problem many times
        self.broken.add(path.partition(".")[0].partition("[")[0])
        return None

    def note(self, path: str, what: str) -> None:
        """Add an invalid value of the right type: the rest of its section can still be checked."""
        self.found[f"{path or 'the recipe'} {what}"] = None


class Entries(list[Any]):
    """A list whose elements keep the key path of their entry."""

    def __init__(self, entries: Iterable[tuple[str, Any]]) -> None:
        self.paths: list[str] = []
        super().__init__()
        for path, entry in entries:
            self.paths.append(path)
            self.append(entry)


class Reader:
    """Parses plain values to a dataclass tree. Problems are added to `problems`, and their values left out.

    `paths` gives the origin of each entry, for lists that were expanded into more entries than the file has.
    """

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.paths: dict[str, list[str]] = {}

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """Parse `value` as a `kind`; None after a problem."""
        origin = get_origin(kind)
        if origin is Annotated:
            return self._annotated(*get_args(kind)[:2], value=value, path=path)
        if origin in (Union, types.UnionType):
            return self._union(get_args(kind), value, path)
        if origin is Literal:
            return self._choice(get_args(kind), value, path)
        if origin is tuple:
            return self._list(get_args(kind)[0], value, path)
        if origin is dict:
            return self._dict(get_args(kind)[1], value, path)
        if kind is Step:
            return self._named("step", STEPS, value, path)
        if kind is RowOperation:
            return self._named("row operation", ROW_OPERATIONS, value, path)
        if kind is Dimension:
            return self._dimension(value, path)
        if dataclasses.is_dataclass(kind):
            return self.dataclass(kind, value, path)
        return self._scalar(kind, value, path, _SCALARS[kind])

    def dataclass(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return self.problems.add(path, f"must be a table, got {show(value)}")
        hints = hints_of(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        prefix = f"{path}." if path else ""
        for key in value:
            if key not in fields:
                self._unknown_key(prefix, str(key), list(fields), value)
        made: dict[str, Any] = {}
        for name, field in fields.items():
            if name in value:
                made[name] = self.read(hints[name], value[name], prefix + name)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.problems.add(prefix + name, "is missing")
                made[name] = () if get_origin(hints[name]) is tuple else None
        return kind(**made)

    def _unknown_key(self, prefix: str, key: str, known: list[str], given: Iterable[str]) -> None:
        absent = [name for name in known if name not in given]
        meant = difflib.get_close_matches(key, absent, n=1)
        self.problems.add(prefix + key, f"is not a known key{nearest(key, meant or known)}")
        if not prefix:
            self.problems.broken.update(meant)  # the section exists under a misspelled name

    def _annotated(self, kind: Any, mark: Any, *, value: Any, path: str) -> Any:
        if mark == EXPANDED:
            return self._names(value, path)
        assert isinstance(mark, Bounds)
        number = self._scalar(kind, value, path, mark.words)
        if number is not None and not mark.fits(number):
            self.problems.note(path, f"must be {mark.words}, got {show(value)}")
        return number

    def _names(self, value: Any, path: str) -> Any:
        names = value if isinstance(value, str) else self._list(str, value, path)
        try:
            return tuple(expand_names(names))
        except ValueError as error:
            self.problems.add(path, str(error))
            return ()

    def _scalar(self, kind: type, value: Any, path: str, words: str) -> Any:
        is_bool = isinstance(value, bool)
        if kind is float and isinstance(value, int) and not is_bool and value in _INT64:
            return float(value)
        if not isinstance(value, kind) or (is_bool and kind is not bool):
            return self.problems.add(path, f"must be {words}, got {show(value)}")
        if kind is int and value not in _INT64:
            return self.problems.add(path, f"must be {words} of at most 64 bits, got {show(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            return self.problems.add(path, f"must be finite, got {show(value)}")
        return value

    def _union(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        options = [kind for kind in kinds if kind is not type(None)]
        if len(options) == 1:
            return self.read(options[0], value, path)
        for kind in options:
            if type(value) is kind:
                return self._scalar(kind, value, path, _SCALARS[kind])
        return self.problems.add(path, f"must be text, a number or true/false, got {show(value)}")

    def _choice(self, choices: tuple[str, ...], value: Any, path: str) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        hint = f'; did you mean "{close[0]}"?' if close else ""
        return self.problems.add(path, f"must be one of {', '.join(choices)}, got {show(value)}{hint}")

    def _list(self, kind: Any, value: Any, path: str) -> tuple[Any, ...]:
        if isinstance(value, str) and kind is str:
            value = [value]
        if not isinstance(value, list | tuple):
            self.problems.add(path, f"must be a list, got {show(value)}")
            return ()
        paths = (
            value.paths if isinstance(value, Entries) else [f"{path}[{index}]" for index in range(len(value))]
        )
        good: list[tuple[str, Any]] = []
        for where, element in zip(paths, value, strict=True):
            count = self.problems.count
            made = self.read(kind, element, where)
            if self.problems.count == count:
                good.append((where, made))
        self.paths[path] = [where for where, _ in good]
        return tuple(made for _, made in good)

    def _dict(self, kind: Any, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.problems.add(path, f"must be a table, got {show(value)}")
            return {}
        return {str(key): self.read(kind, element, f"{path}.{key}") for key, element in value.items()}

    def _named(self, what: str, known: Mapping[str, Any], value: Any, path: str) -> Any:
        """A step or row operation: `"log"`, `{ fill = 0 }` or `{ fill = { statistic = "mean" } }`."""
        options: Any = {}
        if isinstance(value, str):
            name = value
        elif isinstance(value, dict) and len(value) == 1:
            name, options = next(iter(value.items()))
        else:
            wanted = f"must name one {what}, as text or as a table with one key"
            return self.problems.add(path, f"{wanted}; got {show(value)}")
        if name not in known:
            return self.problems.add(path, f'has no {what} "{name}"{nearest(str(name), known)}')
        kind = known[name]
        if not isinstance(options, dict) or (kind.main == "ids" and "ids" not in options):
            if kind.main is None:
                wanted = f"must be a table of parameters{_names_of_fields(kind)}"
                return self.problems.add(f"{path}.{name}", f"{wanted}, got {show(options)}")
            options = {kind.main: options}
        return self.dataclass(kind, options, f"{path}.{name}")

    def _dimension(self, value: Any, path: str) -> Any:
        if isinstance(value, list | tuple):
            return Choices(tuple(value))
        if isinstance(value, dict):
            return self.dataclass(Range, value, path)
        wanted = "must be a list of choices, or a table with low and high"
        return self.problems.add(path, f"{wanted}; got {show(value)}")


def _names_of_fields(kind: Any) -> str:
    names = [field.name for field in dataclasses.fields(kind)]
    return f" ({', '.join(names)})" if names else ""


def show(value: Any) -> str:
    """A value in TOML syntax, shortened to fit into a message."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    elif isinstance(value, list | tuple):
        inner = ["[...]" if isinstance(element, list | tuple) else show(element) for element in value[:10]]
        text = f"[{', '.join(inner)}{', ...' if len(value) > 10 else ''}]"
    elif isinstance(value, dict):
        text = "{ " + ", ".join(f"{key} = ..." for key in list(value)[:5]) + " }" if value else "{}"
    else:
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts and lists, without None fields; steps under their names."""
    if isinstance(value, Step):
        return {value.step_name(): _plain_fields(value)}
    if isinstance(value, RowOperation):
        return {value.operation_name(): _plain_fields(value)}
    if isinstance(value, Choices):
        return to_plain(value.values)
    if dataclasses.is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, tuple | list):
        return [to_plain(element) for element in value]
    if isinstance(value, dict):
        return {key: to_plain(element) for key, element in value.items()}
    return value


def _plain_fields(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: to_plain(element) for name, element in fields.items() if element is not None}


def read_recipe(tree: Any, problems: Problems) -> tuple[Recipe | None, Paths]:
    """The valid part of the recipe, and the key paths of its entries."""
    reader = Reader(problems)
    return reader.dataclass(Recipe, tree, ""), reader.paths
