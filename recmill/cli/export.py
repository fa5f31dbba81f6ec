"""`recmill export`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import Say, add_command, add_folder, add_output_options, say_of, show_bytes
from recmill.cli.flags import add_flags, read_config
from recmill.stages.export.config import ExportConfig

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
    add_folder(parser, "--checkpoint", "what `recmill train` wrote", required=True)
    add_folder(parser, "--into", "where bundles land, one for each version", required=True)
    add_folder(parser, "--data", "the log (default: where it was when it was prepared)")
    add_folder(parser, "--table", "the Table, if the checkpoint does not name its log")
    add_flags(parser, ExportConfig)
    add_output_options(parser)


def _export(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.reporting.progress import Progress
    from recmill.stages.export.export import export
    from recmill.stages.export.find_log import find_log

    config = read_config(parsed, ExportConfig)
    folder = Checkpoint.open(parsed.checkpoint)
    data = find_log(folder, parsed.data, Path(parsed.table) if parsed.table else None)
    exported = export(folder, data, Path(parsed.into), config, Progress(parsed.quiet))
    say_exported(exported, data, say_of(parsed))
    if parsed.json:
        print(json.dumps(exported_json(exported)))
    elif config.publish:
        print(f"next   recmill serve --bundle {parsed.into}")
    else:
        print(f"next   recmill bundle show {exported.bundle.path}")


def say_exported(exported: ExportResult, data: str, say: Say) -> None:
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
