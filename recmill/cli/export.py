"""`recmill export`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import add_command, add_output_options, positive, show_bytes, silent

if TYPE_CHECKING:
    from recmill.stages.export.export import ExportResult

_CHECKED = {"rank": "scores", "user": "user vectors", "item": "item vectors"}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "make a bundle of a checkpoint: all that a server needs, with users and items as of the log's end",
        """
recmill export --checkpoint runs/quickstart/checkpoint --into runs/quickstart/bundle
recmill export --checkpoint c --into b --data /data/shop --rows int8 --keep 3
recmill export --checkpoint c --into b --which last --index clustered
recmill export --checkpoint c --into rejected --despite-gate --no-publish     keep it to look at, serve it never
""",
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="what `recmill train` wrote")
    parser.add_argument(
        "--into", required=True, metavar="DIR", help="where bundles land, one for each version"
    )
    parser.add_argument("--data", metavar="DIR", help="the log (default: where it was when it was prepared)")
    parser.add_argument("--table", metavar="DIR", help="the Table, if the checkpoint does not know its log")
    parser.add_argument(
        "--rows",
        choices=["float32", "float16", "int8"],
        default="float32",
        help="how embedding rows are stored (default: float32)",
    )
    parser.add_argument(
        "--which", default="best", metavar="best|last|STEP", help="which checkpoint (default: best)"
    )
    parser.add_argument(
        "--index",
        choices=["auto", "exact", "clustered"],
        default="auto",
        help="how items are found by vector (default: exact up to 200,000 items, clustered above)",
    )
    parser.add_argument(
        "--despite-gate", action="store_true", help="publish also what did not pass its gate in evaluate"
    )
    parser.add_argument(
        "--no-publish", action="store_true", help="write the version, but let what is current there be"
    )
    parser.add_argument("--keep", type=positive, metavar="N", help="remove all but the newest N versions")
    add_output_options(parser)


def _export(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.reporting.machine import available_cores
    from recmill.reporting.progress import Progress
    from recmill.stages.export.export import ExportConfig, export
    from recmill.stages.export.find_log import find_log

    folder = Checkpoint.open(parsed.checkpoint)
    data = find_log(folder, parsed.data, Path(parsed.table) if parsed.table else None)
    options = ExportConfig(
        rows=parsed.rows,
        which=parsed.which,
        index=parsed.index,
        keep=parsed.keep,
        num_threads=available_cores(),
        despite_gate=parsed.despite_gate,
        publish=not parsed.no_publish,
    )
    exported = export(folder, data, Path(parsed.into), options, Progress(parsed.quiet))
    say_exported(exported, data, silent if parsed.json else print)
    if parsed.json:
        print(json.dumps(exported_json(exported)))
    elif parsed.no_publish:
        print(f"next   recmill bundle show {exported.bundle.path}")
    else:
        print(f"next   recmill serve --bundle {parsed.into}")


def say_exported(exported: ExportResult, data: str, say: Callable[[str], None]) -> None:
    bundle = exported.bundle
    manifest = bundle.manifest
    size = show_bytes(bundle.num_bytes)
    if exported.was_there:
        say(f"found  {bundle.path}   {size}   of this checkpoint and log; nothing to do")
    else:
        known = f"{manifest['num_users']:,} users   {manifest['num_items']:,} items"
        bad = f"   {exported.num_bad:,} bad rows left out" if exported.num_bad else ""
        say(f"read   {data}   {exported.num_rows:,} events   {known}{bad}")
        for line in check_lines(manifest["check"]):
            say(f"check  {line}")
        index = f"   index {manifest['index']}" if manifest["index"] else ""
        say(f"wrote  {bundle.path}   {size}   rows {bundle.rows_dtype}{index}   {exported.seconds:.1f} s")
    if manifest["gate"] is not None and not manifest["gate"]["passed"]:
        say("gate   FAIL: this checkpoint did not meet the conditions that it was evaluated against")
    if exported.removed:
        say(f"removed {', '.join(exported.removed)}")


def check_lines(check: dict[str, dict[str, float]]) -> list[str]:
    """How far the bundle is from the checkpoint, a line for each thing that was compared."""
    lines = []
    for name, words in _CHECKED.items():
        if name in check:
            found = check[name]
            order = f"   order {found['rank_correlation']:.4f}" if "rank_correlation" in found else ""
            off = f"off by at most {found['max']:.1e}, {found['mean']:.1e} on average"
            lines.append(f"{words} of {found['rows']:,} rows   {off}{order}")
    return lines


def exported_json(exported: ExportResult) -> dict[str, Any]:
    manifest = exported.bundle.manifest
    return {
        "bundle": str(exported.bundle.path),
        "num_bytes": exported.bundle.num_bytes,
        "was_there": exported.was_there,
        "rows_read": exported.num_rows,
        "rows_rejected": exported.num_bad,
        "seconds": round(exported.seconds, 3),
        "removed": list(exported.removed),
        **{name: manifest[name] for name in ("version", "rows_dtype", "index", "num_users", "num_items")},
        **{name: manifest[name] for name in ("check", "gate", "checkpoint", "log_end")},
    }
