"""No process of a test run survives it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are supervised on Linux only"),
]

SUPERVISE = Path(__file__).parent / "supervise.py"
# A process in a session of its own, an orphan, and one that ignores what it is told.
FAMILY = """
setsid sleep 600 &
(sleep 600 &)
sh -c 'trap "" INT TERM HUP; touch "$0"; while :; do sleep 600; done' "$1" &
wait
"""
SECONDS = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


class Run:
    """A supervised command under a shell, which stands for make. A variable of its environment marks its processes."""

    def __init__(self, script: str, ready: Path) -> None:
        self.mark = f"TEST_RUN={uuid.uuid4().hex}\0".encode()
        environment = {**os.environ, "TEST_RUN": self.mark[9:-1].decode()}
        command = [sys.executable, str(SUPERVISE), "sh", "-c", script, "family", str(ready)]
        outside = ["sh", "-c", '"$@"; exit $?', "make"]
        self.make = subprocess.Popen([*outside, *command], env=environment, start_new_session=True)
        wait_until(lambda: ready.exists() or self.make.poll() is not None, "it did not start")

    def processes(self) -> dict[int, bytes]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes()
            except OSError:  # it has just ended, or is another user's
                continue
        return found

    def pid_of(self, *words: bytes) -> int:
        """The process with exactly one of these words after the supervisor's name."""
        (pid,) = [
            pid for pid, line in self.processes().items() if line.split(b"\0")[1 : 1 + len(words)] == [*words]
        ]
        return pid

    @property
    def outer(self) -> int:
        return self.pid_of(os.fsencode(SUPERVISE), b"sh")

    @property
    def inner(self) -> int:
        return self.pid_of(os.fsencode(SUPERVISE), b"--inner")

    @property
    def command(self) -> int:
        # Its children have the same command line until they have become what they run.
        return min(pid for pid, line in self.processes().items() if line.startswith(b"sh\0-c\0\nsetsid"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(FAMILY, tmp_path / "ready")
    yield started
    for pid in started.processes():
        os.kill(pid, signal.SIGKILL)
    started.make.wait()


KILLS = [
    ("group", signal.SIGINT),  # Ctrl-C in a terminal
    ("group", signal.SIGTERM),
    ("group", signal.SIGKILL),
    ("make", signal.SIGTERM),
    ("make", signal.SIGKILL),
    ("outer", signal.SIGTERM),
    ("outer", signal.SIGKILL),
    ("inner", signal.SIGKILL),
    ("command", signal.SIGKILL),
]


@pytest.mark.parametrize(("killed", "by"), KILLS, ids=lambda value: getattr(value, "name", value))
def test_nothing_is_left_of_a_run_that_is_killed(run: Run, killed: str, by: signal.Signals) -> None:
    assert len(run.processes()) >= 7
    if killed == "group":
        os.killpg(run.make.pid, by)
    else:
        os.kill(run.make.pid if killed == "make" else getattr(run, killed), by)
    wait_until(lambda: not run.processes(), f"left: {run.processes()}")


def test_nothing_is_left_of_a_run_that_ends_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    run = Run('setsid sleep 600 & (sleep 600 &) ; touch "$1"; exit 3', tmp_path / "ready")
    assert run.make.wait(SECONDS) == 3
    assert not run.processes()
