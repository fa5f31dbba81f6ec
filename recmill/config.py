"""Descriptions of the fields of config dataclasses, from which CLI flags, Python arguments and docs are derived.

    workers: Annotated[int | None, Flag("threads, or tasks of a cluster at once (default: all cores)")] = None

A config has a module of its own that imports nothing heavy, because `recmill prepare --help` imports it. Such a
module does not use `from __future__ import annotations`: annotations must be objects, not text.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class ValueKind:
    """The text form of a value: `parse` raises ValueError with what was expected, `show` is its inverse."""

    parse: Callable[[str], Any]
    metavar: str | None = None
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Flag:
    """The command-line form of a config field.

    Name, kind and metavar follow from the field's name and type unless they are given. The default is appended to the
    help text; where the default is None, the text itself explains it.
    """

    help: str
    kind: ValueKind | None = None
    metavar: str | None = None
    name: str | None = None
    group: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlagField:
    """A config field that has a flag."""

    name: str
    flag: Flag
    type: Any  # without None
    default: Any

    @property
    def option(self) -> str:
        return self.flag.name or "--" + self.name.replace("_", "-")

    @property
    def options(self) -> tuple[str, ...]:
        """All names of the flag, short ones first."""
        short = [alias for alias in self.flag.aliases if not alias.startswith("--")]
        return (*short, self.option, *(alias for alias in self.flag.aliases if alias not in short))

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be repeated, with one value each time."""
        return self.flag.kind is None and get_origin(self.type) in (tuple, Mapping, _MAPPING)

    @property
    def choices(self) -> tuple[Any, ...] | None:
        element = self._element
        return get_args(element) if get_origin(element) is Literal else None

    @property
    def kind(self) -> ValueKind:
        return self.flag.kind or _KINDS.get(self._element, TEXT)

    @property
    def help(self) -> str:
        is_plain = self.default is None or self.default is False or self.default == ()
        is_plain = is_plain or isinstance(self.default, Mapping)
        if is_plain or "default:" in self.flag.help:
            return self.flag.help
        shown = "yes" if self.default is True else self.kind.show(self.default)
        return f"{self.flag.help} (default: {shown})"

    @property
    def _element(self) -> Any:
        if not self.is_repeated:
            return self.type
        return get_args(self.type)[0] if get_origin(self.type) is tuple else Mapping


def flag_fields(config: type) -> Iterator[FlagField]:
    """The fields of a config dataclass that have flags, in order."""
    for field in dataclasses.fields(config):
        assert not isinstance(field.type, str) or "Flag(" not in field.type, f"{config}: annotations are text"
        if get_origin(field.type) is Annotated:
            annotated, *extras = get_args(field.type)
            flag = next(extra for extra in extras if isinstance(extra, Flag))
            default = (
                field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            )
            yield FlagField(field.name, flag, _without_none(annotated), default)


def _without_none(annotated: Any) -> Any:
    if get_origin(annotated) in (Union, types.UnionType):
        return next(option for option in get_args(annotated) if option is not type(None))
    return annotated


# Numbers


def parse_count(text: str) -> int:
    if not re.fullmatch(r"[0-9][0-9_]{0,18}", text) or text.endswith("_") or int(text.replace("_", "")) < 1:
        raise ValueError(f"must be a whole number from 1, got {text}")
    return int(text.replace("_", ""))


def parse_whole(text: str) -> int:
    return 0 if text == "0" else parse_count(text)


def parse_seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or int(text) >= 2**63:
        raise ValueError(f"must be a whole number from 0 to 2**63 - 1, got {text}")
    return int(text)


def parse_port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > 65_535:
        raise ValueError(f"must be a port from 0 to 65535, got {text}")
    return int(text)


def number_kind(expected: str, fits: Callable[[float], bool], metavar: str = "X") -> ValueKind:
    """A number with bounds; `expected` describes them."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not fits(number):  # false for nan, whatever the bounds
            raise ValueError(f"must be {expected}, got {text}")
        return number

    return ValueKind(parse, metavar, show_number)


def show_number(number: float) -> str:
    return f"{number:g}"


_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?B?)", text.strip().upper(), re.ASCII)
    if not match or not float(match[1]):
        raise ValueError(f"must be a size such as 500MB or 2GB, got {text}")
    return int(float(match[1]) * _UNITS[match[2].removesuffix("B") + "B"])


def show_size(number: int) -> str:
    unit = max((unit for unit in _UNITS if number >= _UNITS[unit]), key=lambda unit: _UNITS[unit])
    return f"{number / _UNITS[unit]:g}{unit}"


def parse_fraction(text: str) -> float:
    try:
        fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise ValueError(f"must be a fraction such as 0.001 or 0.1%, got {text}")
    return fraction


# Texts


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"must be modules such as shop.features, got {text}")
    return names


def _parse_pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"must be KEY=VALUE, got {text}")
    return key, value


TEXT = ValueKind(str)
COUNT = ValueKind(parse_count, "N")
WHOLE = ValueKind(parse_whole, "N")
SEED = ValueKind(parse_seed, "S")
PORT = ValueKind(parse_port, "P")
SIZE = ValueKind(parse_size, "SIZE", show_size)
FRACTION = ValueKind(parse_fraction, "FRACTION", lambda fraction: f"{fraction * 100:g}%")
SECONDS = number_kind("a number of seconds above 0", lambda number: 0 < number < 1e9, "SECONDS")
MINUTES = number_kind("a number of minutes above 0", lambda number: 0 < number < 1e9, "MINUTES")
ABOVE_ZERO = number_kind("a number above 0", lambda number: 0 < number < math.inf)
NOT_NEGATIVE = number_kind("a number from 0", lambda number: 0 <= number < math.inf)
NAMES = ValueKind(parse_names, "NAME,...", ",".join)
MODULES = ValueKind(parse_modules, "MODULE,...", ",".join)
PAIR = ValueKind(_parse_pair, "KEY=VALUE")

_MAPPING = get_origin(Mapping[str, str])
_KINDS: dict[Any, ValueKind] = {int: COUNT, float: ABOVE_ZERO, Path: ValueKind(Path, "DIR"), Mapping: PAIR}
