"""`recmill check`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json, add_recipe, counted, load, show_bytes


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "check",
        _check,
        "check a recipe, and whether the files it names parse; takes seconds",
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
        help="also check the log's files: parse the first rows of each, name files that a sequence such as "
        "day_0, day_1, day_3 leaves out, and see whether labels are 0 and 1",
    )
    add_json(parser)


def _check(parsed: argparse.Namespace) -> int:
    from recmill.stages.check.check import check

    checked = check(load(parsed), parsed.data)
    recipe = checked.recipe
    if parsed.json:
        files = {name: _files_json(report) for name, report in checked.files.items()}
        print(
            json.dumps(
                {
                    "recipe": recipe.name,
                    "features": len(recipe.features),
                    "good": checked.good,
                    "files": files,
                    "labels": checked.labels,
                    "warnings": list(checked.warnings),
                }
            )
        )
        return 0 if checked.good else 1
    sizes = {"column": recipe.log.columns, "feature": recipe.features, "label": recipe.labels}
    print(
        f"recipe {recipe.name} is right: {', '.join(counted(len(many), one) for one, many in sizes.items())}"
    )
    for line in checked.warnings:
        print(f"{'warning':<14} {line}")
    for name, report in checked.files.items():
        _say_files(name, report)
    if checked.labels is not None:
        print(f"{'labels':<14} {checked.labels}")
    if checked.good:
        print(
            f"next   recmill prepare {parsed.recipe} --data {parsed.data or 'DIR'} --into runs/{recipe.name}/table"
        )
    return 0 if checked.good else 1


def _files_json(report: Any) -> dict[str, Any]:
    return {
        "matches": {
            pattern: [[file.name, file.size] for file in files] for pattern, files in report.matches.items()
        },
        "first_rows_good": report.num_good,
        "first_rows_bad": [[row.file, row.offset, row.reason, row.column] for row in report.bad],
        "text": report.text and vars(report.text),
        "problem": report.problem,
        "hint": report.hint,
        "missing": list(report.missing),
        "empty": list(report.empty),
    }


def _shown_format(text: Any) -> str:
    """The format, such as: separator ",", header, quote "."""
    words = [f"separator {json.dumps(text.separator)}"]
    words += ["header"] * text.header + [f"quote {text.quote}"] * bool(text.quote)
    return ", ".join(words + [f"escape {text.escape}"] * bool(text.escape) + [text.encoding])


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
    form = f"{_shown_format(report.text)}; " if report.text else ""
    print(f"{name:<14} {form}first rows: {report.num_good} parse, {len(report.bad)} do not")
    for row in report.bad[:5]:
        column = f" (column {row.column})" if row.column else ""
        print(f"{name:<14}   {row.file} at {row.offset:,}: {row.reason}{column}  {row.text[:80]!r}")
    if report.hint:
        print(f"{name:<14} {report.hint}")
