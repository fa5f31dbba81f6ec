"""A bundle opens in a moment, knows when it is damaged, and says which version is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_bundle import MODELS, TREE, write_bundle

from recmill.artifacts.bundle.bundle import Bundle, current_of, previous_of, set_current, versions_of
from recmill.artifacts.bundle.compare import EntityDiff, TableDiff, diff
from recmill.artifacts.manifest import write_manifest
from recmill.dataset.batch import Keys
from recmill.errors import ArtifactError


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "0000000001-aaaaaaaa")


def test_a_bundle_gives_its_parts(bundle: Bundle) -> None:
    assert bundle.version == "0000000001-aaaaaaaa"
    assert bundle.recipe.name == "small"
    assert bundle.models == MODELS
    assert bundle.collections == ["user", "item", "deep"]
    assert bundle.graph("rank") == bundle.path / "graphs" / "rank.onnx"
    assert bundle.graph("user") is None
    popularity = bundle.array("items/popularity.npy")
    assert popularity is not None
    assert popularity.tolist() == [0, 1]
    assert bundle.array("items/vectors.npy") is None
    bundle.verify()


def test_items_and_users_have_features_of_all_models(bundle: Bundle) -> None:
    assert bundle.items is not None
    assert bundle.users is not None
    assert bundle.items.layout.features == ["price", "item", "words"]
    assert bundle.users.layout.features == ["user"]
    assert bundle.items.indices(["2", 1, 3]).tolist() == [1, 0, -1]
    assert bundle.users.indices(["bob"]).tolist() == [1]
    assert bundle.items.features(np.array([1, 0])).numbers.tolist() == [[2], [1]]


def test_an_unknown_user_has_what_the_plan_makes_of_nothing(bundle: Bundle) -> None:
    assert bundle.items is not None
    unknown_user = bundle.items.features(np.array([-1]))
    assert unknown_user.numbers.tolist() == [[2.5]]
    assert unknown_user.keys["words"].values.tolist() == []


def test_rows_of_items_are_found_through_their_features(bundle: Bundle) -> None:
    assert bundle.items is not None
    keys = bundle.items.features(np.array([0, 1])).keys
    deep = bundle.collection("deep")
    assert [feature.pooling for feature in deep.features] == ["none", "none", "mean"]
    assert deep.pooled(keys, ["item"])[:, 0].tolist() == [[1, 1], [1, 1]]
    words = deep.rows["words"].gather(keys["words"].values[:2]).mean(axis=0)
    np.testing.assert_allclose(deep.pooled(keys, ["words"])[0, 0], words)
    with pytest.raises(ArtifactError, match='no tables "wide"'):
        bundle.collection("wide")


def test_what_changes_in_one_opened_bundle_is_not_in_another(bundle: Bundle) -> None:
    column = {"item": Keys(bundle.collection("item").rows["item"].keys)}
    bundle.collection("item").rows["item"].update(column["item"].values, np.full((2, 2), 7))
    other = Bundle.open(bundle.path)
    assert other.collection("item").pooled(column, ["item"])[:, 0].tolist() == [[1, 1], [1, 1]]
    other.verify()


def files_of(bundle: Bundle) -> list[Path]:
    return [path for path in sorted(bundle.path.rglob("*")) if path.is_file()]


def test_a_damaged_byte_is_noticed_in_every_file(bundle: Bundle) -> None:
    assert len(files_of(bundle)) > 20
    for path in files_of(bundle):
        whole = path.read_bytes()
        for index in {0, len(whole) // 2, len(whole) - 2}:
            damaged = bytearray(whole)
            damaged[index] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(ArtifactError, match=r"damaged|is a"):
                Bundle.open(bundle.path)
        path.write_bytes(whole)
    Bundle.open(bundle.path)


def test_a_short_or_missing_file_is_noticed_at_once(bundle: Bundle) -> None:
    for path in files_of(bundle):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if path.name != "manifest.json" else whole[:-3])
        with pytest.raises(ArtifactError, match="damaged"):
            Bundle.open(bundle.path)
        path.unlink()
        with pytest.raises(ArtifactError, match=r"is missing|no manifest"):
            Bundle.open(bundle.path)
        path.write_bytes(whole)


def test_what_is_no_bundle_says_what_to_do(tmp_path: Path, bundle: Bundle) -> None:
    with pytest.raises(ArtifactError, match=r"does not exist\. Run `recmill export` first"):
        Bundle.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="is incomplete"):
        Bundle.open(tmp_path / "empty")
    write_manifest(bundle.path, "table", {})
    with pytest.raises(ArtifactError, match="is a table; expected a bundle"):
        Bundle.open(bundle.path)


def test_the_current_version_is_the_one_that_opens(tmp_path: Path) -> None:
    assert current_of(tmp_path) is None
    for version in ("a", "b"):
        write_bundle(tmp_path / version)
    (tmp_path / "c.partial").mkdir()
    assert versions_of(tmp_path) == ["a", "b"]
    set_current(tmp_path, "a")
    assert (current_of(tmp_path), previous_of(tmp_path)) == ("a", None)
    set_current(tmp_path, "b")
    set_current(tmp_path, "b")
    assert (current_of(tmp_path), previous_of(tmp_path)) == ("b", "a")
    assert Bundle.open(tmp_path).version == "b"
    assert Bundle.open(tmp_path / "a").version == "a"
    with pytest.raises(ArtifactError, match='has no version "d"; it has: a, b'):
        set_current(tmp_path, "d")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(ArtifactError, match="does not exist"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": "../x"}', '{"version": 3}', '{"version": "a", "previous": ".."}']
)
def test_a_current_that_names_no_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "current").write_text(text)
    with pytest.raises(ArtifactError, match="current is damaged"):
        Bundle.open(tmp_path)


def test_a_damaged_byte_of_current_is_noticed_and_mended_by_naming_a_version(tmp_path: Path) -> None:
    for version in ("a", "b"):
        write_bundle(tmp_path / version)
        set_current(tmp_path, version)
    whole = (tmp_path / "current").read_bytes()
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 0x01
        (tmp_path / "current").write_bytes(damaged)
        try:
            assert (current_of(tmp_path), previous_of(tmp_path)) == ("b", "a")  # a blank became another one
        except ArtifactError as error:
            assert "current is damaged" in str(error)  # noqa: PT017, either is fine
    (tmp_path / "current").write_text("damaged")
    set_current(tmp_path, "a")
    assert (current_of(tmp_path), previous_of(tmp_path)) == ("a", None)


def test_a_damaged_version_does_not_become_current(tmp_path: Path) -> None:
    for version in ("a", "b"):
        write_bundle(tmp_path / version)
    set_current(tmp_path, "a")
    file = tmp_path / "b" / "items" / "popularity.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"popularity\.npy does not have the checksums"):
        set_current(tmp_path, "b")
    assert current_of(tmp_path) == "a"


def test_a_bundle_differs_in_nothing_from_itself(bundle: Bundle) -> None:
    found = diff(bundle, bundle)
    assert (found.recipe, found.evaluation, found.tables, found.entities) == ({}, {}, {}, {})
    assert found.lines() == [
        "version     0000000001-aaaaaaaa -> 0000000001-aaaaaaaa",
        f"size        {bundle.num_bytes:,} -> {bundle.num_bytes:,} bytes",
        "plan        the same",
    ]


def test_a_diff_names_what_came_went_and_changed(tmp_path: Path) -> None:
    left = write_bundle(tmp_path / "a", (1, 2, 3), 1.0, evaluation={"ranking": {"auc": 0.7}})
    tree = json.loads(json.dumps(TREE))
    tree["features"][3]["steps"][0]["fill"] = 3.5
    right = write_bundle(tmp_path / "b", (2, 3, 4, 5), 4.0, tree, {"ranking": {"auc": 0.75, "rows": 9}})
    found = diff(left, right)
    assert found.versions == ("a", "b")
    assert list(found.recipe.values()) == [(2.5, 3.5)]
    assert found.evaluation == {"ranking.auc": (0.7, 0.75), "ranking.rows": (None, 9)}
    assert found.entities == {"items": EntityDiff(added=2, removed=1)}
    moved = TableDiff(added=2, removed=1, changed=2, mean_distance=pytest.approx(3 * 2**0.5))
    assert found.tables == {"item/item": moved, "deep/item": moved}
    assert "table       deep/item: 2 rows added, 1 removed, 2 changed by 4.243 on average" in found.lines()
    assert "evaluation  ranking.auc: 0.7 -> 0.75" in found.lines()
    assert "items       2 added, 1 removed" in found.lines()
