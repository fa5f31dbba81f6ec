"""Vectors that users give for their items: a channel of recall that finds items which nobody has clicked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import RecipeError
from recmill.recipe.load import load_recipe
from recmill.recipe.write import toml_of
from recmill.stages.export.export import export
from recmill.stages.prepare.prepare import prepare
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.write import replay_and_write
from recmill.stages.serve.recommender import Recommender
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

pytestmark = pytest.mark.stages

RECIPE = """
name = "articles"
[log]
files = ["events.csv"]
separator = ","
header = true
user = "user"
item = "item"
time = "time"
columns = [{ name = "user", type = "int" }, { name = "item", type = "int" }, { name = "time", type = "int" }]
[tables.items]
files = ["items.csv"]
separator = ","
header = true
columns = [{ name = "item", type = "int" }, { name = "embedding", type = "text" }]
[[rows]]
join = { table = "items", on = "item" }
[split]
by = "time"
column = "time"
held_out = 0.2
halve = true
[[features]]
columns = "user, item"
steps = ["vocabulary"]
[[features]]
name = "text"
columns = "embedding"
steps = [{ split = ";" }, { cast = "float" }, { pad = 3 }]
[table]
order = "shuffle"
[retrieval]
user = "user"
item = "item"
embedding_dim = 4
hidden = []
[retrieval.train]
batch_size = 256
[recall]
content = "text"
"""
USERS, GROUPS, PER_WEEK, WEEKS = 120, 6, 8, 10


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("articles") / "articles.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def log(recipe: Path) -> Path:
    """Every week has new articles of each group; users read those of their own group, in the week that they come out.

    Who reads what last week says nothing about this week's ids, and the text does.
    """
    random = np.random.default_rng(0)
    directions = random.normal(size=(GROUPS, 3))
    items, events = ["item,embedding"], ["user,item,time"]
    for number in range(WEEKS * GROUPS * PER_WEEK):
        near = directions[number % GROUPS] + 0.02 * random.normal(size=3)
        items.append(f"{number},{';'.join(f'{value:.4f}' for value in near)}")
    for week in range(WEEKS):
        for user in range(USERS):
            for place in random.choice(PER_WEEK, 3, replace=False):
                item = week * GROUPS * PER_WEEK + int(place) * GROUPS + user % GROUPS
                events.append(f"{user},{item},{week * 1000 + random.integers(900)}")
    folder = recipe.parent / "log"
    folder.mkdir()
    (folder / "items.csv").write_text("\n".join(items) + "\n")
    (folder / "events.csv").write_text("\n".join(events) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(recipe: Path, log: Path) -> Checkpoint:
    into, loaded = recipe.parent, load_recipe(str(recipe))
    table = prepare(loaded, str(log), into / "table").table
    train(loaded, TableData(table), into / "checkpoint", TrainConfig(threads=1))
    return Checkpoint.open(into / "checkpoint")


def test_new_items_are_recommended_by_their_vectors_alone(
    folder: Checkpoint, log: Path, tmp_path: Path
) -> None:
    config = ReplayConfig(served_bundle=tmp_path / "served", threads=1)
    served = replay_and_write(folder, str(log), config, None, None)
    weights = served.fit.parameters.fusion.weights
    assert max(weights, key=lambda name: weights[name]) == "content"
    assert served.metrics["recall@10"] > 0.1
    assert served.baselines["EASE"].means()["recall@10"] < 0.03
    recommender = Recommender(Bundle.open(tmp_path / "served"))
    items = recommender.recommend(7, k=10, explain=True).items
    assert [int(item.id) % GROUPS for item in items] == [7 % GROUPS] * 10
    bundle = export(folder, str(log), tmp_path / "bundles").bundle
    assert "content" in bundle.manifest["recall"]["neighbours"]
    recaller = Recommender(bundle).recaller
    assert recaller is not None
    newest = WEEKS * GROUPS * PER_WEEK - 1
    content, index = recaller.neighbours["content"], recaller.items.indices([newest])[0]
    nearest = content.indices[content.offsets[index] :][:5]
    assert {int(item) % GROUPS for item in recaller.items.ids(nearest)} == {newest % GROUPS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("recall.content=texts", 'there is no such feature; did you mean "text"'),
        ("recall.content=item", "which is no vector of numbers"),
        ("features[1].of=context", "it must be a feature of the item"),
    ],
)
def test_content_that_is_no_vector_of_the_item_is_refused(recipe: Path, change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(str(recipe), [change])


def test_the_section_survives_writing(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(str(recipe))
    (tmp_path / "again.toml").write_text(toml_of(loaded))
    assert dataclasses.replace(load_recipe(str(tmp_path / "again.toml"))) == loaded
