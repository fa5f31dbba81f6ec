"""What a server does with damaged versions and deltas, and whether changes reach a canary.

    python benchmarks/chaos_bundle.py --shop runs/quickstart [--tries 80] [--seed 1] [--only start,swap]

takes what `recmill run quickstart` left and turns one random bit of a random file around, of every kind of file in
turn: of the current version before a start, of one that becomes current, of one that is asked for by name, of a delta,
and of the current version of a running server of two processes, which are then killed. Each answer is compared with
what the whole version says. One line for each trial: tries, noticed (refused with a reason), harmless (the file says
the same), WRONG. It exits with 1 when an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from chaos import Outcome, Trials, run_trials

from recmill.artifacts.bundle.bundle import Bundle, current_of, publish_bundle, set_current
from recmill.artifacts.bundle.delta import Changes, TableChange, write_delta
from recmill.errors import ArtifactError
from recmill.stages.bench.serve.server import start_server
from recmill.stages.serve.config import ServeConfig
from recmill.stages.serve.messages import Recommend
from recmill.stages.serve.service import Service, user_fraction

USERS = [f"u{number}" for number in range(1, 9)]
Trial = Callable[[Path, random.Random, int], Counter[str]]


def another_version(bundles: Path, suffix: str) -> str:
    old = Bundle.open(bundles)
    version = f"{int(old.version[:10]) + 1:010d}-{suffix}"
    shutil.copytree(old.path, bundles / version)
    (bundles / version / "manifest.json").unlink()
    left_out = ("kind", "format", "files", "version")
    publish_bundle(
        bundles / version, {key: value for key, value in old.manifest.items() if key not in left_out}
    )
    return version


def a_delta(bundles: Path, version: str) -> Path:
    bundle = Bundle.open(bundles / version)
    rows = bundle.collection("deep").rows["item"]
    keys = np.arange(rows.num_rows)
    change = TableChange(keys, rows.lookup(keys) + np.float32(1), np.empty(0, np.int64))
    digest = bundle.manifest["recipe_digest"]
    graphs = {"rank": (bundle.path / "graphs" / "rank.onnx").read_bytes()}
    return write_delta(bundles, version, 1, digest, Changes({"deep/item": change}, graphs), {"log_end": 5.0})


def answers(service: Service) -> list[Any]:
    found = [service.recommend(Recommend(user=user, k=10)) for user in USERS]
    return [[(item.id, item.score) for item in answer.items] for answer in found]


class Flips:
    """Random bits of the files of a folder, each kind of file in turn; whole again behind the block."""

    def __init__(self, folder: Path, chance: random.Random, more: tuple[Path, ...] = ()) -> None:
        kinds: dict[str, list[Path]] = {}
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
            kinds.setdefault(f"{file.relative_to(folder).parts[0]} {file.name}", []).append(file)
        self.kinds = [*kinds.values(), *([file] for file in more)]
        self.chance = chance

    def __call__(self, tries: int) -> Iterator[Path]:
        for number in range(tries):
            file = self.chance.choice(self.kinds[number % len(self.kinds)])
            whole = file.read_bytes()
            damaged = bytearray(whole)
            damaged[self.chance.randrange(len(whole))] ^= 1 << self.chance.randrange(8)
            file.write_bytes(damaged)
            yield file
            file.write_bytes(whole)


def start(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """A damaged current version, or `current` itself, when a server starts."""
    expected = answers(Service(ServeConfig(bundle=bundles, watch=False)))
    new = another_version(bundles, "aaaaaaaa")
    set_current(bundles, new)
    found: Counter[str] = Counter()
    for _ in Flips(bundles / new, chance, (bundles / "current",))(tries):
        try:
            service = Service(ServeConfig(bundle=bundles), watch_seconds=60)
        except ArtifactError:
            found["noticed"] += 1
            continue
        noticed = bool(service.status().refused)
        found["WRONG" if answers(service) != expected else "noticed" if noticed else "harmless"] += 1
    return found


def swap(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """A damaged version becomes current while a server runs."""
    new = another_version(bundles, "bbbbbbbb")
    old, found = str(current_of(bundles)), Counter[str]()
    service = Service(ServeConfig(bundle=bundles), watch_seconds=60)
    expected = answers(service)
    set_current(bundles, new)
    for _ in Flips(bundles / new, chance)(tries):
        service.versions.poll()
        noticed = service.current.version == old
        found["WRONG" if answers(service) != expected else "noticed" if noticed else "harmless"] += 1
        if not noticed:
            service.versions.swap(bundles / old)
    return found


def named(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """A damaged version is asked for by name."""
    new, found = another_version(bundles, "cccccccc"), Counter[str]()
    expected = answers(Service(ServeConfig(bundle=bundles, watch=False)))
    for _ in Flips(bundles / new, chance)(tries):
        service = Service(ServeConfig(bundle=bundles, watch=False))
        try:
            first = service.recommend(Recommend(user=USERS[0], k=10, version=new))
            same = [(item.id, item.score) for item in first.items] == expected[0]
            found["harmless" if same else "WRONG"] += 1
        except ArtifactError:
            found["noticed"] += 1
    return found


def delta(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """A damaged delta, at the start and while a server runs."""
    path, found = a_delta(bundles, str(current_of(bundles))), Counter[str]()
    running = Service(ServeConfig(bundle=bundles), watch_seconds=60)
    before = answers(running)
    for _ in Flips(path, chance)(tries):
        for service in (running, Service(ServeConfig(bundle=bundles), watch_seconds=60)):
            service.versions.poll()
            if service.current.num_deltas:
                found["harmless"] += 1
                running = Service(ServeConfig(bundle=bundles), watch_seconds=60)
            else:
                found["WRONG" if answers(service) != before else "noticed"] += 1
    return found


def restart(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """The current version of a running server is damaged, and its processes are killed: none may serve it again."""
    old, new = str(current_of(bundles)), another_version(bundles, "dddddddd")
    set_current(bundles, new)
    found: Counter[str] = Counter()
    with start_server(bundles, ["--processes", "2", "--threads", "1"]) as server:
        for _ in Flips(bundles / new, chance)(max(1, tries // 20)):
            for process in children(int(server.pid or 0)):
                os.kill(process, signal.SIGKILL)
            wait_until(lambda: version_of(server.http) == old)
            served = {version_of(server.http) for _ in range(40)}
            found["noticed" if served == {old} else "WRONG"] += 1
    return found


def canary(bundles: Path, chance: random.Random, tries: int) -> Counter[str]:
    """Items are removed and added at a server of two processes: users of the canary see what all others see."""
    new, found = another_version(bundles, "eeeeeeee"), Counter[str]()
    users = [
        next(user for user in USERS if (user_fraction(user) < 0.5) == is_canary)
        for is_canary in (False, True)
    ]
    with start_server(bundles, ["--processes", "2", "--threads", "1", "--canary", f"{new}=50%"]) as server:
        for number in range(max(1, tries // 4)):
            gone = ask(server.http, "recommend", {"user": users[1], "k": 1})["items"][0]["id"]
            ask(server.http, "items/remove", {"items": [gone]})
            ask(server.http, "items", {"items": [{"id": f"added{number}", "values": {"category": "garden"}}]})
            time.sleep(1.5)  # three looks of the other process
            for user in users * 4:
                shown = ask(
                    server.http, "recommend", {"user": user, "k": 1000, "show_seen": True, "candidates": 5000}
                )
                ids = {item["id"] for item in shown["items"]}
                found["right" if gone not in ids and f"added{number}" in ids else "WRONG"] += 1
    return found


def ask(address: str | None, path: str, question: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{address}/v1/{path}", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def version_of(address: str | None) -> str:
    try:
        return str(ask(address, "recommend", {"user": "u1", "k": 1})["version"])
    except OSError:
        return "no answer"


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    ends_at = time.monotonic() + seconds
    while not is_so() and time.monotonic() < ends_at:
        time.sleep(0.2)


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True)
    return [int(line) for line in found.stdout.split()]


TRIALS: dict[str, Trial] = {
    "start": start,
    "swap": swap,
    "named": named,
    "delta": delta,
    "restart": restart,
    "canary": canary,
}


def trials_of(shop: Path, seed: int, tries: int) -> Trials:
    def bind(name: str) -> Callable[[], Iterable[Outcome]]:
        return lambda: [_outcome(name, shop, seed, tries)]

    return {name: bind(name) for name in TRIALS}


def _outcome(name: str, shop: Path, seed: int, tries: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        bundles = Path(shutil.copytree(shop / "bundle", Path(folder) / "bundles"))
        found = TRIALS[name](bundles, random.Random(seed), tries)
    wrong, words = found["WRONG"], "   ".join(f"{word} {count}" for word, count in found.most_common())
    return Outcome(f"{name:8s} tries {found.total():4d}   {words}   wrong {wrong}", found.total(), wrong, 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shop", type=Path, required=True, help="what `recmill run quickstart --into` was given"
    )
    parser.add_argument("--tries", type=int, default=80, help="flips of each trial (default: 80)")
    parser.add_argument("--seed", type=int, default=1, help="of files and bits (default: 1)")
    parser.add_argument("--only", default=",".join(TRIALS), help="names of trials with commas between")
    given = parser.parse_args()
    return run_trials(trials_of(given.shop, given.seed, given.tries), given.only)


if __name__ == "__main__":
    sys.exit(main())
