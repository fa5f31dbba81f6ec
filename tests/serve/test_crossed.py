"""Features that look at the user and the item together are made for each candidate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shop import FEW_STEPS, Shop

import recmill
from recmill.cli import main
from recmill.errors import NotFound
from recmill.recipe.load import shipped_recipes
from recmill.stages.serve.messages import Features, Rank, Recommend
from recmill.stages.serve.recommender import Recommender

pytestmark = pytest.mark.stages

CROSS = """
[[features]]
name = "taste"
columns = ["country", "category"]
steps = [{ cross = "_" }, { hash = 500 }]

[[features]]
name = "moment"
columns = ["device", "brand"]
steps = [{ cross = "_" }, { hash = 500 }]

[table]
"""


@pytest.fixture(scope="module")
def crossed(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    into = tmp_path_factory.mktemp("crossed")
    recipe = into / "crossed.toml"
    recipe.write_text(Path(shipped_recipes()["quickstart"]).read_text().replace("[table]\n", CROSS, 1))
    for arguments in (
        ["prepare", recipe, "--data", shop.log, "--into", into / "table"],
        [
            "train",
            recipe,
            "--table",
            into / "table",
            "--into",
            into / "checkpoint",
            *FEW_STEPS,
            "--threads",
            1,
        ],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundles"],
    ):
        assert main([*map(str, arguments), "--quiet"]) == 0
    return recmill.open_bundle(into / "bundles")


def test_they_are_known_for_what_they_are(crossed: Recommender) -> None:
    assert crossed.lookup.crossed_features == ["taste", "moment"]


@pytest.mark.parametrize("user", ["u1", "u2", "an unknown user", None])
def test_ranking_equals_scoring_the_same_raw_rows(crossed: Recommender, user: str | None) -> None:
    items = ["i1", "i2", "i3", "not known"]
    context = {"device": "phone", "position": 3}
    known = crossed.features(Features(user=user, items=items))
    values = known.user.values if known.user is not None else {}
    rows = [{**values, **context, **item.values} for item in known.items]
    frame = crossed.lookup.raw_columns.frame(rows, list(crossed.lookup.raw_columns.kinds)).drop("clicked")
    ranked = crossed.rank(Rank(user=user, items=items, context=context)).scores
    np.testing.assert_allclose(ranked, crossed.score(frame), atol=1e-6)


def test_recommended_scores_are_those_of_ranking(crossed: Recommender) -> None:
    answer = crossed.recommend(Recommend(user="u1", k=10, context={"device": "phone"}))
    items = [item.id for item in answer.items]
    ranked = crossed.rank(Rank(user="u1", items=items, context={"device": "phone"}))
    np.testing.assert_allclose([item.score for item in answer.items], ranked.scores, atol=1e-6)


def test_their_stages_cannot_run_apart(crossed: Recommender) -> None:
    with pytest.raises(NotFound, match="reads users and items together"):
        crossed.packed_rows(Rank(user="u1", items=["i1"]))
