"""Retrievers: the loss is the formula, only clicks teach, planted tastes are found, and ranking keeps its masks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from shop_truth import best_reachable

from recmill.dataset.batch import Batch, Keys
from recmill.dataset.loader import Batches
from recmill.dataset.table import Table
from recmill.errors import ArtifactError, FeatureError, RecipeError, TrainingError
from recmill.learner import eval_queries
from recmill.learner.eval_queries import EvalQueries, ItemFeatures, counts_of
from recmill.learner.retrieval import ItemCounts, Retriever, some_rows
from recmill.recipe.load import load_recipe, recipe_from_dict
from recmill.recipe.protocols import HELD_OUT_CLICKS
from recmill.recipe.recipe import Recipe
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.trainer import Trainer
from recmill.synthetic.generate import generate

pytestmark = pytest.mark.stages

NUM_USERS, NUM_ITEMS = 60, 120


def even_odd_recipe(**retrieval) -> Recipe:
    return recipe_from_dict(
        {
            "name": "even-odd",
            "log": {
                "files": ["events.tsv"],
                "user": "user",
                "item": "item",
                "time": "time",
                "columns": [
                    {"name": "user", "type": "int"},
                    {"name": "item", "type": "int"},
                    {"name": "time", "type": "int"},
                    {"name": "price", "type": "float", "of": "item"},
                    {"name": "click", "type": "int"},
                ],
            },
            "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "where": "click = 1"}}],
            "split": {"by": "time", "column": "time", "held_out": 0.2, "halve": True},
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
                {"name": "recent", "columns": "item_history", "steps": [{"lookup": "item"}]},
                {"columns": "price", "steps": ["standardise"]},
            ],
            "table": {"order": "shuffle", "keep": ["item"]},
            "retrieval": {
                "label": "clicked",
                "user": ["user", "recent"],
                "item": ["item", "price"],
                "embedding_dim": 8,
                "hidden": [16, 8],
                "temperature": 0.2,
                "train": {
                    "batch_size": 128,
                    "dense": {"name": "adam", "learning_rate": 0.01},
                    "sparse": {"name": "adam", "learning_rate": 0.03},
                },
                **retrieval,
            },
        }
    )


def write_log(folder: Path, num_rows: int = 4000) -> Path:
    """Users are shown anything, and click what is even or odd as they are."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, NUM_USERS, num_rows), random.integers(0, NUM_ITEMS, num_rows)
    rows = zip(users, items, range(num_rows), strict=True)
    text = [f"{user}\t{item}\t{time}\t{item / 4}\t{int(user % 2 == item % 2)}\n" for user, item, time in rows]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.tsv").write_text("".join(text))
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    folder = tmp_path_factory.mktemp("even-odd")
    return prepare(even_odd_recipe(), str(write_log(folder / "log")), folder / "table").table


def retriever(table: Table, num_threads: int = 1, **retrieval) -> Retriever:
    return Retriever(even_odd_recipe(**retrieval), table.columns, num_threads)


def batches(table: Table, learner: Retriever, where: str | None = None) -> list[Batch]:
    found = Batches(table, learner.spec.train.batch_size, features=learner.layout.features, where=where)
    return [batch for batch, _ in found.read()]


def train(table: Table, learner: Retriever, epochs: int = 4) -> list[float]:
    return [
        learner.step(batch).loss
        for _ in range(epochs)
        for batch in batches(table, learner, learner.trains_on)
    ]


SHAPES = {
    "layers": {},
    "sum of ids": {"hidden": [], "user": ["user"], "item": ["item"]},
    "history": {"hidden": [], "user": ["recent"], "item": ["item", "price"]},
    "bce": {"loss": "bce"},
}


def top_items(table: Table, learner: Retriever, k: int) -> tuple[EvalQueries, np.ndarray]:
    """The first k of the catalogue for every question of the test split."""
    questions = EvalQueries.of(table, learner.recipe, "test", HELD_OUT_CLICKS)
    items = learner.item_vectors(questions.catalogue.batch(learner.layouts["item"]))
    users = learner.user_vectors(questions.batch(slice(0, len(questions)), learner.layouts["user"]))
    return questions, learner.rank(torch.from_numpy(users), torch.from_numpy(items), questions.seen, k)


@pytest.mark.parametrize("shape", SHAPES)
def test_even_users_are_shown_even_items(table, shape):
    learner = retriever(table, **SHAPES[shape])
    losses = train(table, learner, epochs=10)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    questions, ranked = top_items(table, learner, 10)
    is_even = dict(table.scan().select("item", pl.col("raw_item") % 2 == 0).collect().iter_rows())
    shown = [[is_even[item + 1] for item in items] for items in ranked.tolist()]
    # What a user clicks is even or odd as the user is.
    liked = [
        is_even[questions.ground_truth.of(slice(number, number + 1)).items[0] + 1]
        for number in places(questions)
    ]
    assert np.mean(np.array(shown)[places(questions)] == np.array(liked)[:, None]) > 0.95


def places(questions: EvalQueries) -> list[int]:
    """EvalQueries that have an answer left."""
    return np.flatnonzero(np.diff(questions.ground_truth.offsets)).tolist()


def test_with_too_many_queries_every_third_is_asked(table, monkeypatch):
    recipe = even_odd_recipe()
    everyone = EvalQueries.of(table, recipe, "test", HELD_OUT_CLICKS)
    monkeypatch.setattr(eval_queries, "_MAX_SCORES", len(everyone) * len(everyone.catalogue) // 3 + 1)
    some = EvalQueries.of(table, recipe, "test", HELD_OUT_CLICKS)
    chosen = range(0, len(everyone), 3)
    assert (len(some), some.num_left_out) == (len(chosen), len(everyone) - len(chosen))
    for number, other in enumerate(chosen):
        for lists, all_lists in ((some.seen, everyone.seen), (some.ground_truth, everyone.ground_truth)):
            own = lists.of(slice(number, number + 1)).items.tolist()
            assert own == all_lists.of(slice(other, other + 1)).items.tolist()


def test_the_softmax_is_the_formula_row_by_row(table):
    learner = retriever(table)
    batch = some_rows(batches(table, learner)[0], np.arange(100))
    clicks = some_rows(batch, np.flatnonzero(batch.labels["clicked"] == 1))
    users = learner.user_vectors(learner._side_of("user", clicks))
    items = learner.item_vectors(learner._side_of("item", clicks))
    keys = clicks.keys["item"].values
    assert len(set(keys)) < len(keys) < batch.size
    chance = np.array([(np.sum(keys == key) + 1) / (len(keys) + learner.counts.values.size) for key in keys])
    logits = users @ items.T / 0.2 - np.log(chance)
    expected = []
    for row, own in enumerate(keys):
        others = [logits[row, other] for other in range(len(keys)) if keys[other] != own]
        expected.append(np.log(np.exp([logits[row, row], *others]).sum()) - logits[row, row])
    assert learner.step(batch).loss == pytest.approx(np.mean(expected), rel=1e-5)


def test_rows_without_a_click_teach_the_softmax_nothing(table):
    one, other = retriever(table), retriever(table)
    batch = batches(table, one)[0]
    clicks = some_rows(batch, np.flatnonzero(batch.labels["clicked"] == 1))
    assert one.step(batch).loss == other.step(clicks).loss
    catalogue = ItemFeatures.of(table, table.recipe).batch(one.layouts["item"])
    assert (one.item_vectors(catalogue) == other.item_vectors(catalogue)).all()
    nothing = some_rows(batch, np.flatnonzero(batch.labels["clicked"] == 0))
    assert one.step(nothing).loss == 0.0


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_nothing_but_rounding(table, shape):
    losses = [train(table, retriever(table, threads, **SHAPES[shape]), epochs=1) for threads in (1, 3)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_more_rows_than_fit_at_once_give_the_same_loss(table, monkeypatch):
    batch = batches(table, retriever(table))[0]
    whole = retriever(table).step(batch).loss
    monkeypatch.setattr("recmill.learner.retrieval._ROWS_AT_ONCE", 7)
    assert retriever(table).step(batch).loss == pytest.approx(whole, rel=1e-5)


def test_log_q_is_the_log_of_the_share_of_rows_seen_so_far():
    counts = ItemCounts(4)
    counts.add(np.array([1, 3]), np.array([5, 1]))
    np.testing.assert_allclose(counts.log_q(np.array([1, 2, 3])), np.log([6 / 10, 1 / 10, 2 / 10]), rtol=1e-6)
    unbounded = ItemCounts(None)
    unbounded.add(np.array([-(2**63), 2**62]), np.array([1, 2]))
    assert np.isfinite(unbounded.log_q(np.array([-(2**63), 7]))).all()


def test_without_log_q_popular_items_are_pushed_away(table):
    batch = batches(table, retriever(table))[0]
    assert retriever(table).step(batch).loss != pytest.approx(retriever(table, log_q=False).step(batch).loss)


def test_a_restored_retriever_goes_on_as_if_nothing_had_happened(table):
    learner, restored = retriever(table), retriever(table)
    first, second, *_ = batches(table, learner)
    learner.step(first)
    restored.load_arrays(learner.arrays())
    for name, source in learner.tables.items():
        with source.begin_snapshot() as snapshot:
            for records in snapshot:
                restored.tables[name].load(records)
    restored.steps = learner.steps
    assert (restored.counts.values == learner.counts.values).all()
    assert restored.step(second).loss == learner.step(second).loss


def test_a_new_user_gets_a_finite_unit_vector(table):
    learner = retriever(table)
    train(table, learner, epochs=1)
    nobody = Batch(1, np.zeros((1, 0), np.float32), {"user": one_key(0), "recent": no_keys()}, {}, {})
    vector = learner.user_vectors(nobody)
    assert np.linalg.norm(vector) == pytest.approx(1.0, rel=1e-5)


def test_an_empty_history_alone_gives_a_finite_vector(table):
    learner = retriever(table, user=["recent"], hidden=[])
    nobody = Batch(1, np.zeros((1, 0), np.float32), {"recent": no_keys()}, {}, {})
    assert np.isfinite(learner.user_vectors(nobody)).all()


def one_key(key: int) -> Keys:
    return Keys(np.array([key]))


def no_keys() -> Keys:
    return Keys(np.zeros(0, np.int64), np.zeros(2, np.int64))


def test_a_number_that_is_not_finite_is_an_error_before_anything_changes(table):
    learner = retriever(table)
    batch = batches(table, learner)[0]
    with pytest.raises(FeatureError, match='"price" is inf'):
        learner.step(dataclasses.replace(batch, numbers=np.full_like(batch.numbers, np.inf)))
    with torch.no_grad():
        next(learner.towers.item.parameters()).view(-1)[0] = torch.nan
    users = learner.user_vectors(learner._side_of("user", batch))
    before = learner.arrays()
    with pytest.raises(TrainingError, match="the loss is nan"):
        learner.step(batch)
    after = learner.arrays()
    for name in (name for name in before if name.startswith("model.")):
        np.testing.assert_array_equal(after[name], before[name])
    assert (learner.user_vectors(learner._side_of("user", batch)) == users).all()


@pytest.mark.parametrize(
    ("retrieval", "problem"),
    [
        ({"model": "tower"}, r"retrieval\.model is \"tower\"; expected two_tower, sasrec"),
        ({"loss": "bce", "log_q": False}, r'retrieval\.log_q has no meaning for loss = "bce"'),
        ({"train": {"precision": "bfloat16"}}, r"retrieval\.train\.precision has no meaning for retrieval"),
        ({"train": {"micro_batches": 2}}, r"retrieval\.train\.micro_batches has no meaning for retrieval"),
    ],
)
def test_what_a_retriever_cannot_do_is_no_recipe(retrieval, problem):
    with pytest.raises(RecipeError, match=problem):
        even_odd_recipe(**retrieval)


def test_an_item_tower_that_cannot_tell_items_apart_is_no_recipe():
    with pytest.raises(RecipeError, match=r'retrieval\.item has no feature made of "item" alone'):
        even_odd_recipe(item=["price"])


def test_a_tower_of_numbers_alone_is_no_recipe():
    with pytest.raises(RecipeError, match=r"retrieval\.user has only numbers"):
        even_odd_recipe(user=["price"])


def test_the_catalogue_has_every_known_item_once_as_last_seen(table):
    catalogue = ItemFeatures.of(table, table.recipe)
    assert catalogue.ids.tolist() == list(range(1, NUM_ITEMS + 1))
    last = {row["item"]: row["price"] for row in table.scan().collect().iter_rows(named=True)}
    assert dict(catalogue.rows.select("item", "price").iter_rows()) == last


def test_seen_items_are_neither_ranked_nor_right(table):
    questions = EvalQueries.of(table, table.recipe, "test", HELD_OUT_CLICKS)
    earlier = pl.concat([table.scan(split).collect() for split in ("train", "eval")])
    clicked = (
        earlier.filter(pl.col("clicked") == 1).group_by("user").agg("item").rows_by_key("user", unique=True)
    )
    _, ranked = top_items(table, retriever(table), NUM_ITEMS)
    for number, user in enumerate(questions.users["user"]):
        seen = {item - 1 for item in clicked.get(user, ([],))[0]}
        shown = set(ranked[number].tolist()) - {-1}
        right = questions.ground_truth.of(slice(number, number + 1)).items
        assert shown == set(range(NUM_ITEMS)) - seen
        assert not seen & set(right.tolist())


def test_nothing_is_masked_for_questions_of_the_training_rows(table):
    questions = EvalQueries.of(table, table.recipe, "train", HELD_OUT_CLICKS)
    assert len(questions.seen.items) == 0
    assert retriever(table).evaluate(table, "train").users == len(questions)


def test_a_history_that_grew_makes_another_question_of_the_same_user(table):
    questions = EvalQueries.of(table, table.recipe, "test", HELD_OUT_CLICKS)
    clicks = table.scan("test").collect().filter(pl.col("clicked") == 1)
    assert len(questions) == clicks.select("user", "recent").n_unique()
    assert questions.users["user"].n_unique() < len(questions)
    once = dataclasses.replace(HELD_OUT_CLICKS, name="once", ask="user")
    with pytest.raises(FeatureError, match=r"once asks once for each user, but user .* different"):
        EvalQueries.of(table, table.recipe, "test", once)


def test_ranking_some_users_at_a_time_changes_nothing(table, monkeypatch):
    learner = retriever(table)
    train(table, learner, epochs=1)
    whole = learner.evaluate(table, "test").means()
    monkeypatch.setattr("recmill.learner.retrieval._SCORES_AT_ONCE", 1)
    assert learner.evaluate(table, "test").means() == pytest.approx(whole)


def test_towers_may_read_other_features_than_the_tables_recipe_says(table):
    learner = retriever(table, user=["user"], item=["item"])
    users = table.scan("test").collect().filter(pl.col("clicked") == 1)["user"].n_unique()
    assert len(EvalQueries.of(table, learner.recipe, "test", HELD_OUT_CLICKS)) == users
    assert learner.evaluate(table, "test").users <= users


def test_counts_know_items_only_if_the_table_keeps_them(table):
    found = counts_of(table, table.recipe)
    assert found.interactions == sum(
        table.scan(split).collect()["clicked"].sum() for split in ("train", "eval", "test")
    )
    assert (found.users, found.items) == (None, NUM_ITEMS)


def test_a_split_without_clicks_is_an_error(tmp_path):
    recipe = dataclasses.replace(even_odd_recipe(), split=None)
    whole = prepare(recipe, str(write_log(tmp_path / "log", 200)), tmp_path / "table").table
    with pytest.raises(ArtifactError, match="has no eval rows; its recipe holds none out"):
        EvalQueries.of(whole, recipe, "eval", HELD_OUT_CLICKS)
    log = tmp_path / "log" / "events.tsv"
    rows = log.read_text().splitlines()
    log.write_text(
        "".join(row[:-1] + ("0" if place >= 150 else row[-1]) + "\n" for place, row in enumerate(rows))
    )
    clickless = prepare(even_odd_recipe(), str(tmp_path / "log"), tmp_path / "clickless").table
    with pytest.raises(ArtifactError, match='has no test rows with label "clicked"'):
        EvalQueries.of(clickless, recipe, "test", HELD_OUT_CLICKS)


def test_two_towers_come_near_the_best_reachable_on_a_planted_shop(tmp_path):
    rows, seed = 100_000, 1
    generate("shop", rows, seed, tmp_path / "log")
    recipe = load_recipe("quickstart")
    shop = prepare(recipe, str(tmp_path / "log"), tmp_path / "table").table
    learner = Retriever(recipe, shop.columns)
    clicks = Batches(
        shop, learner.train_spec.batch_size, "train", learner.layout.features, 0, learner.trains_on
    )
    Trainer(learner, clicks, "ndcg@10").train()
    found, best = learner.evaluate(shop, "test").means(), best_reachable(rows, seed, (10, 50))
    # 0.90 to 0.95 from seed to seed; more rows bring it nearer.
    assert 0.85 < found["recall@50"] / best["recall@50"] < 1.02
