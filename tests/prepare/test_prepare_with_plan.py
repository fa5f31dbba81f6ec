"""prepare --plan: features as they were fitted before, for another log or the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs_and_recipes import events_recipe, prepared, rows_of, write_events
from shop import Shop
from test_prepare_digest import RICH

from recmill.errors import ArtifactError, LogError
from recmill.features.plan_artifact import plan_at
from recmill.stages.prepare.prepare import prepare


def test_the_same_log_gives_the_same_table(tmp_path: Path) -> None:
    data = write_events(tmp_path / "log", 300)
    fitted = prepared(RICH, data, tmp_path / "fitted").table
    again = prepare(RICH, str(data), tmp_path / "again", plan=plan_at(fitted.path)).table
    assert again.digest == fitted.digest
    assert again.plan.digest() == fitted.plan.digest()


def test_another_log_gets_the_ids_of_the_first(tmp_path: Path) -> None:
    recipe = events_recipe()
    fitted = prepared(recipe, write_events(tmp_path / "log", 50), tmp_path / "fitted").table
    new = tmp_path / "new"
    new.mkdir()
    (new / "events0.tsv").write_text("unknown user\t1\t0\t\t1\nu6\t9\t1\t2.5\t0\n")
    table = prepare(recipe, str(new), tmp_path / "table", plan=plan_at(fitted.path)).table
    expected = fitted.plan.values_of("user").to_list().index("u6") + 1
    assert rows_of(table)["user"].to_list() == [0, expected]
    assert table.manifest["plan_digest"] == fitted.manifest["plan_digest"]


def test_rows_and_split_are_those_of_the_new_recipe(tmp_path: Path) -> None:
    """A Plan was fitted already, so no row need be left to train on."""
    data = write_events(tmp_path / "log", 50)
    fitted = prepared(events_recipe(), data, tmp_path / "fitted").table
    last_rows = events_recipe(split={"by": "tail", "held_out": 0.99}, rows=[{"filter": "time >= 40"}])
    table = prepare(last_rows, str(data), tmp_path / "table", plan=plan_at(fitted.path)).table
    assert [table.num_rows(split) for split in ("train", "eval", "test")] == [0, 10, 0]


def test_a_plan_of_other_features_is_refused_before_any_work(tmp_path: Path) -> None:
    data = write_events(tmp_path / "log", 50)
    fitted = prepared(events_recipe(), data, tmp_path / "fitted").table
    other = events_recipe(features=[{"columns": "user", "steps": ["vocabulary"]}])
    with pytest.raises(ArtifactError, match=r'another \[features\] than recipe "events" has'):
        prepare(other, str(data), tmp_path / "table", plan=plan_at(fitted.path))
    assert not (tmp_path / "table").exists()


def test_a_table_of_a_plan_is_not_taken_for_one_that_is_fitted(tmp_path: Path) -> None:
    recipe, data = events_recipe(), write_events(tmp_path / "log", 50)
    fitted = prepared(recipe, write_events(tmp_path / "other", 20), tmp_path / "fitted").table
    prepare(recipe, str(data), tmp_path / "table", plan=plan_at(fitted.path))
    assert prepare(recipe, str(data), tmp_path / "table", plan=plan_at(fitted.path)).was_complete
    with pytest.raises(ArtifactError, match="already holds a Table of another recipe or log"):
        prepared(recipe, data, tmp_path / "table")


def test_a_log_without_any_row_is_an_error(tmp_path: Path) -> None:
    data = write_events(tmp_path / "log", 50)
    fitted = prepared(events_recipe(), data, tmp_path / "fitted").table
    with pytest.raises(LogError, match="No rows are left"):
        prepare(
            events_recipe(rows=[{"filter": "time > 99"}]),
            str(data),
            tmp_path / "t",
            plan=plan_at(fitted.path),
        )


@pytest.mark.stages
def test_a_model_with_histories_scores_a_new_log_by_its_plan(recmill, shop: Shop, tmp_path: Path) -> None:
    """What the error of `score --data` advises works."""
    log, table = tmp_path / "log", tmp_path / "table"
    assert recmill("generate", "shop", "--rows", 300, "--seed", 9, "--into", log, "--quiet")[0] == 0
    scored = ["score", "--checkpoint", shop.checkpoint, "--into", tmp_path / "scores", "--quiet"]
    code, _, error = recmill(*scored, "--data", log)
    assert code == 1
    assert "recmill prepare --plan" in error
    prepared = ["prepare", "quickstart", "--data", log, "--into", table, "--plan", shop.checkpoint, "--quiet"]
    assert recmill(*prepared)[0] == 0
    code, out, _ = recmill(*scored, "--table", table, "--split", "test")
    assert code == 0
    assert "AUC" in out
