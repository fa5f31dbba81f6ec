"""Seconds from a new item's first event in the log until every process of a server ranks it by a row of its own.

    python benchmarks/new_id.py --run runs/shop-live --data data/shop [--processes 2] [--items 6]

RUN has the checkpoint and the bundle of `shop-live` over the generated shop in DATA, whose log grows here. A follower
reads it every half second and publishes deltas; a server of several processes watches the bundle. An event is appended,
and the server asked over new connections, which the kernel spreads over its processes, until 20 answers in a row know
the item and give it another score than an id that nobody ever saw.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recmill.stages.bench.contest import header

_RECMILL = [sys.executable, "-m", "recmill"]
_IN_A_ROW, _PATIENCE_SECONDS = 20, 120.0
_NOBODY = "never-seen"


@contextmanager
def running(*arguments: object) -> Iterator[None]:
    process = subprocess.Popen([*_RECMILL, *map(str, arguments)], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def ask(port: int, item: str) -> dict[str, Any]:
    body = json.dumps({"user": "u1", "items": [item, _NOBODY]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/rank", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:  # one connection each
        found: dict[str, Any] = json.load(answer)
        return found


def has_own_row(port: int, item: str) -> bool:
    answer = ask(port, item)
    own, unknown = answer["scores"]
    return item not in answer.get("unknown_items", []) and own != unknown


def seconds_until_served(port: int, events: Path, item: str) -> float:
    """Since the event of a click on the item was written."""
    latest = int(events.read_text().rstrip().rpartition("\n")[2].partition(",")[0])
    with events.open("a") as log:
        log.write(f"{latest + 1},u1,{item},phone,1,9.99,1\n")
    began, in_a_row = time.monotonic(), 0
    known_since = began
    while in_a_row < _IN_A_ROW:
        if time.monotonic() - began > _PATIENCE_SECONDS:
            raise SystemExit(f"{item} has no row of its own after {_PATIENCE_SECONDS:g} s")
        if has_own_row(port, item):
            known_since = time.monotonic() if not in_a_row else known_since
            in_a_row += 1
        else:
            in_a_row = 0
            time.sleep(0.02)
    return known_since - began


def wait_until_ready(port: int) -> None:
    for _ in range(600):
        try:
            ask(port, _NOBODY)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit("The server did not start.")


def measure(run: Path, data: Path, processes: int, num_items: int) -> list[float]:
    port, bundle = free_port(), run / "bundle"
    serve = ["serve", "--bundle", bundle, "--http-port", port, "--processes", processes, "--threads", 1]
    follow = ["train", "shop-live", "--follow", data, "--publish", bundle, "--into", run / "checkpoint"]
    with running(*serve), running(*follow, "--every", 0.5, "--threads", 1, "--quiet"):
        wait_until_ready(port)
        seconds_until_served(port, data / "events.csv", f"warm-up-{time.time_ns()}")
        return [
            seconds_until_served(port, data / "events.csv", f"new-{number}-{time.time_ns()}")
            for number in range(num_items)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--items", type=int, default=6)
    parsed = parser.parse_args()
    seconds = measure(parsed.run, parsed.data, parsed.processes, parsed.items)
    found = {
        "processes": parsed.processes,
        "seconds": [round(one, 2) for one in seconds],
        "median": round(statistics.median(seconds), 2),
    }
    print(json.dumps({**header("new_id"), **found}, indent=1))


if __name__ == "__main__":
    main()
