"""Criteo's click logs: label, 13 integers and 26 hashed categories a line, as Kaggle or as days."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.errors import RecmillError
from recmill.synthetic import files
from recmill.synthetic.draw import (
    F64,
    I64,
    U32,
    U64,
    Bools,
    hex8,
    key_of,
    normal,
    sigmoid,
    uniform,
    zipf,
)
from recmill.synthetic.files import GenerateJob, PartialFiles
from recmill.synthetic.truth import PILOT_ROWS, BestScores, calibrate

NAME = "criteo"
DESCRIPTION = (
    "Criteo clicks: headerless TSV with a label, 13 integers and 26 hex categories; train.txt or day_N"
)
OPTIONS: dict[str, Any] = {"days": None, "compress": False}

POSITIVE_RATE = 0.256
LOGIT_SPREAD = 1.45
# Angle, in radians, by which drifting effects have rotated at the end of the log.
DRIFT = 0.35
# Ids are ranked by frequency, and effects fall with the rank: at this rank, to half of the first. Most of the signal is
# in frequent ids, so a million rows are enough to learn it.
HALF_EFFECT_RANK = 12


@dataclass(frozen=True)
class Integer:
    """One integer column: exp of a normal, rounded down. `pull` is its effect on the logit."""

    missing: float
    log_mean: float
    log_spread: float
    top: int
    pull: float = 0.0
    lowest: int = 0
    missing_with: int | None = None  # the column whose gaps this one shares


@dataclass(frozen=True)
class Category:
    """One categorical column. `pull` is the standard deviation of its effect on the logit."""

    cardinality: int
    missing: float = 0.0
    pull: float = 0.0
    drifts: bool = False


INTEGERS = (
    Integer(0.454, 0.9, 1.2, 5_775, pull=0.35),
    Integer(0.0, 3.0, 2.0, 257_675, pull=-0.2, lowest=-2),
    Integer(0.215, 1.9, 1.6, 65_535),
    Integer(0.217, 1.5, 1.1, 969, pull=0.13),
    Integer(0.026, 7.4, 2.6, 23_159_456, pull=-0.3),
    Integer(0.224, 3.6, 1.6, 431_037, pull=-0.28),
    Integer(0.043, 1.6, 1.5, 56_311, pull=0.3),
    Integer(0.0005, 2.1, 1.1, 6_047),
    Integer(0.043, 3.9, 1.4, 29_019, missing_with=6),
    Integer(0.454, -0.2, 0.8, 11, missing_with=0),
    Integer(0.043, 0.8, 0.9, 231, pull=0.24, missing_with=6),
    Integer(0.765, 0.0, 1.1, 4_008),
    Integer(0.217, 1.6, 1.1, 7_393, pull=0.13, missing_with=3),
)

CATEGORIES = (
    Category(45_833_188, missing=0.034, pull=0.2),
    Category(36_746, pull=0.2),
    Category(17_245, pull=0.25),
    Category(7_413, pull=0.25),
    Category(20_243),
    Category(3, missing=0.121, pull=0.15),
    Category(7_114, pull=0.3),
    Category(1_441, pull=0.35),
    Category(62, pull=0.35, drifts=True),
    Category(29_275_261, missing=0.034, pull=0.2),
    Category(1_572_176, pull=0.2),
    Category(345_138, missing=0.034),
    Category(10, missing=0.44, pull=0.25),
    Category(2_209, pull=0.35),
    Category(11_267, pull=0.2),
    Category(128, pull=0.3, drifts=True),
    Category(4, missing=0.44),
    Category(974, pull=0.35),
    Category(14, missing=0.762),
    Category(48_937_457, missing=0.034),
    Category(11_316_796, missing=0.034),
    Category(40_094_537, missing=0.034),
    Category(452_104, pull=0.15),
    Category(12_606, missing=0.034),
    Category(104, missing=0.44, pull=0.2),
    Category(35, missing=0.44),
)
# (column, column, pull): pairs of ids add to the logit or subtract from it.
CROSSES = ((8, 15, 0.4), (7, 17, 0.4))

BIG = 1_000_000
ZIPF_BIG, ZIPF_SMALL = 1.17, 1.05
# In large columns, a fraction of the rows has ids that are new and disappear soon.
NEW_FRACTION, NEW_PER_ROW, NEW_WINDOW = 0.25, 0.02, 2_000
ID_BITS = 27


def check(job: GenerateJob) -> None:
    days = job.options["days"]
    if days is None:
        return
    whole = all(isinstance(day, int) and not isinstance(day, bool) and 0 <= day <= 99 for day in days)
    if not days or not whole or len(set(days)) != len(days):
        raise RecmillError(
            f"days must be different whole numbers from 0 to 99, such as [0, 1, 2, 23]; got {days}."
        )
    if job.rows < len(days):
        raise RecmillError(f"{len(days)} days need at least {len(days)} rows, got {job.rows}.")


def write(job: GenerateJob, output: PartialFiles) -> tuple[dict[str, float], str]:
    """Write train.txt, or one file for each day; the best scores cover the held-out rows and their halves."""
    parts = _parts(job)
    output.claim([name for name, _, _ in parts])
    model = Model(job.seed, job.rows)
    held_out = _held_out(job, parts)
    scores = {suffix: BestScores() for suffix in held_out}
    for name, start, stop in parts:
        with output.open(name) as file:
            for first, last in files.chunks(start, stop, files.CHUNK_ROWS):
                frame, logits, labels = model.rows(np.arange(first, last))
                files.write_rows(file, frame, "\t")
                for suffix, (begin, end) in held_out.items():
                    rows = slice(max(begin - first, 0), max(end - first, 0))
                    scores[suffix].add(logits[rows], labels[rows])
                job.progress(last)
    best: dict[str, float] = {}
    for suffix, of_part in scores.items():
        best |= of_part.best(suffix)
    return best, _note(job)


def _held_out(job: GenerateJob, parts: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """(first row, last row + 1) of all held-out rows, and of the halves that recipes call eval and test."""
    first = parts[-1][1] if len(parts) > 1 else job.rows - ceil(job.rows / 7)
    middle = (first + job.rows) // 2
    return {"": (first, job.rows), "_eval": (first, middle), "_test": (middle, job.rows)}


def _parts(job: GenerateJob) -> list[tuple[str, int, int]]:
    """(file name, first row, last row + 1), in time order."""
    suffix = ".gz" if job.options["compress"] else ""
    days = job.options["days"]
    if days is None:
        return [(f"train.txt{suffix}", 0, job.rows)]
    edges = [job.rows * part // len(days) for part in range(len(days) + 1)]
    return [(f"day_{day}{suffix}", edges[i], edges[i + 1]) for i, day in enumerate(sorted(days))]


def _note(job: GenerateJob) -> str:
    days = job.options["days"]
    where = "the last seventh of the rows" if days is None or len(days) == 1 else f"day_{max(days)}"
    return (
        "Clicks are drawn from effects of the ids of 17 categories, smaller for rarer ids (two categories drift), "
        "smooth effects of 8 integers and 2 crosses. best scores the true probabilities against the drawn labels "
        f"over {where} (_eval and _test: over its halves): they know every effect, ids never seen before "
        "included, as of that time. A model that has to learn the effects from earlier rows stays below, "
        "because of noise and drift."
    )


class Model:
    """The planted click model; row i depends on (seed, total rows, i) and on nothing else."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.seed = seed
        self.num_rows = num_rows
        pilot = np.linspace(0, max(num_rows, PILOT_ROWS) - 1, PILOT_ROWS).astype(np.int64)
        integers, ids = self._integers(pilot), self._ids(pilot)
        self.strengths = [_strength(pull, effect) for pull, effect in self._effects(pilot, integers, ids)]
        self.scale, self.bias = calibrate(self._raw_logits(pilot, integers, ids), POSITIVE_RATE, LOGIT_SPREAD)

    def rows(self, index: I64) -> tuple[pl.DataFrame, F64, Bools]:
        """The text columns of these rows, their true logits and their drawn labels."""
        integers, ids = self._integers(index), self._ids(index)
        logits = self._raw_logits(index, integers, ids) * self.scale + self.bias
        labels = uniform(self._key("label"), index) < sigmoid(logits)
        columns = {"label": pl.Series(labels.astype(np.int8))}
        for number, (values, present) in enumerate(integers, start=1):
            columns[f"i{number}"] = pl.Series(values=pa.array(values.astype(np.int32), mask=~present))
        for column, (values, present) in enumerate(ids):
            shown = None if CATEGORIES[column].missing == 0 else present
            columns[f"c{column + 1}"] = hex8(hashed(column, values), shown)
        return pl.DataFrame(columns), logits, labels

    def _key(self, *names: object) -> int:
        return key_of(self.seed, NAME, *names)

    def _integers(self, index: I64) -> list[tuple[I64, Bools]]:
        """(values, present) of each integer column."""
        columns = []
        for number, column in enumerate(INTEGERS):
            gaps = number if column.missing_with is None else column.missing_with
            present = uniform(self._key("integer gap", gaps), index) >= column.missing
            spots = normal(self._key("integer", number), index) * column.log_spread + column.log_mean
            values = np.minimum(np.exp(spots), column.top).astype(np.int64) + column.lowest
            columns.append((values, present))
        return columns

    def _ids(self, index: I64) -> list[tuple[I64, Bools]]:
        """(ids, present) of each categorical column."""
        columns = []
        for number, column in enumerate(CATEGORIES):
            draws = uniform(self._key("category", number), index)
            big = column.cardinality > BIG
            ids = (
                _draw_with_new_ids(draws, index, column)
                if big
                else zipf(draws, column.cardinality, ZIPF_SMALL)
            )
            if column.missing:
                present = uniform(self._key("category gap", number), index) >= column.missing
            else:
                present = np.ones(len(index), dtype=np.bool_)
            columns.append((ids, present))
        return columns

    def _raw_logits(self, index: I64, integers: list[tuple[I64, Bools]], ids: list[tuple[I64, Bools]]) -> F64:
        logits = np.zeros(len(index))
        for strength, (_, effect) in zip(self.strengths, self._effects(index, integers, ids), strict=True):
            logits += strength * effect
        return logits

    def _effects(
        self, index: I64, integers: list[tuple[I64, Bools]], ids: list[tuple[I64, Bools]]
    ) -> Iterator[tuple[float, F64]]:
        """(pull, unscaled effect) of each part of the truth."""
        angle = DRIFT * index / max(self.num_rows, 1)
        for integer, (values, present) in zip(INTEGERS, integers, strict=True):
            if integer.pull:
                # A missing count has the effect of a zero.
                level = np.log1p(np.maximum(values, 0) * present) - integer.log_mean
                yield integer.pull, np.tanh(0.5 * level / integer.log_spread)
        for number, category in enumerate(CATEGORIES):
            if category.pull:
                values, present = ids[number]
                effect = self._id_effect(number, values, angle if category.drifts else None)
                yield category.pull, present * effect
        for left, right, pull in CROSSES:
            both = ids[left][1] & ids[right][1]
            yield pull, both * self._character(left, ids[left][0]) * self._character(right, ids[right][0])

    def _id_effect(self, number: int, ids: I64, angle: F64 | None) -> F64:
        effect = normal(self._key("effect", number), ids)
        if angle is not None:
            later = normal(self._key("later effect", number), ids)
            effect = np.cos(angle) * effect + np.sin(angle) * later
        return _fame(ids) * effect

    def _character(self, number: int, ids: I64) -> F64:
        """An id's factor in a cross: half its own effect, half an independent one."""
        return _fame(ids) * (
            normal(self._key("effect", number), ids) + normal(self._key("cross", number), ids)
        )


def _strength(pull: float, effect: F64) -> float:
    """The factor that gives an effect the standard deviation `pull`."""
    deviation = float(effect.std())
    # Rounded for the reason that `calibrate` rounds.
    return round(pull / deviation, 6) if deviation > 0 else 0.0


def _fame(ids: I64) -> F64:
    return 1.0 / (1.0 + ids / HALF_EFFECT_RANK)


def _draw_with_new_ids(draws: F64, index: I64, column: Category) -> I64:
    ids = np.empty(len(draws), dtype=np.int64)
    fresh = draws < NEW_FRACTION
    old = ~fresh
    ids[old] = zipf((draws[old] - NEW_FRACTION) / (1 - NEW_FRACTION), column.cardinality, ZIPF_BIG)
    newest = (index[fresh] * NEW_PER_ROW).astype(np.int64) + NEW_WINDOW
    age = zipf(draws[fresh] / NEW_FRACTION, NEW_WINDOW, 1.0)
    ids[fresh] = column.cardinality + (newest - age) % ((1 << ID_BITS) - column.cardinality)
    return ids


def hashed(column: int, ids: I64 | U64) -> U32:
    """A 32-bit value for an id of a column: looks random, never collides."""
    value = ids.astype(np.uint32)
    value += np.uint32((column << ID_BITS) + 0x68BC21EB & 0xFFFFFFFF)
    value ^= value >> np.uint32(16)
    value *= np.uint32(0x85EBCA6B)
    value ^= value >> np.uint32(13)
    value *= np.uint32(0xC2B2AE35)
    value ^= value >> np.uint32(16)
    return value
