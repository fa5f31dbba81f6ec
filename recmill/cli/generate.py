"""`recmill generate`."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from typing import Any, get_args

from recmill.cli.arguments import add_command, add_output_options, show_bytes
from recmill.cli.flags import add_flags, read_config, refuse_flags, typed
from recmill.config import COUNT
from recmill.recipe.recipe import Shape
from recmill.synthetic.config import GenerateConfig

_FLAGS_OF_SHAPES = {"days": ("criteo",), "format": ("recsys2021",), "compress": ("criteo", "recsys2021")}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate",
        _generate,
        "write a synthetic log with a planted truth, so that AUC and recall mean something",
        """
recmill generate shop --rows 100000 --seed 7 --into data/shop
recmill generate criteo --rows 1000000 --into data/criteo            one train.txt, as on Kaggle
recmill generate criteo --rows 500000 --days 0-3,23 --into data/1tb  day_0 .. day_3 and day_23
recmill generate recsys2021 --rows 100000 --format parquet --into data/twitter
""",
    )
    parser.add_argument("shape", choices=get_args(Shape), help="what the log looks like")
    parser.add_argument("--rows", type=typed(COUNT), required=True, metavar="N", help="number of events")
    parser.add_argument("--into", required=True, metavar="DIR", help="where to write")
    add_flags(parser, GenerateConfig)
    add_output_options(parser)


def _generate(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.reporting.progress import Progress
    from recmill.synthetic.generate import generate

    for name, shapes in _FLAGS_OF_SHAPES.items():
        if parsed.shape not in shapes:
            reason = f"is for {' and '.join(shapes)}; {parsed.shape} has no such option."
            refuse_flags(parsed, GenerateConfig, reason, [name])
    config = read_config(parsed, GenerateConfig)
    options: dict[str, Any] = {"format": config.format} if config.format else {}
    with Progress(parsed.quiet).stage("generate", parsed.rows) as stage:
        made = generate(
            parsed.shape,
            parsed.rows,
            config.seed,
            Path(parsed.into),
            progress=lambda rows: stage.advance(rows - stage.done, rows - stage.rows),
            days=config.days,
            compress=config.compress,
            **options,
        )
    if parsed.json:
        files = [str(file) for file in made.files]
        print(
            json.dumps(
                {
                    "shape": made.shape,
                    "rows": made.rows,
                    "files": files,
                    "bytes": made.num_bytes,
                    "best": made.best,
                }
            )
        )
        return
    say_generated(made, parsed.into, print)
    if recipe := _recipe_for(made):
        overrides = " --set log.format=parquet --set log.separator=" if config.format == "parquet" else ""
        print(f"next   recmill prepare {recipe} --data {parsed.into} --into runs/{recipe}/table{overrides}")


def _recipe_for(made: Any) -> str | None:
    """A shipped recipe whose patterns all match a generated file."""
    from fnmatch import fnmatch

    from recmill.recipe.load import load_recipe, shipped_recipes
    from recmill.recipe.recipe import Recipe

    names = [file.name.removesuffix(".gz") for file in made.files]

    # One named like the log first; those that need an extra package last.
    def order(recipe: Recipe) -> tuple[bool, bool]:
        return recipe.name != made.shape, recipe.ranking is not None and recipe.ranking.trees is not None

    for recipe in sorted(map(load_recipe, shipped_recipes()), key=order):
        held_out = recipe.split.held_out_files if recipe.split else ()
        patterns = (*recipe.log.files, *held_out)
        if recipe.generate == made.shape and all(any(fnmatch(n, p) for n in names) for p in patterns):
            return recipe.name
    return None


def say_generated(made: Any, into: str, say: Callable[[str], None]) -> None:
    files = ", ".join(file.name for file in made.files[:4]) + (", ..." if len(made.files) > 4 else "")
    say(f"wrote  {into}   {files}   {made.rows:,} rows   {show_bytes(made.num_bytes)}")
    say("best   " + "   ".join(f"{_metric(name)} {value:.4f}" for name, value in made.best.items()))
    for line in textwrap.wrap(made.note, 100):
        say(f"       {line}")


def _metric(name: str) -> str:
    return name.replace("auc", "AUC", 1)
