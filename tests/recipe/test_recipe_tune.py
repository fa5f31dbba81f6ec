"""`[tune]` in a recipe: how a space is written, and what is said when it is wrong."""

# ruff: noqa: E501 -- one case is one line: what is written, and what is said about it

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from small_recipe import load, problems, small

from recmill.errors import RecipeError
from recmill.recipe import recipe as r
from recmill.recipe.load import load_recipe, recipe_from_dict, recipe_to_dict, shipped_recipes
from recmill.recipe.search import changed, searched
from recmill.recipe.tuning import merged, objectives_of, tuned_model

RANKING = {"model": "dlrm", "label": "clicked", "interaction": "cat"}


def said(space: Any, **more: Any) -> list[str]:
    return problems(ranking=RANKING, tune={"space": space, **more})


def tuned(space: Any, **more: Any) -> r.Tune:
    tune = load(ranking=RANKING, tune={"space": space, **more}).tune
    assert tune is not None
    return tune


def test_a_space_has_choices_and_ranges_by_key_path() -> None:
    tune = tuned({"ranking.top": [[8], [16, 8]], "ranking.train.epochs": {"low": 1, "high": 3, "step": 1}})
    assert tune.space == {
        "ranking.top": r.Choices(([8], [16, 8])),
        "ranking.train.epochs": r.Range(1, 3, step=1),
    }
    assert (tuned_model(tune), objectives_of(tune, None)) == ("ranking", ("auc", "seconds"))


def test_keys_may_be_nested_as_toml_nests_them() -> None:
    nested = {"ranking": {"top": [[8]], "train": {"epochs": {"low": 1, "high": 3}}}}
    assert tuned(nested) == tuned({"ranking.top": [[8]], "ranking.train.epochs": {"low": 1, "high": 3}})
    recipe = load_recipe("criteo-dcn", ["tune.space.ranking.dropout={ low = 0, high = 0.5 }"])
    assert recipe.tune is not None
    assert recipe.tune.space == {"ranking.dropout": r.Range(0, 0.5)}


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({}, "tune.space is empty; name at least one key, such as ranking.embedding_dim = [8, 16]"),
        (
            {"ranking.embeding_dim": [4]},
            'tune.space.ranking.embeding_dim is not a known key; did you mean "embedding_dim"?',
        ),
        (
            {"ranking.top.x": [4]},
            "tune.space.ranking.top.x is not a known key; ranking.top is a value, not a table",
        ),
        (
            {"features": [4]},
            "tune.space.features is no key of ranking or retrieval, and other keys need another Table",
        ),
        (
            {"rankin.top": [[4]]},
            "tune.space.rankin.top is no key of ranking or retrieval, and other keys need another Table; "
            'did you mean "ranking"?',
        ),
        ({"ranking.dropout": 0.5}, "tune.space.ranking.dropout must be a list of choices, or a table with low and high; got 0.5"),
        ({"ranking.dropout": []}, "tune.space.ranking.dropout is empty; name at least one choice"),
        ({"ranking.dropout": [0.1, 2]}, "tune.space.ranking.dropout[1] must be a number from 0 and below 1, got 2"),
        ({"ranking.top": [[8], [8]]}, "tune.space.ranking.top[1] is [8], which is among the choices already"),
        ({"ranking.top": [[8], 8]}, "tune.space.ranking.top[1] must be a list, got 8"),
        ({"ranking.top": {"low": 1, "high": 2}}, "tune.space.ranking.top is no number; list its choices instead of low and high"),
        ({"ranking.dropout": {"low": 0.1}}, "tune.space.ranking.dropout.high is missing"),
        ({"ranking.dropout": {"low": 0.5, "high": 0.1}}, "tune.space.ranking.dropout.low must be below high, got 0.5 and 0.1"),
        ({"ranking.dropout": {"low": 0, "high": 0.1, "log": True}}, "tune.space.ranking.dropout.low must be above 0 for log = true, got 0"),
        ({"ranking.embedding_dim": {"low": 0.5, "high": 8}}, "tune.space.ranking.embedding_dim.low must be a positive integer, got 0.5"),
        ({"ranking.embedding_dim": {"low": 1, "high": 8, "step": 0.5}}, "tune.space.ranking.embedding_dim.step must be a positive integer, got 0.5"),
        ({"ranking.embedding_dim": {"low": 1, "high": 8, "step": 1, "log": True}}, "tune.space.ranking.embedding_dim.step has no meaning beside log = true; remove one of them"),
        ({"ranking": [{"embedding_dim": 8}, {"dim": 8}]}, "tune.space.ranking[1].dim is not a known key"),
        ({"ranking.train": [{"dense": {"learning_rate": -1}}]}, "tune.space.ranking.train[0].dense.learning_rate must be a number above 0, got -1"),
        ({"ranking.top": [[8]], "retrieval.hidden": [[8]]}, "tune.space has keys of ranking and retrieval; one search is for one model"),
        ({"ranking": [{"top": [8]}], "ranking.top": [[8]]}, "tune.space sets ranking.top in two places; keep one of them"),
        ({"ranking.train": [{"dense": {"learning_rate": 1}}], "ranking.train.dense.learning_rate": [1]}, "tune.space sets ranking.train.dense.learning_rate in two places; keep one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_space_is_said(space: Any, problem: str) -> None:
    assert any(found.startswith(problem) for found in said(space)), said(space)


@pytest.mark.parametrize(
    ("objectives", "problem"),
    [
        (["acu"], 'tune.objectives[0] is "acu"; expected a metric of ranking; did you mean "auc"?'),
        (["seconds"], 'tune.objectives[0] is "seconds"; expected a metric of ranking; known: accuracy, auc'),
        (
            ["auc", "secs"],
            'tune.objectives[1] is "secs"; after the metric come costs; did you mean "seconds"?',
        ),
        (["auc", "log_loss"], 'tune.objectives[1] is "log_loss"; after the metric come costs; known: bytes'),
        (["auc", "auc"], 'tune.objectives has "auc" more than once'),
    ],
)
def test_objectives_are_a_metric_and_then_costs(objectives: list[str], problem: str) -> None:
    found = said({"ranking.top": [[8]]}, objectives=objectives)
    assert found
    assert found[0].startswith(problem)


def test_recipes_that_differ_only_in_tune_are_equal_and_stored_alike() -> None:
    with_tune = load_recipe("quickstart")
    without = dataclasses.replace(with_tune, tune=None)
    assert with_tune.tune is not None
    assert with_tune == without
    assert recipe_to_dict(with_tune) == recipe_to_dict(without)
    assert "tune" not in recipe_to_dict(with_tune)
    assert recipe_from_dict(recipe_to_dict(with_tune)).tune is None


def test_a_python_recipe_keeps_its_tune(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from recmill.recipe.load import load_recipe\ndef recipe():\n    return load_recipe('quickstart')\n"
    )
    assert load_recipe(f"{file}:recipe").tune == load_recipe("quickstart").tune


def test_of_a_table_that_is_set_the_keys_that_it_does_not_name_stay() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2, "e": 3}}}
    assert merged(tree, {"a.c.d": 5, "a": {"b": 7}}) == {"a": {"b": 7, "c": {"d": 5, "e": 3}}}
    assert merged(tree, {"a.x.y": [1]})["a"]["x"] == {"y": [1]}
    assert tree == {"a": {"b": 1, "c": {"d": 2, "e": 3}}}


def test_a_recipe_is_changed_by_key_path_and_checked_again() -> None:
    recipe = recipe_from_dict(small(ranking=RANKING))
    made = changed(
        recipe, {"ranking": {"embedding_dim": 4, "top": [8]}, "ranking.train.dense.learning_rate": 0.5}
    )
    assert made.ranking is not None
    assert (made.ranking.embedding_dim, made.ranking.top) == (4, (8,))
    assert made.ranking.train.dense == r.Optimizer("adagrad", 0.5)


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if load_recipe(name).tune])
def test_the_search_of_a_shipped_recipe_begins_with_the_recipe_itself(name: str) -> None:
    from recmill.stages.tune.space import own_values

    recipe = load_recipe(name)
    assert own_values(recipe, searched(recipe).space) is not None


def test_another_model_takes_the_place_of_the_recipes_own_and_of_its_settings() -> None:
    recipe = load(ranking={**RANKING, "top": [8], "dropout": 0.1, "embedding_dim": 4})
    found = changed(recipe, {"ranking": {"model": "dcn", "hidden": [16]}}).ranking
    assert found is not None
    assert (found.model, found.hidden, found.dropout, found.embedding_dim) == ("dcn", (16,), 0.1, 4)
    assert (found.top, found.interaction) == ((), "dot")  # as if never given
    with pytest.raises(RecipeError, match=r'ranking.top has no meaning for model = "dcn"'):
        changed(recipe, {"ranking": {"model": "dcn", "top": [4]}})


def test_a_search_over_models_may_name_them_alone() -> None:
    assert tuned({"ranking.model": ["dlrm", "wide_deep", "masknet"]}).space
    assert (
        said({"ranking.model": ["dlrm", "mask_net"]}) == []
    )  # what goes with nothing is said as a search begins
    recipe = load(ranking=RANKING, tune={"space": {"ranking.model": ["dlrm", "mask_net"]}})
    with pytest.raises(RecipeError, match=r'"mask_net"; expected .*masknet'):
        searched(recipe)
