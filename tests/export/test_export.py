"""Checkpoints become bundles: whole, equal to what was trained, or not there at all."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from forked import ForkedCommand

import recmill.stages.export.check as check_module
from recmill.artifacts.bundle.bundle import Bundle, current_of, previous_of, versions_of
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import collate
from recmill.errors import ArtifactError, LogError
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import open_learner
from recmill.stages.export import products
from recmill.stages.export.check import check_bundle
from recmill.stages.export.export import ExportConfig, choose, export
from recmill.stages.export.find_log import find_log
from recmill.stages.export.versions import exporting
from recmill.stages.serve.recommender import Recommender

pytestmark = pytest.mark.stages


def raw_events(shop) -> pl.DataFrame:
    """The shop's log, read by other means."""
    events = pl.read_csv(shop.log / "events.csv").with_row_index("place")
    return events.sort("time", "place")


# what is in a bundle


def test_the_manifest_says_what_the_bundle_is(shop, bundle: Bundle) -> None:
    manifest = bundle.manifest
    steps = {model: shop.folder.of(model).find("best").step for model in ("retrieval", "ranking")}
    assert bundle.version.startswith(f"{max(steps.values()):010d}-")
    assert manifest["checkpoint"] == {"path": str(shop.checkpoint), "steps": steps}
    assert manifest["log_end"] == raw_events(shop)["time"].max()
    assert manifest["models"]["ranking"]["label"] == "click"
    assert manifest["models"]["ranking"]["split"] is True
    assert manifest["models"]["retrieval"]["dim"] == 64
    assert manifest["evaluation"]["ranking"]["metrics"]["auc"] > 0
    assert (manifest["index"], manifest["rows_dtype"]) == ("exact", "float32")
    assert current_of(bundle.path.parent) == bundle.version
    assert not list(bundle.path.rglob("*work*"))
    bundle.verify()


def test_served_numbers_equal_trained_numbers(bundle: Bundle) -> None:
    check = bundle.manifest["check"]
    assert set(check) == {"rank", "rank_split", "user", "item"}
    assert check["rank"]["rows"] == 1000
    assert max(found["max"] for found in check.values()) < 1e-5


def test_users_have_the_clicks_of_the_whole_log(shop, bundle: Bundle) -> None:
    clicked = raw_events(shop).filter(pl.col("clicked") == 1)
    expected = clicked.group_by("user_id", maintain_order=True).agg(pl.col("item_id").tail(20))
    assert bundle.users is not None
    assert bundle.items is not None
    users = bundle.users.raw(bundle.users.indices(expected["user_id"].to_list()))
    assert users["item_id_history"].to_list() == expected["item_id"].to_list()
    seen, offsets = bundle.array("users/seen.npy"), bundle.array("users/seen.offsets.npy")
    assert seen is not None
    assert offsets is not None
    for user, items in clicked.group_by("user_id").agg(pl.col("item_id").unique()).iter_rows():
        place = int(bundle.users.indices([user])[0])
        assert set(bundle.items.ids(seen[offsets[place] : offsets[place + 1]].astype(np.int64))) == set(items)


def test_items_stand_in_the_order_of_their_clicks(shop, bundle: Bundle) -> None:
    counts = dict(raw_events(shop).group_by("item_id").agg(pl.col("clicked").sum()).iter_rows())
    assert bundle.items is not None
    popularity = bundle.array("items/popularity.npy")
    assert popularity is not None
    assert np.all(np.diff(popularity) <= 0)
    ids = bundle.items.ids(np.arange(len(bundle.items)))
    assert popularity.tolist() == [counts.get(item, 0) for item in ids]
    assert len(ids) == pl.read_csv(shop.log / "items.csv").height


def test_features_and_vectors_of_items_are_those_of_the_plan_and_the_tower(shop, bundle: Bundle) -> None:
    items = bundle.items
    assert items is not None
    places = np.arange(len(items))
    rows = shop.folder.plan.apply(items.raw(places), labels=False, only=items.layout.features)
    expected = collate(rows, items.layout, with_labels=False)
    found = items.features(places)
    assert np.array_equal(found.numbers, expected.numbers)
    for name in items.layout.keys:
        assert np.array_equal(found.keys[name].values, expected.keys[name].values)
    retriever = open_learner(shop.folder, "retrieval").learner
    assert isinstance(retriever, Retriever)
    vectors = retriever.item_vectors(collate(rows, retriever.layouts["item"], with_labels=False))
    assert np.allclose(bundle.array("items/vectors.npy"), vectors, atol=1e-6)


def test_neighbours_of_a_clicked_item_are_clicked_by_its_users(shop, bundle: Bundle) -> None:
    offsets, neighbours = (bundle.array(f"items/co_clicks.{part}.npy") for part in ("offsets", "indices"))
    assert offsets is not None
    assert neighbours is not None
    assert len(neighbours) == offsets[-1]
    assert bundle.items is not None
    best, other = bundle.items.ids(np.array([0, neighbours[0]]))
    clicked = raw_events(shop).filter(pl.col("clicked") == 1)
    users = [set(clicked.filter(pl.col("item_id") == item)["user_id"]) for item in (best, other)]
    assert users[0] & users[1]


@pytest.mark.parametrize("rows", ["float16", "int8"])
def test_rows_of_fewer_bits_are_smaller_and_nearly_as_good(
    shop, bundle: Bundle, tmp_path: Path, rows: str
) -> None:
    found = export(shop.folder, str(shop.log), tmp_path, ExportConfig(rows=rows)).bundle
    assert found.rows_dtype == rows
    assert found.collection("deep").rows["item"].dtype == rows
    assert found.num_bytes < bundle.num_bytes
    assert 0 < found.manifest["check"]["rank"]["mean"] < 0.01
    assert found.manifest["check"]["rank"]["rank_correlation"] > 0.99


def test_a_log_without_users_and_items_gives_a_bundle_for_scoring(recmill, tmp_path: Path) -> None:
    recmill("generate", "criteo", "--rows", 2000, "--into", tmp_path / "log", "--quiet")
    small = [
        "--set",
        "ranking.bottom=[8, 16]",
        "--set",
        "ranking.top=[8]",
        "--set",
        "ranking.train.max_steps=2",
    ]
    train = ["train", "criteo-deeprec", "--from-log", tmp_path / "log", "--into", tmp_path / "c", *small]
    recmill(*train, "--threads", 1, "--quiet")
    folder = Checkpoint.open(tmp_path / "c")
    found = export(folder, find_log(folder), tmp_path / "b").bundle
    assert (found.items, found.users) == (None, None)
    assert (found.manifest["num_items"], found.manifest["log_end"], found.manifest["index"]) == (
        0,
        None,
        None,
    )
    assert found.manifest["check"]["rank"]["max"] < 1e-5
    assert not (found.path / "items").exists()


# checks


def copy_of(bundle: Bundle, into: Path) -> Bundle:
    shutil.copytree(bundle.path, into / bundle.version)
    return Bundle(into / bundle.version, bundle.manifest)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tables/deep/item/rows.npy", "rank"),
        ("tables/user/category/rows.npy", "user"),
        ("items/vectors.npy", "item"),
    ],
)
def test_a_bundle_that_differs_from_training_fails_its_check(
    shop, bundle: Bundle, tmp_path: Path, file: str, name: str
) -> None:
    learners = {model: open_learner(shop.folder, model).learner for model in ("retrieval", "ranking")}
    sample = _sample(shop, bundle)
    copied = copy_of(bundle, tmp_path)
    assert set(check_bundle(copied, learners, shop.folder.plan, sample)) == {
        "rank",
        "rank_split",
        "user",
        "item",
    }
    np.save(copied.path / file, np.load(copied.path / file) + np.float32(0.01))
    with pytest.raises(ArtifactError, match=f"does not give what training gives: {name} is off by up to"):
        check_bundle(Bundle(copied.path, copied.manifest), learners, shop.folder.plan, sample)


def _sample(shop, bundle: Bundle) -> pl.DataFrame:
    """Some events with all columns of their user and item."""
    assert bundle.users is not None
    assert bundle.items is not None
    events = raw_events(shop).drop("place").head(50)
    users = bundle.users.raw(bundle.users.indices(events["user_id"].to_list())).drop("user_id")
    items = bundle.items.raw(bundle.items.indices(events["item_id"].to_list())).drop("item_id")
    return pl.concat([events, users, items], how="horizontal")


def test_a_failed_check_publishes_nothing(clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "TOLERANCE", -1.0)
    with pytest.raises(ArtifactError, match="Nothing was published"):
        export(clicks, find_log(clicks), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_rows_of_too_few_bits_are_refused(clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "_MAX_MEAN", 0.0)
    with pytest.raises(ArtifactError, match="Rows with fewer bits change rank by"):
        export(clicks, find_log(clicks), tmp_path, ExportConfig(rows="int8"))
    assert versions_of(tmp_path) == []


# publishing


def test_the_same_export_again_finds_it_there(clicks, clicks_bundles: Path) -> None:
    before = Bundle.open(clicks_bundles)
    again = export(clicks, find_log(clicks), clicks_bundles)
    assert again.was_complete
    assert again.bundle.manifest == before.manifest
    assert previous_of(clicks_bundles) is None


def test_a_damaged_version_is_written_again(clicks, clicks_bundles: Path) -> None:
    before = Bundle.open(clicks_bundles)
    (before.path / "graphs" / "rank.onnx").write_bytes(b"")
    again = export(clicks, find_log(clicks), clicks_bundles)
    assert (again.was_complete, again.bundle.version) == (False, before.version)
    again.bundle.verify()


def test_two_exports_into_one_folder_do_not_mix(clicks, tmp_path: Path) -> None:
    with (
        exporting(tmp_path),
        pytest.raises(ArtifactError, match=r"is being written by `.*` \(process \d+ on "),
    ):
        export(clicks, find_log(clicks), tmp_path)


def test_a_bundle_is_not_written_into_another_artifact(clicks) -> None:
    with pytest.raises(ArtifactError, match="is an artifact itself"):
        export(clicks, find_log(clicks), clicks.path)


def test_a_data_folder_without_the_log_is_an_error(clicks, tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"events\*\.csv"):
        export(clicks, str(tmp_path), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_step_is_taken_of_the_models_that_have_it(shop) -> None:
    best = choose(shop.folder, "best")
    step = str(best["ranking"].step)
    assert [found.step for found in choose(shop.folder, step).values()] == [
        best["retrieval"].step,
        best["ranking"].step,
    ]
    with pytest.raises(ArtifactError, match="no checkpoint of step 77; it has"):
        choose(shop.folder, "77")


@pytest.mark.processes
def test_a_killed_export_leaves_nothing_that_passes_for_whole(clicks, tmp_path: Path) -> None:
    for sight in ("*.partial", "*.partial/graphs/rank.onnx", "*.partial/items/raw.arrow"):
        _kill_at(sight, clicks.path, tmp_path)
        if current_of(tmp_path) is None:  # else it was quicker than the kill
            assert versions_of(tmp_path) == []
            with pytest.raises(ArtifactError):
                Bundle.open(tmp_path)
    found = export(clicks, find_log(clicks), tmp_path)
    found.bundle.verify()
    assert sorted(os.listdir(tmp_path)) == [found.bundle.version, "current"]


def _kill_at(sight: str, checkpoint: Path, into: Path) -> None:
    """Start an export and kill it as soon as such a file is there."""
    leftovers = list(into.glob("*.partial"))
    for path in leftovers:
        path.rename(path.with_name(f"left-{path.name}"))  # so that the next one is told apart
    process = ForkedCommand("export", "--quiet", "--checkpoint", checkpoint, "--into", into)
    while not list(into.glob(f"[0-9]{sight}")) and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.communicate()


# products in int8


@pytest.fixture(scope="module")
def int8_bundle(shop, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    into = tmp_path_factory.mktemp("int8")
    return export(shop.folder, str(shop.log), into, ExportConfig(products="int8", despite_gate=True)).bundle


def test_int8_products_are_compared_with_float32_and_served(bundle: Bundle, int8_bundle: Bundle) -> None:
    found = int8_bundle.manifest["check"]["products"]
    assert abs(found["auc_int8"] - found["auc_float32"]) <= products.MAX_AUC_CHANGE
    assert found["rank_correlation"] > 0.99
    assert found["top_overlap"] > 0.9
    assert int8_bundle.version != bundle.version
    floats, rounded = Recommender(bundle), Recommender(int8_bundle)
    assert (floats.ranker.runs, rounded.ranker.runs) == ("native float32", "native int8")
    items = [f"i{number}" for number in range(1, 40)]
    scores = [one.rank("u1", items).scores for one in (floats, rounded)]
    assert 0 < np.abs(np.subtract(*scores)).max() < 0.05


def test_int8_products_that_move_auc_are_refused(
    shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MAX_AUC_CHANGE", -1.0)
    with pytest.raises(ArtifactError, match=r"change AUC by .* more than -1\.0\. Nothing was published"):
        export(shop.folder, str(shop.log), tmp_path, ExportConfig(products="int8", despite_gate=True))
    assert not versions_of(tmp_path)


def test_int8_products_of_a_model_that_native_code_does_not_cover_are_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    models = {name: {**facts} for name, facts in bundle.models.items()}
    del models["ranking"]["layers"]
    other = Bundle(bundle.path, {**bundle.manifest, "models": models})
    with pytest.raises(ArtifactError, match="--products int8 needs a ranker that native code covers"):
        products.fit_byte_products(other, pl.DataFrame())
