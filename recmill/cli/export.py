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

_NAMED = ("version", "rows_dtype", "products", "index", "num_users", "num_items")
_CHECKED = {"rank": "scores", "user": "user vectors", "item": "item vectors"}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "make a bundle of a checkpoint: everything that a server needs, with users and items as of the log's end",
        """
recmill export --checkpoint runs/quickstart/checkpoint --into runs/quickstart/bundle
recmill export --checkpoint c --into b --data /data/shop --rows int8 --keep 3
recmill export --checkpoint c --into b --which last --index clustered
recmill export --checkpoint s3://models/shop/checkpoint --into s3://models/shop/bundle --data s3://logs/shop
recmill export --checkpoint c --into rejected --despite-gate --no-publish     keep it to look at, serve it never
""",
    )
    add_folder(parser, "--checkpoint", "what `recmill train` wrote", required=True)
    add_folder(parser, "--into", "folder of bundles, one per version", required=True)
    add_folder(parser, "--data", "the log (default: the one that was prepared)")
    add_folder(parser, "--table", "the Table, if the checkpoint does not name its log")
    add_flags(parser, ExportConfig)
    add_output_options(parser)


def _export(parsed: argparse.Namespace) -> None:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.reporting.progress import Progress
    from recmill.stages.export.export import export_at
    from recmill.stages.export.find_log import find_log

    config = read_config(parsed, ExportConfig)
    folder = Checkpoint.open(parsed.checkpoint).to_serve(config.which)
    data = find_log(folder, parsed.data, parsed.table)
    exported = export_at(folder, data, parsed.into, config, Progress(parsed.quiet))
    say_exported(exported, data, say_of(parsed))
    if parsed.json:
        print(json.dumps(exported_json(exported)))
    elif config.publish:
        print(f"next   recmill serve --bundle {parsed.into}")
    else:
        print(f"next   recmill bundle show {exported.bundle.path}")


def say_exported(exported: ExportResult, data: str, say: Say) -> None:
    from recmill.storage.view import address_of

    bundle = exported.bundle
    manifest, address = bundle.manifest, address_of(bundle.path)
    size = show_bytes(bundle.num_bytes)
    if exported.was_complete:
        say(f"found  {address}   {size}   of this checkpoint and log; nothing to do")
    else:
        known = f"{manifest['num_users']:,} users   {manifest['num_items']:,} items"
        bad = f"   {exported.num_bad:,} bad rows left out" if exported.num_bad else ""
        say(f"read   {data}   {exported.num_rows:,} events   {known}{bad}")
        for line in check_lines(manifest["check"]):
            say(f"check  {line}")
        index = f"   index {manifest['index']}" if manifest["index"] else ""
        say(f"wrote  {address}   {size}   rows {bundle.rows_dtype}{index}   {exported.seconds:.1f} s")
    if manifest["gate"] is not None and not manifest["gate"]["passed"]:
        say("gate   FAIL: this checkpoint did not meet the conditions that it was evaluated against")
    if exported.removed:
        say(f"removed {', '.join(exported.removed)}")


def check_lines(check: dict[str, dict[str, float]]) -> list[str]:
    """The differences between bundle and checkpoint, one line for each comparison."""
    lines = []
    for name, words in _CHECKED.items():
        if name in check:
            found = check[name]
            order = f"   order {found['rank_correlation']:.4f}" if "rank_correlation" in found else ""
            off = f"off by at most {found['max']:.1e}, {found['mean']:.1e} on average"
            lines.append(f"{words} of {found['rows']:,} rows   {off}{order}")
    if "products" in check:
        found = check["products"]
        lines.append(
            f"int8 products over {found['rows']:,} rows   AUC {found['auc_float32']:.5f} -> {found['auc_int8']:.5f}   "
            f"order {found['rank_correlation']:.4f}   top 50 {found['top_overlap']:.3f}   "
            f"logits off by at most {found['max_logit_error']:.3f}"
        )
    return lines


def exported_json(exported: ExportResult) -> dict[str, Any]:
    from recmill.storage.view import address_of

    manifest = exported.bundle.manifest
    return {
        "bundle": address_of(exported.bundle.path),
        "num_bytes": exported.bundle.num_bytes,
        "was_complete": exported.was_complete,
        "rows_read": exported.num_rows,
        "rows_rejected": exported.num_bad,
        "seconds": round(exported.seconds, 3),
        "removed": list(exported.removed),
        **{name: manifest[name] for name in _NAMED},
        **{name: manifest[name] for name in ("check", "gate", "checkpoint", "log_end")},
    }
