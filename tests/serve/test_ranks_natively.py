"""Servers rank in native code what it covers, by ONNX Runtime what it does not, and give the same lists either way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.delta import Changes, TableChange
from recmill.artifacts.bundle.entities import EntityRows
from recmill.artifacts.bundle.layers import FILE, TOWER_FILE, RankerLayers, TowerLayers
from recmill.stages.serve.messages import Answer, NewItem, Rank, Recommend
from recmill.stages.serve.recommender import Recommender

USERS = [*(f"u{number}" for number in range(1, 20)), "never seen", None]


@pytest.fixture
def recommender(bundles: Path) -> Recommender:
    return Recommender(Bundle.open(bundles))


def by_onnx(recommender: Recommender) -> None:
    """What a bundle without layers does."""
    assert recommender.ranker is not None
    recommender.ranker.swap(replace(recommender.ranker._dense, native=None, runs="onnxruntime: a test"))


def answers(recommender: Recommender) -> list[Answer]:
    return [recommender.recommend(Recommend(user=user, k=20, where="price < 60")) for user in USERS]


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [item.id for item in one.items] == [item.id for item in other.items]
        scores, others = ([item.score for item in answer.items] for answer in (one, other))
        np.testing.assert_allclose(scores, others, atol=1e-5)


def probabilities(recommender: Recommender) -> list[float]:
    items = [*(f"i{number}" for number in range(1, 60)), "new", "never seen"]
    return recommender.rank(Rank(user="u3", items=items)).scores


def layers_of(bundles: Path) -> tuple[dict[str, bytes], RankerLayers]:
    """The dense weights of the bundle, as a delta has them."""
    bundle = Bundle.open(bundles)
    graphs = {name: (bundle.path / "graphs" / f"{name}.onnx").read_bytes() for name in ("rank", "rank_split")}
    content = (bundle.path / "graphs" / FILE).read_bytes()
    interaction = bundle.models["ranking"]["layers"]["interaction"]
    return graphs, RankerLayers.from_bytes(content, interaction, FILE)


def test_lists_are_the_same_as_by_onnx_runtime(recommender: Recommender) -> None:
    natively, scores = answers(recommender), probabilities(recommender)
    by_onnx(recommender)
    assert_same(natively, answers(recommender))
    np.testing.assert_allclose(scores, probabilities(recommender), atol=1e-5)


def test_traces_show_what_ranked(recommender: Recommender) -> None:
    def ranker() -> str:
        trace = recommender.recommend(Recommend(user="u1", trace=True)).trace
        assert trace is not None
        return trace.ranker

    assert ranker() == "native float32"
    by_onnx(recommender)
    assert ranker() == "onnxruntime: a test"


def test_an_item_is_ranked_by_its_new_features_after_it_was_ranked_by_its_old_ones(
    recommender: Recommender,
) -> None:
    recommender.recommend(
        Recommend(user="u3", k=20, candidates=200)
    )  # where its rows are is known from now on
    changed = [NewItem(id=f"i{number}", values={"price": 90.5, "category": "c1"}) for number in range(1, 30)]
    recommender.add_items(changed)
    natively, scores = answers(recommender), probabilities(recommender)
    by_onnx(recommender)
    assert_same(natively, answers(recommender))
    np.testing.assert_allclose(scores, probabilities(recommender), atol=1e-5)


def test_the_user_tower_gives_what_its_graph_gives(recommender: Recommender, tmp_path: Path) -> None:
    tower = recommender._recaller().tower
    assert tower is not None
    assert tower._native is not None
    users = recommender.bundle.entities("user")
    batch = users.rows(np.array([0, 3, 7, -1])).batch(tower.layout)
    natively = tower.vectors(batch)
    layers = TowerLayers.from_bytes(
        (recommender.bundle.path / "graphs" / TOWER_FILE).read_bytes(), TOWER_FILE
    )
    tower._native = None
    np.testing.assert_allclose(natively, tower.vectors(batch), atol=1e-6)
    damaged = TowerLayers([(weights + 1, bias) for weights, bias in layers.layers])
    (tmp_path / TOWER_FILE).write_bytes(damaged.to_bytes())
    assert tower._opened(tmp_path / TOWER_FILE) is None


def test_rows_that_changed_or_are_new_count_at_once(recommender: Recommender) -> None:
    before = probabilities(recommender)
    recommender.add_items([NewItem(id="new", values={"price": 3.5})])
    rows = recommender.bundle.collection("deep").rows["item"]
    keys = np.arange(rows.num_rows)
    moved = TableChange(keys, rows.lookup(keys) + np.float32(0.5), keys[5:8])
    recommender.apply(Changes({"deep/item": moved}))
    natively = probabilities(recommender)
    by_onnx(recommender)
    assert np.abs(np.subtract(natively, before)).max() > 1e-3
    np.testing.assert_allclose(natively, probabilities(recommender), atol=1e-5)


def test_candidates_are_read_where_they_are_mapped_new_and_changed_ones_too(recommender: Recommender) -> None:
    lookup, ranker, items = recommender.lookup, recommender.ranker, recommender.bundle.items
    assert ranker is not None
    assert items is not None
    recommender.add_items(
        [NewItem(id="new", values={"price": 3.5}), NewItem(id="i7", values={"price": 99.0})]
    )
    deep = recommender.bundle.collection("deep")
    rows = deep.rows["item"]
    feature = next(feature.name for feature in deep.features if feature.table == "item")
    unseen = items.rows(items.indices(["new"])).keys[feature].values
    recommender.apply(
        Changes({"deep/item": TableChange(unseen, np.full((1, rows.dim), 0.5), np.empty(0, np.int64))})
    )
    indices = items.indices(["new", *(f"i{number}" for number in range(1, 40)), "new"])
    user = lookup.user_row(Rank(user="u3", items=[]))
    found, degraded = lookup.candidates(indices, user)
    assert isinstance(found, EntityRows)
    assert not degraded
    natively = ranker.rank(user.features, found)
    np.testing.assert_allclose(natively, ranker.rank(user.features, found.rows), atol=1e-6)
    by_onnx(recommender)
    np.testing.assert_allclose(natively, ranker.rank(user.features, found), atol=1e-5)
    assert natively[0] == natively[-1]
    assert len(np.unique(natively)) > 20


def test_a_delta_with_layers_stays_native_and_one_without_falls_back(
    recommender: Recommender, bundles: Path
) -> None:
    graphs, layers = layers_of(bundles)
    ranker, expected = recommender.ranker, probabilities(recommender)
    assert ranker is not None
    recommender.apply(Changes(graphs=graphs, layers=layers.to_bytes()))
    assert ranker.runs == "native float32"
    recommender.apply(Changes(graphs=graphs))  # of a trainer that does not write layers
    assert ranker.runs.startswith("onnxruntime: ")
    np.testing.assert_allclose(probabilities(recommender), expected, atol=1e-5)


def test_layers_that_differ_from_the_graph_are_not_used(recommender: Recommender, bundles: Path) -> None:
    graphs, layers = layers_of(bundles)
    (weights, bias), *rest = layers.top
    other = replace(layers, top=[(weights, bias + 1), *rest])
    recommender.apply(Changes(graphs=graphs, layers=other.to_bytes()))
    assert recommender.ranker is not None
    assert "native logits differ" in recommender.ranker.runs
