"""Features in a Redis that is damaged, emptied, stopped or full: answers stay right, and say what was wrong."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from redis_servers import Server, running, wait_until
from shop import Shop

from recmill.artifacts.bundle.bundle import Bundle, publish_bundle, set_current
from recmill.artifacts.bundle.delta import Changes, write_delta
from recmill.artifacts.feature_store.load import load
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.errors import StoreError
from recmill.stages.serve.changes import Change
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Event, NewItem, Rank, RankRows, Recommend
from recmill.stages.serve.recommender import Recommender
from recmill.stages.serve.service import Service

pytestmark = pytest.mark.services


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def stored(shop: Shop, server: Server) -> Iterator[Recommender]:
    """Answers by what `recmill load` wrote."""
    bundle = Bundle.open(shop.bundles)
    recommender = Recommender(bundle, RedisStore(server.url, bundle))
    load(recommender.lookup.store, bundle, ("user", "item"))  # type: ignore[arg-type]
    yield recommender
    recommender.close()


@pytest.fixture(scope="module")
def mapped(shop: Shop) -> Recommender:
    """Answers by the bundle's own rows."""
    return Recommender(Bundle.open(shop.bundles))


def assert_same_answers(recommender: Recommender, expected: Recommender) -> None:
    for user in ("u1", "u2", "nobody", None):
        one, other = (each.recommend(Recommend(user=user, k=20)) for each in (recommender, expected))
        assert [item.id for item in one.items] == [item.id for item in other.items]
        np.testing.assert_allclose(
            [item.score for item in one.items], [item.score for item in other.items], atol=1e-6
        )


def flip_a_bit_of_each_row(server: Server, pattern: str) -> None:
    client = server.client()
    for number, key in enumerate(client.scan_iter(pattern, 1_000)):
        value = bytearray(client.get(key))
        value[number % len(value)] ^= 1 << number % 8
        client.set(key, bytes(value))
    client.close()


def test_a_whole_store_answers_as_the_bundle_does(stored: Recommender, mapped: Recommender) -> None:
    assert_same_answers(stored, mapped)
    for user in ("u1", "nobody", None):
        assert stored.recommend(Recommend(user=user)).degraded == []


@pytest.mark.parametrize("side", ["item", "user"])
def test_flipped_bits_change_no_answer_and_are_said(
    stored: Recommender, mapped: Recommender, server: Server, side: str
) -> None:
    lacking: list[tuple[str, str, int]] = []
    stored.lookup.missing_rows = lambda *what: lacking.append(what)
    flip_a_bit_of_each_row(server, f"recmill:{side}:*")
    assert_same_answers(stored, mapped)
    degraded = stored.recommend(Recommend(user="u1", k=20)).degraded
    assert len(degraded) == 1
    assert "unreadable" in degraded[0]
    assert "the bundle's own are used" in degraded[0]
    assert lacking[-1 if side == "user" else -2][:2] == (side, "unreadable")
    assert lacking[-1 if side == "user" else -2][2] > 0


def test_an_emptied_store_is_noticed_for_known_and_unknown_users(
    stored: Recommender, mapped: Recommender, server: Server
) -> None:
    server.client().flushall()
    assert_same_answers(stored, mapped)
    known, unknown = (stored.recommend(Recommend(user=user, k=20)).degraded for user in ("u1", "nobody"))
    assert known[0] == "features of the user: the row in the store is missing, the bundle's own are used"
    assert unknown[0] == "features of the user: the store holds no rows; run `recmill load`"
    for degraded in (known, unknown):
        assert degraded[1].startswith("features of items: ")
        assert degraded[1].endswith(" are missing in the store, the bundle's own are used")


def test_damaged_columns_of_a_user_are_those_of_the_bundle(
    stored: Recommender, mapped: Recommender, server: Server
) -> None:
    flip_a_bit_of_each_row(server, "recmill:user:r:*")
    query = Recommend(user="u1", k=20, recent=["i3"])
    answer = stored.recommend(query)
    assert [item.id for item in answer.items] == [item.id for item in mapped.recommend(query).items]
    assert answer.degraded[0].startswith("columns of the user: the row in the store is missing or unreadable")


def test_unknown_items_are_ranked_beside_stored_ones(stored: Recommender, mapped: Recommender) -> None:
    query = Rank(user="u1", items=["i1", "not known", "i2"])
    ranked = stored.rank(query)
    np.testing.assert_allclose(ranked.scores, mapped.rank(query).scores, atol=1e-6)
    assert ranked.degraded == []


@pytest.mark.parametrize("id", ["a\0b", "é" * 5_000, "{1}", "}{", "\ud800", "x\r\n$3\r\nDEL", " ", "-0"])
def test_odd_ids_are_unknown_users(stored: Recommender, id: str) -> None:
    assert len(stored.recommend(Recommend(user=id, k=5)).items) == 5


def test_packed_rows_that_are_damaged_on_their_way_are_defaults(mapped: Recommender) -> None:
    packed = mapped.packed_rows(Rank(user="u1", items=["i1", "i2"]))
    nothing = mapped.rank_rows(RankRows(user=b"", items=[b"", b""])).scores
    damaged = [
        bytes(byte ^ 1 if at == len(row) - 20 else byte for at, byte in enumerate(row))
        for row in packed.items
    ]
    ranked = mapped.rank_rows(RankRows(user=packed.user[:-1], items=damaged))
    assert ranked.scores == nothing
    assert [reason.partition(":")[0] for reason in ranked.degraded] == [
        "features of the user",
        "features of items",
    ]


# changes


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def history(recommender: Recommender, user: str) -> list[str]:
    """Items that the store has in a user's history."""
    row: dict[str, Any] = recommender.lookup.store.raw("user", user, 5.0) or {}
    return list(row.get("item_id_history") or [])


def write_a_delta(bundles: Path, number: int, price: float) -> None:
    """A new user, and a new price of an item."""
    bundle = Bundle.open(bundles)
    assert bundle.items is not None
    assert bundle.users is not None
    items = bundle.items.raw(bundle.items.indices(["i1"])).with_columns(pl.lit(price).alias("price"))
    users = bundle.users.raw(bundle.users.indices(["u1"])).with_columns(
        pl.lit(f"new{number}").alias("user_id")
    )
    changes = Changes(items=items, users=users, clicks=pl.DataFrame({"user": ["u1"], "item": ["i5"]}))
    write_delta(bundles, bundle.version, number, bundle.manifest["recipe_digest"], changes, {})


def look(service: Service) -> None:
    service.versions.poll()


def test_a_delta_is_taken_while_the_store_stands_still_and_reaches_it_afterwards(
    own_bundles: Path, server: Server
) -> None:
    service = Service(ServeConfig(bundle=own_bundles, features=server.url), watch_seconds=60)
    store = service.current.lookup.store
    load(store, service.bundle, ("user", "item"))  # type: ignore[arg-type]
    write_a_delta(own_bundles, 1, price=77.0)
    with standing_still(server):
        began = time.monotonic()
        look(service)
        assert service.current.num_deltas == 1
        assert service.recommend(Recommend(user="new1", k=5)).items
        assert service.change(Change(removed=["i2"])).number == 1
        assert not service.recommend(Recommend(user="u1", only=["i2"])).items
        assert time.monotonic() - began < 15
        wait_until(lambda: store.problem is not None, "the write to fail")
        assert "rows wait to be written" in str(service.status().store)
    wait_until(lambda: store.problem is None, "the rows to be written")
    assert store.num_deltas(service.current.version) == 1
    assert store.get("user", ["new1"], 5.0).found.all()
    assert (store.raw("item", "i1", 5.0) or {})["price"] == 77.0
    assert service.recommend(Recommend(user="new1", k=5)).degraded == []
    service.close()


def test_a_server_that_starts_later_does_not_write_old_deltas_again(
    own_bundles: Path, server: Server
) -> None:
    write_a_delta(own_bundles, 1, price=77.0)
    first = Service(ServeConfig(bundle=own_bundles, features=server.url), watch_seconds=60)
    look(first)
    store = first.current.lookup.store
    wait_until(lambda: store.num_deltas(first.current.version) == 1, "the rows to be written")
    first.change(Change(items=[NewItem(id="i1", values={"price": 5.0})]))
    second = Service(ServeConfig(bundle=own_bundles, features=server.url), watch_seconds=60)
    look(second)
    assert second.current.num_deltas == 1
    second.close()
    assert (store.raw("item", "i1", 5.0) or {})["price"] == 5.0
    first.close()


def test_deltas_that_a_version_took_before_it_was_current_reach_the_store(
    own_bundles: Path, server: Server
) -> None:
    service = Service(ServeConfig(bundle=own_bundles, features=server.url), watch_seconds=60)
    load(service.current.lookup.store, service.bundle, ("user", "item"))  # type: ignore[arg-type]
    old = service.bundle
    new = own_bundles / f"{int(old.version[:10]) + 1:010d}-aaaaaaaa"
    shutil.copytree(old.path, new)
    (new / "manifest.json").unlink()
    publish_bundle(
        new, {name: old.manifest[name] for name in old.manifest if name not in ("version", "files")}
    )
    set_current(own_bundles, new.name)
    write_a_delta(own_bundles, 1, price=77.0)
    look(service)
    store = service.current.lookup.store
    assert (service.current.version, service.current.num_deltas) == (new.name, 1)
    wait_until(lambda: store.num_deltas(new.name) == 1, "the rows to be written")
    assert (store.raw("item", "i1", 5.0) or {})["price"] == 77.0
    service.close()


def test_a_load_has_what_deltas_changed_since_the_export(own_bundles: Path, server: Server) -> None:
    write_a_delta(own_bundles, 1, price=77.0)
    bundle = Bundle.open(own_bundles)
    store = RedisStore(server.url, bundle)
    load(store, bundle, ("user", "item"))
    assert (store.raw("item", "i1", 5.0) or {})["price"] == 77.0
    assert store.get("user", ["new1"], 5.0).found.all()
    assert store.num_deltas(bundle.version) == 1
    store.close()


def test_added_items_are_in_the_store(stored: Recommender) -> None:
    stored.add_items([NewItem(id="brand new", values={"price": 3.5})])
    answer = stored.recommend(Recommend(user="u1", only=["brand new"]))
    assert [item.id for item in answer.items] == ["brand new"]
    assert answer.degraded == []


def test_events_wait_for_a_store_that_stands_still_and_join_what_others_wrote(
    stored: Recommender, shop: Shop, server: Server
) -> None:
    bundle = Bundle.open(shop.bundles)
    other = Recommender(bundle, RedisStore(server.url, bundle))
    other.add_events([Event(user="u1", item="i1", values={"clicked": 1})])
    before = history(stored, "u1")
    assert before[-1] == "i1"
    with standing_still(server):
        assert stored.add_events([Event(user="u1", item=f"i{n}", values={"clicked": 1}) for n in (2, 3)]) == 2
        own = stored.lookup.raw_user("u1", in_store=False)["item_id_history"]
        assert own[-2:] == ["i2", "i3"]
    wait_until(lambda: stored.lookup.store.problem is None, "the events to be written")
    wait_until(lambda: history(stored, "u1")[-1] == "i3", "the last event to be written")
    assert history(stored, "u1") == [*before, "i2", "i3"][-len(history(stored, "u1")) :]
    other.close()


def test_what_one_process_wrote_the_others_do_not_write_again(
    stored: Recommender, shop: Shop, server: Server
) -> None:
    bundle = Bundle.open(shop.bundles)
    other = Recommender(bundle, RedisStore(server.url, bundle))
    before = history(stored, "u1")
    change = Change(process=1, events=[Event(user="u1", item="i1", values={"clicked": 1})], removed=["i2"])
    change.apply(stored)
    with standing_still(server):
        began = time.monotonic()
        change.apply(other, in_store=False)
        assert time.monotonic() - began < 10
        assert not other.recommend(Recommend(user=None, only=["i2"])).items
    after = history(stored, "u1")
    assert after == [*before, "i1"][-len(after) :]
    other.close()


def test_a_full_store_is_said_without_what_users_did_and_is_still_read(
    stored: Recommender, mapped: Recommender, server: Server
) -> None:
    client = server.client()
    client.config_set("maxmemory", 1_000_000)
    with pytest.raises(StoreError, match=r"refuses to write users, keys recmill:user:.*maxmemory") as caught:
        load(stored.lookup.store, stored.bundle, ("user",))  # type: ignore[arg-type]
    assert caught.value.__cause__ is None
    stored.add_events([Event(user="u1", item="i1", values={"clicked": 1})])
    wait_until(lambda: stored.lookup.store.problem is not None, "the write to fail")
    for _ in range(20):
        assert stored.recommend(Recommend(user="u2", k=5)).degraded == []
    client.config_set("maxmemory", 0)
    wait_until(lambda: stored.lookup.store.problem is None, "the write to succeed")
    assert history(stored, "u1")[-1] == "i1"
    client.close()
