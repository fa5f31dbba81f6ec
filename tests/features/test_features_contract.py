"""What every step promises, asked of each in the same way."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from examples import examples
from feature_cases import CASES, Case
from feature_fitting import fit_units, recipe_of, rows_of
from hypothesis import given
from hypothesis import strategies as st

from recmill.features.plan import Plan
from recmill.recipe.recipe import POSITION, SPLIT, Recipe
from recmill.recipe.steps import STEPS

each_case = pytest.mark.parametrize("case", CASES, ids=str)
some_examples = examples(3)


@cache
def recipe_for(case: Case) -> Recipe:
    return recipe_of(case.types, case.features(), case.labels)


@st.composite
def training(draw: st.DrawFn, case: Case) -> pl.DataFrame:
    """Rows of the log, some held out, but not the first."""
    columns = draw(case.rows(min_size=1))
    height = len(next(iter(columns.values())))
    splits = [0, *draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=height - 1, max_size=height - 1))]
    return rows_of(recipe_for(case), columns, splits, first=1 << 44)


@st.composite
def pieces(draw: st.DrawFn, rows: pl.DataFrame) -> list[list[pl.DataFrame]]:
    """The rows cut into batches, these shuffled and dealt to units."""
    batches = draw(st.permutations(cut(rows, draw(st.lists(st.integers(0, rows.height), max_size=4)))))
    bounds = sorted({0, len(batches), *draw(st.lists(st.integers(0, len(batches)), max_size=3))})
    return [batches[start:stop] for start, stop in itertools.pairwise(bounds)]


def cut(rows: pl.DataFrame, at: Sequence[int]) -> list[pl.DataFrame]:
    bounds = sorted([0, rows.height, *at])
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def exactly(frame: pl.DataFrame) -> list[Any]:
    """Types and values; repr tells 0.0 from -0.0 and any two floats apart."""
    return [(column.name, str(column.dtype), repr(column.to_list())) for column in frame]


def learned(plan: Plan) -> tuple[Any, ...]:
    states = repr([transform.state for chain in plan.features for transform in chain.transforms])
    tables = {name: exactly(keyed.frame) for name, keyed in plan.tables.items()}
    return plan.digest(), states, tables, [vars(info) for info in plan.columns()]


def test_every_step_has_a_case() -> None:
    assert {case.step for case in CASES} == set(STEPS)


@each_case
@some_examples
@given(data=st.data())
def test_fitting_in_pieces_equals_fitting_the_whole(case: Case, data: st.DataObject) -> None:
    recipe = recipe_for(case)
    rows = data.draw(training(case))
    whole = fit_units(recipe, [[rows]])
    in_pieces = fit_units(
        recipe, data.draw(pieces(rows)), workers=3, unit_bytes=data.draw(st.sampled_from([64, 50 << 20]))
    )
    assert learned(in_pieces) == learned(whole)
    assert exactly(in_pieces.apply(rows)) == exactly(whole.apply(rows))


@each_case
@some_examples
@given(data=st.data())
def test_each_row_is_transformed_by_itself(case: Case, data: st.DataObject) -> None:
    recipe = recipe_for(case)
    rows = data.draw(training(case))
    plan = fit_units(recipe, [[rows]])
    together = exactly(plan.apply(rows))
    batches = cut(rows, data.draw(st.lists(st.integers(0, rows.height), max_size=3)))
    assert exactly(pl.concat([plan.apply(batch) for batch in batches])) == together
    assert exactly(pl.concat([plan.apply(rows[row]) for row in range(rows.height)])) == together


@each_case
@some_examples
@given(data=st.data())
def test_unseen_values_give_features_of_the_promised_type_and_range(case: Case, data: st.DataObject) -> None:
    recipe = recipe_for(case)
    plan = fit_units(recipe, [[data.draw(training(case))]])
    unseen = rows_of(recipe, data.draw(case.rows(min_size=0))).drop(POSITION, SPLIT)
    features = plan.apply(unseen, labels=False)
    assert features.height == unseen.height
    for info in plan.columns():
        if info.role == "feature":
            assert_as_promised(features[info.name], info.kind, info.size)
    if case.missing_is_zero:
        missing = plan.apply(rows_of(recipe, {name: [None] for name in case.types}), labels=False)["f"][0]
        assert set(missing if isinstance(missing, pl.Series) else [missing]) <= {0}


def assert_as_promised(column: pl.Series, kind: str, size: int | None) -> None:
    element = {"number": pl.Float32, "id": pl.Int32, "key": pl.Int64}[kind.removesuffix("s")]
    values = column.explode() if kind.endswith("s") else column
    assert column.dtype == (pl.List(element) if kind.endswith("s") else element)
    assert column.null_count() == 0
    assert values.null_count() == 0
    if kind.startswith("number"):
        assert values.is_finite().all()
    if kind.startswith("id"):
        assert size is not None
        assert values.is_between(0, size - 1).all()


@each_case
@examples(2)
@given(data=st.data())
def test_a_saved_plan_gives_the_same_features(case: Case, data: st.DataObject) -> None:
    rows = data.draw(training(case))
    plan = fit_units(recipe_for(case), [[rows]])
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder))
        files = {path.suffix for path in Path(folder).rglob("*") if path.is_file()}
        again = Plan.read(Path(folder))
    assert files <= {".json", ".parquet"}
    assert learned(again) == learned(plan)
    assert exactly(again.apply(rows)) == exactly(plan.apply(rows))
