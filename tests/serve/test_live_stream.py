"""Replicas that share an event stream: what one is told, all have, once, in one order, whatever is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_servers import Server, running, wait_until
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle, publish_bundle, set_current
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.errors import BadRequest, StoreError
from recmill.stages.serve.changes import Change
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Event, Features, NewItem, Recommend
from recmill.stages.serve.service import Service
from recmill.stages.train.follow import FollowConfig, Follower

pytestmark = pytest.mark.services

KEY = "shop:events"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis", "--appendonly", "yes") as server:
        yield server


@pytest.fixture
def start(server: Server, own_bundles: Path) -> Iterator[Callable[[], Service]]:
    """Starts replicas of the same bundle and stream."""
    started: list[Service] = []

    def begin() -> Service:
        config = ServeConfig(bundle=own_bundles, events=f"{server.url}/{KEY}")
        started.append(Service(config, watch_seconds=60))
        started[-1].warm_up()
        return started[-1]

    yield begin
    for service in started:
        service.close()


@pytest.fixture
def trainer(shop: Shop, server: Server, own_bundles: Path) -> Iterator[Callable[[], Follower]]:
    started: list[Follower] = []

    def begin() -> Follower:
        options = FollowConfig(tables=shop.log)
        url = f"{server.url}/{KEY}"
        started.append(Follower(Checkpoint.open(shop.checkpoint), url, own_bundles, options))
        return started[-1]

    yield begin
    for follower in started:
        follower.close()


def click(user: str, item: str, id: str | None = None) -> Change:
    return Change(events=[Event(user=user, item=item, id=id)])


def history(service: Service, user: str) -> list[str]:
    found = service.current.features(Features(user=user)).user
    assert found is not None
    return list(found.values.get("item_id_history") or [])


def popularity(service: Service, item: str) -> float:
    recaller = service.current.recaller
    assert recaller is not None
    return float(recaller.popularity.of(recaller.items.indices([item]))[0])


def shown(service: Service) -> set[object]:
    return {item.id for item in service.recommend(Recommend(k=1000, candidates=10_000)).items}


def test_an_event_at_one_replica_is_in_the_next_answer_there_and_reaches_the_others(
    start: Callable[[], Service],
) -> None:
    first, second = start(), start()
    before = popularity(second, "i3")
    assert first.change(click("new user", "i3")).number == 1
    assert history(first, "new user") == ["i3"]
    wait_until(lambda: history(second, "new user") == ["i3"], "the event at the other replica", 2)
    assert popularity(first, "i3") == popularity(second, "i3") == before + 1


def test_items_added_and_removed_at_one_replica_reach_the_others_and_those_that_start_later(
    start: Callable[[], Service],
) -> None:
    first, second = start(), start()
    first.change(Change(items=[NewItem(id="new item", values={"category": "garden", "price": 3.0})]))
    second.change(Change(removed=["i1"]))
    for service in (first, second):
        wait_until(
            lambda service=service: {"new item", "i1"} & shown(service) == {"new item"}, "both changes", 2
        )  # type: ignore[misc]
    third = start()
    assert {"new item", "i1"} & shown(third) == {"new item"}
    first.change(Change(items=[NewItem(id="i1")]))
    wait_until(lambda: "i1" in shown(third), "the item that was added again", 2)


def test_a_delta_brings_no_event_twice_and_replicas_agree_whenever_they_take_it(
    start: Callable[[], Service], trainer: Callable[[], Follower]
) -> None:
    first, second = start(), start()
    before = popularity(first, "i3")
    first.change(click("new user", "i3"))
    follower = trainer()
    assert follower.publish_once() is not None
    first.change(click("new user", "i4"))  # the delta does not have it
    first.versions.poll()
    late = start()  # begins with the delta
    for service in (first, second, late):
        wait_until(lambda service=service: history(service, "new user") == ["i3", "i4"], "both events", 2)  # type: ignore[misc]
        assert popularity(service, "i3") == before + 1
    first.change(click("new user", "i5"))
    assert follower.publish_once() is not None
    wait_until(lambda: history(second, "new user") == ["i3", "i4", "i5"], "the last event", 2)
    for service in (first, second, late):
        service.versions.poll()
        assert service.current.num_deltas == 2
        assert history(service, "new user") == ["i3", "i4", "i5"]
        assert [popularity(service, item) for item in ("i3", "i4", "i5")] == [
            popularity(late, item) for item in ("i3", "i4", "i5")
        ]
        assert popularity(service, "i3") == before + 1


def test_clicks_of_an_item_that_no_replica_has_yet_count_with_the_delta_that_brings_it(
    start: Callable[[], Service], trainer: Callable[[], Follower]
) -> None:
    service = start()
    service.change(click("new user", "unseen item"))
    assert trainer().publish_once() is not None
    service.versions.poll()
    assert popularity(service, "unseen item") == 1
    assert history(service, "new user") == ["unseen item"]


def test_a_replica_that_missed_entries_has_them_from_deltas(
    start: Callable[[], Service], trainer: Callable[[], Follower], server: Server
) -> None:
    first = start()
    before = popularity(first, "i3")
    first.change(click("new user", "i3"))
    assert trainer().publish_once() is not None
    with server.client() as client:
        client.xtrim(KEY, maxlen=0)
    late = start()
    assert history(late, "new user") == ["i3"]
    assert popularity(late, "i3") == before + 1


def test_an_event_that_is_sent_again_with_its_id_counts_once_at_any_replica(
    start: Callable[[], Service],
) -> None:
    first, second = start(), start()
    assert first.change(click("new user", "i3", "e1")).number == 1
    assert second.change(click("new user", "i3", "e1")).number == 0
    second.change(click("new user", "i4", "e2"))
    for service in (first, second):
        wait_until(lambda service=service: history(service, "new user") == ["i3", "i4"], "both events", 2)  # type: ignore[misc]


def test_while_redis_is_down_events_are_refused_and_answers_go_on(
    start: Callable[[], Service], server: Server
) -> None:
    service = start()
    assert service.status().events is None
    server.kill()
    with pytest.raises(StoreError, match="does not answer"):
        service.change(click("new user", "i3", "e1"))
    assert history(service, "new user") == []
    assert service.recommend(Recommend(user="u1")).items
    wait_until(lambda: "does not answer" in (service.status().events or ""), "the status")
    late = start()
    assert late.recommend(Recommend(user="u1")).items
    server.start()
    wait_until(lambda: service.status().events is None, "the stream to be read again")
    assert service.change(click("new user", "i3", "e1")).number == 1
    wait_until(lambda: history(late, "new user") == ["i3"], "the event at the one that started without Redis")


def test_an_event_that_is_no_row_of_the_log_is_refused_before_it_is_written(
    start: Callable[[], Service], server: Server
) -> None:
    service = start()
    with pytest.raises(BadRequest, match=r'value not allowed \(column "clicked"\)'):
        service.change(Change(events=[Event(user="u1", item="i1", values={"clicked": 2})]))
    with pytest.raises(BadRequest, match="no such"):
        service.change(Change(items=[NewItem(id="new item", values={"no such": 2})]))
    with server.client() as client:
        assert client.xlen(KEY) == 0


def test_an_event_is_written_as_a_row_of_the_log(start: Callable[[], Service], server: Server) -> None:
    service = start()
    service.change(Change(events=[Event(user="u1", item="i1", values={"device": "phone", "position": 2})]))
    with server.client() as client:
        ((_, fields),) = client.xrange(KEY)
    assert int(fields.pop(b"time")) > 1_700_000_000
    assert fields == {
        b"user_id": b"u1",
        b"item_id": b"i1",
        b"device": b"phone",
        b"position": b"2",
        b"clicked": b"1",
    }


def test_entries_that_are_no_rows_or_no_clicks_change_no_popularity(
    start: Callable[[], Service], server: Server
) -> None:
    service = start()
    before = popularity(service, "i3")
    with server.client() as client:
        row = {"time": "1900000000", "user_id": "u1", "item_id": "i3"}
        client.xadd(KEY, {"nonsense": "1"})
        client.xadd(KEY, {**row, "clicked": "0"})
        client.xadd(KEY, {**row, "clicked": "what"})
        client.xadd(KEY, {"_item": "what"})
    service.change(click("new user", "i4"))
    assert history(service, "new user") == ["i4"]
    assert popularity(service, "i3") == before


def test_a_version_that_becomes_current_has_the_events_that_its_log_had_not(
    start: Callable[[], Service], own_bundles: Path
) -> None:
    service = start()
    service.change(click("new user", "i3"))
    old = Bundle.open(own_bundles)
    version = f"{int(old.version[:10]) + 1:010d}-aaaaaaaa"
    shutil.copytree(old.path, own_bundles / version)
    (own_bundles / version / "manifest.json").unlink()
    facts = {name: value for name, value in old.manifest.items() if name not in ("kind", "format", "files")}
    publish_bundle(own_bundles / version, {**facts, "version": version})
    set_current(own_bundles, version)
    service.versions.poll()
    assert service.current.version == version
    assert history(service, "new user") == ["i3"]
    service.change(click("new user", "i4"))
    assert history(service, "new user") == ["i3", "i4"]
    assert [history_of(service, old.version), history_of(service, version)] == [["i3", "i4"]] * 2


def history_of(service: Service, version: str) -> list[str]:
    raw = service.versions.named(version).lookup.raw_user("new user")
    return list(raw["item_id_history"])
