"""Joins rows with tables that no process can hold: each part fetches the rows for its values, and nothing else.

A query is sent, by the value's hash, to the bucket that holds that run of the table. Answers are written to files in
which each part finds its own lines, so that the rows themselves never move.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from recmill.artifacts.work import check_file, file_checksum, read_record, write_record
from recmill.engines.cluster import ClusterEngine, cut
from recmill.engines.engine import Answers, Frame, MapFunction, Partition, Question, StoredTable
from recmill.engines.spill import read_bucket, write_buckets
from recmill.features.kernels import ValueIndex, runs_of_values


def join(
    engine: ClusterEngine,
    frame: Frame,
    tables: Mapping[str, StoredTable],
    questions: Sequence[Question],
    function: Callable[[Answers], MapFunction],
    stage: str,
) -> Frame:
    """Map the batches with `function`, which also receives the rows of tables for a part's values.

    A query extracts, given the answers to a part's earlier queries, the distinct values by table from a batch.
    `stage` names the folder of the answers: those of an earlier run are reused.
    """
    asked = {"tables": sorted(tables), "questions": len(questions), "parts": len(frame.parts)}
    answers = AnswerFiles(engine.work / stage, {})
    record = answers.folder / "answers.json"
    earlier = read_record(record) if record.exists() else {}
    # With another memory bound, an earlier run may have kept other tables on disk.
    if earlier.get("asked") == asked:
        answers = replace(answers, files=earlier["files"])
        answers.check()
    else:
        answers.folder.mkdir(parents=True, exist_ok=True)
        for question in questions:
            answers = _ask(engine, frame, tables, question, answers, stage)
        write_record(record, {"asked": asked, "files": answers.files})
    joined = _Joined(frame.maps, answers, function)
    parts = tuple(JoinedPart(part, number, joined) for number, part in enumerate(frame.parts))
    return replace(frame, parts=parts, maps=())


@dataclass(frozen=True)
class AnswerFiles:
    """For each table, files with a bucket for each part, and their checksums."""

    folder: Path
    files: Mapping[str, dict[str, str]]

    def check(self) -> None:
        for files in self.files.values():
            for file, expected in files.items():
                check_file(self.folder / file, expected)

    def of_part(self, number: int) -> dict[str, pl.DataFrame]:
        return {
            # A part may have sent a value more than once.
            name: read_bucket([self.folder / file for file in files], number).unique("value")
            for name, files in self.files.items()
        }


@dataclass(frozen=True)
class _Joined:
    """The functions for the batches of every part."""

    maps: tuple[MapFunction, ...]
    answers: AnswerFiles
    function: Callable[[Answers], MapFunction]


@dataclass(frozen=True)
class JoinedPart:
    """A part whose rows are processed together with the answers to its queries."""

    part: Partition
    number: int
    joined: _Joined

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def read(self) -> Iterator[pl.DataFrame]:
        function = self.joined.function(self.joined.answers.of_part(self.number))
        for batch in self.part.read():
            for before in self.joined.maps:
                batch = before(batch)
            yield function(batch)


def _ask(
    engine: ClusterEngine,
    frame: Frame,
    tables: Mapping[str, StoredTable],
    question: Question,
    answers: AnswerFiles,
    stage: str,
) -> AnswerFiles:
    """The answers so far, and those to one more query."""
    scatter = _AskForPart(
        {name: table.num_runs for name, table in tables.items()},
        question,
        answers,
        engine.memory_per_task // 8,
    )
    gather = _AnswerBucket(dict(tables), answers.folder, len(frame.parts), engine.memory_per_task // 8)
    num_buckets = max(table.num_runs for table in tables.values())
    files = {name: dict(files) for name, files in answers.files.items()}
    for found in engine.exchange(frame, stage, scatter, num_buckets, gather):
        for name, more in found.items():
            files.setdefault(name, {}).update(more)
    return replace(answers, files=files)


@dataclass(frozen=True)
class _AskForPart:
    """Sends the distinct values of a part to the runs of the tables."""

    num_runs: Mapping[str, int]
    question: Question
    answers: AnswerFiles
    memory: int

    def __call__(self, number: int, batches: Iterator[pl.DataFrame]) -> Iterator[tuple[int, pl.DataFrame]]:
        values_of = self.question(self.answers.of_part(number))
        held: dict[str, list[pl.Series]] = {}
        num_bytes = 0
        for batch in batches:
            for name, values in values_of(batch).items():
                held.setdefault(name, []).append(values)
                num_bytes += int(values.estimated_size())
            if num_bytes > self.memory:
                yield from self._send(number, held)
                held, num_bytes = {}, 0
        yield from self._send(number, held)

    def _send(self, part: int, held: Mapping[str, list[pl.Series]]) -> Iterator[tuple[int, pl.DataFrame]]:
        for table, (name, num_runs) in enumerate(self.num_runs.items()):
            if name in held:
                values = pl.concat(held[name]).unique()
                constants = {"part": pl.lit(part, pl.Int32), "table": pl.lit(table, pl.Int32)}
                rows = values.alias("value").to_frame().with_columns(**constants)
                yield from cut(rows, runs_of_values(values, num_runs))


@dataclass(frozen=True)
class _AnswerBucket:
    """Looks values up in one run of each table; the run is read once, on the first value."""

    tables: Mapping[str, StoredTable]
    folder: Path
    num_parts: int
    memory: int

    def __call__(self, bucket: int, frames: Iterator[pl.DataFrame]) -> dict[str, dict[str, str]]:
        names = list(self.tables)
        known: dict[str, _KnownValues] = {}
        held: dict[str, list[pl.DataFrame]] = {}
        files: dict[str, dict[str, str]] = {}
        num_bytes = 0
        for frame in frames:
            name = names[frame["table"][0]]
            if name not in known:
                known[name] = _KnownValues(self.tables[name].run(bucket))
            found = known[name].answer(frame)
            held.setdefault(name, []).append(found)
            num_bytes += int(found.estimated_size())
            if num_bytes > self.memory:
                self._write(bucket, held, files)
                held, num_bytes = {}, 0
        self._write(bucket, held, files)
        return files

    def _write(
        self, bucket: int, held: Mapping[str, list[pl.DataFrame]], files: dict[str, dict[str, str]]
    ) -> None:
        for name, frames in held.items():
            # A task that runs twice leaves an unused file.
            unique = f"{os.getpid()}-{secrets.token_hex(4)}"
            file = f"{list(self.tables).index(name):04d}-{bucket:05d}-{unique}.arrow"
            rows = pl.concat(frames)
            parts = rows["part"].to_numpy()
            write_buckets(rows.drop("part"), parts, self.num_parts, self.folder / file)
            files.setdefault(name, {})[file] = file_checksum(self.folder / file)


class _KnownValues:
    """One run of a table, prepared for lookups."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self.rows = rows
        self.lookup = ValueIndex(rows["value"])

    def answer(self, asked: pl.DataFrame) -> pl.DataFrame:
        """The table's rows for the requested values, with the requesting part; nothing for unknown values."""
        places = self.lookup.find(asked["value"])
        parts = asked["part"].filter(places > 0)
        return self.rows[places.filter(places > 0) - 1].with_columns(part=parts)
