"""One writer at a time: who holds a folder is named, dead holders are recognised, readers never wait."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from shop import FEW_STEPS, Shop

from recmill.artifacts.bundle.bundle import current_of
from recmill.artifacts.bundle.delta import deltas_folder
from recmill.artifacts.lock import LOCK, STALE_SECONDS, Holder, lock_folder
from recmill.errors import ArtifactError

HOLD = """
import sys, time
from pathlib import Path
from recmill.artifacts.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def elsewhere(folder: Path) -> Path:
    """The lock file of a process on another machine, which does not share flock with this one."""
    there = replace(Holder.this_process(), pid=4711, host="node-b", boot="another kernel")
    path = folder / LOCK
    path.write_text(json.dumps(asdict(there)))
    return path


def test_a_second_writer_learns_who_holds_the_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    expected = rf"process {holder.pid} on {platform.node()}, since 20\d\d-.* UTC\). Wait until it is done"
    with pytest.raises(ArtifactError, match=expected), lock_folder(tmp_path):
        pass
    assert holder.poll() is None


def test_a_killed_writer_leaves_no_lock_that_holds(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_only_the_lock_needed_goes_with_it(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "new"):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK]
    assert not (tmp_path / "new").exists()


def test_a_lock_of_another_machine_holds_while_it_is_touched(tmp_path: Path) -> None:
    path, is_over = elsewhere(tmp_path), threading.Event()

    def beat() -> None:
        while not is_over.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ArtifactError, match="process 4711 on node-b"), lock_folder(tmp_path):
            pass
    finally:
        is_over.set()
        thread.join()
    assert json.loads(path.read_text())["host"] == "node-b"


def test_a_stale_lock_of_another_machine_is_taken_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = elsewhere(tmp_path)
    long_ago = time.time() - 2 * STALE_SECONDS
    os.utime(path, (long_ago, long_ago))
    with caplog.at_level(logging.WARNING), lock_folder(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert "process 4711 on node-b" in caplog.text
    assert "no heartbeat for 120 s" in caplog.text


def test_a_writer_whose_lock_was_taken_over_stops(tmp_path: Path) -> None:
    """In a process of its own: it is stopped by a signal, and other tests may have left handlers."""
    (tmp_path / "theirs").write_text("{}")
    program = """
import os, sys, time
from pathlib import Path
from recmill.artifacts import lock
lock.HEARTBEAT_SECONDS = 0.05
folder = Path(sys.argv[1])
with lock.lock_folder(folder):
    os.rename(folder / "theirs", folder / lock.LOCK)
    time.sleep(30)  # until the heartbeat notices
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    stopped = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert "ArtifactError" in stopped.stderr
    assert "was taken over by another process" in stopped.stderr
    assert (tmp_path / LOCK).read_text() == "{}"


def test_of_many_that_start_at_once_one_writes_at_a_time(tmp_path: Path) -> None:
    """A dead process left its lock; sixteen threads in four processes want it."""
    elsewhere(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    program = """
import sys, threading
from pathlib import Path
from recmill.errors import ArtifactError
from recmill.artifacts.lock import lock_folder
folder, inside = Path(sys.argv[1]), Path(sys.argv[1]) / "inside"
def work():
    for _ in range(50):
        try:
            with lock_folder(folder):
                inside.mkdir()  # fails if another writer is here
                inside.rmdir()
        except ArtifactError:
            pass
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        errors = process.communicate()[1]
        assert "Traceback" not in errors, errors
    assert list(tmp_path.iterdir()) == []


def commands(shop: Shop, into: Path) -> dict[str, list[object]]:
    """A command line of every writer."""
    return {
        "generate": ["generate", "shop", "--rows", 100, "--into", into],
        "prepare": ["prepare", "quickstart", "--data", shop.log, "--into", into],
        "train": ["train", "quickstart", "--table", shop.table, "--into", into],
        "resume": ["train", "quickstart", "--table", shop.table, "--into", into, "--resume"],
        "tune": ["tune", "quickstart", "--table", shop.table, "--into", into, "--trials", 1],
        "export": ["export", "--checkpoint", shop.checkpoint, "--into", into],
        "score": ["score", "--checkpoint", shop.checkpoint, "--table", shop.table, "--into", into],
        "run": ["run", "quickstart", "--rows", 1000, "--into", into],
    }


@pytest.mark.parametrize(
    "writer", ["generate", "prepare", "train", "resume", "tune", "export", "score", "run"]
)
def test_every_writer_takes_the_lock(
    writer: str, shop: Shop, tmp_path: Path, holder: subprocess.Popen[str], recmill
) -> None:
    code, _, errors = recmill(*commands(shop, tmp_path)[writer])
    assert (code, f"process {holder.pid}" in errors) == (1, True), errors
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_second_follower_of_a_version_is_refused(shop: Shop, own_bundles: Path, recmill) -> None:
    places = ["--follow", shop.log, "--into", shop.checkpoint, "--publish", own_bundles]
    with lock_folder(deltas_folder(own_bundles, str(current_of(own_bundles)))):
        code, _, errors = recmill("train", "quickstart", *places, *FEW_STEPS)
    assert (code, "is being written by" in errors) == (1, True), errors
