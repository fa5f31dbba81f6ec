"""Features in Redis: real servers of every kind, gone and back again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from redis_servers import (
    PASSWORD,
    Server,
    running,
    running_cluster,
    running_with_password,
    running_with_sentinel,
    running_with_tls,
    wait_until,
)
from small_bundle import write_bundle

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.feature_store.address import Address
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.errors import RecmillError, StoreError

KINDS = ("single", "password", "tls", "sentinel", "cluster")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def stores() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_store(stores: ExitStack, url: str, bundle: Bundle, prefix: str = "recmill") -> RedisStore:
    store = RedisStore(url, bundle, prefix)
    stores.callback(store.close)
    return store


def fill(store: RedisStore, bundle: Bundle) -> None:
    raw = pl.DataFrame({"item": [1, 2], "words": ["red hat", None], "price": [10.0, None]})
    assert bundle.items is not None
    store.put("item", raw, bundle.plan.apply(raw, labels=False, only=bundle.items.layout.features))


def url_of(kind: str, folder: Path, stack: ExitStack) -> str:
    if kind == "single":
        return stack.enter_context(running(folder)).url
    if kind == "password":
        return stack.enter_context(running_with_password(folder))
    if kind == "tls":
        return stack.enter_context(running_with_tls(folder))
    if kind == "sentinel":
        return stack.enter_context(running_with_sentinel(folder)).url
    return stack.enter_context(running_cluster(folder))[0]


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.services) for kind in KINDS])
def store(request: pytest.FixtureRequest, tmp_path: Path, bundle: Bundle, stores: ExitStack) -> RedisStore:
    """Every kind of Redis: one suite for all."""
    return open_store(stores, url_of(request.param, tmp_path / "redis", stores), bundle)


def test_a_store_gives_back_what_was_put(store: RedisStore, bundle: Bundle) -> None:
    fill(store, bundle)
    batch, found, _ = store.get("item", [2, "1", 77], 2.0)
    assert found.tolist() == [True, True, False]
    assert batch.numbers[:, 0].tolist() == [2.5, 10.0, 2.5]
    offsets = batch.keys["words"].offsets
    assert offsets is not None
    assert np.diff(offsets).tolist() == [0, 2, 0]
    assert store.raw("item", 1, 2.0) == {"item": 1, "words": "red hat", "price": 10.0}
    assert store.raw("item", 2, 2.0) == {"item": 2, "words": None, "price": None}
    assert store.raw("item", 77, 2.0) is None


def test_many_are_fetched_in_their_order(store: RedisStore, bundle: Bundle) -> None:
    ids = list(range(100, 2_600))
    raw = pl.DataFrame({"item": ids, "words": ["hat"] * len(ids), "price": [float(id) for id in ids]})
    assert bundle.items is not None
    store.put("item", raw, bundle.plan.apply(raw, labels=False, only=bundle.items.layout.features))
    asked = [*ids[::-1], 5]
    batch, found, _ = store.get("item", asked, 5.0)
    assert found.tolist() == [True] * len(ids) + [False]
    assert batch.numbers[:-1, 0].tolist() == asked[:-1]


def test_nobody_asked_for_is_no_error(store: RedisStore) -> None:
    batch, found, _ = store.get("user", [], 1.0)
    assert batch.size == len(found) == 0


@pytest.mark.services
def test_rows_of_another_plan_are_not_found(
    server: Server, bundle: Bundle, tmp_path: Path, stores: ExitStack
) -> None:
    from copy import deepcopy

    from small_bundle import TREE

    fill(open_store(stores, server.url, bundle), bundle)
    tree = deepcopy(TREE)
    tree["features"][2]["steps"][1] = {"hash": 4}
    other = open_store(stores, server.url, write_bundle(tmp_path / "other", tree=tree))
    assert other.get("item", [1, 2], 1.0)[1].tolist() == [False, False]


@pytest.mark.services
def test_prefixes_keep_stores_apart(server: Server, bundle: Bundle, stores: ExitStack) -> None:
    fill(open_store(stores, server.url, bundle, "one"), bundle)
    assert not open_store(stores, server.url, bundle, "two").get("item", [1], 1.0)[1].any()
    assert server.client().exists("one:item:f:1", "one:item:r:1") == 2


@pytest.mark.services
def test_a_killed_redis_is_an_error_at_once_and_comes_back_by_itself(
    server: Server, bundle: Bundle, stores: ExitStack
) -> None:
    store = open_store(stores, server.url, bundle)
    fill(store, bundle)
    server.kill()
    began = time.monotonic()
    for _ in range(200):
        with pytest.raises(StoreError):
            store.get("item", [1], 0.5)
    assert time.monotonic() - began < 20
    server.start()
    fill_when_back = RedisStore(server.url, bundle)
    fill(fill_when_back, bundle)
    fill_when_back.close()
    wait_until(lambda: answers(store), "the store to answer again")


def answers(store: RedisStore) -> bool:
    try:
        return bool(store.get("item", [1], 0.5)[1].all())
    except StoreError:
        return False


@pytest.mark.services
def test_a_frozen_redis_takes_no_longer_than_the_deadline(
    server: Server, bundle: Bundle, stores: ExitStack
) -> None:
    store = open_store(stores, server.url, bundle)
    fill(store, bundle)
    assert answers(store)
    server.signal(signal.SIGSTOP)
    try:
        times = []
        for _ in range(50):
            began = time.monotonic()
            with pytest.raises(StoreError):
                store.get("item", [1], 0.05)
            times.append(time.monotonic() - began)
        assert max(times) < 5
        assert sorted(times)[len(times) // 2] < 0.04  # most did not wait at all
        time.sleep(0.3)  # the breaker has rested: a thread of its own tries, and no lookup waits
        began = time.monotonic()
        with pytest.raises(StoreError, match="tried again in a moment"):
            store.get("item", [1], 20.0)
        assert time.monotonic() - began < 10
    finally:
        server.signal(signal.SIGCONT)
    wait_until(lambda: answers(store), "the store to answer again")


@pytest.mark.services
def test_redis_killed_and_restarted_under_use_gives_no_wrong_answer(
    server: Server, bundle: Bundle, stores: ExitStack
) -> None:
    store = open_store(stores, server.url, bundle)
    fill(store, bundle)
    stop = threading.Event()
    wrong: list[object] = []
    slowest = [0.0]
    right = [0]

    def use() -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                batch, found, _ = store.get("item", [1, 2], 0.2)
                expected = [10.0, 2.5] if found.all() else [2.5, 2.5]
                right[0] += bool(found.all())
                if batch.numbers[:, 0].tolist() != expected:
                    wrong.append(batch)
            except StoreError:
                time.sleep(0.005)
            except Exception as error:
                wrong.append(error)
            slowest[0] = max(slowest[0], time.monotonic() - began)

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for _ in range(3):
        time.sleep(0.2)
        server.kill()
        time.sleep(0.2)
        server.start()
        wait_until(lambda: _filled(store, bundle), "writing again")
    right[0] = 0
    wait_until(lambda: right[0] > 10, "answers from the store")
    stop.set()
    for user in users:
        user.join()
    assert wrong == []
    assert slowest[0] < 1.0


def _filled(store: RedisStore, bundle: Bundle) -> bool:
    try:
        fill(store, bundle)
    except StoreError:
        return False
    return True


@pytest.mark.services
def test_a_host_that_says_nothing_takes_no_longer_than_the_deadline(
    bundle: Bundle, stores: ExitStack
) -> None:
    import socket

    with socket.socket() as silent:  # accepts connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        port = silent.getsockname()[1]
        for url in (f"redis://:pw@127.0.0.1:{port}", f"redis+cluster://127.0.0.1:{port}"):
            store = open_store(stores, url, bundle)
            began = time.monotonic()
            with pytest.raises(StoreError, match="in time"):
                store.get("item", [1], 0.05)
            assert time.monotonic() - began < 10


@pytest.mark.services
def test_the_next_master_is_asked_after_a_failover(tmp_path: Path, bundle: Bundle, stores: ExitStack) -> None:
    watched = stores.enter_context(running_with_sentinel(tmp_path / "redis"))
    store = open_store(stores, watched.url, bundle)
    fill(store, bundle)
    replica = watched.replica.client()
    wait_until(lambda: replica.exists("recmill:item:f:1"), "the replica to have the row")
    replica.close()
    watched.master.kill()
    wait_until(lambda: answers(store), "the replica to be master", 30)


@pytest.mark.services
def test_a_cluster_answers_again_after_a_node_was_restarted(
    tmp_path: Path, bundle: Bundle, stores: ExitStack
) -> None:
    url, nodes = stores.enter_context(running_cluster(tmp_path / "redis"))
    store = open_store(stores, url, bundle)
    fill(store, bundle)
    for node in nodes:
        node.kill()
    with pytest.raises(StoreError):
        store.get("item", [1, 2], 0.2)
    for node in nodes:
        node.start()
    wait_until(lambda: _filled(store, bundle) and answers(store), "the cluster to answer again", 30)


@pytest.mark.services
def test_a_wrong_password_is_an_error_that_does_not_show_it(
    tmp_path: Path, bundle: Bundle, stores: ExitStack
) -> None:
    url = stores.enter_context(running_with_password(tmp_path / "redis"))
    store = open_store(stores, url.replace("s3cret", "other"), bundle)
    with pytest.raises(StoreError) as caught:
        store.get("item", [1], 1.0)
    assert "other" not in str(caught.value)
    assert "password" in str(caught.value)


def test_an_address_never_shows_its_password() -> None:
    from urllib.parse import quote

    address = Address.parse(
        f"rediss+sentinel://me:{quote(PASSWORD, safe='')}@a:1,b/shop/3?sentinel_password=hush&ca=/x.pem"
    )
    assert (address.username, address.password) == ("me", PASSWORD)
    assert address.sentinel_password == "hush"
    assert address.hosts == (("a", 1), ("b", 26379))
    assert str(address) == "rediss+sentinel://a:1,b:26379/shop/3"
    assert "s3cret" not in repr(address)
    assert "hush" not in repr(address)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost:6379"),
        ("redis://localhost:1/2", "redis://localhost:1/2"),
        ("redis://[::1]:7", "redis://[::1]:7"),
        ("redis+cluster://a,b:1", "redis+cluster://a:6379,b:1"),
    ],
)
def test_an_address_reads_as_it_was_given(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "http://:pw@a",
        "redis://:pw@",
        "redis://:pw@a,b",
        "redis://:pw@a/x",
        "redis://:pw@a:x",
        "redis://:pw@a/1/2",
        "redis+sentinel://:pw@a",
        "redis+cluster://:pw@a/1",
        "redis://:pw@a?what=1",
        "redis://:pw@a#pw",
        "redis://:p/w@a",
        ":pw",
    ],
)
def test_a_url_that_cannot_be_understood_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"expected redis://host") as caught:
        Address.parse(url)
    assert "pw" not in str(caught.value)


def test_a_prefix_with_braces_is_refused(bundle: Bundle) -> None:
    with pytest.raises(RecmillError, match="letters, digits"):
        RedisStore("redis://localhost", bundle, "a{b}")
