"""Criteo's click logs: label, 13 integers and 26 hashed categories per line, as on Kaggle or by day."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from recmill.errors import RecmillError
from recmill.synthetic import files
from recmill.synthetic.criteo_columns import CATEGORIES, GAPS, INTEGERS, Columns
from recmill.synthetic.draw import F64, I64, Bools, hex8, normal, sigmoid, uniform
from recmill.synthetic.files import GenerateJob, PartialFiles
from recmill.synthetic.truth import PILOT_ROWS, BestScores, calibrate

NAME = "criteo"
DESCRIPTION = (
    "Criteo clicks: headerless TSV with a label, 13 integers and 26 hex categories; train.txt or day_N"
)
OPTIONS: dict[str, Any] = {"days": None, "compress": False}

POSITIVE_RATE = 0.256
LOGIT_SPREAD = 1.45

# Effects on the logit besides those of single columns, each with its standard deviation. Ids fit each other or do not:
AFFINITIES = (("c2", "c17", 0.35), ("c4", "c14", 0.55), ("c6", "c13", 0.2), ("c13", "c18", 0.3))
# User activity, impressions of the ad, and its repetition rate, as weights of counts.
ACTIVITY = {"i1": 1, "i5": -1, "i6": -1, "i7": 1, "i11": 1}
FREQUENCY = {"i4": 1, "i8": 1, "i13": 1}
PACE = {"i4": 1, "i8": 1, "i13": -2}
ACTIVITY_WITH_FREQUENCY, PACE_BEND = 0.55, 0.4
# Ids differ in how they perform with active users.
RESPONSES = (("c2", 0.35), ("c11", 0.2))


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
        "Columns are levels of trees of entities (vertical, advertiser, campaign, product; site, placement), as in the "
        "Kaggle log. Clicks are drawn from effects of their ids, frequent or rare, of counts, of gaps, of pairs of "
        "ids that fit each other, and of ids that do better or worse with active users. best scores the true "
        f"probabilities against the drawn labels over {where} (_eval and _test: over its halves): they include "
        "effects of ids never seen before. A model that has to learn the effects from earlier rows stays well below."
    )


class Model:
    """The planted click model; row i depends on (seed, total rows, i) and on nothing else."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.seed = seed
        self.num_rows = num_rows
        index = np.linspace(0, max(num_rows, PILOT_ROWS) - 1, PILOT_ROWS).astype(np.int64)
        pilot = Columns(seed, num_rows, index)
        self.thresholds = {name: pilot.threshold(name) for name in GAPS}
        pilot.open_gaps(self.thresholds)
        self.strengths = [_strength(pull, effect) for pull, effect in effects(pilot)]
        self.scale, self.bias = calibrate(self._raw_logits(pilot), POSITIVE_RATE, LOGIT_SPREAD)

    def rows(self, index: I64) -> tuple[pl.DataFrame, F64, Bools]:
        """The text columns of these rows, their true logits and their drawn labels."""
        columns = Columns(self.seed, self.num_rows, index)
        columns.open_gaps(self.thresholds)
        logits = self._raw_logits(columns) * self.scale + self.bias
        labels = uniform(columns.key("label"), index) < sigmoid(logits)
        shown = {"label": pl.Series(labels.astype(np.int8))}
        for name, values in columns.integers.items():
            shown[name] = pl.Series(values=pa.array(values.astype(np.int32), mask=columns.missing(name)))
        for name in CATEGORIES:
            shown[name] = hex8((columns.ids[name] >> np.uint64(32)).astype(np.uint32), columns.present(name))
        return pl.DataFrame(shown), logits, labels

    def _raw_logits(self, columns: Columns) -> F64:
        logits = columns.gap_effects()
        for strength, (_, effect) in zip(self.strengths, effects(columns), strict=True):
            logits += strength * effect
        return logits


def effects(columns: Columns) -> Iterator[tuple[float, F64]]:
    """(standard deviation, unscaled effect) of each part of the truth except gaps."""
    levels = {name: columns.level(name) for name in INTEGERS}
    for name, integer in INTEGERS.items():
        if integer.pull:
            yield integer.pull, levels[name]
        if integer.bend:
            yield integer.bend, levels[name] ** 2
    for name, category in CATEGORIES.items():
        if category.pull:
            yield category.pull, columns.id_effect(name)
    for left, right, pull in AFFINITIES:
        yield pull, np.einsum("rk,rk->r", columns.tastes(left), columns.tastes(right))
    activity, frequency, pace = (_weighted(levels, weights) for weights in (ACTIVITY, FREQUENCY, PACE))
    for name, pull in RESPONSES:
        yield pull, activity * normal(columns.key("response", name), columns.ids[name])
    yield ACTIVITY_WITH_FREQUENCY, activity * frequency
    yield PACE_BEND, np.abs(pace)


def _weighted(levels: dict[str, F64], weights: dict[str, int]) -> F64:
    total: F64 = np.sum([weight * levels[name] for name, weight in weights.items()], axis=0)
    return total


def _strength(pull: float, effect: F64) -> float:
    """The factor that gives an effect the standard deviation `pull`."""
    deviation = float(effect.std())
    # Rounded for the same reason as in `calibrate`.
    return round(pull / deviation, 6) if deviation > 0 else 0.0
