"""`recmill train --follow`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from recmill.cli.arguments import UsageError, load, seconds, share
from recmill.cli.train_options import set_wait_policy


def add_follow_options(parser: Any) -> None:
    parser.add_argument(
        "--publish", metavar="DIR", help="with --follow: what `recmill export` wrote; deltas of it land there"
    )
    parser.add_argument(
        "--every", type=seconds, metavar="SECONDS", help="with --follow: between deltas (default: 5)"
    )
    parser.add_argument(
        "--rate",
        type=share,
        metavar="SHARE",
        help="with --follow: share of the recipe's rates (default: 30%%)",
    )
    parser.add_argument(
        "--for",
        type=seconds,
        metavar="SECONDS",
        dest="seconds",
        help="with --follow: stop after (default: never)",
    )


def check_follow_flags(parsed: argparse.Namespace) -> None:
    if parsed.follow and not parsed.publish:
        raise UsageError("--follow needs --publish DIR: the bundles whose deltas it writes.")
    if parsed.follow and "://" in parsed.follow:
        raise UsageError(
            f"--follow {parsed.follow}: objects of a store do not grow. Follow a directory that this machine sees, or "
            "prepare, train and export again and again from the URL."
        )
    names = {"publish": "--publish", "every": "--every", "rate": "--rate", "seconds": "--for"}
    for name, flag in names.items():
        if getattr(parsed, name) is not None and not parsed.follow:
            raise UsageError(f"{flag} is for --follow. Remove it.")
    others = {"track": "--track", "profile": "--profile", "only": "--only", "table_memory": "--table-memory"}
    for name, flag in {**others, "resume": "--resume"}.items():
        if getattr(parsed, name) and parsed.follow:
            raise UsageError(f"{flag} is not for --follow. Remove it.")


def follow(parsed: argparse.Namespace) -> None:
    import signal
    import threading
    from pathlib import Path

    recipe = load(parsed)
    set_wait_policy(parsed)
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.errors import ArtifactError
    from recmill.stages.train import follow as following
    from recmill.stages.train.threads import choose_threads

    folder = Checkpoint.open(parsed.into)
    if folder.recipe != recipe:
        raise ArtifactError(f'{folder.path} was trained with another recipe than "{recipe.name}" is now.')
    options = following.FollowConfig(
        every_seconds=5.0 if parsed.every is None else parsed.every,
        rate=0.3 if parsed.rate is None else parsed.rate,
        threads=choose_threads(parsed.threads).number,
        max_seconds=parsed.seconds,
        warn=lambda message: print(f"warning: {message}", file=sys.stderr),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def report(published: following.PublishedDelta) -> None:
        if parsed.json:
            print(json.dumps({**vars(published), "path": str(published.path)}), flush=True)
        elif not parsed.quiet:
            losses = "   ".join(f"{model} loss {loss:.4f}" for model, loss in published.loss.items())
            bad = f"   {published.num_bad:,} bad" if published.num_bad else ""
            print(
                f"delta  {published.number}   {published.num_rows:,} rows{bad}   {published.num_keys:,} keys   "
                f"{published.num_items:,} items   {published.num_users:,} users   {losses}   {published.seconds:.1f} s",
                flush=True,
            )

    if not parsed.json:
        print(
            f"follow {parsed.follow}   deltas into {parsed.publish} every {options.every_seconds:g} s",
            flush=True,
        )
    count = following.follow(folder, parsed.follow, Path(parsed.publish), options, stop, report)
    if not parsed.json:
        print(f"wrote  {count:,} deltas")
