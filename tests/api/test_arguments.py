"""What callers pass: recipes, artifacts and callbacks in every form, and errors that say what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from shop import Shop

import recmill

FRAME = pl.DataFrame({"a": [1]})


@pytest.mark.parametrize("recipe", [42, None, FRAME, ["quickstart"]])
def test_what_is_no_recipe_is_a_recipe_error(recipe: Any) -> None:
    with pytest.raises(recmill.RecipeError, match="expected a name, a TOML file, a dict or a Recipe, got"):
        recmill.prepare(recipe, FRAME)


def test_overrides_are_values_or_texts_and_change_nothing_of_the_callers() -> None:
    tree = {
        "name": "a",
        "log": {"files": ["x"], "columns": [{"name": "c", "type": "int"}]},
        "features": [{"columns": "c", "steps": ["vocabulary"]}],
    }
    as_values = recmill.load_recipe(tree, {"log.columns[0].type": "text", "table.keep": ["c"]})
    as_texts = recmill.load_recipe(tree, ["log.columns[0].type=text", 'table.keep=["c"]'])
    assert as_values == as_texts
    assert as_values.log.columns[0].type == "text"
    assert recmill.load_recipe(tree).log.columns[0].type == "int"
    with pytest.raises(recmill.RecipeError, match='is a list of 1, numbered from 0; it has no "7"'):
        recmill.load_recipe(tree, {"log.columns[7].type": "text"})


def test_a_loaded_recipe_is_checked_again_and_stays_what_it_is() -> None:
    recipe = recmill.load_recipe("quickstart")
    assert recmill.load_recipe(recipe) == recipe
    assert recmill.load_recipe(recipe, {"table.seed": 5}).table.seed == 5


def test_wrong_arguments_name_the_function_that_makes_the_right_one() -> None:
    recipe: Any = recmill.load_recipe("quickstart")
    data: Any = FRAME
    with pytest.raises(
        recmill.ArtifactError, match=r"table: .* got DataFrame; recmill\.prepare\(recipe, data\) makes"
    ):
        recmill.train(recipe, data)
    with pytest.raises(
        recmill.ArtifactError, match=r"checkpoint: .* got Recipe; recmill\.train\(recipe, table\) makes"
    ):
        recmill.evaluate(recipe, data)
    with pytest.raises(
        recmill.ArtifactError, match=r"bundle: .* got DataFrame; recmill\.export\(checkpoint\) makes"
    ):
        recmill.open_bundle(data)
    with pytest.raises(recmill.RecmillError, match="give a Table or from_log, one of them"):
        recmill.train(recipe)


def test_directories_of_a_process_are_removed_by_that_process_alone(tmp_path: Path) -> None:
    code = """
import os, sys
import recmill
made = recmill.generate("shop", rows=100, quiet=True)
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
assert (made.path / "events.csv").exists()
print(made.path)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"TMPDIR": str(tmp_path)},
    )
    assert Path(answer.stdout.strip()).parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stages
def test_a_table_of_another_recipe_is_refused(shop: Shop) -> None:
    other = recmill.load_recipe("quickstart", {"split.held_out": 0.2})
    with pytest.raises(
        recmill.ArtifactError, match=r'prepared with another \[split\] than recipe "quickstart"'
    ):
        recmill.train(other, shop.table, quiet=True)


@pytest.mark.stages
def test_a_recommender_takes_a_user_and_keywords_or_a_query(shop: Shop) -> None:
    from recmill.stages.serve.messages import Recommend

    recommender = recmill.open_bundle(shop.bundles)
    answer = recommender.recommend("u1", k=3, where="price < 30")
    same = recommender.recommend(Recommend(user="u1", k=3, where="price < 30"))
    assert [item.id for item in answer.items] == [item.id for item in same.items]
    assert len(answer.items) == 3
    assert answer._repr_html_().count("<tr>") == 4
    ids: Any = np.array(["u1", "i1", "i2"])
    assert len(recommender.rank(ids[0], ids[1:]).scores) == 2
    keywords: Any = {"kk": 3}
    with pytest.raises(recmill.ServingError, match="unknown field `kk`"):
        recommender.recommend("u1", **keywords)


@pytest.mark.stages
def test_artifacts_show_what_they_are(shop: Shop) -> None:
    table, checkpoint = recmill.Table.open(shop.table), recmill.Checkpoint.open(shop.checkpoint)
    assert repr(table) == (
        f"Table('{shop.table}', recipe quickstart, train rows 4,500, eval rows 250, test rows 250, "
        f"digest {table.digest})"
    )
    assert "<td>eval rows</td><td>250</td>" in table._repr_html_()
    assert re.search(r"ranking step \d+ auc 0\.\d{4}\)$", repr(checkpoint))
    bundle = recmill.Bundle.open(shop.bundles)
    assert "recipe quickstart, models retrieval and ranking, users 100, items 80" in repr(bundle)


@pytest.mark.stages
def test_an_evaluation_prints_as_a_table(shop: Shop, tmp_path: Path) -> None:
    own = shutil.copytree(shop.checkpoint, tmp_path / "checkpoint")  # evaluate writes beside checkpoints
    report = recmill.evaluate(own, shop.table, only="ranking", gate="auc>=0.99", quiet=True)
    lines = str(report).splitlines()
    assert lines[0].split() == ["model", "split", "metric", "value", "95%", "CI"]
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["ranking", "test", "rows"],
        ["ranking", "test", "positive_rate"],
    ]
    assert any(line.split()[2:] == ["gate", "FAIL", "auc", ">=", "0.99"] for line in lines)
    assert not report.passed
    assert report.path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
