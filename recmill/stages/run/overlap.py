"""Two stages at once: a Table is prepared in a process of its own, on any engine, while training follows its shards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from recmill.dataset.partial_table import Heartbeat, announced
from recmill.errors import RecmillError
from recmill.recipe.recipe import Recipe
from recmill.reporting.progress import Progress, ProgressBar
from recmill.stages.prepare import prepare as preparation
from recmill.stages.prepare.config import PrepareConfig

T = TypeVar("T")

_SECONDS_TO_END = 20.0


class Preparing:
    """A Table on its way. Ends with the context that it was begun in."""

    def __init__(self, recipe: Recipe, data: str, into: Path, options: PrepareConfig) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.note = Heartbeat(into)
        self.note.say("starting")  # before anyone looks
        self._result: Any = None
        receiving, sending = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=_prepare, args=(recipe, data, into, options, sending))
        self._process.start()
        sending.close()
        self._thread = threading.Thread(target=self._listen, args=(receiving,), name="preparing", daemon=True)
        self._thread.start()

    def _listen(self, receiving: Connection) -> None:
        """Hear how it ended; a process that was killed says nothing, so that we say it for it."""
        try:
            self._result = receiving.recv()
        except EOFError:
            self._process.join()
            self._result = RecmillError(
                f"prepare was killed (exit code {self._process.exitcode}). Run the same command again; it resumes."
            )
            self.note.say("failed", str(self._result))
        self.seconds = time.perf_counter() - self.started

    def result(self) -> preparation.PrepareResult:
        """What prepare made, when it is done, or its error."""
        self._thread.join()
        if isinstance(self._result, BaseException):
            raise self._result
        assert isinstance(self._result, preparation.PrepareResult)
        return self._result

    def followed_by(self, work: Callable[[], T]) -> T:
        """Do something that follows the Table. When that fails because prepare did, prepare's error is the one."""
        try:
            return work()
        except RecmillError:
            if self.note.read().get("state") == "failed":
                self.result()
            raise

    def end(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_SECONDS_TO_END)
            self._process.kill()
        self._process.join()


@contextmanager
def preparing(recipe: Recipe, data: str, into: Path, options: PrepareConfig) -> Iterator[Preparing]:
    """Prepare a Table meanwhile. Left early, it stops; the same command goes on with it later."""
    job = Preparing(recipe, data, into, options)
    try:
        yield job
    finally:
        job.end()


# the process that prepares


def _prepare(recipe: Recipe, data: str, into: Path, options: PrepareConfig, sending: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        with announced(into) as note:
            found: Any = preparation.prepare(recipe, data, into, options, _Noted(note))
    except SystemExit:
        return  # nobody listens
    except Exception as error:
        found = error
    sending.send(found)


def _stop(*signal_and_frame: object) -> None:
    """As an error, so that clusters are left in order."""
    sys.exit("prepare was stopped")


def _end_with_parent(parent: int) -> None:
    """Nobody waits for the Table any more, and whoever starts again must not find two writers."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class _Noted(Progress):
    """Shows nothing. With the first stage, what lies in the Table's folder is of this job: readers may look."""

    def __init__(self, note: Heartbeat) -> None:
        super().__init__(quiet=True)
        self.note = note

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[ProgressBar]:
        self.note.say("writing")
        with super().stage(name, total) as stage:
            yield stage
