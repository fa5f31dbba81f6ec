"""The steps of a feature, as a recipe names them. `recmill.features` implements them.

Each class is one step; its fields are the step's parameters. In TOML a step is written as its name alone (`"log"`),
with its main parameter (`{ fill = 0 }`) or with several (`{ vocabulary = { min_count = 3 } }`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from recmill.recipe.numbers import AboveZero, Id, NotNegative, NumIds, Positive, Several, Whole

Value = bool | int | float | str
ResultType = Literal["int", "float", "bool", "text", "list of int", "list of float", "list of text"]


@dataclass(frozen=True)
class Step:
    """A transformation of a column. `main` names the parameter that `{ step = value }` sets."""

    main: ClassVar[str | None] = None

    @classmethod
    def step_name(cls) -> str:
        """MinMax -> min_max: the name in recipes."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


# numbers


@dataclass(frozen=True)
class Fill(Step):
    """Replace missing values by a constant, or by the column's median or mean on the training rows."""

    main: ClassVar[str | None] = "value"
    value: Value | None = None
    statistic: Literal["median", "mean"] | None = None


@dataclass(frozen=True)
class Clip(Step):
    """Keep numbers within [min, max]."""

    min: float | None = None
    max: float | None = None


@dataclass(frozen=True)
class Log(Step):
    """ln(max(x + add, at_least)): always finite. The default is ln(max(x, 0) + 1)."""

    main: ClassVar[str | None] = "add"
    add: float = 1.0
    at_least: AboveZero = 1.0


@dataclass(frozen=True)
class Cast(Step):
    """Change the type. Text that is not a number becomes missing."""

    main: ClassVar[str | None] = "to"
    to: Literal["int", "float", "text", "bool"]


@dataclass(frozen=True)
class Add(Step):
    """Add a constant."""

    main: ClassVar[str | None] = "value"
    value: float


@dataclass(frozen=True)
class Standardise(Step):
    """(x - mean) / standard deviation of the training rows; a constant column becomes 0."""


@dataclass(frozen=True)
class MinMax(Step):
    """Scale the training range linearly to [min, max]; values outside it are clipped."""

    min: float = 0.0
    max: float = 1.0


@dataclass(frozen=True)
class Buckets(Step):
    """Index of the interval that holds x: n edges make n + 1 buckets, ids 1 to n + 1; missing is 0."""

    main: ClassVar[str | None] = "edges"
    edges: tuple[float, ...]


@dataclass(frozen=True)
class Quantiles(Step):
    """Buckets whose edges are quantiles of the training rows, so that each holds about equally many rows."""

    main: ClassVar[str | None] = "buckets"
    buckets: Several


@dataclass(frozen=True)
class DatePart(Step):
    """A part of a UTC time stamp, as in calendars; weekday is 0 (Monday) to 6.

    Time stamps are seconds since 1970 unless `unit` is given.
    """

    main: ClassVar[str | None] = "part"
    part: Literal["hour", "weekday", "day", "month", "year", "minute", "week", "day_of_year"]
    unit: Literal["s", "ms", "us"] = "s"


# categories


@dataclass(frozen=True)
class Map(Step):
    """A fixed map from value to id; every other value is 0."""

    main: ClassVar[str | None] = "ids"
    ids: dict[str, Id]


@dataclass(frozen=True)
class Vocabulary(Step):
    """Ids from 1 for the values of the training rows; 0 is unknown, rare or missing.

    Features with the same `named` share one vocabulary, which counts the values of all. `extend` keeps the ids of an
    earlier Table's vocabulary and appends new values. On a list, `keep` reduces it to its most frequent token.
    """

    main: ClassVar[str | None] = "min_count"
    min_count: Positive = 1
    max_size: NumIds | None = None
    order: Literal["count", "first_seen"] = "count"
    named: str | None = None
    extend: str | None = None
    keep: Literal["all", "most_frequent"] = "all"


@dataclass(frozen=True)
class Lookup(Step):
    """Ids of a vocabulary that other features fit, without counting into it (for histories)."""

    main: ClassVar[str | None] = "named"
    named: str


@dataclass(frozen=True)
class Hash(Step):
    """1 + hash modulo `buckets`; missing is 0. Nothing is fitted."""

    main: ClassVar[str | None] = "buckets"
    buckets: NumIds
    seed: Whole = 0


@dataclass(frozen=True)
class Key(Step):
    """A 64-bit key for a dynamic embedding table; missing is 0. Nothing is fitted."""

    main: ClassVar[str | None] = "named"
    named: str | None = None
    seed: Whole = 0


@dataclass(frozen=True)
class Cross(Step):
    """Join the values of several columns into one text, to be hashed or looked up by the next step.

    `edges` has a list for each column: a number is joined as its interval between them, as in `buckets`; an empty
    list leaves the values as they are.
    """

    main: ClassVar[str | None] = "separator"
    separator: str = "\x1f"
    edges: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True)
class Count(Step):
    """How often the value occurs in the training rows."""


@dataclass(frozen=True)
class Frequency(Step):
    """Fraction of the training rows that have the value."""


@dataclass(frozen=True)
class Target(Step):
    """Smoothed mean of a label per value. Training rows use the other folds only, so nothing leaks."""

    main: ClassVar[str | None] = "label"
    label: str
    folds: Several = 5
    smooth: NotNegative = 20.0
    seed: Whole = 0


@dataclass(frozen=True)
class Aggregate(Step):
    """A statistic of another column over the training rows that share this value, joined back."""

    column: str
    statistic: Literal["mean", "sum", "min", "max", "count", "std", "first", "last", "distinct"] = "mean"


# text and lists


@dataclass(frozen=True)
class Split(Step):
    """Text to a list of tokens; empty text is an empty list."""

    main: ClassVar[str | None] = "separator"
    separator: str


@dataclass(frozen=True)
class First(Step):
    """Keep the first `count` elements of a list."""

    main: ClassVar[str | None] = "count"
    count: Positive


@dataclass(frozen=True)
class Concat(Step):
    """A list of tokens to one text."""

    main: ClassVar[str | None] = "separator"
    separator: str


@dataclass(frozen=True)
class Length(Step):
    """Number of elements of a list."""


@dataclass(frozen=True)
class Pad(Step):
    """A list of exactly `length`: its last elements, padded on the right with `value`."""

    main: ClassVar[str | None] = "length"
    length: Positive
    value: float = 0.0


@dataclass(frozen=True)
class Mask(Step):
    """The mask of a list that `pad` makes: 1 for real elements and 0 for padding."""

    main: ClassVar[str | None] = "length"
    length: Positive


@dataclass(frozen=True)
class OneHot(Step):
    """An id to a list of `size` zeros and a one; ids outside 0 to size - 1 are an error."""

    main: ClassVar[str | None] = "size"
    size: NumIds


# several columns


@dataclass(frozen=True)
class Pack(Step):
    """Several columns to one list column."""


@dataclass(frozen=True)
class Expression(Step):
    """An expression over the feature's columns, evaluated row by row: `clicks / (views + 1)`."""

    main: ClassVar[str | None] = "sql"
    sql: str
    type: ResultType = "float"


@dataclass(frozen=True)
class Function(Step):
    """A user-defined function, `package.module:name`: takes the columns as Polars series, returns one series.

    It must treat rows independently: the server calls it with one row.
    """

    main: ClassVar[str | None] = "path"
    path: str
    type: ResultType = "float"


STEPS: dict[str, type[Step]] = {
    step.step_name(): step
    for step in (
        Fill, Clip, Log, Cast, Add, Standardise, MinMax, Buckets, Quantiles, DatePart,
        Map, Vocabulary, Lookup, Hash, Key, Cross, Count, Frequency, Target, Aggregate,
        Split, First, Concat, Length, Pad, Mask, OneHot, Pack, Expression, Function,
    )
}  # fmt: skip

# These take all of a feature's columns at once; every other step takes one.
COMBINING = (Cross, Pack, Expression, Function)
