"""Two replicas and a trainer follow one Redis stream while each of them, and Redis, is killed again and again.

    python benchmarks/chaos_stream.py --shop runs/shop-live [--seconds 60] [--rate 50] [--kill-every 4] [--load 100]

takes what `recmill run shop-live --into runs/shop-live` left. Trial `kill`: events are posted to the replicas, each
again with the same id until it is taken, while one process after the other gets kill -9 and is started again. Then
every event must be in the stream once, in the deltas once, and in the user's history at both replicas once and in
order. Trial `fresh`: nothing is killed; a new item and a new user are told to one replica under a load of requests,
and it is measured when both replicas show them, and when both score them by rows that the trainer learned.
It exits with 1 when anything was lost or counted twice.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from chaos import Outcome, run_trials

from recmill.artifacts.bundle.bundle import current_of
from recmill.artifacts.bundle.delta import Delta, deltas_folder, deltas_of

KEY = "shop:events"
NUM_SENDERS = 4
HISTORY = 20  # that the recipe keeps: no user gets more events
MARKS = 20  # new items and users of `fresh`
SECONDS_TO_SETTLE = 120


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Killable:
    """A program that is started again, with the same arguments, after it was killed."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[], bool]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    kills: int = 0
    down_seconds: list[float] = field(default_factory=list)

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        wait_until(self._is_up, f"{self.name} is not ready")

    def _is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise SystemExit(f"{self.name} ended: {self.log.read_text()[-500:]}")
        return self.is_ready()

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def kill_and_start(self) -> None:
        began = time.monotonic()
        self.kill()
        self.start()
        self.kills += 1
        self.down_seconds.append(time.monotonic() - began)


class Scene:
    """Redis, two replicas and a trainer of one folder of bundles."""

    def __init__(self, shop: Path, folder: Path) -> None:
        self.bundles = Path(shutil.copytree(shop / "bundle", folder / "bundle"))
        redis_port, self.ports = free_port(), (free_port(), free_port())
        url = f"redis://127.0.0.1:{redis_port}/{KEY}"
        self.client = redis.Redis(port=redis_port, socket_timeout=5)
        recmill = [sys.executable, "-m", "recmill"]
        persist = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        self.redis = Killable(
            "redis",
            [
                "redis-server",
                "--port",
                str(redis_port),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(folder),
                *persist,
            ],
            self._redis_answers,
            folder / "redis.txt",
        )
        self.replicas = [
            Killable(
                f"replica {number}",
                [
                    *(*recmill, "serve", "--bundle", str(self.bundles), "--http-port", str(port)),
                    *("--grpc-port", "0", "--events", url, "--threads", "1"),
                ],
                lambda port=port: status_of(port) is not None,  # type: ignore[misc]
                folder / f"replica{number}.txt",
            )
            for number, port in enumerate(self.ports)
        ]
        self.trainer = Killable(
            "trainer",
            [
                *(*recmill, "train", "shop-live", "--follow", url, "--tables", str(shop / "log")),
                *("--publish", str(self.bundles), "--into", str(shop / "checkpoint")),
                *("--every", "1", "--threads", "1", "--json"),
            ],
            lambda: True,
            folder / "trainer.txt",
        )
        self.all = [self.redis, *self.replicas, self.trainer]

    def _redis_answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def deltas(self) -> list[Delta]:
        return [Delta.open(path) for path in deltas_of(self.bundles, str(current_of(self.bundles)))]


@contextmanager
def running(shop: Path) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scene = Scene(shop.resolve(), Path(folder))
        for one in scene.all:
            stack.callback(lambda one=one: one.kill() if one.process is not None else None)  # type: ignore[misc]
            one.start()
        yield scene


def ask(port: int, path: str, message: Any = None, seconds: float = 10) -> Any:
    """The answer; OSError when there is none, ValueError when it is a refusal."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        body = None if message is None else json.dumps(message)
        connection.request(
            "GET" if body is None else "POST", f"/v1/{path}", body, {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        content = reply.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()
    if reply.status != 200:
        raise ValueError(f"{reply.status} {content.decode()[:200]}")
    return json.loads(content)


def status_of(port: int) -> Any:
    try:
        status = ask(port, "status", seconds=2)
        return status if status["ready"] else None
    except (OSError, ValueError):
        return None


def wait_until(happened: Callable[[], bool], problem: str, seconds: float = SECONDS_TO_SETTLE) -> None:
    ends_at = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > ends_at:
            raise SystemExit(problem)
        time.sleep(0.02)


# kill: every event once


class Sender(threading.Thread):
    """Posts events of its own users in order, each until a replica takes it."""

    def __init__(self, number: int, ports: Sequence[int], rate: float, ends_at: float) -> None:
        super().__init__(daemon=True)
        self.number, self.ports, self.rate, self.ends_at = number, ports, rate, ends_at
        self.sent: dict[str, list[str]] = {}
        self.again: Counter[str] = Counter()

    def run(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            if time.monotonic() > self.ends_at:
                return
            user = f"guest{self.number}-{number // HISTORY}"
            item = f"i{number % HISTORY + 1}"
            self._post({"user": user, "item": item, "id": f"{self.number}-{number}"}, number)
            self.sent.setdefault(user, []).append(item)
            time.sleep(max(0.0, began + number / self.rate - time.monotonic()))

    def _post(self, event: dict[str, str], number: int) -> None:
        for attempt in itertools.count():
            try:
                ask(
                    self.ports[(number + attempt) % len(self.ports)], "events", {"events": [event]}, seconds=5
                )
                return
            except ValueError as error:
                self.again[str(error)[:3]] += 1
            except OSError as error:
                self.again[type(error).__name__] += 1
            time.sleep(0.05)


def kill(shop: Path, seconds: float, rate: float, kill_every: float) -> Iterator[Outcome]:
    """Every process in turn gets kill -9 while events arrive."""
    with running(shop) as scene:
        ends_at = time.monotonic() + seconds
        senders = [Sender(number, scene.ports, rate / NUM_SENDERS, ends_at) for number in range(NUM_SENDERS)]
        for sender in senders:
            sender.start()
        for victim in itertools.cycle((scene.trainer, scene.replicas[0], scene.redis, scene.replicas[1])):
            time.sleep(kill_every)
            if time.monotonic() > ends_at:
                break
            victim.kill_and_start()
        for sender in senders:
            sender.join()
        sent = {user: items for sender in senders for user, items in sender.sent.items()}
        again = sum((sender.again for sender in senders), Counter[str]())
        yield _counted(scene, sent, again)


def _counted(scene: Scene, sent: dict[str, list[str]], again: Counter[str]) -> Outcome:
    pairs = Counter((user, item) for user, items in sent.items() for item in items)
    wait_until(
        lambda: sum(delta.manifest["num_rows"] for delta in scene.deltas()) >= pairs.total(),
        "deltas lack rows",
    )
    number = len(scene.deltas())
    for port in scene.ports:
        wait_until(lambda port=port: status_of(port)["deltas"] >= number, "a replica lacks deltas")  # type: ignore[misc]
    stream = Counter(
        (fields[b"user_id"].decode(), fields[b"item_id"].decode()) for _, fields in scene.client.xrange(KEY)
    )
    frames = [delta.changes().clicks for delta in scene.deltas()]
    learned = Counter(
        row for frame in frames if frame is not None for row in frame.select("user", "item").iter_rows()
    )
    places = {"stream": stream, "deltas": learned}
    wrong_order = 0
    for replica, port in zip(scene.replicas, scene.ports, strict=True):
        found = {user: history_at(port, user) for user in sent}
        places[replica.name] = Counter((user, item) for user, items in found.items() for item in items)
        wrong_order += sum(
            found[user] != items for user, items in sent.items() if sorted(found[user]) == sorted(items)
        )
    lost = sum((pairs - found).total() for found in places.values())
    twice = sum((found - pairs).total() for found in places.values())
    kills = ", ".join(f"{one.name} {one.kills}" for one in scene.all)
    line = (
        f"kill   {pairs.total():,} events   {kills}   sent again {again.total():,} {dict(again)}   deltas {number}   "
        f"lost {lost}   twice {twice}   out of order {wrong_order}"
    )
    return Outcome(line, pairs.total(), twice + wrong_order, lost)


def history_at(port: int, user: str) -> list[str]:
    found = ask(port, "features", {"user": user})["user"]
    return list(found["values"].get("item_id_history") or [])


# fresh: how soon a new id is served


class Load(threading.Thread):
    """Requests to one replica at a rate."""

    def __init__(self, port: int, rate: float, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.rate, self.stop = port, rate, stop
        self.seconds: list[float] = []
        self.failed = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        began = time.monotonic()
        for number in itertools.count():
            if self.stop.wait(max(0.0, began + number / self.rate - time.monotonic())):
                return
            sent = time.monotonic()
            body = json.dumps({"user": f"u{number % 500}", "k": 10})
            connection.request("POST", "/v1/recommend", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            self.failed += reply.status != 200
            self.seconds.append(time.monotonic() - sent)


def fresh(shop: Path, load: float) -> Iterator[Outcome]:
    """From a POST at one replica until both show the new item and user, and until both score them by learned rows."""
    with running(shop) as scene:
        stop = threading.Event()
        loads = [Load(port, load / 2, stop) for port in scene.ports] if load else []
        for one in loads:
            one.start()
        _mark(scene, MARKS)  # until the trainer has started
        shown, learned = [], []
        for number in range(MARKS):
            at_both = _mark(scene, number)
            shown.append(at_both[0])
            learned.append(at_both[1])
            time.sleep(0.37)  # no multiple of the seconds between deltas
        stop.set()
        for one in loads:
            one.join()
        seconds = sorted(second for one in loads for second in one.seconds)
        failed = sum(one.failed for one in loads)
        beside = (
            f"   {len(seconds):,} requests, p99 {seconds[int(len(seconds) * 0.99)] * 1000:.0f} ms"
            if seconds
            else ""
        )
        line = (
            f"fresh  {MARKS} new users and items   shown by both {_median_and_max(shown)}   "
            f"learned rows at both {_median_and_max(learned)}{beside}   failed {failed}"
        )
        yield Outcome(line, MARKS + len(seconds), 0, failed)


def _mark(scene: Scene, number: int) -> tuple[float, float]:
    user, item, ports = f"new user {number}", f"new item {number}", scene.ports
    began = time.monotonic()
    ask(ports[0], "items", {"items": [{"id": item, "values": {"category": "garden", "price": 9.5}}]})
    ask(ports[0], "events", {"events": [{"user": user, "item": item}] * 8})
    for port in ports:
        wait_until(lambda port=port: _shows(port, user, item), f"{user} is not shown")  # type: ignore[misc]
    shown = time.monotonic() - began
    number_of_delta = _delta_with(scene, user)
    for port in scene.ports:
        wait_until(lambda port=port: ask(port, "status")["deltas"] >= number_of_delta, "a delta is not taken")  # type: ignore[misc]
    return shown, time.monotonic() - began


def _delta_with(scene: Scene, user: str) -> int:
    """The number of the first delta that has a click of this user."""
    for number in itertools.count(1):
        folder = deltas_folder(scene.bundles, str(current_of(scene.bundles))) / f"{number:06d}"
        wait_until(folder.is_dir, f"no delta has {user}")
        clicks = Delta.open(folder).changes().clicks
        if clicks is not None and user in clicks["user"]:
            return number
    raise AssertionError


def _shows(port: int, user: str, item: str) -> bool:
    query = {"only": [item], "k": 1, "show_seen": True}
    return bool(ask(port, "recommend", query)["items"]) and history_at(port, user) == [item] * 8


def _median_and_max(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shop", type=Path, required=True, help="what `recmill run shop-live --into` was given"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of trial kill (default: 60)")
    parser.add_argument("--rate", type=float, default=50, help="events a second (default: 50)")
    parser.add_argument("--kill-every", type=float, default=4, help="seconds between two kills (default: 4)")
    parser.add_argument(
        "--load", type=float, default=100, help="requests a second beside `fresh` (default: 100)"
    )
    parser.add_argument("--only", default="kill,fresh", help="names of trials with commas between")
    given = parser.parse_args()
    trials = {
        "kill": lambda: kill(given.shop, given.seconds, given.rate, given.kill_every),
        "fresh": lambda: fresh(given.shop, given.load),
    }
    return run_trials(trials, given.only)


if __name__ == "__main__":
    sys.exit(main())
