"""`recmill run`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    Say,
    add_command,
    add_folder,
    add_output_options,
    add_recipe,
    load,
    note,
    say_of,
    warn,
)
from recmill.cli.evaluate import say_evaluated, say_served
from recmill.cli.export import exported_json, say_exported
from recmill.cli.flags import UsageError, add_flags, is_given, read_config, refuse_flags
from recmill.cli.generate import say_generated
from recmill.cli.prepare import say_prepared
from recmill.cli.train import say_trained, set_wait_policy, trained_json
from recmill.errors import check_installed
from recmill.stages.prepare.config import PrepareConfig
from recmill.stages.run.config import RunConfig
from recmill.stages.train.config import RayTrainConfig, TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

    from recmill.recipe.recipe import Recipe
    from recmill.stages.run.run import RunResult

# Both stages have these flags, so that here they name the stage. `--workers` is for training, as in `recmill train`.
_OF_PREPARE = {
    "engine": "--prepare-engine",
    "address": "--prepare-address",
    "workers": "--prepare-workers",
}
# Packages of the last stages: a missing one is reported before the first stage.
_TO_EXPORT = ("torch", "safetensors", "onnx", "onnxscript", "onnxruntime", "faiss")
_TO_SERVE = ("starlette", "uvicorn", "grpc")
_MAX_ID = 14  # characters of an id in the output
_OF_RAY = {"address": "--train-address"}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        _run,
        "run all stages of a recipe; finished stages are skipped",
        """
recmill run quickstart                             generate a shop's log and take it through every stage
recmill run movielens --data ml-1m --into runs/ml  your own files
recmill run criteo-dlrm --data /data/criteo --gate "auc>=0.79"
recmill run criteo-dlrm --data s3://logs/criteo --into s3://models/criteo
recmill run criteo-dlrm --data /data/criteo --into /shared/run --prepare-engine spark --train-engine ray --workers 4
                                                   Spark prepares while Ray trains
""",
    )
    add_recipe(parser)
    add_folder(parser, "--data", "the log's directory or URL (default: generate one)")
    add_folder(parser, "--into", "where stages land, a directory or URL (default: runs/<recipe>)")
    add_flags(parser, RunConfig)
    add_flags(parser, PrepareConfig, leave_out=("binary", "partitions"), rename=_OF_PREPARE)
    add_flags(parser, TrainConfig, leave_out=("resume", "max_bad", "wire", "balance"))
    parser.add_argument(
        "--train-engine",
        choices=["local", "ray"],
        default="local",
        help="where to train (default: this process)",
    )
    add_flags(
        parser,
        RayTrainConfig,
        leave_out=("max_failures", "cpus_per_worker", "worker_resource", "data_workers", "data_resource"),
        rename=_OF_RAY,
    )
    add_output_options(parser)


def _run(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from recmill.storage.objects import address_below, is_url

    config = _config(parsed)
    recipe = load(parsed)
    set_wait_policy(config.train)
    into, say = parsed.into or f"runs/{recipe.name}", say_of(parsed)
    into = into if is_url(into) else Path(into)
    ran = run_and_say(recipe, parsed.data, into, config, parsed.quiet, say)
    if parsed.json:
        print(json.dumps(_as_json(ran)))
    elif "export" in ran.results:
        print(f"next   recmill serve --bundle {address_below(into, 'bundle')}")
    return 0 if ran.passed else 1


def run_and_say(
    recipe: Recipe, data: str | None, into: str | Path, config: RunConfig, quiet: bool, say: Say
) -> RunResult:
    """Run all stages, with a line or more for each and an example at the end."""
    check_installed("A run from the log to the bundle", *_TO_EXPORT, extra="local")
    from recmill.reporting.progress import Progress
    from recmill.stages.run.run import run

    ran = run(
        recipe,
        data,
        into,
        config,
        Progress(quiet),
        lambda stage, result: _say_stage(stage, result, into, data or f"{into}/log", say),
    )
    if "export" in ran.results:
        _say_recommendation(into, say)
    times = "   ".join(f"{stage} {seconds:.1f}" for stage, seconds in ran.seconds.items())
    say(f"seconds {times}   all {ran.total_seconds:.1f}")
    return ran


def check_serving_installed() -> None:
    """Check the packages of commands that serve what they made."""
    check_installed("From a log to a server", *_TO_EXPORT, *_TO_SERVE, extra="local")


def _config(parsed: argparse.Namespace) -> RunConfig:
    if parsed.data:
        reason = "is for generated logs; with --data, the log is read as it is. Remove one of them."
        refuse_flags(parsed, RunConfig, reason, only=("rows",))
    trains_on_ray = parsed.train_engine == "ray"
    if trains_on_ray:
        check_installed('Engine "ray"', "ray")
    for name in ("workers", "address"):
        if is_given(parsed, RayTrainConfig, name) and not trains_on_ray:
            flag = _OF_RAY.get(name, f"--{name}")
            raise UsageError(f"{flag} is for --train-engine ray. Add it, or remove {flag}.")
    prepare = read_config(parsed, PrepareConfig)
    config = read_config(
        parsed,
        RunConfig,
        prepare=prepare,
        train=read_config(parsed, TrainConfig, resume=True),
        ray=read_config(parsed, RayTrainConfig) if trains_on_ray else None,
        note=note,
        warn=warn,
    )
    both_on_clusters = prepare.engine != "local" and trains_on_ray
    return replace(config, at_once=True) if both_on_clusters else config


def _say_stage(stage: str, result: Any, into: str | Path, data: str, say: Say) -> None:
    if stage == "generate" and result is not None:
        say_generated(result, data, say)
    elif stage == "prepare":
        say_prepared(result, say)
    elif stage == "train":
        for trained in result:
            say_trained(trained, say)
    elif stage == "served" and result is not None:
        say_served(result, say)
    elif stage == "evaluate":
        from recmill.stages.run.run import report_path

        say_evaluated(result, report_path(into), say)
    elif stage == "export":
        say_exported(result, data, say)


def _say_recommendation(into: Any, say: Say) -> None:
    from recmill.stages.run.run import recommend

    shown = recommend(into)
    if shown is not None:
        user, titles = shown
        items = ", ".join(f"{_short(title)} ({score:.2f})" for title, score in titles)
        say(f"user {_short(str(user))} is recommended   {items}")


def _short(name: str) -> str:
    """Truncate long ids, such as hex hashes; titles, which have spaces, stay as they are."""
    return name if len(name) <= _MAX_ID or " " in name else f"{name[: _MAX_ID - 3]}..."


def _as_json(ran: Any) -> dict[str, Any]:
    from recmill.stages.replay.write import served_json
    from recmill.storage.view import address_of

    table, served = ran.results["prepare"].table, ran.results.get("served")
    evaluated = ran.results.get("evaluate", [])
    return {
        "data": ran.data,
        "table": address_of(table.path),
        "digest": table.digest,
        "trained": [trained_json(model) for model in ran.results.get("train", [])],
        "served": served_json(served) if served is not None else None,
        "evaluated": {model.model: model.metrics for model in evaluated},
        "exported": exported_json(ran.results["export"]) if "export" in ran.results else None,
        "passed": ran.passed,
        "seconds": ran.seconds,
    }
