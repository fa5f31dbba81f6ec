"""Commands in processes of their own that need not import torch: forks of one that has imported it already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import TimeoutExpired

PRELOADED = [
    "recmill.stages.prepare.prepare",
    "recmill.stages.train.train",
    "recmill.stages.export.export",
    "recmill.stages.score.score",
    "onnxscript",
]


def fork_context() -> ForkServerContext:
    """Forks of a process that has our packages and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class ForkedCommand:
    """`recmill ARGUMENTS` in another process, with what tests use of a subprocess.Popen."""

    def __init__(self, *arguments: object) -> None:
        self._out, self._err = (Path(_temporary_file()) for _ in range(2))
        self._process = fork_context().Process(
            target=_run, args=([str(argument) for argument in arguments], self._out, self._err)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to standard output and to standard error until it ended."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise TimeoutExpired("recmill", timeout or 0)
        out, err = self._out.read_text(), self._err.read_text()
        self._out.unlink()
        self._err.unlink()
        return out, err


def _temporary_file() -> str:
    descriptor, path = tempfile.mkstemp(prefix="recmill-command-")
    os.close(descriptor)
    return path


def _run(arguments: list[str], out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    from recmill.cli import main

    sys.argv = ["recmill", *arguments]
    sys.exit(main(arguments))
