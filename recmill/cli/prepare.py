"""`recmill prepare`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    Say,
    add_command,
    add_folder,
    add_output_options,
    add_recipe,
    load,
    refuse,
)
from recmill.cli.flags import UsageError, add_flags, read_config, refuse_flags, typed
from recmill.config import COUNT
from recmill.stages.prepare.config import PrepareConfig

if TYPE_CHECKING:
    from recmill.stages.prepare.prepare import PrepareResult

_NUM_SIDE_BY_SIDE = 8


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "turn a raw log into a Table: fit the features on the training rows and apply them to all",
        """
recmill prepare criteo-dlrm --data /data/criteo --into runs/criteo/table
recmill prepare criteo-dlrm --data /data/criteo --into runs/criteo/table --memory 1GB --explain
recmill prepare mine.toml --data logs --sample 5     show the first rows, write nothing
recmill prepare quickstart --data logs/today --into runs/today --plan runs/quickstart/checkpoint   for score --table
recmill prepare criteo-dlrm --data s3://logs/criteo --into s3://models/criteo/table
recmill prepare criteo-dlrm --data /shared/criteo --into /shared/table --engine ray --address auto
recmill prepare criteo-dlrm --data /shared/criteo --into /shared/table --engine spark --address yarn
""",
    )
    add_recipe(parser)
    add_folder(parser, "--data", "the log's directory or URL", required=True)
    add_folder(parser, "--into", "directory or URL of the Table; required unless --sample")
    add_folder(
        parser, "--plan", "the Table, checkpoint or bundle whose fitted features to use; nothing is fitted"
    )
    parser.add_argument("--explain", action="store_true", help="show what was fitted for each feature")
    parser.add_argument(
        "--sample",
        type=typed(COUNT),
        metavar="N",
        help="print the first N rows, raw above prepared, fitted on the first 100,000; write nothing",
    )
    add_flags(parser, PrepareConfig)
    add_output_options(parser)


def _prepare(parsed: argparse.Namespace) -> None:
    from recmill.features.plan_artifact import plan_at
    from recmill.reporting.progress import Progress
    from recmill.stages.prepare.prepare import prepare_at

    if parsed.sample:
        return _sample(parsed)
    if parsed.into is None:
        raise UsageError(
            "--into DIR is missing: where should the Table be written? (--sample N shows rows without writing.)"
        )
    recipe = load(parsed)
    prepared = prepare_at(
        recipe,
        parsed.data,
        parsed.into,
        read_config(parsed, PrepareConfig),
        Progress(parsed.quiet),
        plan_at(parsed.plan) if parsed.plan else None,
    )
    if parsed.json:
        explained = {"features": _explained_json(prepared.table.plan)} if parsed.explain else {}
        print(json.dumps({**_prepared_json(prepared), **explained}))
        return
    say_prepared(prepared, print)
    if parsed.explain:
        _say_explained(prepared.table.plan)


def _sample(parsed: argparse.Namespace) -> None:
    import tempfile
    from pathlib import Path

    from recmill.stages.prepare.prepare import preview

    reason = "has no meaning with --sample, which shows a few rows and writes nothing. Remove one of them."
    refuse(parsed, ("into", "plan"), reason)
    refuse_flags(parsed, PrepareConfig, reason)
    with tempfile.TemporaryDirectory() as work:
        found = preview(load(parsed), parsed.data, parsed.sample, Path(work))
    rows = found.rows.select([name for name in found.rows.columns if not name.startswith("__")])
    raw = found.raw.select([name for name in found.raw.columns if not name.startswith("__")])
    if parsed.json:
        explained = {"features": _explained_json(found.plan)} if parsed.explain else {}
        shown = {"fitted_on_rows": found.num_fitted, "raw": _plain(raw), "rows": rows.to_dicts()}
        print(json.dumps({**shown, **explained}))
        return
    print(f"fitted on the first {found.num_fitted:,} rows")
    sources = {chain.info().name: chain.feature.columns for chain in found.plan.features}
    for first in range(0, rows.height, _NUM_SIDE_BY_SIDE):
        _say_rows(
            raw[first : first + _NUM_SIDE_BY_SIDE], rows[first : first + _NUM_SIDE_BY_SIDE], sources, first
        )
    if parsed.explain:
        _say_explained(found.plan)


def _plain(raw: Any) -> list[dict[str, Any]]:
    """Rows for JSON, which has no times."""
    plain = (bool, int, float, str, list, type(None))
    return [
        {name: value if isinstance(value, plain) else str(value) for name, value in row.items()}
        for row in raw.to_dicts()
    ]


def _say_rows(raw: Any, rows: Any, sources: dict[str, tuple[str, ...]], first: int) -> None:
    """Print rows side by side: one line per prepared column, below the log columns that it is made from."""
    width = max(12, min(40, 110 // max(1, rows.height)))

    def say(name: str, values: list[Any]) -> None:
        cells = [_cut(_short(value), width) for value in values]
        print(f"{name:<28} " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip())

    say("row", [str(first + number) for number in range(rows.height)])
    for column in rows.iter_columns():
        for source in sources.get(column.name, ()):
            say(f"  {source}", raw[source].to_list())
        say(column.name, column.to_list())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def say_prepared(prepared: PrepareResult, say: Say) -> None:
    from recmill.storage.view import address_of

    table = prepared.table
    address = address_of(table.path)
    if prepared.was_complete:
        say(f"found  {address}   nothing to do")
    else:
        seconds = prepared.seconds_fit + prepared.seconds_write
        rate = f"{prepared.tally.rows / max(1e-9, seconds):,.0f} rows/s   (fit {prepared.seconds_fit:.1f} s)"
        how = "went on with unfinished work" if prepared.went_on else rate
        say(f"read   {prepared.tally.rows:,} rows in {seconds:.1f} s   {how}")
    if prepared.tally.bad:
        say(f"bad    {prepared.tally.bad:,} rows set aside in {table.path / 'rejected'}")
        for line in prepared.tally.describe():
            say(f"       {line}")
    if prepared.crosses is not None:
        say(f"cross  {'   '.join(prepared.crosses) or 'no pair adds anything to its columns'}")
    rows = "   ".join(f"{split} {table.num_rows(split):,}" for split in ("train", "eval", "test"))
    say(f"wrote  {address}   {len(table.manifest['shards'])} shards   {rows}")
    say(f"digest {table.digest}")


def _prepared_json(prepared: PrepareResult) -> dict[str, Any]:
    from recmill.storage.view import address_of

    table = prepared.table
    return {
        "table": address_of(table.path),
        "digest": table.digest,
        "rows_read": prepared.tally.rows,
        "rows_rejected": dict(prepared.tally.reasons),
        "rows": {split: table.num_rows(split) for split in ("train", "eval", "test")},
        "shards": len(table.manifest["shards"]),
        "seconds": {"fit": prepared.seconds_fit, "write": prepared.seconds_write},
        **({"crosses": list(prepared.crosses)} if prepared.crosses is not None else {}),
    }


def _say_explained(plan: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from recmill.stages.prepare.explain import explain

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

    from recmill.stages.prepare.explain import explain

    return [asdict(entry) for entry in explain(plan)]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
