"""Vectors of users and items, and the best items of every user: of a Table by a checkpoint, and of a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from shop import Shop
from small_criteo import Criteo, read

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.vector_index import ExactIndex
from recmill.dataset.batch import collate
from recmill.dataset.table import Table
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.stages.score.recall import nearest_items
from recmill.stages.score.score import ScoreResult

pytestmark = pytest.mark.stages
K = 5


@pytest.fixture(scope="module")
def written(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Vectors and recall by the shop's checkpoint and by its bundle."""
    from recmill.cli import main

    folder = tmp_path_factory.mktemp("sides")
    models = {
        "checkpoint": ["--checkpoint", shop.checkpoint, "--table", shop.table],
        "bundle": ["--bundle", shop.bundles],
    }
    for name, model in models.items():
        asked = [
            "--embeddings",
            "user,item",
            "--recall",
            K,
            "--without-seen",
            "--into",
            folder / name,
            "--quiet",
        ]
        assert main(list(map(str, ["score", *model, *asked]))) == 0
    return {name: folder / name for name in models}


def matrix(into: Path, output: str, name: str) -> tuple[list[str], np.ndarray]:
    """Ids and vectors [N, V]."""
    rows = read(into, output)
    return rows[name].to_list(), np.array(rows["vector"].to_list(), np.float32)


def clicked(shop: Shop) -> dict[str, set[str]]:
    """What each user clicked, in the whole log."""
    events = pl.read_csv(shop.log / "events.csv").filter(pl.col("clicked") == 1)
    return {user: set(items) for user, items in events.group_by("user_id").agg("item_id").iter_rows()}


def test_each_user_and_item_of_a_table_has_one_unit_vector(shop: Shop, written: dict[str, Path]) -> None:
    events = pl.read_csv(shop.log / "events.csv")
    for output, name in (("users", "user_id"), ("items", "item_id")):
        ids, vectors = matrix(written["checkpoint"], output, name)
        counts = events[name].value_counts()
        assert len(set(ids)) == len(ids)
        assert set(ids) == set(Table.open(shop.table).plan.values_of(name).to_list()) <= set(counts[name])
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_vectors_of_items_are_those_of_the_bundle(shop: Shop, written: dict[str, Path]) -> None:
    ids, vectors = matrix(written["checkpoint"], "items", "item_id")
    stored, stored_vectors = matrix(written["bundle"], "items", "item_id")
    bundle = Bundle.open(shop.bundles)
    assert np.array_equal(stored_vectors, bundle.array("items/vectors.npy"))
    places = [stored.index(item) for item in ids]
    assert np.abs(vectors - stored_vectors[places]).max() < 1e-5


def test_the_vector_of_a_user_is_that_of_its_last_row(shop: Shop, written: dict[str, Path]) -> None:
    table = Table.open(shop.table)
    rows = pl.concat([table.scan(split).collect() for split in ("train", "eval", "test")])
    last = rows.filter(pl.col("user_id") != 0).unique("user_id", keep="last", maintain_order=True)
    retriever = open_learner(shop.folder, "retrieval").learner
    assert isinstance(retriever, Retriever)
    expected = retriever.user_vectors(collate(last, retriever.layouts["user"], with_labels=False))
    names = table.plan.values_of("user_id")
    ids, vectors = matrix(written["checkpoint"], "users", "user_id")
    assert ids == [names[number - 1] for number in last["user_id"].to_list()]
    assert np.allclose(vectors, expected, atol=1e-6)


def test_users_of_a_bundle_are_as_of_the_end_of_the_log(shop: Shop, written: dict[str, Path]) -> None:
    ids, vectors = matrix(written["bundle"], "users", "user_id")
    users = Bundle.open(shop.bundles).users
    assert users is not None
    assert ids == users.ids(np.arange(len(users)))
    retriever = open_learner(shop.folder, "retrieval").learner
    assert isinstance(retriever, Retriever)
    raw = shop.folder.plan.apply(
        users.raw(np.arange(len(users))), labels=False, only=retriever.layouts["user"].features
    )
    expected = retriever.user_vectors(collate(raw, retriever.layouts["user"], with_labels=False))
    assert np.allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("model", ["checkpoint", "bundle"])
def test_recall_is_the_best_of_all_items_that_a_user_has_not_clicked(
    shop: Shop, written: dict[str, Path], model: str
) -> None:
    users, user_vectors = matrix(written[model], "users", "user_id")
    items, item_vectors = matrix(written[model], "items", "item_id")
    seen, found = clicked(shop), read(written[model], "recall")
    assert found["user_id"].to_list() == users
    scores = user_vectors @ item_vectors.T
    for row, user in enumerate(users):
        may_be_shown = [place for place, item in enumerate(items) if item not in seen.get(user, set())]
        best = sorted(may_be_shown, key=lambda place: -scores[row, place])[:K]
        assert np.allclose(found["scores"][row].to_numpy(), scores[row, best], atol=1e-5)
        assert not set(found["items"][row]) & seen.get(user, set())


def test_recall_alone_writes_nothing_else(recmill, shop: Shop, tmp_path: Path) -> None:
    args = ["--checkpoint", shop.checkpoint, "--table", shop.table, "--recall", 200, "--into", tmp_path / "r"]
    assert recmill("score", *args, "--quiet")[0] == 0
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["manifest.json", "recall"]
    lengths = read(tmp_path / "r", "recall")["items"].list.len()
    assert lengths.unique().to_list() == [80]  # all there are
    assert set(ScoreResult.open(tmp_path / "r").outputs) == {"recall"}


def test_users_who_saw_much_still_get_k_items() -> None:
    random = np.random.default_rng(0)
    items, users = (
        random.normal(size=(50, 4)).astype(np.float32),
        random.normal(size=(3, 4)).astype(np.float32),
    )
    seen = [np.arange(0, 40), np.array([], np.int64), np.arange(2, 50)]
    places, scores = nearest_items(ExactIndex(items), users, 5, seen)
    for user in range(3):
        left = np.setdiff1d(np.arange(50), seen[user])
        best = left[np.argsort(-(items[left] @ users[user]))][:5]
        assert places[user, : len(best)].tolist() == best.tolist()
        assert np.all(places[user, len(best) :] == -1)
        assert np.allclose(scores[user, : len(best)], items[best] @ users[user], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "{c}", "--into", "{o}"], "Which rows? Add --data DIR"),
        (
            ["--bundle", "{b}", "--which", "3", "--table", "{t}", "--into", "{o}"],
            "--which is for --checkpoint",
        ),
        (
            ["--checkpoint", "{c}", "--data", "{l}", "--recall", "5", "--into", "{o}"],
            "add --table DIR instead of --data",
        ),
        (
            ["--bundle", "{b}", "--table", "{t}", "--recall", "5", "--into", "{o}"],
            "has its own users and items",
        ),
        (
            ["--bundle", "{b}", "--table", "{t}", "--without-seen", "--into", "{o}"],
            "--without-seen is for --recall",
        ),
        (["--bundle", "{b}", "--data", "{l}", "--split", "eval", "--into", "{o}"], "--split is for --table"),
        (
            ["--bundle", "{b}", "--table", "{t}", "--without-labels", "--into", "{o}"],
            "--without-labels is for --data",
        ),
        (["--bundle", "{b}", "--recall", "5", "--keep", "user_id", "--into", "{o}"], "--keep is for scores"),
        (
            ["--bundle", "{b}", "--recall", "5", "--embeddings", "users", "--into", "{o}"],
            "must be user, item",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    recmill, shop: Shop, tmp_path: Path, arguments: list[str], said: str
) -> None:
    places = {"c": shop.checkpoint, "b": shop.bundles, "t": shop.table, "l": shop.log, "o": tmp_path / "o"}
    code, _, error = recmill("score", *(argument.format(**places) for argument in arguments))
    assert code == 2
    assert said in error
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "{c}", "--data", "{l}"], "has history, which needs other rows"),
        (["--checkpoint", "{c}", "--table", "{t}", "--keep", "price"], 'does not hold raw values of "price"'),
        (
            ["--checkpoint", "{criteo}", "--table", "{t}", "--recall", "5"],
            "has no retrieval model; it has: ranking",
        ),
        (["--bundle", "{criteob}", "--embeddings", "user"], "has no retrieval model; it has: ranking"),
        (["--checkpoint", "{c}", "--table", "{t}", "--which", "9999"], "has no checkpoint of step 9999"),
        (
            ["--checkpoint", "{criteo}", "--data", "{criteolog}", "--keep", "label"],
            "have a column of that name",
        ),
        (
            ["--checkpoint", "{criteo}", "--data", "{criteolog}", "--keep", "user"],
            'There is no column "user"',
        ),
        (["--bundle", "{b}", "--recall", "5", "--address", "auto"], "is not for engine local"),
    ],
)
def test_what_cannot_be_done_says_why(
    recmill, shop: Shop, criteo: Criteo, tmp_path: Path, arguments: list[str], said: str
) -> None:
    places = {"c": shop.checkpoint, "b": shop.bundles, "t": shop.table, "l": shop.log}
    places |= {"criteo": criteo.checkpoint, "criteob": criteo.bundles, "criteolog": criteo.log}
    code, _, error = recmill("score", *(one.format(**places) for one in arguments), "--into", tmp_path / "o")
    assert code == 1
    assert said in error
    assert not (tmp_path / "o").exists()
