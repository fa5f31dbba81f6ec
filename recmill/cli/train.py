"""`recmill train`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from recmill.artifacts.event_stream import is_stream
from recmill.cli.arguments import (
    Say,
    add_command,
    add_folder,
    add_output_options,
    add_recipe,
    load,
    note,
    refuse,
    say_of,
    silent,
    warn,
)
from recmill.cli.flags import UsageError, add_flags, read_config, refuse_flags
from recmill.cli.follow import follow
from recmill.errors import RecmillError, check_installed
from recmill.stages.train.config import FollowConfig, RayTrainConfig, TrainConfig

if TYPE_CHECKING:
    from recmill.distributed.workers import Workers
    from recmill.recipe.recipe import Recipe
    from recmill.stages.train.launch import MakeSource
    from recmill.stages.train.source import TrainingData
    from recmill.stages.train.train import TrainResult

_MAIN_METRICS = ("auc", "log_loss", "normalised_entropy", "recall@10", "ndcg@10", "recall@50")
_NOT_FOR_FOLLOW = ("track", "profile", "only", "table_memory", "resume", "wire", "balance")


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
recmill train criteo-dlrm --table s3://models/t --into s3://models/c --resume   go on where another machine was
recmill train criteo-dlrm --table t --into c --engine ray --workers 4 --address auto
recmill train criteo-deeprec --from-log /data/criteo --into c --engine ray --workers 2..4 --data-workers 8
torchrun --nproc-per-node 2 -m recmill train criteo-dlrm --table t --into c
recmill train quickstart --follow /data/shop --publish runs/quickstart/bundle --into runs/quickstart/checkpoint
recmill train shop-live --follow redis://localhost:6379/shop:events --tables /data/shop --publish b --into c
""",
    )
    add_recipe(parser)
    rows = parser.add_mutually_exclusive_group(required=True)
    add_folder(rows, "--table", "the Table to learn from")
    add_folder(rows, "--from-log", "train on a raw log, a directory or URL, without a Table")
    add_folder(
        rows,
        "--follow",
        "keep training on a log that is still written, or from a stream, redis://host:port/KEY; needs --publish, "
        "and checkpoints in --into",
    )
    add_folder(parser, "--into", "where checkpoints land", required=True)
    parser.add_argument(
        "--while-prepared", action="store_true", help="with --table: start while it is still being written"
    )
    add_folder(parser, "--plan", "with --from-log: the Table or checkpoint whose fitted features to use")
    add_folder(parser, "--publish", "with --follow: what `recmill export` wrote; deltas of it land there")
    add_flags(parser, FollowConfig)
    add_flags(parser, TrainConfig)
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="where to run (default: this process)"
    )
    add_flags(parser, RayTrainConfig)
    parser.add_argument(
        "--explain-placement",
        action="store_true",
        help="show where tables go, with bytes on the wire and in memory for each worker",
    )
    add_output_options(parser)


def _train(parsed: argparse.Namespace) -> None:
    config, ray = read_config(parsed, TrainConfig), read_config(parsed, RayTrainConfig)
    _check_flags(parsed, ray)
    recipe = load(parsed)
    set_wait_policy(config)
    if parsed.follow:
        follow(parsed, recipe, config)
        return
    make_source = _make_source(parsed, recipe, config)
    trained: list[TrainResult] | None
    if parsed.engine == "ray":
        trained = _train_on_ray(parsed, recipe, make_source, config, ray)
    elif _is_one_of_several():
        trained = _train_with_others(parsed, recipe, make_source, config)
    else:
        trained = _train_here(parsed, recipe, make_source, config)
    if trained and parsed.json:
        print(json.dumps({"checkpoint": parsed.into, "models": [trained_json(model) for model in trained]}))
    elif trained and parsed.table:
        print(f"next   recmill evaluate {parsed.recipe} --checkpoint {parsed.into} --table {parsed.table}")


def _check_flags(parsed: argparse.Namespace, ray: RayTrainConfig) -> None:
    _check_source_flags(parsed)
    if parsed.engine == "ray" and _is_one_of_several():
        raise UsageError(
            "--engine ray starts its own workers. Run it without torchrun, or remove --engine ray."
        )
    if parsed.engine == "ray" and parsed.follow:
        raise UsageError("--engine ray is not for --follow, which is one process. Remove it.")
    if ray.address and ray.address.startswith("ray://"):
        raise UsageError(
            f"--address must be auto or HOST:PORT, got {ray.address}. From outside the cluster, use "
            "`ray job submit --address http://HOST:8265 -- recmill train ... --address auto`."
        )
    if parsed.while_prepared and (not parsed.table or ray.data_workers):
        raise UsageError(
            "--while-prepared reads the shards of a --table as they appear, without --data-workers. Remove one of them."
        )
    if ray.data_resource and not ray.data_workers:
        raise UsageError("--data-resource is where --data-workers run. Add --data-workers D.")
    if parsed.engine != "ray":
        refuse_flags(parsed, RayTrainConfig, _workers_elsewhere(ray), only=("workers",))
        refuse_flags(parsed, RayTrainConfig, "is for --engine ray. Add it, or remove the flag.")


def _check_source_flags(parsed: argparse.Namespace) -> None:
    if not parsed.from_log:
        reason = "is for --from-log; a Table is prepared already. Remove it."
        refuse(parsed, ("plan",), reason)
        refuse_flags(parsed, TrainConfig, reason, only=("max_bad",))
    if not parsed.follow:
        refuse(parsed, ("publish",), "is for --follow. Remove it.")
        refuse_flags(parsed, FollowConfig, "is for --follow. Remove it.")
        return
    refuse_flags(parsed, TrainConfig, "is not for --follow. Remove it.", only=_NOT_FOR_FOLLOW)
    if not parsed.publish:
        raise UsageError("--follow needs --publish DIR: the bundles whose deltas it writes.")
    if "://" in parsed.follow and not is_stream(parsed.follow):
        raise UsageError(
            f"--follow {parsed.follow}: objects of a store do not grow. Follow a directory that this machine sees or a "
            "stream (redis://host:port/KEY), or prepare, train and export again and again from the URL."
        )


def _workers_elsewhere(ray: RayTrainConfig) -> str:
    if _is_one_of_several():
        return "is not for torchrun, which has started the workers already. Remove it."
    return (
        "needs several processes: add --engine ray, or start them with torchrun: "
        f"torchrun --nproc-per-node {ray.workers[1]} -m recmill train ... (without --workers)."
    )


def _is_one_of_several() -> bool:
    """Whether torchrun, or another launcher with its variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def set_wait_policy(config: TrainConfig) -> None:
    """Set OpenMP's wait policy, which it reads once, when torch is first imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", config.wait_policy.upper())


# the rows, as any process opens them, here or on another node


def _make_source(parsed: argparse.Namespace, recipe: Recipe, config: TrainConfig) -> MakeSource:
    from functools import partial

    from recmill.stages.train.source import open_log_data, open_table_data

    if parsed.table and parsed.while_prepared:
        from recmill.stages.train.partial_table import open_growing

        return partial(open_growing, os.path.abspath(parsed.table), None)
    if parsed.table:
        return partial(open_table_data, _absolute(parsed.table))
    plan = _absolute(parsed.plan) if parsed.plan else None
    data = _absolute(parsed.from_log)
    return partial(open_log_data, recipe, data, plan, config.max_bad)


def _absolute(address: str) -> str:
    return address if "://" in address else os.path.abspath(address)


# a single process, several that torchrun started, or Ray


def _train_here(
    parsed: argparse.Namespace,
    recipe: Recipe,
    make_source: MakeSource,
    config: TrainConfig,
    workers: Workers | None = None,
) -> list[TrainResult]:
    from dataclasses import replace

    from recmill.distributed.workers import SINGLE_WORKER
    from recmill.reporting.progress import Progress
    from recmill.stages.train.train import TrainContext, train_at

    workers = workers or SINGLE_WORKER
    source = make_source(note if workers.is_first else silent)
    say = say_of(parsed) if workers.is_first else silent
    if parsed.explain_placement:
        _explain_placement(recipe, config, source, workers.size, say)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        config = replace(config, resume=True)
    return train_at(
        recipe,
        source,
        parsed.into,
        config,
        Progress(parsed.quiet or not workers.is_first),
        lambda model: say_trained(model, say),
        TrainContext(workers, warn=warn),
    )


def _train_with_others(
    parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource, config: TrainConfig
) -> list[TrainResult] | None:
    """Train in one of the processes that torchrun started; only the first one prints."""
    from recmill.distributed.workers import from_environment

    workers = from_environment()
    try:
        trained = _train_here(parsed, recipe, make_source, config, workers)
        return trained if workers.is_first else None
    except RecmillError as error:
        if workers.is_first:
            raise
        sys.exit(error.exit_code)
    finally:
        workers.close()


def _train_on_ray(
    parsed: argparse.Namespace,
    recipe: Recipe,
    make_source: MakeSource,
    config: TrainConfig,
    ray: RayTrainConfig,
) -> list[TrainResult]:
    from contextlib import redirect_stdout
    from pathlib import Path

    check_installed('Engine "ray"', "ray")
    from recmill.reporting.progress import Progress
    from recmill.stages.train.launch import launch
    from recmill.stages.train.train import TrainContext, check_can_publish

    check_can_publish(parsed.into, config, ray.workers[1], is_on_cluster=True)
    say = say_of(parsed)
    if parsed.explain_placement:
        _explain_placement(recipe, config, make_source(note), ray.workers[1], say)
    with redirect_stdout(sys.stderr):  # Ray prints there which workers died
        trained = launch(
            recipe,
            make_source,
            Path(parsed.into),
            config,
            ray,
            Progress(parsed.quiet),
            note,
            TrainContext(warn=warn),
        )
    for model in trained:
        say_trained(model, say)
    return trained


def _explain_placement(
    recipe: Recipe, config: TrainConfig, source: TrainingData, num_workers: int, say: Say
) -> None:
    from recmill.distributed.parallel import explain
    from recmill.learner.saved import models_of, new_learner

    for model in [config.only] if config.only else models_of(recipe):
        learner = new_learner(recipe, model, source.columns, 1)
        for line in explain(learner, num_workers, config.wire):
            say(f"place  {model}   {line}")


# output


def say_trained(trained: TrainResult, say: Say) -> None:
    from recmill.storage.view import address_of

    state = trained.state
    if trained.was_complete:
        ended = f"{describe_end(state.stopped_by)} at step {trained.resumed_from:,}"
        say(f"found  {address_of(trained.path)}   {ended}; nothing to do")
    else:
        say(f"threads {trained.threads.number}   {trained.threads.reason}")
        since = f" (resumed from step {trained.resumed_from:,})" if trained.resumed_from else ""
        speed = f"{trained.samples_per_second:,.0f} rows/s   data wait {trained.data_wait:.0%}"
        rows = f"{state.samples:,} rows in {state.seconds:.1f} s{since}"
        name = f"{trained.model} with the eval rows" if trained.is_refit else trained.model
        say(f"trained {name}   {rows}   {speed}   {describe_end(state.stopped_by)}")
    metrics = trained.best.metrics
    shown = "   ".join(f"{name} {metrics[name]:.4f}" for name in _MAIN_METRICS if name in metrics)
    say(f"wrote  {address_of(trained.best.path)}   step {trained.best.step:,}   {shown}")


def describe_end(stopped_by: str | None) -> str:
    """Why training ended, in the words of every command."""
    return "all epochs done" if stopped_by == "end" else f"stopped by {stopped_by}"


def trained_json(trained: TrainResult) -> dict[str, Any]:
    from recmill.storage.view import address_of

    return {
        "model": trained.model,
        "path": address_of(trained.path),
        "step": trained.best.step,
        "metrics": trained.best.metrics,
        "stopped_by": trained.state.stopped_by,
        "samples": trained.state.samples,
        "seconds": trained.state.seconds,
        "samples_per_second": trained.samples_per_second,
        "data_wait": trained.data_wait,
        "threads": trained.threads.number,
        "workers": trained.workers,
        "wire_bytes": trained.wire_bytes,
        "resumed_from": trained.resumed_from,
    }
