"""Synthetic logs in each supported format, with a planted truth.

Every label is drawn from a known probability, so the best metrics that any model can reach are known too. They are
returned, and stored in `_truth.json` beside the files.
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
from recmill.synthetic.files import TRUTH_FILE, GenerateJob, PartialFiles, open_output

__all__ = ["SHAPES", "TRUTH_FILE", "GeneratedLog", "LogShape", "generate", "read_truth"]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class GeneratedLog:
    """The files, and the best metrics that any model can reach on them."""

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
        """Allows the log to be passed wherever a log's directory is expected."""
        return str(self.path)


@dataclass(frozen=True)
class LogShape:
    """A layout of log files that recmill can read and generate."""

    name: str
    description: str
    options: dict[str, Any]
    write: Callable[[GenerateJob, PartialFiles], tuple[dict[str, float], str]]
    check: Callable[[GenerateJob], None] = lambda job: None


SHAPES: dict[str, LogShape] = {
    shape.name: shape
    for shape in (
        LogShape(criteo.NAME, criteo.DESCRIPTION, criteo.OPTIONS, criteo.write, criteo.check),
        LogShape(
            recsys2021.NAME, recsys2021.DESCRIPTION, recsys2021.OPTIONS, recsys2021.write, recsys2021.check
        ),
        LogShape(movielens.NAME, movielens.DESCRIPTION, movielens.OPTIONS, movielens.write),
        LogShape(shop.NAME, shop.DESCRIPTION, shop.OPTIONS, shop.write),
    )
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

    `progress` is called with the number of rows written so far. A folder has one generated log: the same arguments
    may write it again, others are rejected. Files appear under their final names only when all are complete.
    """
    chosen = _shape_named(shape)
    _check_numbers(rows, seed)
    asked = dict(options)
    if days is not None:
        asked["days"] = list(days)
    if compress:
        asked["compress"] = True
    job = GenerateJob(rows, seed, _with_defaults(chosen, asked), progress or (lambda num_rows: None))
    chosen.check(job)
    parameters = {"shape": shape, "rows": rows, "seed": seed, **job.options}
    with open_output(Path(into), parameters) as output:
        best, note = chosen.write(job, output)
        truth = {"shape": shape, "rows": rows, "seed": seed, "best": best, "note": note}
        files = output.publish(truth)
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
