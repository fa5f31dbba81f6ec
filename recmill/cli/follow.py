"""`recmill train --follow`."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from typing import TYPE_CHECKING

from recmill.cli.arguments import say_of, warn
from recmill.cli.flags import read_config
from recmill.errors import ArtifactError
from recmill.recipe.defaults import is_resolution
from recmill.stages.train.config import FollowConfig, TrainConfig

if TYPE_CHECKING:
    from recmill.recipe.recipe import Recipe
    from recmill.stages.train.follow import PublishedDelta


def follow(parsed: argparse.Namespace, recipe: Recipe, config: TrainConfig) -> None:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.stages.train import follow as following
    from recmill.stages.train.threads import choose_threads

    folder = Checkpoint.open(parsed.into).to_serve()
    if not is_resolution(folder.recipe, recipe):
        raise ArtifactError(f'{folder.path} was trained with another recipe than "{recipe.name}" is now.')
    threads = choose_threads(config.threads).number
    options = read_config(parsed, FollowConfig, threads=threads, warn=warn)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def report(published: PublishedDelta) -> None:
        if parsed.json:
            print(json.dumps({**vars(published), "path": str(published.path)}), flush=True)
        elif not parsed.quiet:
            print(_delta_line(published), flush=True)

    say = say_of(parsed)
    say(f"follow {parsed.follow}   deltas into {parsed.publish} every {options.every_seconds:g} s")
    count = following.follow(folder, parsed.follow, parsed.publish, options, stop, report)
    say(f"wrote  {count:,} deltas")


def _delta_line(published: PublishedDelta) -> str:
    losses = "   ".join(f"{model} loss {loss:.4f}" for model, loss in published.loss.items())
    bad = f"   {published.num_bad:,} bad" if published.num_bad else ""
    return (
        f"delta  {published.number}   {published.num_rows:,} rows{bad}   {published.num_keys:,} keys   "
        f"{published.num_items:,} items   {published.num_users:,} users   {losses}   {published.seconds:.1f} s"
    )
