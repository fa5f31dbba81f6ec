"""Lists that models read unpooled are served as they were trained: histories with target attention and in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recmill
from recmill.cli import main
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.write import toml_of
from recmill.stages.serve.messages import Event, Recommend
from recmill.stages.serve.recommender import Recommender

pytestmark = pytest.mark.stages

TRAIN = {"batch_size": 64, "max_steps": 8, "dense": {"name": "adam", "learning_rate": 0.01}}
RETRIEVAL = {
    "model": "sasrec",
    "label": "clicked",
    "user": ["before"],
    "item": ["item"],
    "blocks": 1,
    "negatives": 10,
    "train": TRAIN,
}
RANKING = {"model": "din", "label": "clicked", "sequences": ["before"], "hidden": [8], "train": TRAIN}
RECIPE: dict[str, Any] = {
    "name": "histories",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "time": "time",
        "columns": [{"name": name, "type": "int"} for name in ("user", "item", "time", "click")],
    },
    "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "max_length": 8}}],
    "split": {"by": "last", "column": "user", "order": "time"},
    "labels": [{"name": "clicked", "columns": "click"}],
    "features": [
        {"columns": "user", "steps": ["vocabulary"]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"name": "before", "columns": "item_history", "steps": [{"lookup": "item"}]},
    ],
    "table": {"order": "shuffle", "keep": ["user", "item"]},
    "retrieval": RETRIEVAL,
    "ranking": RANKING,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    into = tmp_path_factory.mktemp("sequences")
    random = np.random.default_rng(0)
    rows = [(user, random.integers(30), time) for user in range(20) for time in range(15)]
    lines = [f"{user}\t{item}\t{time}\t{int(time < 13 or time % 2)}\n" for user, item, time in rows]
    (into / "log").mkdir()
    (into / "log" / "events.tsv").write_text("".join(lines))
    recipe = into / "histories.toml"
    recipe.write_text(toml_of(recipe_from_dict(RECIPE)))
    for arguments in (
        ["prepare", recipe, "--data", into / "log", "--into", into / "table"],
        ["train", recipe, "--table", into / "table", "--into", into / "checkpoint", "--threads", 1],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundles"],
    ):
        assert main([*map(str, arguments), "--quiet"]) == 0
    return recmill.open_bundle(into / "bundles")


def test_an_event_changes_what_the_next_request_finds(served: Recommender) -> None:
    def found(user: int) -> list[Any]:
        return [item.id for item in served.recommend(Recommend(user=user, k=10)).items]

    before, other = found(3), found(4)
    served.add_events([Event(user=3, item=found(3)[-1])])
    assert found(3) != before
    assert found(4) == other
