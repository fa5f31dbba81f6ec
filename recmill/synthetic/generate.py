"""Synthetic logs in each supported shape, with a planted truth, so that AUC and recall mean something.

Every label is drawn from a probability that we know, so the best reachable metrics are known too: they are
returned, and kept in `_truth.json` beside the files for later stages to compare themselves with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recmill.errors import LogError, RecmillError
from recmill.synthetic import criteo, movielens, recsys2021, shop
from recmill.synthetic.files import TRUTH_FILE, Aside, Job, written_aside

__all__ = ["SHAPES", "TRUTH_FILE", "GeneratedLog", "LogShape", "generate", "read_truth"]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class GeneratedLog:
    """What was written, and the best metrics any model can reach on it."""

    shape: str
    rows: int
    files: tuple[Path, ...]
    num_bytes: int
    best: dict[str, float]
    note: str

    @property
    def path(self) -> Path:
        """The directory that holds the files."""
        return self.files[0].parent

    def __fspath__(self) -> str:
        """So that it can be given wherever a log's directory is."""
        return str(self.path)


@dataclass(frozen=True)
class LogShape:
    """One layout of log files that recmill can read and generate."""

    name: str
    description: str
    options: dict[str, Any]
    check: Callable[[Job], None]
    write: Callable[[Job, Aside], tuple[dict[str, float], str]]


SHAPES: dict[str, LogShape] = {
    module.NAME: LogShape(module.NAME, module.DESCRIPTION, module.OPTIONS, module.check, module.write)
    for module in (criteo, recsys2021, movielens, shop)
}


def generate(
    shape: str,
    rows: int,
    seed: int,
    into: Path,
    *,
    progress: Callable[[int], None] | None = None,
    days: Sequence[int] | None = None,
    compress: bool = False,
    **options: Any,
) -> GeneratedLog:
    """Write `rows` events in the given shape into a folder; equal arguments give equal bytes.

    `progress` is called with the number of rows written so far. A folder holds one generated log: the same
    arguments may write it again, other arguments are refused. Nothing appears under its own name until
    everything is written.
    """
    chosen = _shape_named(shape)
    _check_numbers(rows, seed)
    asked = dict(options)
    if days is not None:
        asked["days"] = list(days)
    if compress:
        asked["compress"] = True
    job = Job(rows, seed, _with_defaults(chosen, asked), progress or _silent)
    chosen.check(job)
    parameters = {"shape": shape, "rows": rows, "seed": seed, **job.options}
    with written_aside(Path(into), parameters) as aside:
        best, note = chosen.write(job, aside)
        truth = {"shape": shape, "rows": rows, "seed": seed, "best": best, "note": note}
        files = aside.publish(truth)
    return GeneratedLog(shape, rows, files, sum(file.stat().st_size for file in files), best, note)


def read_truth(folder: Path) -> dict[str, Any] | None:
    """The planted truth of a generated log: shape, rows, seed, best, note and more; None for other logs."""
    path = Path(folder) / TRUTH_FILE
    if not path.exists():
        return None
    try:
        truth: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LogError(f"{path} is not valid JSON: {error}. Generate the log again.") from error
    return truth


def _shape_named(name: str) -> LogShape:
    if name not in SHAPES:
        raise RecmillError(f'There is no log shape "{name}". Shapes: {", ".join(SHAPES)}.')
    return SHAPES[name]


def _check_numbers(rows: int, seed: int) -> None:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise RecmillError(f"rows must be a whole number of at least 1, got {rows!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise RecmillError(f"seed must be a whole number between 0 and 2**63 - 1, got {seed!r}.")


def _with_defaults(shape: LogShape, asked: dict[str, Any]) -> dict[str, Any]:
    for name in asked:
        if name not in shape.options:
            known = ", ".join(shape.options) or "none"
            nearest = get_close_matches(name, shape.options, n=1)
            hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
            raise RecmillError(f'Shape "{shape.name}" has no option "{name}". Its options: {known}.{hint}')
    return {**shape.options, **asked}


def _silent(num_rows: int) -> None:
    """Progress for callers who do not ask."""
