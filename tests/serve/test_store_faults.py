"""Features in a Redis that is damaged, emptied, stopped or full: answers stay right, and say what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_servers import Server, running
from shop import Shop

from recmill.bundle import Bundle
from recmill.serve.messages import Rank, Recommend
from recmill.serve.recommender import Recommender
from recmill.store import RedisStore
from recmill.store.load import load

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
    stored.lookup.rows_lacking = lambda *what: lacking.append(what)
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
    user, items, _ = mapped.lookup_rows(Rank(user="u1", items=["i1", "i2"]))
    nothing = mapped.rank_rows(b"", [b"", b""], {}).scores
    damaged = [
        bytes(byte ^ 1 if at == len(row) - 20 else byte for at, byte in enumerate(row)) for row in items
    ]
    ranked = mapped.rank_rows(user[:-1], damaged, {})
    assert ranked.scores == nothing
    assert [reason.partition(":")[0] for reason in ranked.degraded] == [
        "features of the user",
        "features of items",
    ]
