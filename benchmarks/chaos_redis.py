"""What servers do while their feature store is emptied, damaged, stopped, full or of another bundle.

    python benchmarks/chaos_redis.py --shop runs/quickstart [--rate 50] [--seconds 20] [--only flush,flips,pause]

Each trial fills a real Redis, asks a real server, and compares every answer with those of the bundle alone.
It prints answers right, wrong, refused, late or lost, as chaos.py does, then what else was to be seen. It exits with 1
when anything was wrong (a removed item that is shown among them) or lost (a change that never arrives among them).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import redis
from chaos import Expected, Outcome, Scene, Trial, Trials, run_trials

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.delta import Changes, write_delta
from recmill.artifacts.feature_store.codec import RowCodec
from recmill.artifacts.feature_store.redis import RedisStore
from recmill.stages.bench.serve.server import BenchServer, start_server
from recmill.stages.serve.changes import Change
from recmill.stages.serve.messages import Event

PAUSE_SECONDS = 4.0
ASKED = 24  # times, so that every process is
_CLICK = Event(user="guest", item="i1")


class Redis:
    """A Redis that holds the rows of a bundle."""

    def __init__(self, folder: str, bundles: Path) -> None:
        self.port = 20_000 + os.getpid() % 10_000
        self.url = f"redis://127.0.0.1:{self.port}"
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            folder,
            "--save",
            "",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port, socket_timeout=30)
        _until(self._answers, 10)
        command = [sys.executable, "-m", "recmill", "load", "--bundle", str(bundles), "--features", self.url]
        subprocess.run([*command, "--json"], check=True, stdout=subprocess.DEVNULL)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def flip_bits(self) -> None:
        """One bit of each row."""
        for number, key in enumerate(self.client.scan_iter("recmill:*:[fr]:*", 1_000)):
            value = bytearray(self.client.get(key))
            value[number % len(value)] ^= 1 << number % 8
            self.client.set(key, bytes(value))

    def put_rows_of_another_bundle(self, bundles: Path) -> None:
        """The same rows, as a bundle with another Plan would write them."""
        bundle = Bundle.open(bundles)
        store = RedisStore(self.url, bundle)
        for side in ("user", "item"):
            entities = bundle.entities(side)  # type: ignore[arg-type]
            places = entities.indices(entities.ids_with_prefix("", len(entities)))
            rows = RowCodec(entities.layout, entities.unknown_row, "another").encode(
                entities.features(places)
            )
            keys = store.keys(side, "f", entities.ids(places))  # type: ignore[arg-type]
            self.client.mset(dict(zip(keys, rows, strict=True)))
        store.close()

    def stand_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def served(scene: Scene, processes: int) -> Iterator[tuple[Redis, Path, BenchServer]]:
    """A Redis, bundles of our own, and a server of both."""
    with tempfile.TemporaryDirectory() as folder:
        bundles = Path(shutil.copytree(scene.bundles, Path(folder) / "bundles"))
        store = Redis(folder, bundles)
        try:
            with start_server(bundles, ["--features", store.url, "--processes", str(processes)]) as server:
                yield store, bundles, server
        finally:
            store.process.kill()
            store.process.wait()


def _ask(server: BenchServer, path: str, message: Any = None) -> Any:
    body = None if message is None else json.dumps(message).encode()
    request = urllib.request.Request(
        f"http://{server.http}/v1/{path}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)


def _shows(server: BenchServer, item: str) -> int:
    """How often an item is shown, asked over new connections, which reach every process."""
    # With a deadline that a busy machine keeps too: how fast answers come is counted elsewhere.
    query = {"user": "u1", "only": [item], "k": 1, "deadline_ms": 10_000}
    return sum(bool(_ask(server, "recommend", query)["items"]) for _ in range(ASKED))


def _until(happened: Callable[[], bool], seconds: float) -> float:
    """Seconds until it happened; infinite when it did not in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if happened():
            return time.monotonic() - began
        time.sleep(0.05)
    return float("inf")


# trials


def flush(scene: Scene) -> Iterator[tuple[Trial, str]]:
    yield _with(scene, "flush", lambda store, _: store.client.flushall())


def flips(scene: Scene) -> Iterator[tuple[Trial, str]]:
    yield _with(scene, "flips", lambda store, _: store.flip_bits())


def other(scene: Scene) -> Iterator[tuple[Trial, str]]:
    yield _with(scene, "other bundle", lambda store, bundles: store.put_rows_of_another_bundle(bundles))


def _with(scene: Scene, name: str, damage: Callable[[Redis, Path], object]) -> tuple[Trial, str]:
    with served(scene, 1) as (store, bundles, server):

        def trouble() -> None:
            time.sleep(scene.seconds / 4)
            damage(store, bundles)

        return scene.load(name, server, trouble), f"{store.client.dbsize():,} keys"


def full(scene: Scene) -> Iterator[tuple[Trial, str]]:
    """Events arrive while the memory of Redis is full; then it has room again."""
    events = [{"user": f"guest{number}", "item": "i1"} for number in range(20)]
    changes = [Change(events=[Event(**event)]) for event in events]  # each changes what is popular
    scene = replace(scene, expected=Expected(scene.bundles, changes))
    with served(scene, 1) as (store, _, server):
        taken: Counter[int] = Counter()

        def trouble() -> None:
            store.client.config_set("maxmemory", 1_000_000)
            for event in events:
                taken[_ask(server, "events", {"events": [event]})["number"]] += 1
            time.sleep(scene.seconds / 2)
            store.client.config_set("maxmemory", 0)

        trial = scene.load("full", server, trouble)

        def written() -> bool:
            return all(store.client.exists(f"recmill:user:f:{event['user']}") for event in events)

        wait = _until(written, 10)
        trial.found["lost"] += len(events) - taken[1] + (wait == float("inf"))
        yield trial, f"{taken[1]} of {len(events)} events taken, in Redis {wait:.1f} s after the load"


def pause(scene: Scene) -> Iterator[tuple[Trial, str]]:
    """Redis stands still while a delta arrives and an item is removed; by one process and by two."""
    item = _item_that_nobody_is_shown(scene.bundles, scene.expected)
    # A click changes what is popular, and behind an item that is gone all others move up: scores follow.
    changes = [Change(events=[_CLICK]), Change(removed=[item])]
    scene = replace(scene, expected=Expected(scene.bundles, changes))
    for processes in (1, 2):
        with served(scene, processes) as (store, bundles, server):
            seen: list[str] = []
            found: Counter[str] = Counter()

            def trouble() -> None:
                time.sleep(scene.seconds / 4)
                store.stand_still()
                try:
                    seen.append(_change_while_it_stands_still(item, bundles, server, found))  # noqa: B023
                finally:
                    store.go_on()
                wait = _until(lambda: bool(store.client.exists("recmill:user:f:new")), 20)
                found["lost"] += wait == float("inf")  # noqa: B023
                seen.append(f"the delta's user is in Redis {wait:.1f} s after the pause")  # noqa: B023

            trial = scene.load(f"pause {processes}", server, trouble)
            trial.found += found
            status = _ask(server, "status")
            seen.append(f"deltas {status['deltas']}, store {status.get('store')}")
            yield trial, "; ".join(seen)


def _change_while_it_stands_still(item: str, bundles: Path, server: BenchServer, found: Counter[str]) -> str:
    began = time.monotonic()
    users = (bundle := Bundle.open(bundles)).entities("user")
    new = users.raw(users.indices(["u1"])).with_columns(pl.lit("new").alias(users.id_column))
    digest = bundle.manifest["recipe_digest"]
    write_delta(bundles, bundle.version, 1, digest, Changes(users=new), {})
    _ask(server, "events", {"events": [{"user": _CLICK.user, "item": _CLICK.item}]})
    _ask(server, "items/remove", {"items": [item]})
    hidden = _until(lambda: not _shows(server, item), 20)
    taken = _until(lambda: _ask(server, "status")["deltas"] == 1, 20)
    time.sleep(max(0.0, began + PAUSE_SECONDS - time.monotonic()))
    shown = _shows(server, item)
    found["WRONG"] += shown
    found["lost"] += [hidden, taken].count(float("inf"))
    return (
        f"removed item gone after {hidden:.1f} s, shown {shown} times then; delta taken {taken:.1f} s later"
    )


def _item_that_nobody_is_shown(bundles: Path, expected: Expected) -> str:
    shown = {item for items in expected.items.values() for item in items}
    items = Bundle.open(bundles).entities("item")
    return next(str(item) for item in items.ids_with_prefix("", len(items)) if item not in shown)


TRIALS = {"flush": flush, "flips": flips, "other": other, "full": full, "pause": pause}


def trials_of(scene: Scene) -> Trials:
    def bind(trial: Callable[[Scene], Iterator[tuple[Trial, str]]]) -> Callable[[], Iterable[Outcome]]:
        return lambda: (_outcome(found, seen) for found, seen in trial(scene))

    return {name: bind(trial) for name, trial in TRIALS.items()}


def _outcome(trial: Trial, seen: str) -> Outcome:
    reasons = [f"\n    {number:6,} x {reason}" for reason, number in trial.degraded.most_common(4)]
    return trial.outcome(seen + "".join(reasons))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shop", type=Path, required=True, help="what `recmill run quickstart --into` was given"
    )
    parser.add_argument("--rate", type=float, default=50, help="requests a second (default: 50)")
    parser.add_argument("--seconds", type=float, default=20, help="of each trial (default: 20)")
    parser.add_argument("--only", default=",".join(TRIALS), help="names of trials with commas between")
    given = parser.parse_args()
    bundles = given.shop / "bundle"
    scene = Scene(given.shop, bundles, Expected(bundles), given.rate, given.seconds)
    return run_trials(trials_of(scene), given.only)


if __name__ == "__main__":
    sys.exit(main())
