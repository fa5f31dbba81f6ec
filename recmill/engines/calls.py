"""The state of one call on a cluster, in a folder that all machines share: finished parts, and errors.

Clusters lose the type of an error on its way, and report little progress; the folder does not.
"""

from __future__ import annotations

import builtins
import os
import shutil
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from recmill import errors
from recmill.errors import ArtifactError, RecmillError, ResourceError

_MAX_ATTEMPTS = 6
_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True)
class TaskCall:
    """The records that tasks of one call write. Small and picklable: it is sent with each of them."""

    folder: Path

    # on any machine

    def done(self, number: int) -> None:
        self._write(f"done/{number}", b"")

    @contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Record an error and re-raise it. A part whose process is lost again and again is an error."""
        try:
            self._begin(number)
            yield
        except Exception as error:
            self._write(f"failed/{number}-{uuid.uuid4().hex}", _record_of(error))
            raise

    def _begin(self, number: int) -> None:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                (self.folder / "begun" / f"{number}-{attempt}").touch(exist_ok=False)
                return
            except FileExistsError:
                continue
        raise ResourceError(
            f"Part {number} was begun {_MAX_ATTEMPTS} times, and each time its process or machine was lost. "
            "Mostly that is memory: lower --memory or --workers, or use larger machines."
        )

    def _write(self, name: str, content: bytes) -> None:
        aside = self.folder / f"{uuid.uuid4().hex}.partial"
        aside.write_bytes(content)
        os.replace(aside, self.folder / name)

    # on the caller

    def failure(self) -> Exception | None:
        """The error of the first part that failed."""
        records = sorted(
            (self.folder / "failed").iterdir(), key=lambda record: int(record.name.split("-")[0])
        )
        if not records:
            return None
        return _error_of(records[0].read_bytes())

    def _done_numbers(self) -> set[int]:
        return {int(name) for name in os.listdir(self.folder / "done")}

    @contextmanager
    def reported(self, num_parts: int, report: Callable[[int], None]) -> Iterator[None]:
        """Report parts as their records appear, and the remaining ones at the end."""
        reported: set[int] = set()
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
                for number in self._done_numbers() - reported:
                    reported.add(number)
                    report(number)

        thread = threading.Thread(target=look, name="cluster-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        for number in sorted(set(range(num_parts)) - reported):
            report(number)


@contextmanager
def new_call(work: Path) -> Iterator[TaskCall]:
    """A call whose folder is removed at its end."""
    call = TaskCall(work / "calls" / uuid.uuid4().hex)
    for name in ("begun", "done", "failed"):
        (call.folder / name).mkdir(parents=True)
    try:
        yield call
    finally:
        shutil.rmtree(call.folder, ignore_errors=True)


@dataclass(frozen=True)
class _ErrorRecord:
    """An error on disk, as JSON. Never as pickle: others may be able to write into the folder."""

    kind: str
    arguments: list[Any]
    message: str
    is_ours: bool
    trace: str


def _record_of(error: Exception) -> bytes:
    arguments = list(error.__reduce__()[1])
    trace = "".join(traceback.format_exception(error))
    record = _ErrorRecord(type(error).__name__, arguments, str(error), isinstance(error, RecmillError), trace)
    return msgspec.json.encode(record, enc_hook=str)


def _error_of(content: bytes) -> Exception:
    """The original error, if it is ours or Python's own; else its message."""
    try:
        record = msgspec.json.decode(content, type=_ErrorRecord)
    except msgspec.DecodeError as error:
        return ArtifactError(
            f"A task failed, and what it wrote about it is damaged: {error}. Run the command again."
        )
    said = RecmillError(record.message) if record.is_ours else RuntimeError(record.trace)
    raised = _made_again(record) or said
    raised.add_note(f"raised in a task:\n{record.trace}")
    return raised


def _made_again(record: _ErrorRecord) -> Exception | None:
    kind = getattr(errors, record.kind, None) or getattr(builtins, record.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        error = kind(*record.arguments)
    except TypeError:  # its constructor takes other arguments
        return None
    return error if str(error) == record.message else None
