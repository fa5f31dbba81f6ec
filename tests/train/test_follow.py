"""A trained model goes on learning from a log that is still written."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from shop import FEW_STEPS, Shop, Stages, run_quietly

from recmill.artifacts.bundle.delta import deltas_of
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import collate
from recmill.errors import ArtifactError, FeatureError, LogError
from recmill.logs.tally import Tally
from recmill.recipe.load import load_recipe
from recmill.recipe.recipe import History
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Features, Recommend
from recmill.stages.serve.service import Service
from recmill.stages.train.follow import FollowConfig, Follower, check_rows, follow

pytestmark = pytest.mark.stages

NOW = 1_900_000_000


@pytest.fixture
def log(shop: Shop, tmp_path: Path) -> Path:
    """A copy of the shop's log, to write on."""
    return Path(shutil.copytree(shop.log, tmp_path / "log"))


@pytest.fixture
def follower(shop: Shop, log: Path, own_bundles: Path) -> Follower:
    return Follower(Checkpoint.open(shop.checkpoint), str(log), own_bundles, FollowConfig())


def write(log: Path, *rows: str, end: str = "\n") -> None:
    with open(log / "events.csv", "a") as file:
        file.write("\n".join(rows) + end)


def click(user: str, item: str, at: int = 0) -> str:
    return f"{NOW + at},{user},{item},phone,1,9.5,1"


def served(own_bundles: Path) -> Service:
    service = Service(ServeConfig(bundle=own_bundles), watch_seconds=60)
    service.warm_up()
    return service


def test_nothing_new_is_no_delta(follower: Follower) -> None:
    assert follower.publish_once() is None


def test_a_new_user_and_a_new_item_are_served_after_one_delta(
    follower: Follower, log: Path, own_bundles: Path
) -> None:
    service = served(own_bundles)
    with open(log / "items.csv", "a") as file:
        file.write("fresh item,garden,Pure Birch,9.5,A thing\n")
    write(log, click("fresh user", "i1"), click("fresh user", "fresh item", 1), click("u1", "fresh item", 2))
    published = follower.publish_once()
    assert published is not None
    assert (published.num_rows, published.num_items, published.num_users) == (3, 2, 2)
    service.versions.poll()
    assert service.current.num_deltas == 1
    known = service.current.features(Features(user="fresh user", items=["fresh item"]))
    assert known.user is not None
    assert known.user.values["item_id_history"] == ["i1", "fresh item"]
    assert known.items[0].values["category"] == "garden"
    everything = Recommend(user="u2", k=1000, candidates=10_000, show_seen=True)
    assert "fresh item" in [item.id for item in service.recommend(everything).items]
    seen = Recommend(user="fresh user", k=1000, candidates=10_000)
    assert not {"i1", "fresh item"} & {item.id for item in service.recommend(seen).items}


def test_histories_go_on_from_the_bundle_and_keep_out_rows_of_the_same_second(
    follower: Follower, log: Path
) -> None:
    users = follower.bundle.users
    assert users is not None
    before = users.raw(users.indices(["u1"]))["item_id_history"][0].to_list()
    write(log, click("u1", "i3", 0), click("u1", "i4", 0), click("u1", "i5", 1))
    tally = Tally()
    rows = follower._with_operations(follower.source.read(tally))
    assert tally.bad == 0
    assert rows["item_id_history"].to_list() == [
        before[-20:],
        before[-20:],
        [*before, "i3", "i4"][-20:],
    ]


def test_a_history_that_the_bundle_does_not_hold_is_refused() -> None:
    history = History(("item_id",), by="device", order="time")
    with pytest.raises(
        FeatureError, match=r'history by "device", but a bundle holds histories by log.user alone'
    ):
        check_rows(replace(load_recipe("quickstart"), rows=(history,)))


def test_half_a_line_waits_for_its_end(follower: Follower, log: Path) -> None:
    whole = click("u1", "i3")
    write(log, whole[:10], end="")
    assert follower.publish_once() is None
    write(log, whole[10:])
    published = follower.publish_once()
    assert published is not None
    assert (published.num_rows, published.num_bad) == (1, 0)


def test_bad_rows_are_counted_and_the_rest_is_learned(follower: Follower, log: Path) -> None:
    write(log, "what is this", click("u1", "i3"), "1,2,3")
    published = follower.publish_once()
    assert published is not None
    assert (published.num_rows, published.num_bad) == (1, 2)


def test_a_side_table_that_is_being_written_is_taken_as_it_was(
    shop: Shop, log: Path, own_bundles: Path
) -> None:
    heard: list[str] = []
    follower = Follower(
        Checkpoint.open(shop.checkpoint), str(log), own_bundles, FollowConfig(warn=heard.append)
    )
    write(log, click("u1", "i3"))
    assert follower.publish_once() is not None
    with open(log / "items.csv", "a") as file:
        file.write("half a ro")
    write(log, click("u1", "i4", 1))
    assert follower.publish_once() is not None
    assert "Side table items" in heard[0]


def test_a_log_that_shrank_is_an_error(follower: Follower, log: Path) -> None:
    (log / "events.csv").write_text("time,user_id,item_id,device,position,price_shown,clicked\n")
    with pytest.raises(LogError, match="only grows"):
        follower.publish_once()


def test_only_rows_that_changed_are_published(follower: Follower, log: Path) -> None:
    write(log, click("u1", "i3"))
    published = follower.publish_once()
    assert published is not None
    total = sum(
        table.statistics().keys for learner in follower.learners.values() for table in learner.tables.values()
    )
    assert 0 < published.num_keys < total / 4


def test_dense_weights_of_towers_stay_and_those_of_the_ranker_learn(follower: Follower, log: Path) -> None:
    before = {name: learner.arrays() for name, learner in follower.learners.items()}
    write(log, *(click("u1", f"i{number}", number) for number in range(1, 20)))
    follower.publish_once()
    for name, learner in follower.learners.items():
        after = learner.arrays()
        changed = [
            key for key in after if key.startswith("model.") and (after[key] != before[name][key]).any()
        ]
        assert bool(changed) == (name == "ranking")


def test_a_killed_follower_goes_on_with_the_next_delta_and_loses_nothing(
    shop: Shop, log: Path, own_bundles: Path, follower: Follower
) -> None:
    write(log, click("first", "i3"))
    follower.publish_once()
    write(log, click("second", "i4"))
    again = Follower(Checkpoint.open(shop.checkpoint), str(log), own_bundles, FollowConfig())
    published = again.publish_once()
    assert published is not None
    assert (published.number, published.num_rows) == (2, 1)
    service = served(own_bundles)
    for user, item in (("first", "i3"), ("second", "i4")):
        known = service.current.features(Features(user=user)).user
        assert known is not None
        assert known.values["item_id_history"] == [item]


def test_a_follower_that_is_started_again_publishes_no_click_twice(
    shop: Shop, log: Path, own_bundles: Path, follower: Follower
) -> None:
    before = popularity(served(own_bundles), "i3")
    write(log, *(click(f"u{number}", "i3", number) for number in range(5)))
    follower.publish_once()
    for _ in range(2):
        again = Follower(Checkpoint.open(shop.checkpoint), str(log), own_bundles, FollowConfig())
        assert again.publish_once() is None
    write(log, click("late", "i3", 9))
    assert again.publish_once() is not None
    assert popularity(served(own_bundles), "i3") == before + 6


def popularity(service: Service, item: str) -> float:
    recaller = service.current.recaller
    assert recaller is not None
    return float(recaller.popularity.of(recaller.items.indices([item]))[0])


def test_served_scores_after_deltas_are_those_of_the_learner(
    follower: Follower, log: Path, own_bundles: Path
) -> None:
    for number in range(3):
        write(log, *(click(f"u{row}", f"i{row + number}", 10 * number + row) for row in range(1, 9)))
        follower.publish_once()
    service = served(own_bundles)
    frame = service.current.lookup.raw_columns.frame(
        [
            {"user_id": "u1", "item_id": f"i{number}", "device": "phone", "position": 2}
            for number in range(1, 9)
        ],
        ["user_id", "item_id", "device", "position"],
    )
    ranker = follower.learners["ranking"]
    full = service.current.lookup.raw_columns.cast(frame, list(service.current.lookup.raw_columns.kinds))
    applied = follower.bundle.plan.apply(full, labels=False, only=ranker.layout.features)
    expected = ranker.predict(collate(applied, ranker.layout, with_labels=False))  # type: ignore[union-attr]
    assert service.current.score(frame) == pytest.approx(expected, abs=1e-5)


def test_follow_runs_until_it_is_told_to_stop(shop: Shop, log: Path, own_bundles: Path) -> None:
    stop = threading.Event()
    write(log, click("u1", "i3"))
    options = FollowConfig(every_seconds=0.05)
    folder = Checkpoint.open(shop.checkpoint)
    count = follow(folder, str(log), own_bundles, options, stop, lambda published: stop.set())
    assert (
        count
        == len(deltas_of(own_bundles, Follower(folder, str(log), own_bundles, options).bundle.version))
        == 1
    )


def test_a_bundle_of_another_recipe_cannot_be_followed(
    shop: Shop, log: Path, own_bundles: Path, tmp_path: Path
) -> None:
    from recmill.cli import main

    other = tmp_path / "other"
    arguments = ["--table", str(shop.table), "--into", str(other), "--threads", "1", "--quiet"]
    few = ["--set", "ranking.train.max_steps=2", "--set", "retrieval.train.max_steps=2"]
    assert main(["train", "quickstart", *arguments, *few]) == 0
    with pytest.raises(ArtifactError, match="another recipe"):
        Follower(Checkpoint.open(other), str(log), own_bundles, FollowConfig())


@pytest.fixture(scope="module")
def live(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """The shop again, with keys instead of vocabularies; its log is a copy."""
    stages = Stages(tmp_path_factory.mktemp("live"))
    shutil.copytree(shop.log, stages.log)
    run_quietly("prepare", "shop-live", "--data", stages.log, "--into", stages.table)
    trained = ["--table", stages.table, "--into", stages.checkpoint, *FEW_STEPS, "--threads", 1]
    run_quietly("train", "shop-live", *trained)
    run_quietly("export", "--checkpoint", stages.checkpoint, "--into", stages.bundles)
    return stages


def test_a_new_key_is_served_by_a_row_of_its_own_after_one_delta(live: Stages) -> None:
    service = served(live.bundles)
    tower = service.current.bundle.collection("item").rows["item"]
    num_rows = tower.num_rows
    follower = Follower(Checkpoint.open(live.checkpoint), str(live.log), live.bundles, FollowConfig())
    attributes = "garden,Pure Birch,9.5,A thing"
    with open(live.log / "items.csv", "a") as file:
        file.write(f"fresh item,{attributes}\nunseen item,{attributes}\n")
    write(live.log, *(click("fresh user", "fresh item", second) for second in range(40)))
    assert follower.publish_once() is not None
    service.versions.poll()
    frame = service.current.lookup.raw_columns.frame(
        [
            {"user_id": user, "item_id": item, "category": "garden", "brand": "Pure Birch", "price": 9.5}
            for user in ("fresh user", "unseen user")
            for item in ("fresh item", "unseen item")
        ],
        ["user_id", "item_id", "category", "brand", "price"],
    )
    both, of_user, of_item, neither = service.current.score(frame)
    assert both > max(of_user, of_item) > min(of_user, of_item) > neither
    assert tower.num_rows == num_rows + 1
