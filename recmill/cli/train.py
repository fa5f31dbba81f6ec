"""`recmill train`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_recipe,
    load,
    positive,
    seconds,
    share,
    silent,
    size,
)

if TYPE_CHECKING:
    from recmill.train import Trained

TRACKERS = ("tensorboard", "mllog", "mlflow")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        "train a recipe's models: a Table or a raw log in, checkpoints out",
        """
recmill train quickstart --table runs/quickstart/table --into runs/quickstart/checkpoint
recmill train criteo-dlrm --table runs/criteo/table --into runs/criteo/checkpoint --resume
recmill train criteo-deeprec --from-log /data/criteo --into runs/deeprec   features on the fly, no Table
recmill train criteo-dlrm --from-log /data/new --plan runs/criteo/table --into runs/new
recmill train mine.toml --table t --into c --set ranking.train.max_minutes=10 --track tensorboard
recmill train quickstart --follow /data/shop --publish runs/quickstart/bundle --into runs/quickstart/checkpoint
""",
    )
    add_recipe(parser)
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--table", metavar="DIR", help="the Table to learn from")
    rows.add_argument("--from-log", metavar="DIR", help="learn straight from a raw log's directory or URL")
    rows.add_argument(
        "--follow",
        metavar="DIR",
        help="go on learning from a log that is still written; needs --publish, and checkpoints in --into",
    )
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
    parser.add_argument(
        "--plan", metavar="DIR", help="with --from-log: the Table or checkpoint whose fitted features to use"
    )
    parser.add_argument(
        "--max-bad",
        type=share,
        metavar="SHARE",
        help="with --from-log: share of bad rows that is an error (default: 0.1%%)",
    )
    parser.add_argument("--into", required=True, metavar="DIR", help="where checkpoints land")
    add_train_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last good checkpoint in --into")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_train_options(parser: Any) -> None:
    parser.add_argument(
        "--only", choices=["ranking", "retrieval"], help="train this model (default: all that the recipe has)"
    )
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads (default: chosen by a short probe at the start)",
    )
    parser.add_argument(
        "--wait-policy",
        choices=["passive", "active"],
        default="passive",
        help="what idle threads do: sleep, or spin, which is faster on a machine of one's own (default: passive)",
    )
    parser.add_argument(
        "--table-memory",
        type=size,
        metavar="SIZE",
        help="memory bound of embedding tables; what is beyond it lies on disk (default: none)",
    )
    parser.add_argument(
        "--track",
        choices=TRACKERS,
        action="append",
        default=[],
        help="also write what goes to history.jsonl for this tool; may be repeated",
    )
    parser.add_argument(
        "--profile", type=positive, metavar="N", help="write a Chrome trace of N steps beside the checkpoints"
    )


def set_wait_policy(parsed: argparse.Namespace) -> None:
    """OpenMP reads it once, when torch is first imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", parsed.wait_policy.upper())


def train_options(parsed: argparse.Namespace, resume: bool) -> Any:
    from recmill.train import Options

    return Options(
        threads=parsed.threads,
        resume=resume,
        models=(parsed.only,) if parsed.only else (),
        track=tuple(parsed.track),
        profile_steps=parsed.profile,
        table_memory=parsed.table_memory,
        warn=lambda message: print(f"warning: {message}", file=sys.stderr),
    )


def _train(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    _check_follow_flags(parsed)
    if parsed.follow:
        _follow(parsed)
        return
    for flag in ("plan", "max_bad"):
        if getattr(parsed, flag) is not None and not parsed.from_log:
            raise UsageError(
                f"--{flag.replace('_', '-')} is for --from-log; a Table is prepared already. Remove it."
            )
    recipe = load(parsed)
    set_wait_policy(parsed)
    from recmill.logs.tally import DEFAULT_MAX_BAD
    from recmill.progress import Progress
    from recmill.table import Table
    from recmill.train import train
    from recmill.train.source import LogSource, TableSource

    source = (
        TableSource(Table.open(parsed.table))
        if parsed.table
        else LogSource(
            recipe,
            parsed.from_log,
            Path(parsed.plan) if parsed.plan else None,
            DEFAULT_MAX_BAD if parsed.max_bad is None else parsed.max_bad,
            lambda line: print(f"note   {line}", file=sys.stderr),
        )
    )
    say = silent if parsed.json else print
    trained = train(
        recipe,
        source,
        Path(parsed.into),
        train_options(parsed, parsed.resume),
        Progress(parsed.quiet),
        lambda model: say_trained(model, say),
    )
    if parsed.json:
        print(json.dumps({"checkpoint": parsed.into, "models": [trained_json(model) for model in trained]}))
    elif parsed.table:
        print(f"next   recmill evaluate {parsed.recipe} --checkpoint {parsed.into} --table {parsed.table}")


def _check_follow_flags(parsed: argparse.Namespace) -> None:
    if parsed.follow and not parsed.publish:
        raise UsageError("--follow needs --publish DIR: the bundles whose deltas it writes.")
    names = {"publish": "--publish", "every": "--every", "rate": "--rate", "seconds": "--for"}
    for name, flag in names.items():
        if getattr(parsed, name) is not None and not parsed.follow:
            raise UsageError(f"{flag} is for --follow. Remove it.")
    others = {"track": "--track", "profile": "--profile", "only": "--only", "table_memory": "--table-memory"}
    for name, flag in {**others, "resume": "--resume"}.items():
        if getattr(parsed, name) and parsed.follow:
            raise UsageError(f"{flag} is not for --follow. Remove it.")


def _follow(parsed: argparse.Namespace) -> None:
    import signal
    import threading
    from pathlib import Path

    recipe = load(parsed)
    set_wait_policy(parsed)
    from recmill.checkpoint import CheckpointFolder
    from recmill.errors import ArtifactError
    from recmill.train.follow import Options, Published, follow
    from recmill.train.threads import choose_threads

    folder = CheckpointFolder.open(parsed.into)
    if folder.recipe != recipe:
        raise ArtifactError(f'{folder.path} was trained with another recipe than "{recipe.name}" is now.')
    options = Options(
        every_seconds=5.0 if parsed.every is None else parsed.every,
        rate=0.3 if parsed.rate is None else parsed.rate,
        threads=choose_threads(parsed.threads).number,
        max_seconds=parsed.seconds,
        warn=lambda message: print(f"warning: {message}", file=sys.stderr),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def report(published: Published) -> None:
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
    count = follow(folder, parsed.follow, Path(parsed.publish), options, stop, report)
    if not parsed.json:
        print(f"wrote  {count:,} deltas")


def say_trained(trained: Trained, say: Callable[[str], None]) -> None:
    state = trained.state
    if trained.was_there:
        say(
            f"found  {trained.path}   stopped by {state.stopped_by} at step {trained.resumed_from:,}; nothing to do"
        )
    else:
        say(f"threads {trained.threads.number}   {trained.threads.reason}")
        since = f" (went on from step {trained.resumed_from:,})" if trained.resumed_from else ""
        speed = f"{trained.samples_per_second:,.0f} rows/s   waited {trained.wait_share:.0%}"
        rows = f"{state.samples:,} rows in {state.seconds:.1f} s{since}"
        say(f"trained {trained.model}   {rows}   {speed}   stopped by {state.stopped_by}")
    metrics = "   ".join(f"{name} {value:.4f}" for name, value in _main_metrics(trained).items())
    say(f"wrote  {trained.best.path}   step {trained.best.step:,}   {metrics}")


def trained_json(trained: Trained) -> dict[str, Any]:
    return {
        "model": trained.model,
        "path": str(trained.path),
        "step": trained.best.step,
        "metrics": trained.best.metrics,
        "stopped_by": trained.state.stopped_by,
        "samples": trained.state.samples,
        "seconds": trained.state.seconds,
        "samples_per_second": trained.samples_per_second,
        "wait_share": trained.wait_share,
        "threads": trained.threads.number,
        "resumed_from": trained.resumed_from,
    }


def _main_metrics(trained: Trained) -> dict[str, float]:
    wanted = ("auc", "log_loss", "normalised_entropy", "recall@10", "ndcg@10", "recall@50")
    return {name: trained.best.metrics[name] for name in wanted if name in trained.best.metrics}
