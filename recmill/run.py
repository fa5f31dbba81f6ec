"""run: a recipe's whole chain in order. A stage that is done already is not done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recmill.errors import RecmillError
from recmill.logs.generate import Generated, generate, read_truth
from recmill.prepare import Options, Prepared, prepare
from recmill.progress import Progress
from recmill.spec.recipe import Recipe

DEFAULT_ROWS = 100_000


@dataclass(frozen=True)
class Ran:
    """What the stages made."""

    data: Path
    generated: Generated | None
    prepared: Prepared


def run(
    recipe: Recipe,
    data: str | None,
    into: Path,
    rows: int = DEFAULT_ROWS,
    options: Options | None = None,
    progress: Progress | None = None,
    report: Callable[[Generated | Prepared], None] = lambda result: None,
) -> Ran:
    """Generate a log unless there is one, then prepare it. `report` hears of each stage as it ends."""
    generated = None
    if data is None:
        data = str(into / "log")
        generated = _generate(recipe, Path(data), rows)
        if generated is not None:
            report(generated)
    prepared = prepare(recipe, data, into / "table", options, progress)
    report(prepared)
    return Ran(Path(data), generated, prepared)


def _generate(recipe: Recipe, into: Path, rows: int) -> Generated | None:
    """A synthetic log in the recipe's shape; None when it is there already."""
    if recipe.generate is None:
        raise RecmillError(f'Recipe "{recipe.name}" has no generator; give its log with --data DIR.')
    truth = read_truth(into)
    if truth is not None and truth["shape"] == recipe.generate and truth["rows"] == rows:
        return None
    return generate(recipe.generate, rows, 0, into)
