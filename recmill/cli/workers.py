"""Flags and launch of several workers that train together."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import UsageError, positive, silent
from recmill.cli.train_options import note, say_trained, train_options

if TYPE_CHECKING:
    from recmill.recipe.recipe import Recipe
    from recmill.stages.train.launch import MakeSource
    from recmill.stages.train.source import TrainingData
    from recmill.stages.train.train import TrainResult


def add_worker_options(parser: Any) -> None:
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


def is_one_of_several() -> bool:
    """Whether torchrun, or whoever sets the same variables, started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_worker_flags(parsed: argparse.Namespace) -> None:
    if parsed.engine == "ray" and is_one_of_several():
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
        many = is_one_of_several()
        raise UsageError(
            "torchrun has started the workers already. Remove --workers."
            if many
            else "--workers needs several processes: add --engine ray, or start them with torchrun: "
            f"torchrun --nproc-per-node {parsed.workers[1]} -m recmill train ... (without --workers)."
        )
    for name in ("address", "max_failures", "cpus_per_worker", "worker_resource", "data_workers"):
        if getattr(parsed, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --engine ray. Add it, or remove the flag.")


def train_on_ray(parsed: argparse.Namespace, recipe: Recipe, make_source: MakeSource) -> list[TrainResult]:
    from contextlib import redirect_stdout
    from pathlib import Path

    from recmill.errors import MissingPackage
    from recmill.reporting.progress import Progress

    try:
        from recmill.distributed.data_tasks import DataWorkers
        from recmill.stages.train.launch import WorkerRange, launch
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise MissingPackage('Engine "ray"', "ray", "ray") from None

    least, most = parsed.workers or (1, 1)
    scale = WorkerRange(
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
        explain_placement(parsed, recipe, make_source(note), most, say)
    with redirect_stdout(sys.stderr):  # Ray prints there what died, and what is ours must stay readable
        trained = launch(
            recipe,
            make_source,
            Path(parsed.into),
            train_options(parsed, parsed.resume),
            scale,
            Progress(parsed.quiet),
            note=note,
        )
    for model in trained:
        say_trained(model, say)
    return trained


def explain_placement(
    parsed: argparse.Namespace,
    recipe: Recipe,
    source: TrainingData,
    num_workers: int,
    say: Callable[[str], None],
) -> None:
    from recmill.distributed.workers import explain
    from recmill.learner.saved import models_of, new_learner

    for model in [parsed.only] if parsed.only else models_of(recipe):
        learner = new_learner(recipe, model, source.columns, 1)
        for line in explain(learner, num_workers, parsed.wire):
            say(f"place  {model}   {line}")
