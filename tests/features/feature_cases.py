"""One or a few cases for each step: which raw columns it may meet, and the features that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from hypothesis import strategies as st

INT64 = 1 << 63

small_ints = st.integers(-4, 4)
ints = st.one_of(st.none(), small_ints, st.integers(-INT64, INT64 - 1))
floats = st.one_of(
    st.none(),
    st.sampled_from([0.0, -0.0, 0.1, 0.2, 0.3, 1.0, -2.5]),
    st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 3)),
)
texts = st.one_of(
    st.none(),
    st.sampled_from(["", "a", "b", "B", "é", "日本", "🎉", "a|b", "|", "12", "-3.5", "true", "nan", "inf"]),
    st.text(max_size=6),
)
tokens = st.one_of(st.none(), st.lists(st.sampled_from(["a", "b", "é", "🎉", ""]), max_size=5).map("|".join))
bools = st.one_of(st.none(), st.booleans())
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "int": ints,
    "float": floats,
    "text": texts,
    "bool": bools,
    **{
        f"list of {kind}": st.one_of(st.none(), st.lists(elements, max_size=4))
        for kind, elements in (("int", ints), ("float", floats), ("text", texts), ("bool", bools))
    },
}


@dataclass(frozen=True, eq=False)
class Case:
    """Features that use `step`. The feature "f" is 0 (or an empty list) for a missing value if `missing_is_zero`."""

    step: str
    types: Mapping[str, str]
    steps: Sequence[Any]
    note: str = ""
    more: Sequence[Mapping[str, Any]] = ()
    labels: Sequence[Mapping[str, Any]] = ()
    reads: Sequence[str] = ()
    missing_is_zero: bool = False
    strategies: Mapping[str, st.SearchStrategy[Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(part for part in (self.step, *self.types.values(), self.note) if part).replace(
            " ", "_"
        )

    def features(self) -> list[Mapping[str, Any]]:
        return [
            {"name": "f", "columns": list(self.reads or self.types), "steps": list(self.steps)},
            *self.more,
        ]

    def rows(self, min_size: int) -> st.SearchStrategy[dict[str, list[Any]]]:
        """Columns of raw values."""
        row = st.tuples(*(self.strategies.get(name, STRATEGIES[kind]) for name, kind in self.types.items()))
        return st.lists(row, min_size=min_size, max_size=10).map(
            lambda rows: {name: [row[number] for row in rows] for number, name in enumerate(self.types)}
        )


def number_of_characters(texts: pl.Series) -> pl.Series:
    """A user's own function."""
    return texts.str.len_chars()


def _one(step: str, kind: str, steps: Sequence[Any], note: str = "", ids: bool = False, **rest: Any) -> Case:
    """A case over one column; `ids` says that missing values have id or key 0."""
    name = "x_history" if kind.startswith("list of ") else "x"
    strategies = {name: rest.pop("values")} if "values" in rest else {}
    return Case(step, {name: kind}, steps, note, missing_is_zero=ids, strategies=strategies, **rest)


_CLICK = [{"name": "click", "columns": "clicked", "steps": [{"fill": 0}]}]
DATE_PARTS = ("weekday", "day", "month", "year", "minute", "week", "day_of_year")
STATISTICS = ("sum", "min", "max", "count", "std", "first", "last", "distinct")
_SHARED = {"vocabulary": {"named": "shared", "min_count": 2}}

CASES = [
    _one("fill", "int", [{"fill": 7}]),
    _one("fill", "int", [{"fill": 0.5}], "float"),
    _one("fill", "float", [{"fill": -1}]),
    _one("fill", "bool", [{"fill": True}]),
    _one("fill", "text", [{"fill": "none"}, "vocabulary"]),
    _one("fill", "int", [{"fill": {"statistic": "mean"}}], "mean"),
    _one("fill", "float", [{"fill": {"statistic": "median"}}, "standardise"], "median"),
    _one("clip", "int", [{"clip": {"min": -2.5, "max": 1e9}}]),
    _one("clip", "float", [{"clip": {"max": 0.25}}]),
    _one("clip", "list of int", [{"clip": {"min": 0}}]),
    _one("log", "int", ["log"]),
    _one("log", "float", [{"log": {"add": 3, "at_least": 0.5}}]),
    _one("log", "list of float", ["log"]),
    _one("cast", "text", [{"cast": "int"}]),
    _one("cast", "text", [{"cast": "float"}, {"clip": {"min": -9, "max": 1e9}}], "float"),
    _one("cast", "text", [{"cast": "bool"}], "bool"),
    _one("cast", "float", [{"cast": "int"}, {"hash": 5}], ids=True),
    _one("cast", "int", [{"cast": "text"}, "vocabulary"], ids=True),
    _one("cast", "list of text", [{"cast": "int"}]),
    _one("add", "int", [{"add": 0.5}]),
    _one("add", "list of float", [{"add": -1}]),
    _one("standardise", "int", ["standardise"]),
    _one("standardise", "float", [{"clip": {"min": -5}}, "standardise"]),
    _one("standardise", "bool", ["standardise"]),
    _one("min_max", "float", ["min_max"]),
    _one("min_max", "int", [{"min_max": {"min": -1, "max": 3}}]),
    _one("buckets", "int", [{"buckets": [-1, 0, 10]}], ids=True),
    _one("buckets", "list of float", [{"buckets": [0.1]}], ids=True),
    _one("quantiles", "float", [{"quantiles": 4}], ids=True),
    _one("quantiles", "int", [{"quantiles": 100}], ids=True),
    _one(
        "date_part",
        "int",
        [{"date_part": "hour"}],
        more=[{"name": part, "columns": "x", "steps": [{"date_part": part}]} for part in DATE_PARTS],
    ),
    _one("date_part", "float", [{"date_part": {"part": "hour", "unit": "ms"}}], "ms"),
    _one("map", "text", [{"map": {"a": 2, "é": 1}}], ids=True),
    _one("map", "bool", [{"map": {"true": 1}}], ids=True),
    _one("map", "list of int", [{"map": {"1": 1, "-3": 4}}], ids=True),
    _one("vocabulary", "text", ["vocabulary"], ids=True),
    _one("vocabulary", "int", [{"vocabulary": {"min_count": 2}}], ids=True),
    _one("vocabulary", "int", [{"vocabulary": {"max_size": 2}}], "max_size", ids=True),
    _one("vocabulary", "bool", ["vocabulary"], ids=True),
    _one("vocabulary", "text", [{"vocabulary": {"order": "first_seen"}}], "first_seen", ids=True),
    _one("vocabulary", "list of text", [{"vocabulary": {"order": "first_seen"}}], "first_seen", ids=True),
    _one("vocabulary", "list of int", ["vocabulary"], ids=True),
    _one(
        "vocabulary",
        "text",
        [{"split": "|"}, {"vocabulary": {"keep": "most_frequent"}}],
        "most_frequent",
        ids=True,
        values=tokens,
    ),
    Case(
        "vocabulary",
        {"x": "text", "y": "text"},
        [_SHARED],
        "shared",
        reads=["x"],
        more=[
            {"name": "g", "columns": "y", "steps": [_SHARED]},
            {
                "name": "late",
                "columns": ["x", "y"],
                "steps": [{"cross": "|"}, "count", {"cast": "text"}, _SHARED],
            },
        ],
        missing_is_zero=True,
    ),
    Case(
        "lookup",
        {"x": "int", "y_history": "list of int"},
        [{"lookup": "item"}],
        reads=["y_history"],
        more=[{"name": "item", "columns": "x", "steps": [{"vocabulary": {"named": "item"}}]}],
        missing_is_zero=True,
    ),
    _one("hash", "text", [{"hash": 7}], ids=True),
    _one("hash", "int", [{"hash": {"buckets": 3, "seed": 9}}], ids=True),
    _one("hash", "list of bool", [{"hash": 2}], ids=True),
    _one("key", "int", ["key"], ids=True),
    _one("key", "list of text", [{"key": {"seed": 1}}], ids=True),
    Case("cross", {"x": "text", "y": "int", "z": "bool"}, ["cross", {"hash": 50}]),
    Case("cross", {"x": "text", "y": "text"}, [{"cross": "_"}, {"vocabulary": 2}]),
    Case("cross", {"x": "float", "y": "int"}, [{"cross": {"edges": [[0.0, 10.0], []]}}, {"vocabulary": 2}]),
    _one("count", "text", ["count", "log"]),
    _one("count", "int", ["count"]),
    _one("frequency", "text", ["frequency"]),
    _one("frequency", "bool", ["frequency", "min_max"]),
    Case(
        "target",
        {"x": "text", "clicked": "int"},
        [{"target": "click"}],
        reads=["x"],
        labels=_CLICK,
        strategies={"clicked": st.integers(0, 1)},
    ),
    Case(
        "target",
        {"x": "int", "clicked": "float"},
        [{"target": {"label": "click", "folds": 2, "smooth": 0}}],
        "smooth_0",
        reads=["x"],
        labels=_CLICK,
    ),
    Case(
        "aggregate",
        {"x": "text", "y": "float"},
        [{"aggregate": {"column": "y"}}],
        reads=["x"],
        strategies={"x": st.sampled_from([None, "a", "b"])},
        more=[
            {"name": name, "columns": "x", "steps": [{"aggregate": {"column": "y", "statistic": name}}]}
            for name in STATISTICS
        ],
    ),
    Case(
        "aggregate",
        {"x": "int", "y": "text"},
        [{"aggregate": {"column": "y", "statistic": "distinct"}}],
        "text",
        reads=["x"],
    ),
    _one("split", "text", [{"split": "|"}, "vocabulary"], ids=True, values=tokens),
    _one("first", "list of int", [{"first": 2}, {"hash": 9}], ids=True),
    _one(
        "concat",
        "text",
        [{"split": "|"}, {"first": 2}, {"concat": "_"}, {"map": {"a": 1, "a_b": 2}}],
        ids=True,
        values=tokens,
    ),
    _one("length", "list of text", ["length", "standardise"]),
    _one("pad", "list of int", ["vocabulary", {"pad": 3}], ids=True),
    _one("pad", "list of float", [{"pad": {"length": 2, "value": -1}}]),
    _one("pad", "list of bool", [{"pad": 2}]),
    _one("mask", "list of text", [{"mask": 3}]),
    _one("one_hot", "int", [{"clip": {"min": 0, "max": 3}}, {"one_hot": 4}]),
    _one("one_hot", "text", ["vocabulary", {"clip": {"max": 2}}, {"one_hot": 3}]),
    Case("pack", {"x": "int", "y": "float", "z": "bool"}, ["pack"]),
    Case("pack", {"x": "text", "y": "text"}, ["pack", "vocabulary"]),
    Case(
        "expression",
        {"x": "float", "y": "int"},
        [{"expression": "x / (abs(y) + 1.0)"}, "standardise"],
        strategies={"y": st.one_of(st.none(), small_ints)},
    ),
    Case(
        "expression",
        {"x": "text", "y": "bool"},
        [{"expression": {"sql": "lower(x) || y", "type": "text"}}, {"hash": 9}],
    ),
    _one(
        "function",
        "text",
        [{"function": {"path": "feature_cases:number_of_characters", "type": "int"}}, "log"],
    ),
]
