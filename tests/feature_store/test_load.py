"""Filling Redis from a bundle or from Parquet: whole, resumable, no faster than allowed, and silent about secrets."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from redis_servers import PASSWORD, Server, running, running_cluster, running_with_password, wait_until
from small_bundle import write_bundle

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.feature_store.load import Pace, load
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.cli import load as load_command
from recmill.errors import ArtifactError, RecmillError, StoreError

NUM_ITEMS = 3_000
LOAD = """
import argparse
from recmill.cli import load
parser = argparse.ArgumentParser()
load.add(parser.add_subparsers())
parsed = parser.parse_args()
parsed.command(parsed)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(
        tmp_path_factory.mktemp("load") / "0000000001-abc", items=tuple(range(1, NUM_ITEMS + 1))
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def store(server: Server, bundle: Bundle) -> Iterator[RedisStore]:
    store = RedisStore(server.url, bundle)
    yield store
    store.close()


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    load_command.add(parser.add_subparsers())
    parsed = parser.parse_args(["load", *arguments])
    parsed.command(parsed)


@pytest.mark.services
def test_a_loaded_store_answers_as_the_bundle_does(bundle: Bundle, store: RedisStore) -> None:
    assert store.loaded() is None
    done = load(store, bundle, ("user", "item"))
    assert [(one.side, one.num_rows) for one in done] == [("user", 2), ("item", NUM_ITEMS)]
    assert store.loaded() == bundle.version
    for side, ids in (("item", [*range(1, NUM_ITEMS + 1, 7), 99_999]), ("user", ["ann", "eve"])):
        entities = bundle.entities(side)
        expected = entities.features(entities.indices(ids))
        batch, found, _ = store.get(side, ids, 1.0)
        np.testing.assert_array_equal(found, entities.indices(ids) >= 0)
        np.testing.assert_array_equal(batch.numbers, expected.numbers)
        for name, keys in expected.keys.items():
            np.testing.assert_array_equal(batch.keys[name].values, keys.values)
        assert store.raw(side, ids[0], 1.0) == entities.raw_row(ids[0])


@pytest.mark.services
def test_a_cluster_is_loaded_too(bundle: Bundle, tmp_path: Path) -> None:
    with running_cluster(tmp_path / "redis") as (url, nodes):
        store = RedisStore(url, bundle)
        load(store, bundle, ("item",))
        assert store.get("item", range(1, 501), 2.0)[1].all()
        assert store.loaded() == bundle.version
        assert store.is_loaded(2.0)
        store.close()
        for node in nodes:
            client = node.client()
            assert client.dbsize() > NUM_ITEMS / 3
            client.close()


@pytest.mark.services
def test_a_killed_load_goes_on_where_it_was(bundle: Bundle, server: Server, store: RedisStore) -> None:
    command = [sys.executable, "-c", LOAD, "load", "--bundle", str(bundle.path), "--features", server.url]
    client = server.client()
    killed = subprocess.Popen([*command, "--rate", "2000", "--quiet"], stdout=subprocess.DEVNULL)
    wait_until(lambda: client.dbsize() > NUM_ITEMS // 2, "a quarter of the rows")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert store.loaded() is None
    assert client.dbsize() < 2 * NUM_ITEMS
    rest = load(store, bundle, ("user", "item"), resume=True)
    assert rest[0].num_skipped == 2
    assert 0 < rest[1].num_skipped < NUM_ITEMS
    assert rest[1].num_rows + rest[1].num_skipped == NUM_ITEMS
    assert store.get("item", range(1, NUM_ITEMS + 1), 5.0)[1].all()
    assert store.loaded() == bundle.version
    client.close()


@pytest.mark.services
def test_without_resume_everything_is_written_again(bundle: Bundle, store: RedisStore) -> None:
    load(store, bundle, ("item",))
    again = load(store, bundle, ("item",), resume=False)
    assert again[0].num_rows == NUM_ITEMS
    nothing = load(store, bundle, ("item",), resume=True)
    assert (nothing[0].num_rows, nothing[0].num_skipped) == (0, NUM_ITEMS)


@pytest.mark.services
def test_another_version_does_not_resume(
    bundle: Bundle, store: RedisStore, server: Server, tmp_path: Path
) -> None:
    load(store, bundle, ("item",))
    other = write_bundle(tmp_path / "0000000002-abc")
    store_of_other = RedisStore(server.url, other)
    assert load(store_of_other, other, ("item",), resume=True)[0].num_skipped == 0
    assert store.loaded() == other.version
    store_of_other.close()


@pytest.mark.services
def test_the_rate_is_kept(bundle: Bundle, store: RedisStore) -> None:
    began = time.monotonic()
    load(store, bundle, ("item",), rows_per_second=2_500)
    assert time.monotonic() - began > 0.9 * NUM_ITEMS / 2_500 - 0.1


def test_a_pace_does_not_make_up_for_a_pause() -> None:
    slept: list[float] = []
    pace = Pace(100, slept.append)
    pace.wait(10)
    time.sleep(0.3)
    pace.wait(6_000)
    assert slept == []
    pace.wait(10)
    assert slept[0] == pytest.approx(60, abs=20)


@pytest.mark.services
def test_rows_get_a_time_to_live_and_the_version_does_not(bundle: Bundle, server: Server) -> None:
    store = RedisStore(server.url, bundle, ttl_seconds=100)
    load(store, bundle, ("user",))
    client = server.client()
    assert 90 < client.ttl("recmill:user:f:ann") <= 100
    assert 90 < client.ttl("recmill:user:r:ann") <= 100
    assert client.ttl("recmill:loaded") == -1
    client.close()
    store.close()


@pytest.mark.services
def test_raw_rows_of_parquet_go_through_the_plan(bundle: Bundle, store: RedisStore, tmp_path: Path) -> None:
    rows = pl.DataFrame({"price": [7, None], "item": ["5", "9000"], "colour": ["red", "blue"]})
    rows.write_parquet(tmp_path / "items.parquet")
    assert load(store, bundle, ("item",), tmp_path / "items.parquet")[0].num_rows == 2
    batch, found, _ = store.get("item", [5, 9000], 1.0)
    assert found.all()
    assert batch.numbers[:, 0].tolist() == [7.0, 2.5]
    assert store.raw("item", 5, 1.0) == {"item": 5, "words": None, "price": 7.0}


@pytest.mark.services
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"thing": [1]}, 'no column "item".*it has: thing'),
        ({"item": [None, 1]}, 'rows without "item"'),
        ({"item": ["shoe"]}, 'types.*"item" is String there, and some of its values are no Int64'),
    ],
)
def test_parquet_that_does_not_fit_is_an_error(
    bundle: Bundle, store: RedisStore, tmp_path: Path, rows: dict[str, list[object]], says: str
) -> None:
    pl.DataFrame(rows).write_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ArtifactError, match=says) as caught:
        load(store, bundle, ("item",), tmp_path / "rows.parquet")
    assert "shoe" not in str(caught.value)
    assert store.loaded() is None


def test_a_file_that_is_not_parquet_is_an_error(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("item\n1\n")
    with pytest.raises(ArtifactError, match="as Parquet"):
        load(RedisStore("redis://127.0.0.1:1", bundle), bundle, ("item",), tmp_path / "rows.parquet")


@pytest.mark.services
def test_the_command_says_what_it_did_and_no_password(
    bundle: Bundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_with_password(tmp_path / "redis") as url:
        run("--bundle", str(bundle.path), "--features", url, "--prefix", "shop")
        shown = capfd.readouterr()
        assert f"loaded {NUM_ITEMS:,} items" in shown.out
        assert f"version {bundle.version}" in shown.out
        run("--bundle", str(bundle.path), "--features", url, "--prefix", "shop", "--resume", "--json")
        as_json = capfd.readouterr()
        assert json.loads(as_json.out)["sides"][1] | {"seconds": 0} == {
            "side": "item",
            "rows": 0,
            "skipped": NUM_ITEMS,
            "seconds": 0,
        }
        for text in (*shown, *as_json):
            assert PASSWORD not in text
            assert "s3cret" not in text


@pytest.mark.services
def test_a_full_redis_is_an_error_that_shows_no_row(
    bundle: Bundle, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    client = server.client()
    client.config_set("maxmemory", 1_000_000)
    client.close()
    with pytest.raises(
        StoreError, match=r"keys recmill:\w+:\*: its memory is full. Raise maxmemory"
    ) as caught:
        run("--bundle", str(bundle.path), "--features", server.url, "--quiet")
    shown = "".join(traceback.format_exception(caught.value)) + "".join(capfd.readouterr())
    assert "SET" not in shown
    assert "ann" not in shown.replace("cannot", "")


def test_parquet_needs_a_side(bundle: Bundle) -> None:
    with pytest.raises(RecmillError, match="--side user or --side item"):
        run("--bundle", str(bundle.path), "--features", "redis://x", "--parquet", "rows.parquet")


def test_no_redis_is_an_error_that_names_it(bundle: Bundle) -> None:
    with pytest.raises(StoreError, match=r"redis://127\.0\.0\.1:1 does not answer"):
        run("--bundle", str(bundle.path), "--features", "redis://:pw@127.0.0.1:1", "--quiet")
