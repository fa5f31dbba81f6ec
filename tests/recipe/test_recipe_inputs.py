"""What models would refuse is refused with the recipe, and what the recipe may say, models take."""

# ruff: noqa: E501 -- one case is one line: what is written, and what is said about it

from __future__ import annotations

from typing import Any

import pytest
from small_recipe import TREE, load, problems

from recmill.errors import RecipeError
from recmill.features.plan import Plan
from recmill.learner.saved import models_of, new_learner

WORDS = {"name": "tokens", "columns": "words", "steps": [{"split": " "}, {"hash": 100}]}
USER = {"columns": "user", "steps": ["vocabulary"]}
ITEM = {"columns": "item", "steps": ["vocabulary"]}
COUNT = {"name": "popular", "columns": "item", "steps": ["count"]}
NUMBER = {"columns": "n2", "steps": [{"fill": 0}]}
NUMBERS = {"name": "many", "columns": "words", "steps": [{"split": " "}, {"cast": "float"}]}
DLRM = {"model": "dlrm", "label": "clicked"}
WIDE = {"model": "wide_deep", "label": "clicked", "hidden": [8]}
TOWERS = {"label": "clicked", "user": "user", "item": "item"}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"features": [{**USER, "dim": 8}, ITEM], "ranking": {"model": "lr", "label": "clicked", "embedding_dim": 1}}, 'features[0].dim is 8, but ranking.embedding_dim is 1, and "lr" reads this feature with no other dim: remove it'),
        ({"features": [{**USER, "steps": [{"vocabulary": {"named": "v"}}], "dim": 8}, {"columns": "item", "steps": [{"lookup": "v"}]}], "ranking": WIDE}, 'features[0].dim is 8, but other features of vocabulary "v", which share its table, have another; give all of them the same'),
        ({"features": [USER, NUMBERS], "ranking": WIDE}, 'ranking.features is not given, so all are used; it has "many", which ends as lists of numbers of any length; models take those of one length: end it with pad'),
        ({"features": [USER, NUMBERS], "ranking": {**WIDE, "features": "user, many"}}, 'ranking.features has "many", which ends as lists of numbers'),
        ({"features": [USER, ITEM, {**NUMBERS, "of": "user"}], "retrieval": {**TOWERS, "user": "user, many"}}, 'retrieval.user has "many", which ends as lists of numbers'),
        ({"features": [NUMBER], "ranking": WIDE}, "ranking.features is not given, so all are used; it has only numbers"),
        ({"features": [USER, ITEM, COUNT], "retrieval": {**TOWERS, "item": "popular"}}, "retrieval.item has only numbers"),
        ({"features": [USER, COUNT, {"name": "kind", "columns": "words", "steps": ["vocabulary"], "of": "item"}], "retrieval": {**TOWERS, "item": "popular, kind"}}, 'retrieval.item has no id or key made of "item" alone'),
        ({"features": [USER, NUMBER], "ranking": {**WIDE, "features": "user", "wide": "n2"}}, 'ranking.wide has "n2", which ends as numbers; only ids and keys have weights'),
        ({"features": [USER], "ranking": DLRM}, 'ranking.interaction is "dot", which needs two features or more; use "cat"'),
        ({"features": [USER, ITEM], "ranking": {**DLRM, "bottom": [16]}}, "ranking.bottom has no meaning without features that are numbers; remove it"),
        ({"features": [USER, NUMBER], "ranking": DLRM}, "ranking.bottom is missing: numbers come out of it as one more vector of embedding_dim = 16"),
        ({"features": [{"columns": "words", "steps": ["vocabulary"]}, ITEM], "retrieval": {**TOWERS, "user": "words"}}, 'retrieval is evaluated user by user, but nothing in the Table identifies them: add "user" to table.keep'),
        ({"ranking": {**DLRM, "bottom": [16], "train": {"target": "ndcg@10 >= 0.5"}}}, 'ranking.train.target names "ndcg@10", which is no metric of ranking'),
        ({"retrieval": {**TOWERS, "train": {"target": "auc >= 0.5"}}}, 'retrieval.train.target names "auc", which is no metric of retrieval'),
        ({"features": [{"columns": "user", "steps": ["key"]}], "ranking": {**WIDE, "dynamic": {"admit_after": 70_000}}}, "ranking.dynamic.admit_after must be at most 65535, got 70000"),
        ({"features": [{"columns": "user", "steps": ["key"]}], "ranking": {**WIDE, "dynamic": {"shared_rows": 7}}}, "ranking.dynamic.shared_rows is for keys that are not admitted yet; it needs admit_after above 1"),
        ({"features": [{"columns": "user", "steps": ["key"]}, ITEM], "retrieval": {**TOWERS, "dynamic": {"shared_rows": 7}}}, "retrieval.dynamic.shared_rows is for keys that are not admitted yet; it needs admit_after above 1"),
        ({"features": [USER, ITEM], "retrieval": {**TOWERS, "dynamic": {"capacity": 7}}}, "retrieval.dynamic has no meaning without features that end with key; remove it"),
        ({"split": None, "ranking": {**WIDE, "train": {"target": "auc >= 0.8"}}}, "ranking.train.target needs held-out rows to measure; add [split], or remove it"),
        ({"split": None, "ranking": {**WIDE, "train": {"evaluations": 3, "patience": 2}}}, "ranking.train.patience needs held-out rows to measure; add [split], or remove it"),
        ({"split": None, "ranking": {**WIDE, "train": {"schedule": {"drop_factor": 0.5}}}}, "ranking.train.schedule.drop_factor needs held-out rows"),
    ],
)  # fmt: skip
def test_what_a_model_would_refuse_is_no_recipe(sections: dict[str, Any], problem: str) -> None:
    found = problems(**sections)
    assert any(one.startswith(problem) for one in found), found


def test_vocabularies_that_wait_for_each_other_are_no_recipe() -> None:
    waiting = [
        {"name": own, "columns": "time", "steps": [{"lookup": other}, {"vocabulary": {"named": f"{own}s"}}]}
        for own, other in (("a", "bs"), ("b", "as"))
    ]
    assert problems(features=[USER, *waiting]) == [
        "features: vocabularies as, bs depend on each other; give them names of their own"
    ]


RATING = {"name": "stars", "type": "int", "allowed": [1, 2, 3, 4, 5]}
OF_RATINGS = {**TREE["log"], "columns": [*TREE["log"]["columns"], RATING]}


@pytest.mark.parametrize(
    "model", [{"ranking": {**WIDE, "label": "liked"}}, {"retrieval": {**TOWERS, "label": "liked"}}]
)
def test_a_rating_is_no_label_without_a_threshold(model: dict[str, Any]) -> None:
    label = {"name": "liked", "columns": "stars"}
    assert problems(log=OF_RATINGS, labels=[label], **model) == [
        'labels[0] is column "stars", which may be 2; models learn labels of 0 and 1. Write down what counts as 1 in '
        'its steps, such as { expression = { sql = "stars >= 4", type = "int" } }, or learn the number itself by a loss '
        'such as "squared"'
    ]
    threshold = {"expression": {"sql": "stars >= 4", "type": "int"}}
    assert problems(log=OF_RATINGS, labels=[{**label, "steps": [threshold]}], **model) == []
    assert problems(log=OF_RATINGS, labels=[*TREE["labels"], label], ranking=WIDE) == []  # nobody learns it
    if "ranking" in model:
        of_number = {"ranking": {**model["ranking"], "loss": "squared"}}
        assert problems(log=OF_RATINGS, labels=[label], **of_number) == []


@pytest.mark.parametrize(
    ("ranking", "problem"),
    [
        (
            {**WIDE, "loss": "square"},
            'ranking.loss is "square"; expected squared, huber, squared_log, weighted_logistic, your own function as '
            'package.module:function, or none; did you mean "squared"?',
        ),
        (
            {**DLRM, "model": "mmoe", "loss": "huber", "label": "", "tasks": {"labels": ["click", "buy"]}},
            'ranking.loss is "huber", which is for one label; beside others, name it in ranking.tasks.losses',
        ),
        (
            {**WIDE, "loss": "huber", "train": {"target": "auc >= 0.8"}},
            'ranking.train.target names "auc", which is no metric of ranking',
        ),
    ],
)
def test_losses_of_numbers_have_their_labels_and_metrics(ranking: dict[str, Any], problem: str) -> None:
    assert any(one.startswith(problem) for one in problems(ranking=ranking)), problems(ranking=ranking)


_FEATURES = [USER, ITEM, NUMBER, NUMBERS, WORDS, COUNT, {**ITEM, "name": "other", "dim": 4}]
_MODELS: list[dict[str, Any]] = [
    {"ranking": {**model, "embedding_dim": dim, "features": names, **more}}
    for model, more in ((WIDE, {}), (DLRM, {}), (DLRM, {"interaction": "cross"}), (DLRM, {"bottom": [4]}))
    for dim in (1, 4)
    for names in ("user", "n2", "many", "tokens, n2", "user, item, other", "")
] + [
    {"retrieval": {"label": "clicked", "user": user, "item": item, "embedding_dim": dim}}
    for dim in (4, 16)
    for user in ("user", "tokens", "n2", "user, many")
    for item in ("item", "popular", "other, popular", "item, other")
] + [{"ranking": {**WIDE, "features": "user", "wide": wide}} for wide in ("item", "n2", "many", "tokens")]  # fmt: skip


@pytest.mark.parametrize("model", _MODELS)
def test_models_take_every_recipe_that_is_right(model: dict[str, Any]) -> None:
    try:
        recipe = load(features=_FEATURES, **model)
    except RecipeError:
        return
    columns = Plan(recipe).columns()
    for name in models_of(recipe):
        new_learner(recipe, name, columns, num_threads=1)
