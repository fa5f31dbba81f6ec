"""`recmill tune`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    add_command,
    add_folder,
    add_output_options,
    add_recipe,
    counted,
    load,
    say_of,
)
from recmill.cli.flags import UsageError, add_flags, read_config
from recmill.stages.tune.config import TuneConfig

if TYPE_CHECKING:
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.reporting.progress import Progress
    from recmill.stages.tune.front import TrialResult
    from recmill.stages.tune.tune import TuneResult

GENERATED_ROWS = 100_000


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "tune",
        _tune,
        "search the recipe's [tune] space: quality against cost; a second run resumes",
        """
recmill tune quickstart --trials 20 --into runs/tune                  a generated log, prepared first
recmill tune criteo-dlrm --table runs/criteo/table --trials 30 --into runs/tune
recmill tune criteo-deeprec --table t --into runs/tune --within 0.001    the cheapest of equal quality
recmill tune mine.toml --table t --into runs/tune --set "tune.space.ranking.embedding_dim=[4, 8, 16]"
recmill tune mine.toml --table t --into runs/tune --engine ray --address auto --threads 2
""",
    )
    add_recipe(parser)
    rows = parser.add_mutually_exclusive_group()
    add_folder(rows, "--table", "the Table to learn from")
    add_folder(rows, "--data", "the log to prepare first (default: generate one, as `recmill run` does)")
    add_folder(parser, "--into", "directory of the study and its results", required=True)
    add_flags(parser, TuneConfig)
    add_output_options(parser)


def _tune(parsed: argparse.Namespace) -> int:
    config, say = read_config(parsed, TuneConfig), say_of(parsed)
    if config.address and config.engine != "ray":
        raise UsageError("--address is for --engine ray. Remove it.")
    recipe = load(parsed)
    from recmill.recipe.search import searched
    from recmill.recipe.tuning import objectives_of
    from recmill.reporting.progress import Progress
    from recmill.stages.tune.tune import tune

    objectives = objectives_of(
        searched(recipe), recipe.ranking
    )  # errors should be reported before anything is prepared
    bars = Progress(parsed.quiet or parsed.json)
    table = _open_table(parsed, recipe, bars)
    say(f"read   {table.path}   {table.num_rows():,} train rows   {table.num_rows('eval'):,} eval rows")
    tuned = tune(
        recipe, table, Path(parsed.into), config, bars, lambda one: say(_trial_line(one, objectives))
    )
    if parsed.json:
        print(json.dumps(_as_json(tuned)))
    else:
        _say_tuned(parsed, tuned, table)
    return 0 if tuned.best else 1


def _open_table(parsed: argparse.Namespace, recipe: Recipe, bars: Progress) -> Table:
    """Open the given Table, or prepare one below --into from the given or a generated log."""
    from recmill.dataset.table import Table

    if parsed.table:
        return Table.open(parsed.table)
    from recmill.stages.prepare.prepare import prepare

    into = Path(parsed.into)
    return prepare(
        recipe, parsed.data or _generated(recipe, into / "log"), into / "table", progress=bars
    ).table


def _generated(recipe: Recipe, into: Path) -> str:
    from recmill.synthetic.generate import generate, read_truth

    if recipe.generate is None:
        raise UsageError(f'Recipe "{recipe.name}" has no generator; give --table DIR or --data DIR.')
    if read_truth(into) is None:
        generate(recipe.generate, GENERATED_ROWS, 0, into)
    return str(into)


def _trial_line(one: TrialResult, objectives: tuple[str, ...]) -> str:
    from recmill.stages.tune.write import show_values

    end = _numbers_line(one, objectives) if one.state == "complete" else f"{one.state}: {one.reason}"
    return f"trial  {one.number}   {end}   {show_values(one, '   ')}"


def _numbers_line(one: TrialResult, objectives: tuple[str, ...]) -> str:
    from recmill.stages.tune.write import show_number

    names = dict.fromkeys((*objectives, "parameters"))
    return "   ".join(f"{name} {show_number(one.found[name])}" for name in names)


def _say_tuned(parsed: argparse.Namespace, tuned: TuneResult, table: Table) -> None:
    from recmill.stages.tune.write import BEST, REPORT, TRIALS

    for one in tuned.front:
        print(_trial_line(one, tuned.objectives).replace("trial", "front", 1))
    states = [one.state for one in tuned.tried]
    shares = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"tried  {counted(len(states), 'trial')}" + (f": {shares}" if shares else ""))
    if tuned.best is None:
        print(f"recmill: no trial came to its end; {tuned.into / TRIALS} says why", file=sys.stderr)
        return
    print(_trial_line(tuned.best, tuned.objectives).replace("trial", "best ", 1))
    if tuned.own:
        print(f"recipe {tuned.own.number}   as it was: {_numbers_line(tuned.own, tuned.objectives)}")
    print(f"wrote  {tuned.into / BEST}   {tuned.into / REPORT}   {tuned.into / TRIALS}")
    print(f"next   recmill train {tuned.into / BEST} --table {table.path} --into {tuned.into / 'checkpoint'}")


def _as_json(tuned: TuneResult) -> dict[str, Any]:
    from dataclasses import asdict

    from recmill.reporting.tracking import plain
    from recmill.stages.tune.write import BEST, REPORT

    best: Any = plain(asdict(tuned.best)) if tuned.best else None
    return {
        "study": str(tuned.into),
        "objectives": tuned.objectives,
        "trials": len(tuned.tried),
        "front": [one.number for one in tuned.front],
        "best": best,
        "recipe": str(tuned.into / BEST) if tuned.best else None,
        "report": str(tuned.into / REPORT),
    }
