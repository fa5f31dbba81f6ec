"""A trained model goes on learning from a Redis stream: each entry once, whatever is killed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import Server, running, running_cluster, wait_until
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle, current_of, publish_bundle, set_current
from recmill.artifacts.bundle.delta import Delta, deltas_of
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.event_stream import ITEM, EventStream, entry_id, entry_number
from recmill.errors import ArtifactError, LogError, StoreError
from recmill.stages.train.follow import FollowConfig, Follower

pytestmark = pytest.mark.services

NOW = 1_900_000_000
KEY = "shop:events"
GROUP = "recmill-quickstart"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis", "--appendonly", "yes") as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}/{KEY}"


@pytest.fixture
def stream(url: str) -> Iterator[EventStream]:
    stream = EventStream(url)
    yield stream
    stream.close()


@pytest.fixture
def followers(shop: Shop, url: str, own_bundles: Path) -> Iterator[list[Follower]]:
    """New followers of the same bundle: one that starts is what is left of one that was killed."""
    made: list[Follower] = []
    yield made
    for follower in made:
        follower.close()


def start(shop: Shop, url: str, own_bundles: Path, followers: list[Follower]) -> Follower:
    options = FollowConfig(tables=shop.log)
    followers.append(Follower(Checkpoint.open(shop.checkpoint), url, own_bundles, options))
    return followers[-1]


def click(user: str, item: str, at: int = 0, **fields: str) -> dict[str, str]:
    row = {"time": str(NOW + at), "user_id": user, "item_id": item, "device": "phone", "position": "1"}
    return {**row, "price_shown": "9.5", "clicked": "1", **fields}


def add(server: Server, *events: dict[str, str]) -> list[int]:
    """Append entries as any program does."""
    with server.client() as client:
        return [entry_number(client.xadd(KEY, event)) for event in events]  # type: ignore[arg-type]


def clicks_of_all_deltas(own_bundles: Path) -> list[tuple[str, str]]:
    paths = deltas_of(own_bundles, str(current_of(own_bundles)))
    frames = [Delta.open(path).changes().clicks for path in paths]
    return [row for frame in frames if frame is not None for row in frame.select("user", "item").iter_rows()]


def test_entries_are_learned_and_published_and_the_consumer_group_shows_what_was_not(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    follower = start(shop, url, own_bundles, followers)
    assert follower.publish_once() is None
    numbers = add(server, click("u1", "i3"), click("fresh user", "i4", 1), click("u2", "i5", clicked="0"))
    published = follower.publish_once()
    assert published is not None
    assert (published.num_rows, published.num_users) == (3, 3)
    delta = Delta.open(published.path)
    assert delta.manifest["stream"] == {"key": KEY, "end": entry_id(numbers[-1])}
    assert clicks_of_all_deltas(own_bundles) == [("u1", "i3"), ("fresh user", "i4")]
    add(server, click("u1", "i6"))
    with server.client() as client:
        (group,) = client.xinfo_groups(KEY)
    assert (group["name"].decode(), group["last-delivered-id"].decode()) == (GROUP, entry_id(numbers[-1]))


def test_a_killed_follower_goes_on_with_the_next_delta_and_no_entry_counts_twice(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    first = start(shop, url, own_bundles, followers)
    add(server, click("first", "i3"))
    assert first.publish_once() is not None
    add(server, click("second", "i4"))
    again = start(shop, url, own_bundles, followers)
    published = again.publish_once()
    assert published is not None
    assert (published.number, published.num_rows) == (2, 1)
    assert start(shop, url, own_bundles, followers).publish_once() is None
    assert clicks_of_all_deltas(own_bundles) == [("first", "i3"), ("second", "i4")]


def test_one_that_is_started_again_has_learned_what_the_killed_one_had_though_the_entries_are_gone(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    first = start(shop, url, own_bundles, followers)
    add(server, *(click(f"u{number}", "i3", number) for number in range(1, 30)))
    assert first.publish_once() is not None
    with server.client() as client:
        client.xtrim(KEY, maxlen=0)
    again = start(shop, url, own_bundles, followers)
    for name, learner in first.learners.items():
        for array, values in learner.arrays().items():
            assert again.learners[name].arrays()[array] == pytest.approx(values, abs=1e-6), array


def test_a_redis_that_is_down_delays_entries_and_loses_none(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    follower = start(shop, url, own_bundles, followers)
    add(server, click("first", "i3"))
    server.kill()
    with pytest.raises(StoreError, match="does not answer"):
        follower.publish_once()
    server.start()
    wait_until(lambda: follower.publish_once() is not None, "a delta")
    assert clicks_of_all_deltas(own_bundles) == [("first", "i3")]


def test_entries_that_are_no_rows_are_kept_with_their_ids_and_the_rest_is_learned(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    follower = start(shop, url, own_bundles, followers)
    numbers = add(server, {"nonsense": "1"}, click("u1", "i3"), click("u2", "i3", clicked="2"))
    published = follower.publish_once()
    assert published is not None
    assert (published.num_rows, published.num_bad) == (1, 2)
    start(shop, url, own_bundles, followers).publish_once()
    with server.client() as client:
        rejected = client.xrange(f"{{{KEY}}}:rejected")
    reasons = {entry_number(id): fields[b"_reason"] for id, fields in rejected}
    assert reasons == {
        numbers[0]: b"missing required value (time)",
        numbers[2]: b"value not allowed (clicked)",
    }


def test_an_item_that_servers_were_told_has_its_columns_in_the_delta(
    shop: Shop, server: Server, stream: EventStream, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    stream.change_items(
        [(ITEM, "new item", '{"id": "new item", "values": {"category": "garden", "price": 3.0}}')]
    )
    add(server, click("u1", "new item"))
    published = start(shop, url, own_bundles, followers).publish_once()
    assert published is not None
    items = Delta.open(published.path).changes().items
    assert items is not None
    assert items.select("item_id", "category", "price").rows() == [("new item", "garden", 3.0)]


def test_entries_stay_until_every_consumer_group_has_them_and_an_hour_longer(
    server: Server, stream: EventStream
) -> None:
    hours_ago = [f"{int(time.time() * 1000) - hours * 3_600_000}-0" for hours in (4, 3, 2)]
    with server.client() as client:
        for id in hours_ago:
            client.xadd(KEY, {"a": "1"}, id=id)
        client.xgroup_create(KEY, "another", id=hours_ago[0])
        client.xreadgroup("another", "one", {KEY: ">"}, count=1)
        (last,) = add(server, {"a": "1"})
        stream.learned(GROUP, last)
        assert client.xlen(KEY) == 3  # the second one is read, but not acknowledged
        client.xack(KEY, "another", hours_ago[1])
        stream.learned(GROUP, last)
        assert client.xlen(KEY) == 2
        client.xgroup_destroy(KEY, "another")
        stream.learned(GROUP, last)
        assert client.xlen(KEY) == 1


def test_an_event_that_is_sent_again_with_its_id_is_in_the_stream_once(stream: EventStream) -> None:
    ((first, is_new),) = stream.add_events({"e1": click("u1", "i3")})
    again = stream.add_events({"e1": click("u1", "i3"), "e2": click("u1", "i4")})
    assert is_new
    assert again[0] == (first, False)
    assert [entry.number for entry in stream.read(0, 10)] == [first, again[1][0]]


def test_versions_take_from_each_others_deltas_what_their_own_logs_and_deltas_do_not_have(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    follower = start(shop, url, own_bundles, followers)
    add(server, click("in the log", "i3", 0), click("since then", "i4", 100))
    assert follower.publish_once() is not None
    old = Bundle.open(own_bundles)
    version = f"{int(old.version[:10]) + 1:010d}-aaaaaaaa"
    shutil.copytree(old.path, own_bundles / version)
    (own_bundles / version / "manifest.json").unlink()
    facts = {name: value for name, value in old.manifest.items() if name not in ("kind", "format", "files")}
    ends = {"version": version, "log_end": NOW + 50, "created_at": time.time()}
    publish_bundle(own_bundles / version, {**facts, **ends})
    set_current(own_bundles, version)
    assert follower.is_outdated
    with server.client() as client:
        client.xtrim(KEY, maxlen=0)
    add(server, click("now", "i5", 0))  # late: its time is in the log's, but it was written after the export
    published = start(shop, url, own_bundles, followers).publish_once()
    assert published is not None
    assert published.number == 1
    assert clicks_of_all_deltas(own_bundles) == [("since then", "i4"), ("now", "i5")]

    # The old version again: it learns what only the new one had.
    set_current(own_bundles, old.version)
    with server.client() as client:
        client.xtrim(KEY, maxlen=0)
    published = start(shop, url, own_bundles, followers).publish_once()
    assert published is not None
    assert (published.number, published.num_rows) == (2, 1)
    assert clicks_of_all_deltas(own_bundles) == [("in the log", "i3"), ("since then", "i4"), ("now", "i5")]


def test_files_and_a_stream_are_not_followed_in_turn(
    shop: Shop, server: Server, url: str, own_bundles: Path, followers: list[Follower]
) -> None:
    add(server, click("u1", "i3"))
    start(shop, url, own_bundles, followers).publish_once()
    with pytest.raises(ArtifactError, match="learned from a stream, and --follow names files"):
        start(shop, str(shop.log), own_bundles, followers)


def test_side_tables_of_a_stream_need_a_directory(shop: Shop, url: str, own_bundles: Path) -> None:
    with pytest.raises(LogError, match=r"joins side tables \(users, items\).*--tables DIR"):
        Follower(Checkpoint.open(shop.checkpoint), url, own_bundles, FollowConfig())


def test_a_stream_in_a_cluster_takes_and_gives_the_same(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "cluster") as (url, _):
        stream = EventStream(f"{url}/{KEY}")
        ((first, is_new),) = stream.add_events({"e1": click("u1", "i3")})
        assert is_new
        assert stream.add_events({"e1": click("u1", "i3")}) == [(first, False)]
        last = stream.change_items([(ITEM, "i3", '{"id": "i3"}')])
        assert [entry.number for entry in stream.read(0, 10)] == [first, last]
        changes, end = stream.items()
        assert ([change.number for change in changes], end) == ([last], last)
        stream.learned(GROUP, first)
        assert [entry.number for entry in stream.read(first, 10)] == [last]
        stream.close()


@pytest.mark.parametrize("url", ["redis://localhost:6379", "redis://localhost:6379/", "redis://localhost/0"])
def test_a_stream_has_a_name(url: str) -> None:
    with pytest.raises(StoreError, match="ends with the stream's key"):
        EventStream(url)
