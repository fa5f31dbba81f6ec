"""`recmill check`."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_recipe, counted, load, show_bytes

if TYPE_CHECKING:
    from recmill.recipe.recipe import Recipe

_FIRST_LABELS = 10_000  # rows whose labels are looked at


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "check",
        _check,
        "is this recipe right, and do the files it names parse? Answers at once",
        """
recmill check mine.toml
recmill check criteo-dlrm --data /data/criteo
recmill check mine.toml --set split.held_out=0.2
""",
    )
    add_recipe(parser)
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="also look at the log's files there: parse their first rows, and see whether labels are 0 and 1",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _check(parsed: argparse.Namespace) -> int:
    recipe = load(parsed)
    if recipe.tune is not None:
        from recmill.recipe.search import searched

        searched(recipe)
    _check_named(recipe)
    reports = _check_files(recipe, parsed.data) if parsed.data else {}
    good = all(report.problem is None and not report.bad and report.num_good for report in reports.values())
    if reports and good:
        _check_held_out_files(recipe, parsed.data)
    problem = _label_problem(recipe, parsed.data) if reports and good else None
    good = good and problem is None
    if parsed.json:
        files = {name: _files_json(report) for name, report in reports.items()}
        print(
            json.dumps(
                {
                    "recipe": recipe.name,
                    "features": len(recipe.features),
                    "good": good,
                    "files": files,
                    "labels": problem,
                }
            )
        )
        return 0 if good else 1
    sizes = {"column": recipe.log.columns, "feature": recipe.features, "label": recipe.labels}
    print(
        f"recipe {recipe.name} is right: {', '.join(counted(len(many), one) for one, many in sizes.items())}"
    )
    for name, report in reports.items():
        _say_files(name, report)
    if problem is not None:
        print(f"{'labels':<14} {problem}")
    if good:
        print(
            f"next   recmill prepare {parsed.recipe} --data {parsed.data or 'DIR'} --into runs/{recipe.name}/table"
        )
    return 0 if good else 1


def _check_named(recipe: Recipe) -> None:
    """Fail when something that the recipe names is not on this machine: functions, vocabularies to extend, a model."""
    from recmill.recipe.steps import Vocabulary
    from recmill.recipe.trust import functions_of

    for path in functions_of(recipe):
        from recmill.features.lists import import_function

        import_function(path)
    for feature in recipe.features:
        for step in feature.steps:
            if isinstance(step, Vocabulary) and step.extend:
                from recmill.features.category import read_vocabulary

                read_vocabulary(step.extend, step.named or feature.name)
    if recipe.ranking is not None and ":" in recipe.ranking.model and find_spec("torch") is not None:
        from recmill.learner.ranking import own_model

        own_model(recipe.ranking.model)


def _check_held_out_files(recipe: Recipe, data: str) -> None:
    if recipe.split is not None and recipe.split.by == "files":
        from recmill.logs.base import open_source
        from recmill.logs.splits import held_out_files

        held_out_files(open_source(recipe.log, data), recipe.split)


def _check_files(recipe: Recipe, data: str) -> dict[str, Any]:
    from recmill.logs.describe import describe_files

    return {
        "log": describe_files(recipe.log, data),
        **{f"tables.{n}": describe_files(t, data) for n, t in recipe.tables.items()},
    }


def _label_problem(recipe: Recipe, data: str) -> str | None:
    """Why no model could learn from the first rows, if so."""
    import tempfile
    from pathlib import Path

    from recmill.errors import FeatureError
    from recmill.stages.prepare.prepare import check_first_labels

    with tempfile.TemporaryDirectory(prefix="recmill-check-") as work:
        try:
            check_first_labels(recipe, data, _FIRST_LABELS, Path(work))
        except FeatureError as error:
            return str(error)
    return None


def _files_json(report: Any) -> dict[str, Any]:
    return {
        "matches": {
            pattern: [[file.name, file.size] for file in files] for pattern, files in report.matches.items()
        },
        "first_rows_good": report.num_good,
        "first_rows_bad": [[row.file, row.offset, row.reason, row.column] for row in report.bad],
        "problem": report.problem,
    }


def _say_files(name: str, report: Any) -> None:
    for pattern, files in report.matches.items():
        if not files:
            print(f"{name:<14} {pattern}: nothing matches")
        for file in files:
            kind = f"   {file.compression}" if file.compression else ""
            print(f"{name:<14} {file.name}   {show_bytes(file.size)}{kind}")
    if report.problem:
        print(f"{name:<14} {report.problem}")
        return
    print(f"{name:<14} first rows: {report.num_good} parse, {len(report.bad)} do not")
    for row in report.bad[:5]:
        column = f" (column {row.column})" if row.column else ""
        print(f"{name:<14}   {row.file} at {row.offset:,}: {row.reason}{column}  {row.text[:80]!r}")
