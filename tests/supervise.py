"""Run a command; when it ends, however it ends, end every process that it started.

    python tests/supervise.py COMMAND ...

Linux gives an orphan to its nearest ancestor that is a "child subreaper", so no descendant gets away by starting a
session of its own. Two supervisors run, one inside the other: `kill -9` of one leaves the other to end the rest. They
also stop when the process that started them (make) is gone. After Ctrl-C or SIGTERM the command has seconds to end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

INNER = "--inner"
SECONDS_TO_END = 15.0
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: list[str]) -> int:
    if sys.platform != "linux":
        os.execvp(arguments[0], arguments)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPS, signal.SIGCHLD})
    if arguments[0] == INNER:
        os.setsid()  # a signal to the whole process group of the outer one does not reach this one
        code = wait_for(start(arguments[1:]), SECONDS_TO_END)
    else:
        code = wait_for(start([sys.executable, __file__, INNER, *arguments]), SECONDS_TO_END + 5)
    end_descendants()
    return code


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def start(command: list[str]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOPS, signal.SIGCHLD})
            os.execvp(command[0], command)
    finally:
        os._exit(127)


def wait_for(child: int, seconds_to_end: float) -> int:
    """The exit code of a child; told to stop, it is asked to, and given some seconds. A second signal ends the wait."""
    deadline = None
    while (code := reaped().get(child)) is None:
        left = 3600 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return 1
        came = signal.sigtimedwait({*STOPS, signal.SIGCHLD}, left)
        if came is not None and came.si_signo in STOPS:
            os.kill(child, signal.SIGINT)
            deadline = time.monotonic() + (seconds_to_end if deadline is None else 0)
    return code


def reaped() -> dict[int, int]:
    """Exit codes of the children that have ended."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            ended[found[0]] = 128 - code if code < 0 else code
    except ChildProcessError:
        pass
    return ended


def end_descendants() -> None:
    """Kill until there are none: a process may start another one before the signal reaches it."""
    while found := [*descendants(os.getpid())]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        reaped()


def descendants(ancestor: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if state != "Z" or int(parent) == ancestor:
            children.setdefault(int(parent), []).append(int(folder.name))
    waiting = [ancestor]
    while waiting:
        found = children.get(waiting.pop(), [])
        waiting += found
        yield from found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
