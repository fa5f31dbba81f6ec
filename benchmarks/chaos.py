"""What a server does while things break around it. Every answer is compared with what it should be.

    python benchmarks/chaos.py --shop runs/quickstart [--rate 50] [--seconds 20] [--soak 600] [--only redis,bundle.swap]

takes what `recmill run quickstart` left (log, checkpoint, bundle), loads real servers and prints one line for each
trial: answers right, wrong, refused, late (after their deadline) or lost (a connection that broke), and memory.
Where answers may change (roles that are gone, deltas that teach) only their size is looked at. The trials of
chaos_bundle.py (bundle), chaos_redis.py (store) and chaos_transport.py (transport) are among them. `--only` takes
trials and groups. It exits with 1 when an answer was wrong or a request lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle, publish_bundle, set_current
from recmill.artifacts.bundle.delta import Changes, TableChange, write_delta
from recmill.stages.bench.serve.arrivals import poisson_times
from recmill.stages.bench.serve.server import BenchServer, Usage, start_server
from recmill.stages.bench.serve.transports import GrpcTransport, precise_loop
from recmill.stages.serve import messages as m
from recmill.stages.serve.changes import Change
from recmill.stages.serve.messages import Recommend
from recmill.stages.serve.proto import recmill_pb2 as pb
from recmill.stages.serve.recommender import Recommender

DEADLINE = 1.0
NUM_USERS = 40
ANSWERED = ("right", "WRONG", "refused", "late")  # every other word is a broken connection or an error
K = 20


class Outcome(NamedTuple):
    """What a trial prints, and what must be 0 in it."""

    line: str
    tries: int
    wrong: int
    lost: int


Trials = Mapping[str, Callable[[], Iterable[Outcome]]]


def run_trials(trials: Trials, only: str) -> int:
    """Run trials by name or by group (what is before the dot); the exit code: 1 if anything was wrong or lost."""
    names = [name for wanted in only.split(",") for name in _matches(trials, wanted)]
    total = Counter[str]()
    for name in names:
        for outcome in trials[name]():
            print(outcome.line, flush=True)
            total.update(tries=outcome.tries, wrong=outcome.wrong, lost=outcome.lost)
    print(f"all   tries {total['tries']:,}   wrong {total['wrong']:,}   lost {total['lost']:,}", flush=True)
    return 1 if total["wrong"] or total["lost"] else 0


def _matches(trials: Trials, wanted: str) -> list[str]:
    found = [name for name in trials if wanted in ("all", name, name.partition(".")[0])]
    if not found:
        raise SystemExit(f'--only: there is no trial "{wanted}"; there are: {", ".join(trials)}.')
    return found


@dataclass
class Trial:
    """What became of the requests of one trial."""

    name: str
    found: Counter[str] = field(default_factory=Counter)
    degraded: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: list[float] = field(default_factory=list)

    def line(self) -> str:
        words = "   ".join(f"{name} {count:,}" for name, count in self.found.most_common())
        memory = f"   {self.memory[0]:,.0f} -> {self.memory[-1]:,.0f} MB" if self.memory else ""
        degraded = f"   degraded {self.degraded.total():,}" if self.degraded else ""
        return f"{self.name:12s} {words}   slowest {self.slowest * 1000:,.0f} ms{memory}{degraded}"

    def outcome(self, seen: str = "") -> Outcome:
        line = self.line() + (f"   {seen}" if seen else "")
        lost = sum(number for word, number in self.found.items() if word not in ANSWERED)
        return Outcome(line, self.found.total(), self.found["WRONG"], lost)


class Expected:
    """Answers of the bundle in process, for some users, before any of the changes and after each of them."""

    def __init__(self, bundles: Path, changes: Sequence[Change] = ()) -> None:
        recommender = Recommender(Bundle.open(bundles))
        users = recommender.bundle.users
        assert users is not None
        self.users = [str(user) for user in users.ids(np.arange(NUM_USERS))]
        self.states = [self._lists(recommender)]
        for change in changes:
            change.apply(recommender, in_store=False)
            self.states.append(self._lists(recommender))

    def _lists(self, recommender: Recommender) -> dict[str, dict[m.Id, float]]:
        return {
            user: {item.id: item.score for item in recommender.recommend(Recommend(user=user, k=K)).items}
            for user in self.users
        }

    @property
    def items(self) -> dict[str, dict[m.Id, float]]:
        """Before any change."""
        return self.states[0]

    def request(self, user: str) -> bytes:
        return pb.RecommendRequest(queries=[pb.Query(user=pb.Id(text=user))], k=K).SerializeToString()

    def is_right(self, user: str, body: bytes, degraded: Counter[str], exact: bool) -> bool:
        answer = pb.RecommendReply.FromString(body).answers[0]
        degraded.update(answer.degraded)
        found = {item.id.text: item.score for item in answer.items}
        if not exact or any(reason.startswith("rank") for reason in answer.degraded):
            return len(found) == K
        return any(_is_same(found, state[user]) for state in self.states)


def _is_same(found: Mapping[m.Id, float], wanted: Mapping[m.Id, float]) -> bool:
    return found.keys() == wanted.keys() and all(abs(found[id] - wanted[id]) < 1e-5 for id in found)


class Load(threading.Thread):
    """Requests at a rate, whatever becomes of them."""

    def __init__(
        self, trial: Trial, expected: Expected, address: str, times: list[float], exact: bool
    ) -> None:
        super().__init__(daemon=True)
        self.trial, self.expected, self.address = trial, expected, address
        self.times, self.exact = times, exact

    def run(self) -> None:
        loop = precise_loop()
        loop.run_until_complete(self._run())
        loop.close()

    async def _run(self) -> None:
        transport = GrpcTransport(self.address, "/recmill.v1.Recommender/Recommend", DEADLINE)
        await transport.open()
        loop, finished = asyncio.get_running_loop(), asyncio.Event()
        start, waiting = loop.time(), len(self.times)

        def send(number: int) -> None:
            user, sent = self.expected.users[number % NUM_USERS], loop.time()

            def done(problem: str, body: bytes) -> None:
                nonlocal waiting
                waiting -= 1
                self.trial.slowest = max(self.trial.slowest, loop.time() - sent)
                self.trial.found[problem or self._word(user, body)] += 1
                if not waiting:
                    finished.set()

            transport.send(self.expected.request(user), done)

        for number, at in enumerate(self.times):
            await asyncio.sleep(max(0.0, start + at - loop.time()))
            send(number)
        await finished.wait()
        transport.close()

    def _word(self, user: str, body: bytes) -> str:
        return "right" if self.expected.is_right(user, body, self.trial.degraded, self.exact) else "WRONG"


@dataclass
class Scene:
    """Where trials happen."""

    shop: Path
    bundles: Path
    expected: Expected
    rate: float
    seconds: float

    def load(
        self,
        name: str,
        server: BenchServer,
        trouble: Callable[[], None],
        exact: bool = True,
        rate: float | None = None,
    ) -> Trial:
        """Load a server while trouble is made."""
        trial = Trial(name)
        times = poisson_times(rate or self.rate, self.seconds, 1).tolist()
        load = Load(trial, self.expected, str(server.grpc), times, exact)
        watch = threading.Thread(target=_watch, args=(trial, server, load), daemon=True)
        load.start()
        watch.start()
        trouble()
        load.join()
        watch.join()
        return trial


def _watch(trial: Trial, server: BenchServer, load: Load) -> None:
    while load.is_alive():
        usage = Usage.of(server)
        if usage is not None:
            trial.memory.append(usage.resident_bytes / 1e6)
        load.join(timeout=2)


# trials


def nothing(scene: Scene) -> Iterator[Trial]:
    with start_server(scene.bundles) as server:
        yield scene.load("quiet", server, lambda: None)


def redis(scene: Scene) -> Iterator[Trial]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = 20_000 + os.getpid() % 10_000
        command = [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            folder,
            "--appendonly",
            "yes",
        ]
        url = f"redis://127.0.0.1:{port}"

        def start() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            time.sleep(1)
            return process

        process = start()
        stack.callback(lambda: process.kill())
        load = [
            sys.executable,
            "-m",
            "recmill",
            "load",
            "--bundle",
            str(scene.bundles),
            "--features",
            url,
            "--json",
        ]
        subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
        server = stack.enter_context(start_server(scene.bundles, ["--features", url]))

        def trouble() -> None:
            nonlocal process
            time.sleep(scene.seconds / 4)
            process.kill()
            process.wait()
            time.sleep(scene.seconds / 4)
            process = start()

        yield scene.load("redis", server, trouble)
        process.kill()


def roles(scene: Scene) -> Iterator[Trial]:
    with ExitStack() as stack:
        stages = {
            name: stack.enter_context(start_server(scene.bundles, ["--role", role]))
            for name, role in (
                ("recall", "recall"),
                ("features", "features"),
                ("rank", "rank"),
                ("rank2", "rank"),
            )
        }
        at = ["--recall-at", stages["recall"].grpc, "--features-at", stages["features"].grpc]
        at += ["--rank-at", f"{stages['rank'].grpc},{stages['rank2'].grpc}"]
        server = stack.enter_context(start_server(scene.bundles, ["--role", "recommend", *map(str, at)]))

        def trouble() -> None:
            time.sleep(scene.seconds / 4)
            os.kill(int(stages["rank"].pid or 0), signal.SIGKILL)
            time.sleep(scene.seconds / 4)
            os.kill(int(stages["features"].pid or 0), signal.SIGKILL)

        yield scene.load("roles", server, trouble, exact=False)


def delta(scene: Scene) -> Iterator[Trial]:
    with _copied(scene.bundles) as bundles, start_server(bundles) as server:
        bundle = Bundle.open(bundles)
        rows = bundle.collection("deep").rows["item"]
        keys = np.arange(rows.num_rows)
        change = Changes({"deep/item": TableChange(keys, rows.lookup(keys), np.empty(0, np.int64))})

        def trouble() -> None:
            for number in range(1, 6):
                time.sleep(scene.seconds / 8)
                path = write_delta(
                    bundles, bundle.version, number, bundle.manifest["recipe_digest"], change, {}
                )
                if number == 2:
                    file = next(path.rglob("rows.npy"))
                    file.write_bytes(file.read_bytes()[:-9])

        yield scene.load("delta", server, trouble)


def swap(scene: Scene) -> Iterator[Trial]:
    with _copied(scene.bundles) as bundles, start_server(bundles) as server:
        old = Bundle.open(bundles)
        other = f"{int(old.version[:10]) + 1:010d}-00000000"
        shutil.copytree(old.path, bundles / other)
        (bundles / other / "manifest.json").unlink()
        kept = {
            name: value for name, value in old.manifest.items() if name not in ("kind", "format", "files")
        }
        publish_bundle(bundles / other, {**kept, "version": other})

        def trouble() -> None:
            for number in range(20):
                time.sleep(scene.seconds / 21)
                set_current(bundles, (other, old.version)[number % 2])

        yield scene.load("swap", server, trouble)


def overload(scene: Scene) -> Iterator[Trial]:
    for flags in (["--threads", "1"], ["--processes", "2", "--threads", "1"]):
        with start_server(scene.bundles, flags) as server:
            trial = scene.load("overload", server, lambda: None, rate=8 * scene.rate)
            trial.name = "overload" if len(flags) == 2 else "overload 2"
            yield trial


def follow(scene: Scene) -> Iterator[Trial]:
    """A new user and a new item in appended lines of the log: how long until they are served."""
    with _copied(scene.bundles) as bundles, tempfile.TemporaryDirectory() as folder:
        log = Path(shutil.copytree(scene.shop / "log", Path(folder) / "log"))
        command = [
            sys.executable,
            "-m",
            "recmill",
            "train",
            "quickstart",
            "--follow",
            str(log),
            "--publish",
            str(bundles),
        ]
        command += ["--into", str(scene.shop / "checkpoint"), "--every", "2", "--threads", "1"]
        with (
            start_server(bundles) as server,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer,
        ):
            assert trainer.stdout is not None
            trainer.stdout.readline()
            time.sleep(15)  # it traces its graphs first
            waits: list[float] = []

            def trouble() -> None:
                for number in range(4):
                    time.sleep(1)
                    waits.append(_until_served(server, log, f"newcomer{number}", f"novelty{number}"))

            trial = scene.load("follow", server, trouble, exact=False)
            trial.name = f"follow {max(waits):.1f} s"
            trial.found["lost"] += waits.count(float("inf"))
            trainer.send_signal(signal.SIGTERM)
            yield trial


def _until_served(server: BenchServer, log: Path, user: str, item: str) -> float:
    import urllib.request

    with open(log / "items.csv", "a") as file:
        file.write(f"{item},garden,Pure Birch,9.5,A new thing\n")
    with open(log / "events.csv", "a") as file:
        file.write(
            f"{int(time.time())},{user},i1,phone,1,9.5,1\n{int(time.time())},{user},{item},phone,2,9.5,1\n"
        )
    began = time.monotonic()
    questions = (("features", {"user": user}), ("recommend", {"user": "u1", "only": [item], "k": 1}))
    while time.monotonic() - began < 60:
        answers = []
        for path, question in questions:
            request = urllib.request.Request(
                f"http://{server.http}/v1/{path}",
                json.dumps(question).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                answers.append(json.load(reply))
        if answers[0]["user"]["known"] and answers[1]["items"]:
            return time.monotonic() - began
        time.sleep(0.1)
    return float("inf")


TRIALS = {
    "quiet": nothing,
    "redis": redis,
    "roles": roles,
    "delta": delta,
    "swap": swap,
    "overload": overload,
    "follow": follow,
}


@contextmanager
def _copied(bundles: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(bundles, Path(folder) / "bundles"))


def trials_of(scene: Scene) -> Trials:
    def bind(trial: Callable[[Scene], Iterator[Trial]]) -> Callable[[], Iterable[Outcome]]:
        return lambda: (found.outcome() for found in trial(scene))

    return {name: bind(trial) for name, trial in TRIALS.items()}


def soak(scene: Scene) -> Iterator[Outcome]:
    """One long quiet trial, and its memory over time."""
    for trial in nothing(scene):
        trial.name = "soak"
        yield trial.outcome()
        print(
            "soak MB   "
            + " ".join(f"{value:.0f}" for value in trial.memory[:: max(1, len(trial.memory) // 20)])
        )


def all_trials(scene: Scene, given: Any) -> Trials:
    """Our own trials by name, those of the other files as group.name."""
    import chaos_bundle
    import chaos_redis
    import chaos_transport

    groups: dict[str, Trials] = {
        "bundle": chaos_bundle.trials_of(given.shop, given.seed, given.tries),
        "store": chaos_redis.trials_of(scene),
        "transport": chaos_transport.trials_of(
            chaos_transport.Scene(scene.bundles, scene.expected, given.connections, given.seconds, given.rate)
        ),
    }
    grouped = {f"{group}.{name}": trial for group, found in groups.items() for name, trial in found.items()}
    return {**trials_of(scene), **grouped}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shop", type=Path, required=True, help="what `recmill run quickstart --into` was given"
    )
    parser.add_argument("--rate", type=float, default=50, help="requests a second (default: 50)")
    parser.add_argument("--seconds", type=float, default=20, help="of each trial (default: 20)")
    parser.add_argument(
        "--soak", type=float, default=0, help="seconds of one long quiet trial (default: none)"
    )
    parser.add_argument("--tries", type=int, default=80, help="flips of each trial of bundles (default: 80)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the files and bits that are flipped (default: 1)"
    )
    parser.add_argument("--connections", type=int, default=2_000, help="of a flood (default: 2000)")
    parser.add_argument(
        "--only", default="all", help="trials and groups with commas between (default: everything)"
    )
    given = parser.parse_args()
    bundles = given.shop / "bundle"
    scene = Scene(given.shop, bundles, Expected(bundles), given.rate, given.seconds)
    code = run_trials(all_trials(scene, given), given.only)
    if given.soak:
        code |= run_trials({"soak": lambda: soak(replace(scene, seconds=given.soak))}, "soak")
    return code


if __name__ == "__main__":
    sys.exit(main())
