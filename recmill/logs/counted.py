"""A log that was counted before training: its units, their rows per split, and its bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import polars as pl

from recmill.dataset.positions import offset_of, position
from recmill.features.kernels import Counter, CountOptions
from recmill.logs.base import LogFiles, LogRange, open_source
from recmill.logs.gzip_text import Mark
from recmill.logs.reduced import ReducedRows
from recmill.logs.rows import RowFunction, row_functions
from recmill.logs.scan import note_rows, scan
from recmill.logs.splits import (
    SplitFunction,
    all_train,
    by_positions,
    by_time,
    held_out_positions,
    last_rows,
    last_rows_of_each,
    needs_counts,
    random_rows,
    rows_of_splits,
    split_function,
    time_cuts,
)
from recmill.logs.tally import Tally
from recmill.logs.text import TextSource
from recmill.recipe.recipe import POSITION, SPLIT, SPLITS, Holdout, Recipe
from recmill.reporting.machine import available_cores

P = TypeVar("P")
T = TypeVar("T")
Rows = np.ndarray[Any, np.dtype[np.int64]]  # per split
# one unit; or the same range of offsets of several files, whose rows are interleaved
Piece = tuple[LogRange, ...]

# Large enough to amortise the fixed cost of a call, small enough to be prefetched.
PIECE_BYTES = 4 << 20


_BATCHES_OF_PIECE = 8  # batches per unit of a surveyed file
_MOST_MARKS = 1 << 14  # limit over all gzip files of a log: 13 KB each


@dataclass
class SurveyedPiece:
    """What the survey of an unsplittable file found between two rows."""

    file_index: int
    start: int
    has_splits: bool  # if not, `rows` counts all rows as the first split
    end: int = 0
    tally: Tally = field(default_factory=Tally)
    rows: Rows = field(default_factory=lambda: np.zeros(len(SPLITS), np.int64))

    @property
    def unit(self) -> LogRange:
        return LogRange(self.file_index, self.start, self.end)


class Each(Protocol):
    """A parallel map over units: on threads of this process, or on other machines, which receive function and units."""

    def __call__(self, function: Callable[[P], T], parts: Sequence[P]) -> Iterator[T]:
        """The results of the function for all units, in order."""


class CountedLog:
    """The rows of a log in the splits that `prepare` would assign, without features. Picklable, with nothing open.

    Opening reads the log once to count it, and once before that when the split depends on the values of all rows;
    `each` runs this work, on `num_workers` threads by default. `keep` may drop rows after all other operations.
    Unsplittable files (gzip, zstd, quoted, UTF-16) are cut into units by the pass that counts them.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: str,
        max_bad: float,
        num_workers: int | None = None,
        keep: RowFunction | None = None,
        memory: int = 2 << 30,
        each: Each | None = None,
    ) -> None:
        self.source = open_source(recipe.log, data)
        self.functions = row_functions(
            recipe, data, memory, "Run `recmill prepare` and train from its Table instead.", max_bad
        )
        each = each or partial(on_threads, num_workers or available_cores())
        self.keep = keep
        self._surveys: dict[LogRange, SurveyedPiece] = {}
        units = self._survey(recipe.split, each)
        self.pieces: list[Piece] = [(unit,) for unit in units]
        split = self._split_function(units, recipe.split, each)
        self.functions += [split, *([keep] if keep else [])]
        self.pieces, self.notes = _in_order(self.source, self.pieces, recipe.table.order)
        self.rows, self.tally = self._count(split, each)
        self._surveys = {}  # keeps the pickled log small
        self.source.check_unchanged()
        self.tally.check(self.source, max_bad)

    def num_rows(self, split: str) -> int:
        return int(self.rows[:, SPLITS.index(split)].sum())

    def read(self, piece: Piece, tally: Tally | None = None) -> Iterator[pl.DataFrame]:
        """A unit's valid rows, in order, after all row functions; bad ones are counted in the tally."""
        frames = scan(self.source, piece, tally if tally is not None else Tally(), 2 * PIECE_BYTES)
        for frame in frames if len(piece) == 1 else _taking_turns(frames):
            for function in self.functions:
                frame = function(frame)
            if frame.height:
                yield frame

    def _survey(self, split: Holdout | None, each: Each) -> list[LogRange]:
        """All units of the log; for unsplittable files, those that a pass over the file determines."""
        units, source = self.source.units(target_bytes=PIECE_BYTES), self.source
        if not isinstance(source, TextSource):
            return units
        whole = [unit for unit in units if not source.can_cut(source.files[unit.file_index])]
        function = None if needs_counts(split) else split_function(source, units, split, lambda units: [])
        spacing = max(PIECE_BYTES * 3 // 4, sum(map(source.text_bytes, whole)) // _MOST_MARKS)
        surveys = dict(zip(whole, each(partial(self._survey_file, function, spacing), whole), strict=True))
        for unit, (pieces, marks) in surveys.items():
            source.cut_at_rows(unit.file_index, marks)
            self._surveys |= {piece.unit: piece for piece in pieces}
        return [
            cut
            for unit in units
            for cut in ([p.unit for p in surveys[unit][0]] if unit in surveys else [unit])
        ]

    def _survey_file(
        self, split: SplitFunction | None, spacing: int, unit: LogRange
    ) -> tuple[list[SurveyedPiece], list[Mark]]:
        """Survey an unsplittable file: its units with their row counts, and marks to start reading at any of them."""
        assert isinstance(self.source, TextSource)
        batch_bytes = max(1, PIECE_BYTES // _BATCHES_OF_PIECE)
        piece = SurveyedPiece(unit.file_index, unit.start, split is not None)
        pieces, marks = list[SurveyedPiece](), list[Mark]()
        for batch, end, found in self.source.survey(unit, batch_bytes, spacing):
            note_rows(batch, piece.tally)
            piece.rows += self._rows_of_splits(batch.frame, split or all_train)
            piece.end = end
            marks += found
            if (
                found or end - piece.start > PIECE_BYTES - batch_bytes
            ):  # little is read between a mark and a unit
                pieces.append(piece)
                piece = SurveyedPiece(unit.file_index, end, split is not None)
        return [*pieces, piece] if piece.tally.rows else pieces, marks

    def _rows_of_splits(self, frame: pl.DataFrame, split: SplitFunction) -> Rows:
        """Number of rows of each split in a frame, after all row functions."""
        for function in (*self.functions, split, *([self.keep] if self.keep else [])):
            if frame.height:
                frame = function(frame)
        return _count_splits(frame) if frame.height else np.zeros(len(SPLITS), np.int64)

    def _count(self, split: SplitFunction, each: Each) -> tuple[Rows, Tally]:
        """Rows of each unit and split, and the bad rows of all."""
        known = [self._known_rows(split, piece) for piece in self.pieces]
        counted = each(
            self._count_piece, [piece for piece, rows in zip(self.pieces, known, strict=True) if rows is None]
        )
        total = Tally()
        for number, found in enumerate(known):
            known[number] = found or next(counted)
        for _, tally in filter(None, known):
            total.add(tally)
        return np.array([rows for rows, _ in filter(None, known)]).reshape(-1, len(SPLITS)), total

    def _known_rows(self, split: SplitFunction, piece: Piece) -> tuple[Rows, Tally] | None:
        """A unit's rows per split from the survey, if it determined them."""
        survey = self._surveys.get(piece[0])
        if survey is None:
            return None
        if survey.has_splits:
            return survey.rows, survey.tally
        if self.keep is not None:
            return None
        first, last = (position(survey.file_index, offset) for offset in (survey.start, survey.end - 1))
        rows = rows_of_splits(split, first, last, int(survey.rows.sum()))
        return None if rows is None else (np.array(rows), survey.tally)

    def _count_piece(self, piece: Piece) -> tuple[Rows, Tally]:
        tally, rows = Tally(), np.zeros(len(SPLITS), np.int64)
        for frame in self.read(piece, tally):
            rows += _count_splits(frame)
        return rows, tally

    def _split_function(self, units: list[LogRange], split: Holdout | None, each: Each) -> SplitFunction:
        def count_rows(units: list[LogRange]) -> list[int]:
            counts = each(self.source.count_rows, [unit for unit in units if unit not in self._surveys])
            return [
                self._surveys[unit].tally.rows if unit in self._surveys else next(counts) for unit in units
            ]

        function = split_function(self.source, units, split, count_rows)
        if function is not None:
            return function
        assert split is not None
        by = str(split.column)
        if split.by == "time":
            return partial(by_time, by, self._time_cuts(by, split, each))
        if split.by == "random":
            return self._by_groups(partial(_select, [by, POSITION]), partial(random_rows, split), each)
        order = str(split.order)
        return self._by_groups(partial(last_rows_of_each, by, order), partial(last_rows, by, order), each)

    def _time_cuts(self, column: str, split: Holdout, each: Each) -> tuple[float, float]:
        counter = Counter(CountOptions(is_text=False))
        for counts in each(partial(self._count_times, column), self.pieces):
            counter.add_counts(counts["value"], counts["count"], None)
        counts = counter.drain()
        return time_cuts(counts["value"], counts["count"], split)

    def _count_times(self, column: str, piece: Piece) -> pl.DataFrame:
        counter = Counter(CountOptions(is_text=False))
        for frame in self.read(piece):
            counter.add(frame[column].cast(pl.Int64))
        return counter.drain()

    def _by_groups(self, keys_of: RowFunction, assign: SplitFunction, each: Each) -> SplitFunction:
        """A split that needs all rows of a group: `keys_of` extracts what `assign` needs, in one extra pass."""
        held = ReducedRows(keys_of)
        for frames in each(partial(self._keys_of_piece, keys_of), self.pieces):
            for keys in frames:
                held.add(keys)
        all_keys = held.result()
        if all_keys is None:
            return all_train  # for no rows, which counting then rejects
        return partial(by_positions, *held_out_positions(assign(all_keys)))

    def _keys_of_piece(self, keys_of: RowFunction, piece: Piece) -> list[pl.DataFrame]:
        return [keys_of(frame) for frame in self.read(piece)]


def on_threads(num_threads: int, function: Callable[[P], T], parts: Sequence[P]) -> Iterator[T]:
    """Map a function over units on threads, in order; on an error, work that has not started is dropped."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield from pool.map(function, parts)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _count_splits(frame: pl.DataFrame) -> Rows:
    return np.bincount(frame[SPLIT].to_numpy(), minlength=len(SPLITS))


def _select(columns: list[str], frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(columns)


def _in_order(source: LogFiles, pieces: list[Piece], order: str) -> tuple[list[Piece], tuple[str, ...]]:
    """The units in the order that the recipe asks of a Table, with a note where that is impossible."""
    if order == "log" or (len(source.files) == 1 and order == "interleave"):
        return pieces, ()
    if order == "shuffle":
        return pieces, ("Rows come in log order: table.order = shuffle is for a Table only.",)
    if isinstance(source, TextSource) and all(source.can_cut(file) for file in source.files):
        return list(_side_by_side(source)), ()
    return pieces, (
        "Rows come in log order: table.order = interleave needs a Table, or files of plain text without quotes.",
    )


def _side_by_side(source: LogFiles) -> Iterator[Piece]:
    """The same range of bytes of every file, range after range."""
    step = max(1, PIECE_BYTES // len(source.files))
    for start in range(0, max(file.size for file in source.files), step):
        yield tuple(
            LogRange(number, start, min(start + step, file.size))
            for number, file in enumerate(source.files)
            if start < file.size
        )


def _taking_turns(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Rows of several files ordered by their offset in the file, ties by file: as a Table interleaves them."""
    held = list(frames)
    if held:
        rows = pl.concat(held)
        yield rows[np.argsort(offset_of(rows[POSITION].to_numpy()), kind="stable")]
