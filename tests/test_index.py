"""Search by inner product: exact and clustered give the same answers, also while items come and go."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill.artifacts.vector_index import (
    EXACT_BELOW,
    ClusteredIndex,
    ExactIndex,
    Index,
    _probes_needed,
    build_index,
    open_index,
)
from recmill.errors import ArtifactError

Array = np.ndarray[Any, np.dtype[Any]]


def units(vectors: Array) -> Array:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def planted(
    num_items: int = 20_000, num_clusters: int = 100, dim: int = 32, seed: int = 1
) -> tuple[Array, Array]:
    """Items around centres, as trained towers make them, and queries between two centres."""
    random = np.random.default_rng(seed)
    centers = units(random.standard_normal((num_clusters, dim)))

    def around(points: Array) -> Array:
        return units(points + random.standard_normal(points.shape) * 0.7 / dim**0.5)

    items = around(centers[random.integers(0, num_clusters, num_items)])
    pairs = random.integers(0, num_clusters, (100, 2))
    return items, around(centers[pairs[:, 0]] + 0.5 * centers[pairs[:, 1]])


def truth(vectors: Array, query: Array, k: int, left_out: tuple[int, ...] = ()) -> list[int]:
    scores = vectors.astype(np.float64) @ query
    scores[list(left_out)] = -np.inf
    return np.lexsort((np.arange(len(scores)), -scores))[:k].tolist()


@pytest.fixture(params=["exact", "clustered", "opened exact", "opened clustered"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Builds an index of any kind, or builds, saves and opens it."""

    def make_index(vectors: Array) -> Index:
        index = build_index(vectors, request.param.removeprefix("opened "))
        if not request.param.startswith("opened"):
            return index
        index.save(tmp_path / "index")
        np.save(tmp_path / "vectors.npy", vectors)
        return open_index(tmp_path / "index", np.load(tmp_path / "vectors.npy", mmap_mode="r"))

    return make_index


AXES = np.array([[1, 0], [0, 1], [0.6, 0.8], [-1, 0]], np.float32)


def test_the_best_come_first_with_their_inner_products(make: Any) -> None:
    indices, scores = make(AXES).search(np.array([[1, 0], [0.1, 2]], np.float32), 3)
    assert indices.tolist() == [[0, 2, 1], [1, 2, 0]]
    np.testing.assert_allclose(scores, [[1, 0.6, 0], [2, 1.66, 0.1]], rtol=1e-6)
    assert (indices.dtype, scores.dtype) == (np.int64, np.float32)


def test_fewer_than_asked_for_are_padded(make: Any) -> None:
    indices, scores = make(AXES).search(AXES[:1], 6)
    assert indices.tolist() == [[0, 2, 1, 3, -1, -1]]
    assert np.isneginf(scores[0, 4:]).all()


def test_none_asked_for_are_none_found(make: Any) -> None:
    assert make(AXES).search(AXES, 0)[0].shape == (4, 0)
    assert make(AXES).search(AXES[:0], 3)[0].shape == (0, 3)


def test_a_query_that_is_no_number_finds_nothing(make: Any) -> None:
    assert make(AXES).search(np.full((1, 2), np.nan, np.float32), 2)[0].tolist() == [[-1, -1]]


def test_ties_go_by_index(make: Any) -> None:
    index = make(np.repeat(AXES[:2], 50, axis=0))
    assert index.search(AXES[1:2], 7)[0].tolist() == [[50, 51, 52, 53, 54, 55, 56]]


def test_an_added_item_is_found_and_a_removed_one_is_not(make: Any) -> None:
    index = make(AXES)
    index.add(np.array([4, 7]), np.array([[0.8, 0.6], [0.0, -1.0]]))
    index.remove(np.array([0]))
    assert len(index) == 5
    indices, scores = index.search(AXES[:1], 5)
    assert indices.tolist() == [[4, 2, 1, 7, 3]]
    assert scores[0, 0] == pytest.approx(0.8)


def test_a_changed_item_has_its_new_vector_only(make: Any) -> None:
    index = make(AXES)
    index.add(np.array([0, 0]), np.array([[0.5, 0.5], [-0.5, -0.5]]))
    indices, scores = index.search(AXES[:1], 4)
    assert indices.tolist() == [[2, 1, 0, 3]]
    assert scores[0, 2] == pytest.approx(-0.5)


def test_a_removed_item_may_come_back(make: Any) -> None:
    index = make(AXES)
    index.remove(np.array([1, 99, -1]))
    index.add(np.array([1]), AXES[1:2])
    assert index.search(AXES[1:2], 1)[0].tolist() == [[1]]
    assert len(index) == 4


def test_an_empty_index_answers_with_nothing_until_something_is_added() -> None:
    index = build_index(np.empty((0, 2), np.float32))
    assert index.search(AXES[:1], 2)[0].tolist() == [[-1, -1]]
    index.add(np.array([0]), AXES[:1])
    assert index.search(AXES[:1], 2)[0].tolist() == [[0, -1]]


def test_exact_answers_are_the_truth() -> None:
    vectors, queries = planted(5_003)
    indices, scores = build_index(vectors).search(queries, 40)
    for query, found, found_scores in zip(queries, indices, scores, strict=True):
        expected = truth(vectors, query, 40)
        np.testing.assert_allclose(found_scores, (vectors @ query)[expected], rtol=1e-5)
        assert len(set(found.tolist()) & set(expected)) >= 39  # float32 may swap the last


def test_nearly_all_of_the_best_are_found_by_clusters() -> None:
    vectors, queries = planted()
    index = build_index(vectors, "clustered")
    assert isinstance(index, ClusteredIndex)
    assert index.recall >= 0.97
    indices = index.search(queries, 500)[0]
    shares = [
        len(set(found[:50].tolist()) & set(truth(vectors, query, 50))) / 50
        for query, found in zip(queries, indices, strict=True)
    ]
    assert np.mean(shares) >= 0.97


def test_vectors_without_clusters_are_found_too() -> None:
    random = np.random.default_rng(5)
    vectors, queries = units(random.standard_normal((20_000, 16))), units(random.standard_normal((50, 16)))
    indices = build_index(vectors, "clustered", queries).search(queries, 50)[0]
    shares = [
        len(set(found.tolist()) & set(truth(vectors, query, 50))) / 50
        for query, found in zip(queries, indices, strict=True)
    ]
    assert np.mean(shares) >= 0.95


def test_removing_whole_clusters_leaves_full_answers() -> None:
    vectors, queries = planted()
    index = build_index(vectors, "clustered")
    gone = truth(vectors, queries[0], 6_000)
    index.remove(np.array(gone))
    indices, scores = index.search(queries[:1], 500)
    assert (indices >= 0).all()
    assert not set(indices[0].tolist()) & set(gone)
    np.testing.assert_allclose(scores[0], vectors[indices[0]] @ queries[0], atol=1e-6)


def test_all_items_are_found_when_all_are_asked_for(make: Any) -> None:
    vectors, queries = planted(3_000)
    assert sorted(make(vectors).search(queries[:1], 3_000)[0][0].tolist()) == list(range(3_000))


def test_an_opened_index_answers_as_the_built_one(tmp_path: Path) -> None:
    vectors, queries = planted()
    built = build_index(vectors, "clustered")
    built.save(tmp_path)
    opened = open_index(tmp_path, vectors)
    assert isinstance(opened, ClusteredIndex)
    for one, other in zip(built.search(queries, 100), opened.search(queries, 100), strict=True):
        np.testing.assert_array_equal(one, other)


def test_building_twice_gives_the_same_answers() -> None:
    vectors, queries = planted(6_000)
    one, other = (build_index(vectors, "clustered").search(queries, 20)[0] for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_equal_vectors_are_not_all_assigned_again_for_each_query() -> None:
    """Items that were seen once share the vector of the unknown id: most of a catalogue may."""

    class Clusters:
        nlist, assigned = 1, 0

        @property
        def quantizer(self) -> Clusters:
            return self

        def reconstruct_n(self, first: int, number: int) -> Array:
            return AXES[:1]

        def assign(self, vectors: Array, number: int) -> Array:
            self.assigned += len(vectors)
            return np.zeros((len(vectors), number), np.int64)

    clusters = Clusters()
    probes, recall = _probes_needed(np.repeat(AXES[:1], 3_000, axis=0), clusters, AXES[:2])
    assert (probes, recall) == (1, 1.0)
    assert clusters.assigned == 2 * 500


def test_few_items_are_searched_exactly(tmp_path: Path) -> None:
    index = build_index(AXES)
    assert isinstance(index, ExactIndex)
    assert len(AXES) <= EXACT_BELOW
    index.save(tmp_path / "index")
    assert isinstance(open_index(tmp_path / "index", AXES), ExactIndex)
    assert isinstance(open_index(tmp_path / "never saved", AXES), ExactIndex)


def test_an_index_of_other_items_is_refused(tmp_path: Path) -> None:
    vectors, _ = planted(3_000)
    build_index(vectors, "clustered").save(tmp_path)
    with pytest.raises(ArtifactError, match="not of these 2,000 items"):
        open_index(tmp_path, vectors[:2_000])


@pytest.mark.parametrize("file", ["clusters.json", "clusters.faiss"])
def test_a_damaged_index_is_refused(tmp_path: Path, file: str) -> None:
    vectors, _ = planted(3_000)
    build_index(vectors, "clustered").save(tmp_path)
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="recmill export"):
        open_index(tmp_path, vectors)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="must be"):
        build_index(AXES, "magic")


def test_searches_see_each_change_whole_or_not_at_all(make: Any) -> None:
    vectors, queries = planted(3_000)
    index = make(vectors)
    query = queries[:1]
    stop = threading.Event()
    wrong: list[object] = []

    def search() -> None:
        while not stop.is_set():
            try:
                indices, scores = index.search(query, 3)
                pair = set(indices[0].tolist()) & {5_000, 5_001}
                if len(pair) == 1 or (np.diff(scores[0]) > 0).any():
                    wrong.append(indices)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        index.add(np.array([5_000, 5_001]), np.repeat(query, 2, axis=0))
        index.remove(np.array([5_000, 5_001]))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
