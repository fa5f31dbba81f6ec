"""A Table that is still being written: its Plan, and its training rows in Table order as their shards appear.

The writer keeps a heartbeat file with its state beside the Table; readers wait as long as the writer is alive.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from recmill.artifacts.manifest import WORK, is_published, write_whole
from recmill.artifacts.work import read_record
from recmill.dataset.batch import Batch, Layout, collate
from recmill.dataset.loader import Batches, batches_from, permuted, read_rows
from recmill.dataset.prefetch import prefetch
from recmill.dataset.schedule import Cursor, UnitRows
from recmill.dataset.shard import ShardFile
from recmill.dataset.table import Table
from recmill.errors import ArtifactError
from recmill.features.plan import Plan

T = TypeVar("T")

SECONDS_BETWEEN_SIGNS = 2.0
DEFAULT_PATIENCE = 600.0  # seconds without any sign of a writer that has no heartbeat file
_PATIENCE_WITH_NOTE = 120.0  # network file systems may show a change late
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


def _time_of(path: Path) -> int | None:
    """Modification time of a file in nanoseconds; None when it does not exist."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


# the writer's side


class Heartbeat:
    """The file `<table>.writer` with the state of a Table's writer. A live writer touches it at intervals."""

    def __init__(self, table: Path) -> None:
        self.path = table.with_name(table.name + ".writer")

    def say(self, state: str, reason: str = "") -> None:
        """Write the state: starting, writing or failed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"state": state, "reason": reason}))

    def read(self) -> dict[str, str]:
        """The state; empty without a heartbeat file."""
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}

    def time(self) -> int | None:
        return _time_of(self.path)

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def announced(table: Path) -> Iterator[Heartbeat]:
    """Keep a heartbeat file while the Table is written. It is removed on success, and holds the reason of a failure."""
    note = Heartbeat(table)
    note.say("starting")
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(SECONDS_BETWEEN_SIGNS):
            with suppress(FileNotFoundError):
                os.utime(note.path)

    thread = threading.Thread(target=touch, name="writer-note", daemon=True)
    thread.start()
    try:
        yield note
    except BaseException as error:
        note.say("failed", str(error) or type(error).__name__)
        raise
    else:
        note.forget()
    finally:
        is_over.set()
        thread.join()


# the reader's side


class PartialTable:
    """The finished rows of a Table. Missing rows are waited for as long as the writer is alive."""

    def __init__(self, path: Path, patience_seconds: float | None = None) -> None:
        self.path = path
        self.work = path / WORK
        self.note = Heartbeat(path)
        self.patience_seconds = patience_seconds
        self.job, self.plan = self._wait(self._find_plan)

    def is_finished(self) -> bool:
        return is_published(self.path)

    @cached_property
    def finished(self) -> Table:
        """The whole Table, once it is published."""
        table: Table = self._wait(self._find_table)
        if table.manifest["job"] != self.job:
            raise self._began_anew()
        if self.plan.num_rows:
            self.check_rows(table.num_rows("train") == self.plan.num_rows)
        return table

    def check_rows(self, are_right: bool) -> None:
        """Check that the Table has as many training rows as fitting counted, since training relied on them."""
        if not are_right:
            raise ArtifactError(
                f"Table {self.path} has other training rows than the {self.plan.num_rows:,} that its features were "
                "fitted on: the log changed meanwhile. Delete the Table and prepare it again."
            )

    def shards(self, is_over: threading.Event) -> Iterator[ShardFile]:
        """Complete shards of training rows, in order. `is_over` ends the waiting."""
        given: list[ShardFile] = []
        for number in itertools.count():
            found = self._wait(partial(self._find_part, number, "train"), is_over)
            if not isinstance(found, list):
                break
            given += found
            yield from found
        if not is_over.is_set():
            files = self.finished.files("train")
            if files[: len(given)] != given:
                raise self._began_anew()
            yield from files[len(given) :]

    def held_out(self, split: str) -> Table:
        """A Table of the eval or test rows alone, as soon as they exist; of all rows, if they come together."""
        self._wait(lambda: self.is_finished() or self._num_held_out_parts() or None)
        records: list[dict[str, Any]] = []
        first = self._num_held_out_parts()
        for number in range(first, 2 * first):
            found = self._wait(partial(self._find_records, number))
            if isinstance(found, list):
                records += [record for record in found if record["split"] == split]
        if self.is_finished():
            return self.finished
        columns = [asdict(column) for column in self.plan.columns()]
        return Table(self.path, {"shards": records, "columns": columns})

    def _num_held_out_parts(self) -> int:
        """The number of parts that hold only held-out rows; 0 while it is unknown, or without such parts.

        They are written first, and their numbers follow those of the parts of training rows.
        """
        try:
            return int(read_record(self.work / "held-out-parquet.buckets"))
        except FileNotFoundError:
            return 0

    def _find_plan(self) -> tuple[str, Plan] | None:
        if self.is_finished():
            table = Table.open(self.path)
            return str(table.manifest["job"]), table.plan
        if self._note().get("state") == "starting":  # what is there may belong to another job
            return None
        try:
            return self._job(), Plan.read(self.work / "plan")
        except FileNotFoundError:
            return None
        except ArtifactError:
            if (self.work / "plan" / "plan.json").exists():
                raise
            return None  # not written yet, or about to be published

    def _find_table(self) -> Table | None:
        return Table.open(self.path) if self.is_finished() else None

    def _find_part(self, number: int, split: str) -> list[ShardFile] | Literal["all"] | None:
        """Shards of a part of the Table; "all" when it is finished."""
        found = self._find_records(number)
        if not isinstance(found, list):
            return found
        return [ShardFile.of(self.path, record) for record in found if record["split"] == split]

    def _find_records(self, number: int) -> list[dict[str, Any]] | Literal["all"] | None:
        if self.is_finished():
            return "all"
        try:
            if self._job() != self.job:
                raise self._began_anew()
            return list(read_record(self.work / "done" / f"parquet-{number:06d}.json"))
        except FileNotFoundError:
            return None

    def _note(self) -> dict[str, str]:
        """The writer's state.

        A heartbeat file from before the work was opened belongs to an earlier writer and is ignored.
        """
        said_at, opened_at = self.note.time(), _time_of(self.work / "job")
        is_old = said_at is not None and opened_at is not None and said_at < opened_at
        return {} if is_old else self.note.read()

    def _job(self) -> str:
        return (self.work / "job").read_text(errors="replace")

    def _began_anew(self) -> ArtifactError:
        return ArtifactError(
            f"Table {self.path} is prepared anew, from another log or recipe than when training began. "
            "Train again, into another --into."
        )

    def _wait(self, find: Callable[[], T | None], is_over: threading.Event | None = None) -> T:
        """Poll `find` until it returns something; less often as time passes."""
        is_over = is_over or threading.Event()
        pause, seen_at = _SHORTEST_PAUSE, time.monotonic()
        sign: tuple[Any, ...] = ()
        while (found := find()) is None and not is_over.wait(pause):
            pause = min(2 * pause, _LONGEST_PAUSE)
            before, sign = sign, self._sign()
            if sign != before:
                seen_at = time.monotonic()
            self._check_writer(time.monotonic() - seen_at)
        return found  # type: ignore[return-value]  # None only for those who said that it is over

    def _sign(self) -> tuple[Any, ...]:
        """A value that changes as long as the writer is alive."""
        done = self.work / "done"
        return self.note.time(), len(os.listdir(done)) if done.is_dir() else None, self.is_finished()

    def _check_writer(self, silent_seconds: float) -> None:
        note = self._note()
        if note.get("state") == "failed":
            raise ArtifactError(f"Table {self.path} was not finished: {note['reason']}")
        patience = self.patience_seconds or (_PATIENCE_WITH_NOTE if note else DEFAULT_PATIENCE)
        if silent_seconds > patience:
            who = "Its writer was killed, or its machine is gone" if note else "Is `recmill prepare` running?"
            raise ArtifactError(
                f"Table {self.path} is not finished and did not grow for {silent_seconds:,.0f} s. {who} "
                "Prepare it again and train again with --resume; both go on from where they were."
            )


class PartialTableBatches:
    """Batches with the same rows and cursors as `Batches` of the finished Table.

    The first epoch is read while the Table grows. Fitting has counted its rows.
    """

    def __init__(
        self,
        table: PartialTable,
        batch_size: int,
        features: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> None:
        self.table = table
        self.seed = seed
        self.batch_size = batch_size
        self.features = features
        self.layout = Layout.of(table.plan.columns(), features)
        self.num_rows = table.plan.num_rows
        self._known = UnitRows(total=self.num_rows)

    @property
    def units(self) -> Sequence[object]:
        """The units known so far."""
        return self._finished().units if self.table.is_finished() else self._known.ends

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def read(self, cursor: Cursor = Cursor()) -> Iterator[tuple[Batch, Cursor]]:  # noqa: B008, frozen
        """Read one epoch from the cursor: each batch with the cursor after it."""
        if cursor.epoch or self.table.is_finished():
            return self._finished().read(cursor)
        return self._read_as_it_grows(cursor)

    def _finished(self) -> Batches:
        return Batches(self.table.finished, self.batch_size, "train", self.features, self.seed)

    def _read_as_it_grows(self, cursor: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        units = self._known = UnitRows(total=self.num_rows)
        is_over = threading.Event()
        chunks = prefetch(
            self._chunks(cursor, units, is_over)
        )  # held, so that it ends after `is_over` is set
        try:
            yield from batches_from(chunks, units, self.batch_size, epoch=0)
        finally:
            is_over.set()  # otherwise the prefetching thread would wait for rows that nobody needs

    def _chunks(
        self, cursor: Cursor, units: UnitRows, is_over: threading.Event
    ) -> Iterator[tuple[Batch, int]]:
        """Rows of each unit from the cursor, with the number of rows up to its end."""
        for shard in self.table.shards(is_over):
            for group, num_rows in enumerate(shard.group_rows()):
                unit = len(units.ends)
                units.add(num_rows)
                if unit >= cursor.unit:
                    rows = read_rows(shard, group, self.layout)
                    if self.seed is not None:
                        rows = permuted(rows, self.seed, epoch=0, unit=unit)
                    rows = rows[cursor.row if unit == cursor.unit else 0 :]
                    yield collate(rows, self.layout), units.ends[unit]
            num_known = units.begin(len(units.ends))
            self.table.check_rows(num_known <= self.num_rows)
            if num_known == self.num_rows:
                return
