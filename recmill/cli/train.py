"""`recmill train`."""

from __future__ import annotations

import argparse
import json
import os
import re
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
    from recmill.spec.recipe import Recipe
    from recmill.train import Trained
    from recmill.train.launch import MakeSource
    from recmill.train.parallel import Workers
    from recmill.train.source import Source

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
recmill train criteo-dlrm --table t --into c --engine ray --workers 4 --address auto
recmill train criteo-deeprec --from-log /data/criteo --into c --engine ray --workers 2..4 --data-workers 8
torchrun --nproc-per-node 2 -m recmill train criteo-dlrm --table t --into c
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
        "--while-prepared", action="store_true", help="with --table: begin while it is still written"
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
    _add_scale_options(parser)
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


def _add_scale_options(parser: Any) -> None:
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="where to run (default: this process)"
    )
    parser.add_argument(
        "--workers",
        type=worker_range,
        metavar="N|A..B",
        help="processes that train together, or a range: as many as the cluster has room for (with --engine ray)",
    )
    parser.add_argument(
        "--address",
        metavar="auto|HOST:PORT",
        help="with --engine ray: the cluster (default: Ray is started on this machine)",
    )
    parser.add_argument(
        "--max-failures",
        type=whole,
        metavar="K",
        help="with --engine ray: how often workers may be lost before the run ends (default: 3)",
    )
    parser.add_argument(
        "--cpus-per-worker",
        type=positive,
        metavar="C",
        help="with --engine ray: CPUs and threads of each worker (default: 1)",
    )
    parser.add_argument(
        "--worker-resource",
        metavar="NAME",
        help="with --engine ray: train only on nodes with this custom resource",
    )
    parser.add_argument(
        "--data-workers",
        type=positive,
        metavar="D",
        help="with --engine ray: read, parse and apply features in so many tasks at once, on any node",
    )
    parser.add_argument(
        "--data-resource",
        metavar="NAME",
        help="with --data-workers: only on nodes with this custom resource",
    )
    parser.add_argument(
        "--wire",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="how rows of embeddings and their gradients travel between workers (default: float32)",
    )
    parser.add_argument(
        "--no-balance",
        action="store_true",
        help="equal shares of each batch for all workers, however slow one is",
    )
    parser.add_argument(
        "--explain-placement",
        action="store_true",
        help="show where tables go, with bytes on the wire and in memory for each worker",
    )


_RANGE = re.compile(r"([1-9][0-9]{0,5})(?:\.\.([1-9][0-9]{0,5}))?", re.ASCII)


def worker_range(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a number from 1, or a range such as 2..4, got {text}")
    return int(match[1]), int(match[2] or match[1])


def whole(text: str) -> int:
    return 0 if text == "0" else positive(text)


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
        wire=getattr(parsed, "wire", "float32"),
        balance=not getattr(parsed, "no_balance", False),
        warn=lambda message: print(f"warning: {message}", file=sys.stderr),
    )


def _train(parsed: argparse.Namespace) -> None:
    _check_follow_flags(parsed)
    _check_scale_flags(parsed)
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
    make_source = _make_source(parsed, recipe)
    trained: list[Trained] | None
    if parsed.engine == "ray":
        trained = _train_on_ray(parsed, recipe, make_source)
    elif _is_one_of_several():
        trained = _train_with_others(parsed, recipe, make_source)
    else:
        trained = _train_here(parsed, recipe, make_source)
    if trained and parsed.json:
        print(json.dumps({"checkpoint": parsed.into, "models": [trained_json(model) for model in trained]}))
    elif trained and parsed.table:
        print(f"next   recmill evaluate {parsed.recipe} --checkpoint {parsed.into} --table {parsed.table}")


def _make_source(parsed: argparse.Namespace, recipe: Recipe) -> MakeSource:
    """How any process, here or on another node, opens the rows."""
    from functools import partial

    from recmill.logs.tally import DEFAULT_MAX_BAD

    if parsed.table and parsed.while_prepared:
        from recmill.train.growing import open_growing

        return partial(open_growing, os.path.abspath(parsed.table), None)
    if parsed.table:
        return partial(_table_source, os.path.abspath(parsed.table))
    plan = os.path.abspath(parsed.plan) if parsed.plan else None
    data = parsed.from_log if "://" in parsed.from_log else os.path.abspath(parsed.from_log)
    return partial(
        _log_source, recipe, data, plan, DEFAULT_MAX_BAD if parsed.max_bad is None else parsed.max_bad
    )


def _table_source(path: str, note: Callable[[str], None]) -> Source:
    from recmill.table import Table
    from recmill.train.source import TableSource

    return TableSource(Table.open(path))


def _log_source(
    recipe: Recipe, data: str, plan: str | None, max_bad: float, note: Callable[[str], None]
) -> Source:
    from pathlib import Path

    from recmill.train.source import LogSource

    return LogSource(recipe, data, Path(plan) if plan else None, max_bad, note)


def _train_here(
    parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource, workers: Workers | None = None
) -> list[Trained]:
    from dataclasses import replace
    from pathlib import Path

    from recmill.progress import Progress
    from recmill.train import train
    from recmill.train.parallel import ALONE

    workers = workers or ALONE
    source = make_source(_note if workers.is_first else silent)
    say = silent if parsed.json or not workers.is_first else print
    if parsed.explain_placement:
        _explain_placement(parsed, recipe, source, workers.size, say)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return train(
        recipe,
        source,
        Path(parsed.into),
        replace(train_options(parsed, parsed.resume or restarted), workers=workers),
        Progress(parsed.quiet or not workers.is_first),
        lambda model: say_trained(model, say),
    )


def _train_with_others(
    parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource
) -> list[Trained] | None:
    """One of the processes that torchrun started; what there is to say, the first one says."""
    from recmill.errors import RecmillError
    from recmill.train.parallel import from_environment

    workers = from_environment()
    try:
        trained = _train_here(parsed, recipe, make_source, workers)
        return trained if workers.is_first else None
    except RecmillError as error:
        if workers.is_first:
            raise
        sys.exit(error.exit_code)
    finally:
        workers.close()


def _train_on_ray(parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource) -> list[Trained]:
    from contextlib import redirect_stdout
    from pathlib import Path

    from recmill.errors import MissingPackage
    from recmill.progress import Progress

    try:
        from recmill.train.feed import DataWorkers
        from recmill.train.launch import Scale, launch
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise MissingPackage('Engine "ray"', "ray", "ray") from None

    least, most = parsed.workers or (1, 1)
    scale = Scale(
        least,
        most,
        parsed.address,
        3 if parsed.max_failures is None else parsed.max_failures,
        parsed.cpus_per_worker or 1,
        parsed.worker_resource,
        DataWorkers(parsed.data_workers, parsed.data_resource) if parsed.data_workers else None,
    )
    say = silent if parsed.json else print
    if parsed.explain_placement:
        _explain_placement(parsed, recipe, make_source(_note), most, say)
    with redirect_stdout(sys.stderr):  # Ray prints there what died, and what is ours must stay readable
        trained = launch(
            recipe,
            make_source,
            Path(parsed.into),
            train_options(parsed, parsed.resume),
            scale,
            Progress(parsed.quiet),
            note=_note,
        )
    for model in trained:
        say_trained(model, say)
    return trained


def _explain_placement(
    parsed: argparse.Namespace,
    recipe: Recipe,
    source: Source,
    num_workers: int,
    say: Callable[[str], None],
) -> None:
    from recmill.learner.saved import models_of, new_learner
    from recmill.train.parallel import explain

    for model in [parsed.only] if parsed.only else models_of(recipe):
        learner = new_learner(recipe, model, source.columns, 1)
        for line in explain(learner, num_workers, parsed.wire):
            say(f"place  {model}   {line}")


def _note(line: str) -> None:
    print(f"note   {line}", file=sys.stderr)


def _is_one_of_several() -> bool:
    """Whether torchrun, or whoever sets the same variables, started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _check_scale_flags(parsed: argparse.Namespace) -> None:
    if parsed.engine == "ray" and _is_one_of_several():
        raise UsageError(
            "--engine ray starts its own workers. Run it without torchrun, or remove --engine ray."
        )
    if parsed.engine == "ray" and parsed.follow:
        raise UsageError("--engine ray is not for --follow, which is one process. Remove it.")
    if parsed.address and parsed.address.startswith("ray://"):
        raise UsageError(
            f"--address must be auto or HOST:PORT, got {parsed.address}. From outside the cluster, use "
            "`ray job submit --address http://HOST:8265 -- recmill train ... --address auto`."
        )
    if parsed.while_prepared and (not parsed.table or parsed.data_workers):
        raise UsageError(
            "--while-prepared reads the shards of a --table as they appear, without --data-workers. Remove one of them."
        )
    if parsed.data_resource and not parsed.data_workers:
        raise UsageError("--data-resource says where --data-workers run. Add --data-workers D.")
    if parsed.engine == "ray":
        return
    if parsed.workers is not None:
        many = _is_one_of_several()
        raise UsageError(
            "torchrun has started the workers already. Remove --workers."
            if many
            else "--workers needs several processes: add --engine ray, or start them with torchrun: "
            f"torchrun --nproc-per-node {parsed.workers[1]} -m recmill train ... (without --workers)."
        )
    for name in ("address", "max_failures", "cpus_per_worker", "worker_resource", "data_workers"):
        if getattr(parsed, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --engine ray. Add it, or remove the flag.")


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
        "workers": trained.workers,
        "wire_bytes": trained.wire_bytes,
        "resumed_from": trained.resumed_from,
    }


def _main_metrics(trained: Trained) -> dict[str, float]:
    wanted = ("auc", "log_loss", "normalised_entropy", "recall@10", "ndcg@10", "recall@50")
    return {name: trained.best.metrics[name] for name in wanted if name in trained.best.metrics}
