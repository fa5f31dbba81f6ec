"""Vocabularies on disk give the same plan and the same features as vocabularies in memory."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from examples import examples
from feature_cases import CASES, Case
from feature_fitting import MemorySource, fit_units, recipe_of, rows_of
from hypothesis import given
from hypothesis import strategies as st
from small_cluster import SizedEngine
from test_features_contract import exactly, learned, pieces, recipe_for, training

from recmill.engines.join import join
from recmill.errors import FeatureError, ResourceError
from recmill.features import stored
from recmill.features.base import ValueTable
from recmill.features.kernels import CountOptions, StoredCounts, run_file, runs_of_values, write_run
from recmill.features.plan import Plan
from recmill.features.stored import StoredValueTable, learn_stored, merge_runs
from recmill.recipe.recipe import POSITION, Recipe
from recmill.stages.prepare.prepare import fit

NONE_ARE_SMALL, ALL_ARE_SMALL = 0, 1 << 40
each_case = pytest.mark.parametrize("case", CASES, ids=str)


class Fitted:
    """A recipe fitted on a cluster, with its vocabularies on disk or in memory."""

    def __init__(
        self, recipe: Recipe, units: Sequence[Sequence[pl.DataFrame]], work: Path, small_bytes: int
    ) -> None:
        self.engine = SizedEngine(work, small_bytes)
        self.frame = self.engine.read(MemorySource(units, unit_bytes=3 << 20))
        self.plan = fit(self.engine, self.frame, recipe)

    def features(self) -> pl.DataFrame:
        if not self.plan.joins():
            return self.engine.collect(self.engine.map(self.frame, self.plan.apply)).sort(POSITION)
        questions, function = self.plan.joins(), self.plan.joined(attrgetter("apply"))
        joined = join(self.engine, self.frame, self.plan.stored, questions, function, "answers")
        return self.engine.collect(joined).sort(POSITION)


@each_case
@examples(3)
@given(data=st.data())
def test_stored_vocabularies_give_the_same_plan_and_features(case: Case, data: st.DataObject) -> None:
    rows = data.draw(training(case))
    units = data.draw(pieces(rows))
    small_bytes = data.draw(st.sampled_from([NONE_ARE_SMALL, NONE_ARE_SMALL, ALL_ARE_SMALL]))
    local = fit_units(recipe_for(case), [[rows]])
    with tempfile.TemporaryDirectory() as work:
        fitted = Fitted(recipe_for(case), units, Path(work), small_bytes)
        assert exactly(fitted.features()) == exactly(local.apply(rows).sort(POSITION))
        assert learned(fitted.plan) == learned(local)


@each_case
@examples(1)
@given(data=st.data())
def test_a_plan_that_was_sent_gives_the_same_features(case: Case, data: st.DataObject) -> None:
    rows = data.draw(training(case))
    plan = fit_units(recipe_for(case), [[rows]])
    features = plan.apply(rows)  # by now it has built its lookups and expressions
    sent = pickle.loads(pickle.dumps(plan))
    assert learned(sent) == learned(plan)
    assert exactly(sent.apply(rows)) == exactly(features)


def test_codes_of_a_target_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """11/21 by way of 1/21 is another number: what Polars does when it knows that all counts are equal."""
    recipe = recipe_of(
        {"x": "text", "clicked": "int"},
        [{"name": "f", "columns": "x", "steps": [{"target": "click"}]}],
        [{"name": "click", "columns": "clicked", "steps": [{"fill": 0}]}],
    )
    units = [[rows_of(recipe, {"x": ["a", "b"], "clicked": [0, 1]})]]
    fitted = Fitted(recipe, units, tmp_path, NONE_ARE_SMALL)
    assert learned(fitted.plan) == learned(fit_units(recipe, units))


def test_what_travels_of_a_stored_vocabulary_does_not_grow_with_it(tmp_path: Path) -> None:
    recipe = recipe_of({"x": "int"}, [{"name": "f", "columns": "x", "steps": ["vocabulary"]}])
    sizes = []
    for number, height in enumerate((10, 10_000)):
        rows = rows_of(recipe, {"x": list(range(height))})
        plan = Fitted(recipe, [[rows]], tmp_path / str(number), NONE_ARE_SMALL).plan
        assert len(plan.tables["f"]) == height
        sizes.append(len(pickle.dumps(plan)))
    assert sizes[1] == pytest.approx(sizes[0], abs=8)


CHAIN = [
    {"name": "f", "columns": "x", "steps": ["count", {"cast": "text"}, {"vocabulary": {"named": "shared"}}]},
    {"name": "g", "columns": "y", "steps": [{"vocabulary": {"named": "shared"}}]},
    {"name": "h", "columns": "y", "steps": ["vocabulary", {"clip": {"max": 1}}, "standardise"]},
    {"name": "t", "columns": "x", "steps": ["frequency", {"cast": "text"}, {"target": "click"}]},
]


def chained(tmp_path: Path) -> tuple[Plan, pl.DataFrame, Fitted]:
    """What reaches some stored vocabularies depends on other ones, when fitting and when applying."""
    labels = [{"name": "click", "columns": "z", "steps": [{"fill": 0}]}]
    recipe = recipe_of({"x": "int", "y": "text", "z": "int"}, CHAIN, labels)
    rows = rows_of(
        recipe,
        {"x": [7, 7, 8, 9, None], "y": ["1", "2", "2.0", "1", "1.0"], "z": [1, 0, 1, None, 1]},
        [0, 0, 0, 0, 1],
    )
    fitted = Fitted(recipe, [[rows[:2], rows[2:3]], [rows[3:]]], tmp_path, NONE_ARE_SMALL)
    return fit_units(recipe, [[rows]]), rows, fitted


def test_stored_vocabularies_behind_stored_ones_are_asked_one_after_the_other(tmp_path: Path) -> None:
    local, rows, fitted = chained(tmp_path)
    assert set(fitted.plan.stored) == {"f/0", "shared", "h", "t/0"}
    assert len(fitted.plan.joins()) == 2
    assert fitted.plan.digest() == local.digest()
    assert exactly(fitted.features()) == exactly(local.apply(rows).sort(POSITION))


def test_a_stored_plan_is_saved_as_any_other_and_read_back_from_where_it_is(tmp_path: Path) -> None:
    local, rows, fitted = chained(tmp_path / "work")
    fitted.plan.save(tmp_path / "plan")
    assert learned(Plan.read(tmp_path / "plan")) == learned(local)
    folders = {name: keyed.folder for name, keyed in fitted.plan.stored.items()}
    again = Plan.read(tmp_path / "plan", folders)
    assert set(again.stored) == set(fitted.plan.stored)
    fitted.plan = again
    assert exactly(fitted.features()) == exactly(local.apply(rows).sort(POSITION))


def test_a_vocabulary_that_max_size_makes_small_is_held_in_memory(tmp_path: Path) -> None:
    steps = [{"vocabulary": {"max_size": 2}}]
    recipe = recipe_of({"x": "int"}, [{"name": "f", "columns": "x", "steps": steps}])
    rows = rows_of(recipe, {"x": [5, 5, *range(1000)]})
    plan = Fitted(recipe, [[rows]], tmp_path, small_bytes=100).plan
    assert plan.stored == {}
    assert plan.tables["f"].frame["value"].to_list() == [5, 0]
    assert plan.digest() == fit_units(recipe, [[rows]]).digest()


@pytest.mark.parametrize("step", [{"quantiles": 4}, {"fill": {"statistic": "median"}}], ids=str)
def test_what_must_be_in_memory_and_is_too_large_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any
) -> None:
    recipe = recipe_of({"x": "float"}, [{"name": "f", "columns": "x", "steps": [step]}])
    rows = rows_of(recipe, {"x": [1.0, 2.0, 3.0]})
    monkeypatch.setattr("recmill.features.kernels.BYTES_FOR_LOOKUP", 1 << 40)
    with pytest.raises(ResourceError, match=r'The values of "f/0" need .* MB in one process'):
        Fitted(recipe, [[rows]], tmp_path, NONE_ARE_SMALL)


def test_extending_reads_stored_counts_and_keeps_the_ids_of_the_earlier_vocabulary(tmp_path: Path) -> None:
    first = recipe_of({"x": "text"}, [{"name": "f", "columns": "x", "steps": ["vocabulary"]}])
    fit_units(first, [[rows_of(first, {"x": ["b", "b", "a"]})]]).save(tmp_path / "old" / "plan")
    steps = [{"vocabulary": {"extend": str(tmp_path / "old")}}]
    recipe = recipe_of({"x": "text"}, [{"name": "f", "columns": "x", "steps": steps}])
    rows = rows_of(recipe, {"x": ["c", "c", "c", "a"]})
    fitted = Fitted(recipe, [[rows]], tmp_path / "work", NONE_ARE_SMALL)
    assert fitted.plan.tables["f"].frame["value"].to_list() == ["b", "a", "c"]
    assert exactly(fitted.features()) == exactly(fit_units(recipe, [[rows]]).apply(rows))


# merging sorted runs


def stored_counts(
    rows: pl.DataFrame, folder: Path, options: CountOptions, num_runs: int, chunk_bytes: int
) -> StoredCounts:
    """Runs as counting writes them, in chunks of a few rows."""
    folder.mkdir()
    key = "first" if options.track_first else "count"
    ordered = rows.sort(key, "value", descending=[key == "count", False])
    runs = runs_of_values(ordered["value"], num_runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recmill.features.kernels._MERGE_BYTES", 0)
        patch.setattr("recmill.features.kernels._MIN_CHUNK_BYTES", chunk_bytes)
        for number in set(runs.tolist()):
            write_run(ordered.filter(runs == number), run_file(folder, number), num_runs)
    total = int(rows["count"].sum())
    return StoredCounts(folder, num_runs, options, total, 3, rows.height, 1 << 20, memory=1 << 30)


@examples(24)
@given(
    values=st.one_of(
        st.sets(st.text(max_size=3), min_size=1, max_size=40),
        st.sets(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=40),
    ),
    data=st.data(),
)
def test_merged_runs_are_the_sorted_whole(values: set[Any], data: st.DataObject) -> None:
    is_text = isinstance(next(iter(values)), str)
    few = st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values))
    columns: Mapping[str, Any] = {
        "value": pl.Series(list(values), dtype=pl.String if is_text else pl.Int64),
        "count": pl.Series(data.draw(few), dtype=pl.Int64),
        "first": pl.Series(data.draw(few), dtype=pl.Int64),
    }
    options = CountOptions(is_text, track_first=data.draw(st.booleans()))
    rows = pl.DataFrame(columns)
    rows = rows if options.track_first else rows.drop("first")
    key = "first" if options.track_first else "count"
    whole = rows.sort(key, "value", descending=[key == "count", False])
    min_count, max_size = data.draw(st.integers(1, 3)), data.draw(st.one_of(st.none(), st.integers(1, 30)))
    kept = whole.filter(pl.col("count") >= min_count).head(max_size or whole.height)
    kept = kept.select("value", "count")
    with tempfile.TemporaryDirectory() as folder:
        counts = stored_counts(
            rows,
            Path(folder) / "runs",
            options,
            data.draw(st.integers(1, 5)),
            data.draw(st.sampled_from([1, 60, 200])),
        )
        assert pl.concat(merge_runs(counts)).drop("run").equals(whole)
        keyed = learn_stored(counts, "f", min_count, max_size)
        assert keyed.digest() == ValueTable(kept).digest()
        assert keyed.frame.equals(kept)
        assert keyed.facts["known"] == kept["count"].sum()
        if isinstance(keyed, StoredValueTable):
            assert keyed.top(3).equals(ValueTable(kept).top(3))
            found = pl.concat([keyed.run(number) for number in range(keyed.num_runs)]).sort("id")
            assert found["id"].to_list() == list(range(1, kept.height + 1))
            assert found.drop("id").equals(kept)


def test_a_vocabulary_has_no_more_values_than_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pl.DataFrame({"value": [1, 2, 3], "count": [1, 1, 1]})
    counts = stored_counts(rows, tmp_path / "runs", CountOptions(is_text=False), 1, 1)
    monkeypatch.setattr(stored, "_MAX_SIZE", 2)
    with pytest.raises(FeatureError, match="at most 2 values"):
        learn_stored(counts, "f")
