"""Joining rows with tables on disk: each part gets what the tables know about its own values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import SizedEngine

from recmill.engines.join import Answers, join
from recmill.features.kernels import runs_of_values


@dataclass(frozen=True)
class Rows:
    """Columns x and y and the place of each row, as a source; a unit is one frame, read a row at a time."""

    frames: Sequence[pl.DataFrame]

    def units(self) -> range:
        return range(len(self.frames))

    def unit_bytes(self, unit: int) -> int:
        return 100

    def first_position(self, unit: int) -> int:
        return unit

    def max_offset(self) -> int:
        return 1 << 20

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        for row in range(self.frames[unit].height):
            yield self.frames[unit][row]


@dataclass(frozen=True)
class TableInRuns:
    rows: pl.DataFrame
    num_runs: int

    def run(self, number: int) -> pl.DataFrame:
        return self.rows.filter(runs_of_values(self.rows["value"], self.num_runs) == number)


def values(**columns: str) -> Callable[[Answers], Callable[[pl.DataFrame], dict[str, pl.Series]]]:
    """The question for a table's knowledge about a column, for each table named."""
    return partial(_values, columns)


def _values(columns: Mapping[str, str], answers: Answers) -> Callable[[pl.DataFrame], dict[str, pl.Series]]:
    return partial(_column_values, columns)


def _column_values(columns: Mapping[str, str], rows: pl.DataFrame) -> dict[str, pl.Series]:
    return {table: rows[column].drop_nulls().unique() for table, column in columns.items()}


def next_values(answers: Answers) -> Callable[[pl.DataFrame], dict[str, pl.Series]]:
    """What the table "next" knows about x is what the table is asked after that."""
    return partial(_next_values, answers["next"])


def _next_values(known: pl.DataFrame, rows: pl.DataFrame) -> dict[str, pl.Series]:
    found = rows.select(pl.col("x").alias("value")).join(known, on="value")
    return {"next": found["next"].unique()}


def known_of(name: str, column: str, answers: Answers) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return partial(_with_known, answers[name], column)


def _with_known(known: pl.DataFrame, column: str, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.join(known, left_on=column, right_on="value", how="left", maintain_order="left")


def both_of(answers: Answers) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return partial(_with_both, answers)


def _with_both(answers: Answers, rows: pl.DataFrame) -> pl.DataFrame:
    return _with_known(answers["b"], "y", _with_known(answers["a"], "x", rows))


def rows_of(x: Sequence[Any], y: Sequence[Any], num_parts: int) -> Rows:
    rows = pl.DataFrame(
        {"x": x, "y": y, "place": range(len(x))}, {"x": pl.Int64, "y": pl.String, "place": pl.Int64}
    )
    return Rows([rows[part::num_parts] for part in range(num_parts)])


A = pl.DataFrame({"value": [1, 2, 3], "id": [7, 8, 9]})
B = pl.DataFrame({"value": ["p", "q", ""], "count": [4, 5, 6]})


@examples(10)
@given(
    rows=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, None]), st.sampled_from(["p", "", "z", None]))),
    num_parts=st.integers(1, 4),
    num_runs=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    task_memory=st.sampled_from([8, 1 << 20]),
)
def test_a_join_equals_one_in_memory(
    rows: list[tuple[Any, Any]], num_parts: int, num_runs: tuple[int, int], task_memory: int
) -> None:
    source = rows_of([x for x, _ in rows], [y for _, y in rows], num_parts)
    tables = {"a": TableInRuns(A, num_runs[0]), "b": TableInRuns(B, num_runs[1])}
    with tempfile.TemporaryDirectory() as work:
        engine = SizedEngine(Path(work), task_memory=task_memory)
        joined = join(engine, engine.read(source), tables, [values(a="x", b="y")], knows_all, "answers")
        found = engine.collect(joined)
    whole = pl.concat(source.frames)
    expected = _with_both({"a": A, "b": B}, whole)
    if rows:
        assert found.sort("place").equals(expected.sort("place"))


def knows_all(answers: Answers) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """A table that no part asked is not among the answers."""
    return both_of({"a": A.clear(), "b": B.clear(), **answers})


def ids_of(work: Path, x: Sequence[Any]) -> list[Any]:
    """What table A knows about these values, asked in the folder `answers`."""
    engine = SizedEngine(work)
    frame = engine.read(rows_of(x, ["p"] * len(x), 2))
    tables = {"a": TableInRuns(A, 3)}
    joined = join(engine, frame, tables, [values(a="x")], partial(known_of, "a", "x"), "answers")
    return engine.collect(joined).sort("place")["id"].to_list()


def test_what_was_mapped_before_a_join_is_mapped_before_its_question(tmp_path: Path) -> None:
    engine = SizedEngine(tmp_path)
    frame = engine.map(engine.read(rows_of([0, 1], ["p", "p"], 2)), _x_plus_one)
    tables = {"a": TableInRuns(A, 2)}
    joined = join(engine, frame, tables, [values(a="x")], partial(known_of, "a", "x"), "answers")
    assert engine.collect(joined).sort("place")["id"].to_list() == [7, 8]


def _x_plus_one(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(pl.col("x") + 1)


def test_a_part_gets_no_answers_but_its_own(tmp_path: Path) -> None:
    engine = SizedEngine(tmp_path)
    frame = engine.read(rows_of([1, 2, 1, 2], ["p"] * 4, 2))
    joined = join(engine, frame, {"a": TableInRuns(A, 2)}, [values(a="x")], told, "answers")
    found = engine.collect(joined).sort("place")
    assert found["told"].to_list() == [[1], [2], [1], [2]]


def told(answers: Answers) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return partial(_with_told, answers["a"]["value"].sort().to_list())


def _with_told(known: list[int], rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(told=pl.lit(known, dtype=pl.List(pl.Int64)))


def test_a_question_may_build_on_the_answers_before_it(tmp_path: Path) -> None:
    table = TableInRuns(pl.DataFrame({"value": [1, 2, 3], "next": [2, 3, 9]}), 2)
    engine = SizedEngine(tmp_path)
    frame = engine.read(rows_of([1], ["p"], 1))
    joined = join(engine, frame, {"next": table}, [values(next="x"), next_values], follow, "answers")
    assert engine.collect(joined)["told"].to_list() == [[1, 2]]


def follow(answers: Answers) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return partial(_with_told, answers["next"]["value"].sort().to_list())


def test_what_an_earlier_run_asked_is_not_asked_again(tmp_path: Path) -> None:
    assert ids_of(tmp_path, [1, 2, 4]) == [7, 8, None]
    files = sorted(file.name for file in (tmp_path / "answers").iterdir())
    assert ids_of(tmp_path, [1, 2, 4]) == [7, 8, None]
    assert sorted(file.name for file in (tmp_path / "answers").iterdir()) == files


def test_with_other_tables_on_disk_than_the_earlier_run_had_it_is_asked_again(tmp_path: Path) -> None:
    ids_of(tmp_path, [1, 2])
    engine = SizedEngine(tmp_path)
    tables = {"a": TableInRuns(A, 3), "b": TableInRuns(B, 1)}
    frame = engine.read(rows_of([1, 2], ["p", "q"], 2))
    joined = join(engine, frame, tables, [values(a="x", b="y")], both_of, "answers")
    assert engine.collect(joined).sort("place")["count"].to_list() == [4, 5]
