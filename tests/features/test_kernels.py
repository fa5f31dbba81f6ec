"""The native kernels against plain Python."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter as PlainCounter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import polars as pl
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.features.kernels import Counter, CountOptions, Moments, RowDigest, ValueIndex

some_examples = examples(20)
ints = st.one_of(st.none(), st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
texts = st.one_of(st.none(), st.sampled_from(["", "a", "é", "🎉"]), st.text(max_size=20))
columns = st.one_of(
    st.lists(ints, max_size=30).map(lambda values: pl.Series("x", values, dtype=pl.Int64)),
    st.lists(texts, max_size=30).map(lambda values: pl.Series("x", values, dtype=pl.String)),
)
finite = st.floats(allow_nan=False, allow_infinity=False)


def counted(counter: Counter) -> dict[Any, int]:
    frame = counter.drain()
    return dict(zip(frame["value"].to_list(), frame["count"].to_list(), strict=True))


def counter_for(column: pl.Series, track_first: bool = False) -> Counter:
    return Counter(CountOptions(column.dtype == pl.String, track_first=track_first))


@some_examples
@given(column=columns, cut=st.integers(0, 30))
def test_counter_counts_what_python_counts(column: pl.Series, cut: int) -> None:
    counter = counter_for(column)
    counter.add(column[cut:])
    counter.add(column[:cut])
    assert counter.num_missing == column.null_count()
    assert counted(counter) == PlainCounter(column.drop_nulls().to_list())
    assert counted(counter) == {}


@some_examples
@given(column=columns, cuts=st.lists(st.integers(0, 30), max_size=3), order=st.randoms())
def test_drained_counters_add_up_in_any_order(column: pl.Series, cuts: list[int], order: Any) -> None:
    bounds = sorted([0, len(column), *(min(cut, len(column)) for cut in cuts)])
    places = pl.Series(range(len(column)), dtype=pl.Int64)
    parts = []
    for start, stop in itertools.pairwise(bounds):
        counter = counter_for(column, track_first=True)
        counter.add(column[start:stop], places[start:stop])
        parts.append(counter.drain())
    order.shuffle(parts)
    merged = counter_for(column, track_first=True)
    for part in parts:
        merged.add_counts(part["value"], part["count"], part["first"])
    found = merged.drain()
    values = column.to_list()
    expected = {value: (values.count(value), values.index(value)) for value in set(values) - {None}}
    assert {row[0]: row[1:] for row in found.select("value", "count", "first").iter_rows()} == expected


@pytest.mark.parametrize("dtype", [pl.Int64, pl.String])
def test_threads_that_count_at_once_find_what_one_thread_finds(dtype: Any) -> None:
    column = (pl.int_range(40_000, eager=True) ** 2 % 1_009).cast(pl.Int64).cast(dtype)
    together, alone = counter_for(column), counter_for(column)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(together.add, [column[start : start + 1_000] for start in range(0, 40_000, 1_000)]))
    alone.add(column)
    assert counted(together) == counted(alone)


@some_examples
@given(column=columns, probes=columns)
def test_lookup_numbers_values_from_1(column: pl.Series, probes: pl.Series) -> None:
    values = column.drop_nulls().unique(maintain_order=True)
    ids = {value: number for number, value in enumerate(values.to_list(), start=1)}
    lookup = ValueIndex(values)
    probes = probes if probes.dtype == values.dtype else column
    assert lookup.find(probes).to_list() == [ids.get(value, 0) for value in probes.to_list()]
    assert lookup.find(values).to_list() == list(ids.values())


@some_examples
@given(values=st.lists(finite, max_size=20))
def test_moments_are_exact(values: list[float]) -> None:
    moments = Moments.of(pl.Series(values, dtype=pl.Float64))
    assert Fraction(moments.sum_units, 1 << 1074) == sum(map(Fraction, values))
    assert Fraction(moments.square_units, 1 << 2148) == sum(Fraction(value) ** 2 for value in values)
    assert moments.count == len(values)
    if values:
        assert (moments.min, moments.max) == (min(values), max(values))
        assert moments.mean == float(sum(map(Fraction, values)) / len(values))
        assert moments.std == statistics.pstdev(values)


@some_examples
@given(parts=st.lists(st.lists(finite, max_size=5), max_size=5), order=st.randoms())
def test_moments_add_up_in_any_order(parts: list[list[float]], order: Any) -> None:
    whole = Moments.of(pl.Series([value for part in parts for value in part], dtype=pl.Float64))
    order.shuffle(parts)
    found = sum((Moments.of(pl.Series(part, dtype=pl.Float64)) for part in parts), Moments())
    assert repr(found) == repr(whole)


def test_moments_leave_out_missing_and_infinite_values() -> None:
    moments = Moments.of(pl.Series([1.0, None, math.nan, math.inf, 3.0]))
    assert (moments.count, moments.mean, moments.std) == (2, 2.0, 1.0)
    assert (Moments().mean, Moments().std) == (0.0, 0.0)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_a_deviation_survives_squares_beyond_the_range_of_floats(size: float) -> None:
    assert Moments.of(pl.Series([size, -size])).std == size


rows = st.lists(st.tuples(ints, texts, st.one_of(st.none(), finite), st.lists(ints, max_size=3)), max_size=12)
SCHEMA = {"a": pl.Int64, "b": pl.String, "c": pl.Float64, "d": pl.List(pl.Int64)}


@some_examples
@given(rows=rows, cut=st.integers(0, 12), order=st.randoms())
def test_a_row_digest_does_not_depend_on_order_or_cutting(rows: list[Any], cut: int, order: Any) -> None:
    frame = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    order.shuffle(rows)
    shuffled = pl.DataFrame(rows, schema=SCHEMA, orient="row").select("d", "b", "a", "c")
    assert RowDigest.of(shuffled[:cut]) + RowDigest.of(shuffled[cut:]) == RowDigest.of(frame)


def test_a_row_digest_does_not_depend_on_the_width_of_numbers() -> None:
    wide = pl.DataFrame({"a": [7, -1, None], "b": [0.5, None, -2.0], "c": [[1], [], [2, 3]]})
    narrow = wide.cast({"a": pl.Int32, "b": pl.Float32, "c": pl.List(pl.Int16)})
    assert RowDigest.of(narrow) == RowDigest.of(wide)


@pytest.mark.parametrize(
    "other",
    [
        {"a": [1, 2], "b": ["y", "x"]},
        {"a": [1, 1], "b": ["x", "y"]},
        {"a": [1, 2], "b": ["x", None]},
        {"a": [1, 2, 2], "b": ["x", "y", "y"]},
        {"b": [1, 2], "a": ["x", "y"]},
    ],
)
def test_other_rows_have_another_digest(other: dict[str, list[Any]]) -> None:
    assert RowDigest.of(pl.DataFrame(other)) != RowDigest.of(pl.DataFrame({"a": [1, 2], "b": ["x", "y"]}))


def test_a_digest_reads_back_what_it_wrote() -> None:
    digest = RowDigest.of(pl.DataFrame({"a": [1, 2]}))
    assert RowDigest.read({"rows": 2, "digest": digest.hex()}) == digest
