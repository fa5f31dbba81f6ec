"""Models that read lists unpooled: what they find that a mean of the list hides, and that nothing else changes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from recmill.dataset.batch import Batch, Keys
from recmill.dataset.table import Table
from recmill.errors import RecipeError
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.learner.saved import new_learner
from recmill.learner.sequences import SequenceRetriever
from recmill.metrics import ScoreSums
from recmill.models.sasrec import drop, sampled_softmax
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare.prepare import prepare
from recmill.stages.train.source import TableData
from recmill.stages.train.trainer import Trainer

pytestmark = pytest.mark.stages

# where the target item matters

NUM_ITEMS, LENGTH = 20, 8
RANKER_COLUMNS = [
    ColumnInfo("item", "id", "feature", "item", size=NUM_ITEMS, vocabulary="item"),
    ColumnInfo("recent", "ids", "feature", "user", size=NUM_ITEMS, vocabulary="item"),
    ColumnInfo("click", "number", "label"),
]


def clicks_on_known_items(random: np.random.Generator, size: int) -> Batch:
    """Users click an item exactly when they have had it before."""
    recent = random.permuted(np.tile(np.arange(NUM_ITEMS), (size, 1)), axis=1)[:, :LENGTH]
    items = np.where(random.random(size) < 0.5, recent[:, 0], random.integers(0, NUM_ITEMS, size))
    clicks = (recent == items[:, None]).any(axis=1).astype(np.float32)
    recent = random.permuted(recent, axis=1)
    keys = {"item": Keys(items), "recent": Keys(recent.reshape(-1), np.arange(size + 1) * LENGTH)}
    return Batch(size, np.zeros((size, 0), np.float32), keys, {}, {"click": clicks})


def clicks_like_the_last_item(random: np.random.Generator, size: int) -> Batch:
    """Users click even items when their last one was even, and odd ones when it was odd."""
    batch = clicks_on_known_items(random, size)
    last = batch.keys["recent"].values.reshape(size, LENGTH)[:, -1]
    clicks = (last % 2 == batch.keys["item"].values % 2).astype(np.float32)
    return Batch(size, batch.numbers, batch.keys, {}, {"click": clicks})


def auc_after_training(plant=clicks_on_known_items, **model) -> float:
    training = r.Training(batch_size=256, dense=r.Optimizer("adam", 0.01), sparse=r.Optimizer("adam", 0.02))
    ranker = Ranker(r.Ranking(label="click", embedding_dim=4, train=training, **model), RANKER_COLUMNS)
    random = np.random.default_rng(0)
    for _ in range(150):
        ranker.step(plant(random, 256))
    held_out, sums = plant(random, 2000), ScoreSums()
    sums.add(held_out.labels["click"], ranker.predict(held_out))
    return sums.metrics().as_dict()["auc"]


def test_target_attention_finds_what_a_mean_of_the_history_hides():
    pooled = auc_after_training(model="dlrm", top=(16,))
    attention = auc_after_training(model="din", hidden=(16,), sequences=("recent",))
    assert attention > pooled + 0.12


def test_a_ranker_that_knows_order_finds_what_target_attention_cannot():
    unordered = auc_after_training(
        clicks_like_the_last_item, model="din", hidden=(16,), sequences=("recent",)
    )
    ordered = auc_after_training(clicks_like_the_last_item, model="bst", hidden=(16,), sequences=("recent",))
    assert unordered < 0.75
    assert ordered > 0.95


# where order matters


IDS = ({"vocabulary": {"named": "item"}}, {"lookup": "item"})


def walk_recipe(packed: bool = True, ids=IDS, **retrieval) -> r.Recipe:
    return recipe_from_dict(
        {
            "name": "walk",
            "log": {
                "files": ["events.tsv"],
                "user": "user",
                "item": "item",
                "time": "time",
                "columns": [{"name": name, "type": "int"} for name in ("user", "item", "time")],
            },
            "rows": [
                {
                    "history": {
                        "columns": ["item"],
                        "by": "user",
                        "order": "time",
                        "max_length": 12,
                        "packed": packed,
                    }
                }
            ],
            "split": {"by": "last", "column": "user", "order": "time"},
            "labels": [
                {
                    "name": "seen",
                    "columns": "item",
                    "steps": [{"expression": {"sql": "item >= 0", "type": "int"}}],
                }
            ],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": [ids[0]]},
                {"name": "before", "columns": "item_history", "steps": [ids[1]]},
            ],
            "table": {"order": "shuffle", "keep": ["user", "item"]},
            "retrieval": {
                "label": "seen",
                "user": ["before"],
                "item": ["item"],
                "embedding_dim": 16,
                "temperature": 0.1,
                **retrieval,
            },
        }
    )


TRAIN = {
    "batch_size": 32,
    "epochs": 12,
    "dense": {"name": "adam", "learning_rate": 0.01},
    "sparse": {"name": "adam", "learning_rate": 0.01},
}
SASREC = {"model": "sasrec", "blocks": 1, "negatives": 20, "dropout": 0.0, "train": TRAIN}
MEAN = {"hidden": [], "packed": False, "train": {**TRAIN, "batch_size": 256}}


def walk_table(folder: Path, recipe: r.Recipe) -> Table:
    """Of 150 items, each leads to another one. Users go there from their last item, or half of the time anywhere.

    The two items that are held out are where the one before leads. Many earlier items lead to items not seen yet.
    """
    random = np.random.default_rng(0)
    leads_to = np.roll(random.permutation(150), 1)[np.argsort(random.permutation(150))]
    lines = []
    for user in range(150):
        item = int(random.integers(150))
        for time in range(20):
            lines.append(f"{user}\t{item}\t{time}\n")
            item = int(leads_to[item]) if time >= 17 or random.random() < 0.5 else int(random.integers(150))
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "events.tsv").write_text("".join(lines))
    return prepare(recipe, str(folder / "log"), folder / "table").table


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Table:
    return walk_table(tmp_path_factory.mktemp("packed"), walk_recipe(**SASREC))


def trained(table: Table, recipe: r.Recipe, num_threads: int = 1):
    learner = new_learner(recipe, "retrieval", table.columns, num_threads)
    Trainer(learner, TableData(table).batches(learner), "recall@10").train()
    return learner


def test_a_sequence_tower_knows_the_order_that_a_mean_does_not(packed, tmp_path):
    mean_recipe = walk_recipe(**MEAN)
    mean = trained(walk_table(tmp_path, mean_recipe), mean_recipe)
    order = trained(packed, walk_recipe(**SASREC))
    found = [learner.evaluate(packed).means()["mrr@10"] for learner in (mean, order)]
    assert found[0] < 0.35
    assert found[1] > found[0] + 0.4


# the sequence retriever


def test_a_packed_history_has_every_training_row_once(packed):
    rows = packed.scan("train").collect()
    lengths = rows["before"].list.len()
    # 18 training rows: the last has 12 before it, the one 12 rows earlier has 5.
    assert rows.height == 150 * 18
    assert sorted(lengths.filter(lengths > 0).unique().to_list()) == [5, 12]
    assert lengths.filter(lengths > 0).len() == 300
    assert packed.scan("eval").collect()["before"].list.len().min() == 12


def test_rows_without_a_history_are_no_part_of_an_epoch(packed):
    learner = new_learner(walk_recipe(**SASREC), "retrieval", packed.columns, 1)
    assert TableData(packed).batches(learner).batches_per_epoch == -(-300 // 32)


def first_batch(table: Table, learner: SequenceRetriever) -> Batch:
    return next(iter(TableData(table).batches(learner).read()))[0]


def test_the_loss_is_the_softmax_of_every_element_after_those_before(packed):
    learner = new_learner(walk_recipe(**SASREC), "retrieval", packed.columns, 1)
    batch = first_batch(packed, learner)
    history, items = batch.keys["before"], batch.keys["item"].values
    negatives = np.sort(1 + np.random.default_rng([0, 1]).choice(150, 20, replace=False))

    def vectors_of(keys: np.ndarray) -> np.ndarray:
        ids = Batch(len(keys), np.zeros((len(keys), 0), np.float32), {"item": Keys(keys)}, {}, {})
        return learner.item_vectors(ids).astype(np.float64)

    losses = []
    for row in range(batch.size):
        sequence = [*history.values[history.offsets[row] : history.offsets[row + 1]], items[row]]
        for index, target in enumerate(sequence):
            before = Keys(np.array(sequence[:index], np.int64), np.array([0, index]))
            user = learner.user_vectors(Batch(1, np.zeros((1, 0), np.float32), {"before": before}, {}, {}))[0]
            others = negatives[negatives != target]
            own = user @ vectors_of(np.array([target]))[0] / 0.1
            logits = vectors_of(others) @ user / 0.1 + np.log(150 / 20)
            losses.append(np.log(np.exp(own) + np.exp(logits).sum()) - own)
    assert learner.step(batch).loss == pytest.approx(np.mean(losses), rel=1e-4)


def test_threads_change_nothing_but_rounding(packed):
    losses = []
    for threads in (1, 3):
        learner = new_learner(walk_recipe(**SASREC), "retrieval", packed.columns, threads)
        losses.append([learner.step(batch).loss for batch, _ in TableData(packed).batches(learner).read()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_a_restored_retriever_goes_on_to_the_same_bits(packed):
    recipe = walk_recipe(**{**SASREC, "dropout": 0.2})
    learner, restored = (new_learner(recipe, "retrieval", packed.columns, 1) for _ in range(2))
    first, second, *_ = [batch for batch, _ in TableData(packed).batches(learner).read()]
    learner.step(first)
    restored.load_arrays(learner.arrays())
    for name, source in learner.tables.items():
        with source.begin_snapshot() as snapshot:
            for records in snapshot:
                restored.tables[name].load(records)
    restored.steps, state = learner.steps, torch.get_rng_state()
    expected = learner.step(second).loss
    torch.set_rng_state(state)
    assert restored.step(second).loss == expected


def test_a_user_without_a_history_has_a_unit_vector(packed):
    learner = new_learner(walk_recipe(**SASREC), "retrieval", packed.columns, 1)
    none = {"before": Keys(np.zeros(0, np.int64), np.zeros(2, np.int64))}
    vector = learner.user_vectors(Batch(1, np.zeros((1, 0), np.float32), none, {}, {}))
    assert np.linalg.norm(vector) == pytest.approx(1.0, rel=1e-5)


def test_the_order_of_users_does_not_change_their_vectors(packed):
    learner = new_learner(walk_recipe(**SASREC), "retrieval", packed.columns, 1)
    lists = [[1, 2, 3], [], [5], [4, 3, 2, 1]]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    keys = Keys(np.concatenate([np.array(one, np.int64) for one in lists]), offsets)
    together = learner.user_vectors(Batch(4, np.zeros((4, 0), np.float32), {"before": keys}, {}, {}))
    for row, one in enumerate(lists):
        alone = {"before": Keys(np.array(one, np.int64), np.array([0, len(one)]))}
        vector = learner.user_vectors(Batch(1, np.zeros((1, 0), np.float32), alone, {}, {}))
        np.testing.assert_allclose(together[row], vector[0], atol=1e-6)


def test_a_negative_that_is_the_target_does_not_count():
    states, negatives = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    hit = torch.tensor([0]), torch.tensor([0])
    loss = sampled_softmax(states, torch.tensor([[1.0, 0.0]]), negatives, hit, 1.0, 0.0)
    assert float(loss) == pytest.approx(np.log(np.e + 1) - 1, rel=1e-5)


@pytest.mark.parametrize(
    ("retrieval", "problem"),
    [
        ({"hidden": [8]}, r'retrieval\.hidden has no meaning for model = "sasrec"'),
        ({"heads": 3}, r"retrieval\.embedding_dim is 16, but heads is 3"),
        ({"user": ["before", "user"]}, r'retrieval\.user has 2 features, but model = "sasrec" takes one'),
        ({"user": ["user"]}, r'retrieval\.user has "user", which holds ids; it needs lists of ids'),
        (
            {"ids": [{"key": "item"}] * 2},
            r'retrieval\.item has "item", whose keys have no bound, but model = "sasrec"',
        ),
        ({"model": "two_tower"}, r"retrieval\.(blocks|dropout|negatives) has no meaning"),
    ],
)
def test_what_sasrec_cannot_do_is_no_recipe(retrieval, problem):
    with pytest.raises(RecipeError, match=problem):
        walk_recipe(**{**SASREC, **retrieval})


def test_only_sasrec_learns_from_packed_histories():
    with pytest.raises(RecipeError, match='retrieval reads "before", whose history is packed'):
        walk_recipe(**{**MEAN, "packed": True})


def test_the_sampled_softmax_and_its_gradients_are_those_of_plain_operations() -> None:
    torch.manual_seed(0)
    given = [torch.randn(size, 4, requires_grad=True) for size in (6, 6, 5)]
    hits = torch.tensor([1, 4]), torch.tensor([0, 3])

    def plain(states: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        own = (states * targets).sum(dim=1, keepdim=True) / 0.5
        others = (states @ negatives.T / 0.5 + 1.5).index_put(hits, torch.tensor(-torch.inf))
        return functional.cross_entropy(
            torch.cat([own, others], dim=1), torch.zeros(6, dtype=torch.long), reduction="sum"
        )

    loss, expected = sampled_softmax(*given, hits, 0.5, 1.5), plain(*given)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss, given), torch.autograd.grad(3 * expected, given), rtol=1e-5, atol=1e-5
    )


def test_dropout_leaves_out_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    values = drop(torch.ones(3, 33_333), 0.2, training=True)
    assert values.unique().tolist() == pytest.approx([0, 1.25], abs=1e-4)
    assert float(values.mean()) == pytest.approx(1, abs=0.01)
    assert float((values == 0).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert drop(values, 0.2, training=False) is values
