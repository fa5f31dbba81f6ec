"""The command line: one command for each verb. A verb is imported only when it is called."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from recmill import __version__
from recmill.errors import RecmillError

if TYPE_CHECKING:
    from recmill.prepare import Options, Prepared
    from recmill.spec.recipe import Recipe

SHAPES = ("criteo", "recsys2021", "movielens", "shop")
_FLAGS_OF_SHAPES = {"days": ("criteo",), "format": ("recsys2021",), "compress": ("criteo", "recsys2021")}
_NUM_SIDE_BY_SIDE = 8


class UsageError(RecmillError):
    """Flags that do not go together."""

    exit_code = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only when it did what was asked."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        code = int(parsed.command(parsed) or 0)
        sys.stdout.flush()  # so that a reader who is gone is noticed here
        return code
    except RecmillError as error:
        print(f"recmill: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("recmill: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): say nothing more, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"recmill: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recmill", description="Turns raw click logs into a served recommender."
    )
    parser.add_argument("--version", action="version", version=f"recmill {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_generate(commands)
    _add_recipes(commands)
    _add_check(commands)
    _add_prepare(commands)
    _add_bench(commands)
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], help: str, examples: str
) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_recipe(parser: Any) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a shipped recipe's name, a TOML file, or file.py:function"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a value of the recipe; without VALUE, its default holds",
    )


def _add_prepare_options(parser: Any) -> None:
    parser.add_argument(
        "--engine", choices=["local"], default="local", help="where to run (default: this machine)"
    )
    parser.add_argument(
        "--memory", type=_size, default="2GB", metavar="SIZE", help="memory bound, such as 1GB (default: 2GB)"
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="threads (default: the cores this process may use)"
    )
    parser.add_argument(
        "--max-bad",
        type=_share,
        default="0.1%",
        metavar="SHARE",
        help="share of bad rows that is an error (default: 0.1%%)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


# run


def _add_run(commands: Any) -> None:
    parser = _add(
        commands,
        "run",
        _run,
        "run a recipe's whole chain, as far as it is done already, it is not done again",
        """
recmill run quickstart                             generate a shop's log and take it through every stage
recmill run movielens --data ml-1m --into runs/ml  your own files
""",
    )
    _add_recipe(parser)
    parser.add_argument("--data", metavar="DIR", help="the log's directory or URL (default: generate one)")
    parser.add_argument("--into", metavar="DIR", help="where stages land (default: runs/<recipe>)")
    parser.add_argument("--rows", type=_positive, metavar="N", help="rows to generate (default: 100000)")
    _add_prepare_options(parser)


def _run(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.logs.generate import Generated
    from recmill.progress import Progress
    from recmill.run import DEFAULT_ROWS, run

    if parsed.data and parsed.rows:
        raise UsageError(
            "--rows is for generated logs; with --data, the log is read as it is. Remove one of them."
        )
    recipe = _load(parsed)
    into = Path(parsed.into or f"runs/{recipe.name}")
    say = _silent if parsed.json else print

    def report(result: Any) -> None:
        if isinstance(result, Generated):
            _say_generated(result, str(into / "log"), say)
        else:
            _say_prepared(result, say)

    ran = run(
        recipe,
        parsed.data,
        into,
        parsed.rows or DEFAULT_ROWS,
        _options(parsed),
        Progress(parsed.quiet),
        report,
    )
    table = ran.prepared.table
    if parsed.json:
        print(json.dumps({"data": str(ran.data), "table": str(table.path), "digest": table.digest}))
        return
    print("first row of the Table:")
    for name, value in table.scan().head(1).collect().row(0, named=True).items():
        print(f"  {name:<28} {value}")


# generate


def _add_generate(commands: Any) -> None:
    parser = _add(
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
    parser.add_argument("shape", choices=SHAPES, help="what the log looks like")
    parser.add_argument("--rows", type=_positive, required=True, metavar="N", help="number of events")
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="S", help="equal seeds give equal files (default: 0)"
    )
    parser.add_argument("--into", required=True, metavar="DIR", help="where to write")
    parser.add_argument("--days", metavar="LIST", help="criteo: write these day files, such as 0-3,23")
    parser.add_argument("--format", choices=["csv", "parquet"], help="recsys2021: file format")
    parser.add_argument("--compress", action="store_true", help="criteo, recsys2021: gzip the files")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _generate(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.logs.generate import generate
    from recmill.progress import Progress

    for flag, shapes in _FLAGS_OF_SHAPES.items():
        if getattr(parsed, flag) and parsed.shape not in shapes:
            raise UsageError(f"--{flag} is for {' and '.join(shapes)}; {parsed.shape} has no such option.")
    options: dict[str, Any] = {"format": parsed.format} if parsed.format else {}
    days = _days(parsed.days) if parsed.days else None
    with Progress(parsed.quiet).stage("generate", parsed.rows) as stage:
        made = generate(
            parsed.shape,
            parsed.rows,
            parsed.seed,
            Path(parsed.into),
            progress=lambda rows: stage.advance(rows - stage.done, rows - stage.rows),
            days=days,
            compress=parsed.compress,
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
    _say_generated(made, parsed.into, print)
    if recipe := _recipe_for(made):
        overrides = " --set log.format=parquet --set log.separator=" if parsed.format == "parquet" else ""
        print(f"next   recmill prepare {recipe} --data {parsed.into} --into runs/{recipe}/table{overrides}")


def _recipe_for(made: Any) -> str | None:
    """The first shipped recipe whose patterns all find a file in what was generated."""
    from fnmatch import fnmatch

    from recmill.spec.load import load_recipe, shipped_recipes

    names = [file.name.removesuffix(".gz") for file in made.files]
    for recipe in map(load_recipe, shipped_recipes()):
        held_out = recipe.split.held_out_files if recipe.split else ()
        patterns = (*recipe.log.files, *held_out)
        if recipe.generate == made.shape and all(any(fnmatch(n, p) for n in names) for p in patterns):
            return recipe.name
    return None


def _say_generated(made: Any, into: str, say: Callable[[str], None]) -> None:
    files = ", ".join(file.name for file in made.files[:4]) + (", ..." if len(made.files) > 4 else "")
    say(f"wrote  {into}   {files}   {made.rows:,} rows   {_bytes(made.num_bytes)}")
    say("best   " + "   ".join(f"{_metric(name)} {value:.4f}" for name, value in made.best.items()))
    say(f"       {made.note}")


def _metric(name: str) -> str:
    return name.replace("auc", "AUC", 1)


def _days(text: str) -> list[int]:
    days: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part, re.ASCII)
        if not match:
            raise UsageError(f'--days must look like 0-3,23; got "{text}".')
        first, last = int(match[1]), int(match[2] or match[1])
        days += range(first, last + 1)
    return days


# recipes and check


def _add_recipes(commands: Any) -> None:
    parser = _add(
        commands,
        "recipes",
        _recipes,
        "list the shipped recipes, or print one to start your own from",
        """
recmill recipes
recmill recipes quickstart > mine.toml
""",
    )
    parser.add_argument("name", nargs="?", help="print this recipe's TOML")


def _recipes(parsed: argparse.Namespace) -> None:
    from recmill.spec.load import load_recipe, shipped_recipes
    from recmill.spec.names import nearest

    shipped = shipped_recipes()
    if parsed.name is None:
        for name in shipped:
            print(f"{name:<20} {load_recipe(name).description}")
        return
    if parsed.name not in shipped:
        raise UsageError(f'There is no shipped recipe "{parsed.name}"{nearest(parsed.name, shipped)}')
    print(shipped[parsed.name].read_text(encoding="utf-8"), end="")


def _add_check(commands: Any) -> None:
    parser = _add(
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
    _add_recipe(parser)
    parser.add_argument(
        "--data", metavar="DIR", help="also look at the log's files there, and parse their first rows"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _check(parsed: argparse.Namespace) -> int:
    recipe = _load(parsed)
    reports = _check_files(recipe, parsed.data) if parsed.data else {}
    good = all(report.problem is None and not report.bad and report.num_good for report in reports.values())
    if parsed.json:
        files = {name: _files_json(report) for name, report in reports.items()}
        print(
            json.dumps(
                {"recipe": recipe.name, "features": len(recipe.features), "good": good, "files": files}
            )
        )
        return 0 if good else 1
    sizes = {"column": recipe.log.columns, "feature": recipe.features, "label": recipe.labels}
    print(
        f"recipe {recipe.name} is right: {', '.join(_counted(len(many), one) for one, many in sizes.items())}"
    )
    for name, report in reports.items():
        _say_files(name, report)
    if good:
        print(
            f"next   recmill prepare {parsed.recipe} --data {parsed.data or 'DIR'} --into runs/{recipe.name}/table"
        )
    return 0 if good else 1


def _check_files(recipe: Recipe, data: str) -> dict[str, Any]:
    from recmill.logs.base import describe_files

    return {
        "log": describe_files(recipe.log, data),
        **{f"tables.{n}": describe_files(t, data) for n, t in recipe.tables.items()},
    }


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
            print(f"{name:<14} {file.name}   {_bytes(file.size)}{kind}")
    if report.problem:
        print(f"{name:<14} {report.problem}")
        return
    print(f"{name:<14} first rows: {report.num_good} parse, {len(report.bad)} do not")
    for row in report.bad[:5]:
        column = f" (column {row.column})" if row.column else ""
        print(f"{name:<14}   {row.file} at {row.offset:,}: {row.reason}{column}  {row.text[:80]!r}")


# prepare


def _add_prepare(commands: Any) -> None:
    parser = _add(
        commands,
        "prepare",
        _prepare,
        "turn a raw log into a Table: fit the features on the training rows and apply them to all",
        """
recmill prepare criteo-dlrm --data /data/criteo --into runs/criteo/table
recmill prepare criteo-dlrm --data /data/criteo --into runs/criteo/table --memory 1GB --explain
recmill prepare mine.toml --data logs --sample 5     show the first rows, write nothing
""",
    )
    _add_recipe(parser)
    parser.add_argument("--data", required=True, metavar="DIR", help="the log's directory or URL")
    parser.add_argument("--into", metavar="DIR", help="where the Table lands; needed unless --sample")
    parser.add_argument("--explain", action="store_true", help="show what was fitted for each feature")
    parser.add_argument(
        "--sample",
        type=_positive,
        metavar="N",
        help="fit and apply to the first N rows, print them, write nothing",
    )
    parser.add_argument(
        "--binary", action="store_true", help="Criteo: also write <split>.bin, 40 int32 a row"
    )
    parser.add_argument(
        "--partitions", type=_positive, metavar="N", help="cut the log into about N pieces (default: by size)"
    )
    _add_prepare_options(parser)


def _prepare(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.prepare import prepare
    from recmill.progress import Progress

    if parsed.sample:
        return _sample(parsed)
    if parsed.into is None:
        raise UsageError(
            "--into DIR is missing: where should the Table land? (Or look without writing: --sample N)"
        )
    recipe = _load(parsed)
    prepared = prepare(recipe, parsed.data, Path(parsed.into), _options(parsed), Progress(parsed.quiet))
    if parsed.json:
        explained = {"features": _explained_json(prepared.table.plan)} if parsed.explain else {}
        print(json.dumps({**_prepared_json(prepared), **explained}))
        return
    _say_prepared(prepared, print)
    if parsed.explain:
        _say_explained(prepared.table.plan)


def _sample(parsed: argparse.Namespace) -> None:
    import tempfile
    from pathlib import Path

    from recmill.prepare import preview

    for flag in ("into", "binary", "partitions"):
        if getattr(parsed, flag):
            raise UsageError(
                f"--{flag} has no meaning with --sample, which writes nothing. Remove one of them."
            )
    with tempfile.TemporaryDirectory() as work:
        plan, rows = preview(_load(parsed), parsed.data, parsed.sample, Path(work))
    rows = rows.select([name for name in rows.columns if not name.startswith("__")])
    if parsed.json:
        explained = {"features": _explained_json(plan)} if parsed.explain else {}
        print(json.dumps({"rows": rows.to_dicts(), **explained}))
        return
    for first in range(0, rows.height, _NUM_SIDE_BY_SIDE):
        _say_rows(rows.slice(first, _NUM_SIDE_BY_SIDE), first)
    if parsed.explain:
        _say_explained(plan)


def _say_rows(rows: Any, first: int) -> None:
    """One line for each column, rows side by side."""
    width = max(12, min(40, 110 // max(1, rows.height)))
    print(f"{'row':<28} " + " ".join(f"{first + number:<{width}}" for number in range(rows.height)).rstrip())
    for column in rows.iter_columns():
        cells = [_cut(_short(value), width) for value in column.to_list()]
        print(f"{column.name:<28} " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _say_prepared(prepared: Prepared, say: Callable[[str], None]) -> None:
    table = prepared.table
    if prepared.was_there:
        say(f"found  {table.path}   nothing to do")
    else:
        seconds = prepared.seconds_fit + prepared.seconds_write
        rate = prepared.tally.rows / max(1e-9, seconds)
        say(
            f"read   {prepared.tally.rows:,} rows in {seconds:.1f} s   {rate:,.0f} rows/s   "
            f"(fit {prepared.seconds_fit:.1f} s)"
        )
    if prepared.tally.bad:
        say(f"bad    {prepared.tally.bad:,} rows set aside in {table.path / 'rejected'}")
        for line in prepared.tally.describe():
            say(f"       {line}")
    rows = "   ".join(f"{split} {table.num_rows(split):,}" for split in ("train", "eval", "test"))
    say(f"wrote  {table.path}   {len(table.manifest['shards'])} shards   {rows}")
    say(f"digest {table.digest}")


def _prepared_json(prepared: Prepared) -> dict[str, Any]:
    table = prepared.table
    return {
        "table": str(table.path),
        "digest": table.digest,
        "rows_read": prepared.tally.rows,
        "rows_rejected": dict(prepared.tally.reasons),
        "rows": {split: table.num_rows(split) for split in ("train", "eval", "test")},
        "shards": len(table.manifest["shards"]),
        "seconds": {"fit": prepared.seconds_fit, "write": prepared.seconds_write},
    }


def _say_explained(plan: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from recmill.prepare.explain import explain

    shown = Table(
        "feature", "kind", "of", "size", "known", "unknown", "missing", "most frequent", "learned", box=None
    )
    for entry in explain(plan):
        shares = [
            f"{share:.1%}" if share is not None else ""
            for share in (entry.coverage, entry.unknown, entry.missing)
        ]
        top = ", ".join(f"{value} ({count:,})" for value, count in entry.top)
        learned = ", ".join(f"{key} {_short(value)}" for key, value in entry.learned.items())
        size = f"{entry.size:,}" if entry.size is not None else ""
        shown.add_row(entry.name, entry.kind, entry.of, size, *shares, top, learned)
    Console(width=None if sys.stdout.isatty() else 200).print(shown)


def _explained_json(plan: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from recmill.prepare.explain import explain

    return [asdict(entry) for entry in explain(plan)]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


# bench


def _add_bench(commands: Any) -> None:
    parser = _add(
        commands,
        "bench",
        _bench,
        "measure a stage beside its peers, in one run",
        """
recmill bench prepare
recmill bench prepare --rows 10000000 --memory 1GB --json
""",
    )
    parser.add_argument("stage", choices=["prepare"], help="what to measure")
    parser.add_argument(
        "--rows",
        type=_positive,
        default=1_000_000,
        metavar="N",
        help="generated Criteo rows (default: 1000000)",
    )
    parser.add_argument(
        "--recipe", default="criteo-dlrm", help="recipe to prepare with (default: criteo-dlrm)"
    )
    parser.add_argument(
        "--memory", type=_size, default="2GB", metavar="SIZE", help="memory bound of prepare (default: 2GB)"
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="threads (default: the cores this process may use)"
    )
    parser.add_argument(
        "--repeat",
        type=_positive,
        default=1,
        metavar="N",
        help="interleaved rounds; medians are reported (default: 1)",
    )
    parser.add_argument(
        "--without-pandas",
        action="store_true",
        help="leave out the pandas peer, which needs much memory and time",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="keep and reuse the generated log there (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _bench(parsed: argparse.Namespace) -> None:
    from recmill.bench.prepare import bench_prepare, describe

    result = bench_prepare(
        parsed.recipe,
        parsed.rows,
        parsed.memory,
        parsed.workers,
        parsed.repeat,
        not parsed.without_pandas,
        parsed.data,
    )
    print(json.dumps(result) if parsed.json else describe(result))


# shared


def _load(parsed: argparse.Namespace) -> Recipe:
    from recmill.spec.load import load_recipe

    return load_recipe(parsed.recipe, parsed.overrides)


def _options(parsed: argparse.Namespace) -> Options:
    from recmill.prepare import Options

    return Options(
        workers=parsed.workers,
        memory=parsed.memory,
        max_bad=parsed.max_bad,
        partitions=getattr(parsed, "partitions", None),
        binary=getattr(parsed, "binary", False),
    )


def _silent(line: str) -> None:
    """Say nothing."""


def _counted(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text}")
    return int(text)


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9][0-9_]{0,18}", text) or text.endswith("_") or int(text.replace("_", "")) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return int(text.replace("_", ""))


_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?B?)", text.strip().upper(), re.ASCII)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB or 2GB, got {text}")
    unit = match[2] if match[2].endswith("B") or not match[2] else match[2] + "B"
    return int(float(match[1]) * _UNITS[unit])


def _share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 0.001 or 0.1%, got {text}")
    return share


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
