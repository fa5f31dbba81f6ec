"""`recmill score`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import Say, add_command, add_folder, add_output_options, counted, say_of
from recmill.cli.evaluate import say_numbers
from recmill.cli.flags import UsageError, add_flags, add_trust_code, read_config, refuse_flags
from recmill.stages.score.config import ScoreConfig

if TYPE_CHECKING:
    from recmill.stages.score.inputs import Input
    from recmill.stages.score.models import ModelRef
    from recmill.stages.score.score import ScoreResult

_WORDS = {"scores": "scores", "users": "users", "items": "items", "recall": "users"}


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "score",
        _score,
        "score all rows of a log or Table with a checkpoint or bundle; write vectors and the best items of users",
        """
recmill score --checkpoint runs/criteo/checkpoint --data /data/day_23 --into runs/criteo/scores
recmill score --checkpoint c --table t --split test --into scores --keep user_id,item_id
recmill score --bundle b --data /data/tomorrow --without-labels --into scores --engine ray --address auto
recmill score --checkpoint c --table t --into vectors --embeddings user,item
recmill score --bundle b --into recall --recall 100 --without-seen --engine spark --address spark://host:7077
""",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    add_folder(model, "--checkpoint", "what `recmill train` wrote")
    add_folder(model, "--bundle", "what `recmill export` wrote; torch is not needed")
    add_trust_code(parser)
    rows = parser.add_mutually_exclusive_group()
    add_folder(rows, "--data", "the log's directory or URL; features by the model's own Plan")
    add_folder(rows, "--table", "a Table that was prepared with the model's Plan")
    add_folder(parser, "--into", "directory or URL of all output", required=True)
    add_flags(parser, ScoreConfig)
    add_output_options(parser)


def _score(parsed: argparse.Namespace) -> None:
    config = read_config(parsed, ScoreConfig)
    _check_flags(parsed, config)
    from recmill.dataset.table import Table
    from recmill.reporting.progress import Progress
    from recmill.stages.score.score import score
    from recmill.storage.workspace import written

    model = _model(parsed, config)
    of_table = parsed.checkpoint and (config.embeddings or config.recall)
    with written(parsed.into) as target:
        scored = score(
            model,
            _rows(parsed, config, model) if config.wants_scores else None,
            Table.open(parsed.table) if of_table else None,
            target.path,
            config,
            Progress(parsed.quiet),
        )
        target.push()
    say_scored(scored, parsed.data or parsed.table, say_of(parsed))
    if parsed.json:
        print(json.dumps(scored_json(scored)))


def _check_flags(parsed: argparse.Namespace, config: ScoreConfig) -> None:
    """Refuse invalid combinations before anything heavy is imported."""
    if parsed.trust_code and not parsed.bundle:
        raise UsageError("--trust-code is for --bundle; code of a checkpoint is your own. Remove it.")
    if parsed.bundle:
        reason = "is for --checkpoint; a bundle is of one step. Remove it."
        refuse_flags(parsed, ScoreConfig, reason, only=("which",))
    if config.wants_scores and not (parsed.data or parsed.table):
        raise UsageError("Which rows? Add --data DIR, a log, or --table DIR.")
    if parsed.checkpoint and (config.embeddings or config.recall) and not parsed.table:
        raise UsageError(
            "--embeddings and --recall read the users and items of a Table: add --table DIR instead of --data. "
            "For users and items as of the end of a log, export a bundle and use --bundle."
        )
    if parsed.bundle and not config.wants_scores and (parsed.data or parsed.table):
        raise UsageError(
            "A bundle has its own users and items: remove --data and --table, or add --scores for scores of them."
        )
    if config.without_seen and not config.recall:
        raise UsageError("--without-seen is for --recall. Remove it.")
    if parsed.data:
        refuse_flags(parsed, ScoreConfig, "is for --table. Remove it.", only=("split",))
    else:
        of_logs = ("without_labels", "partitions", "max_bad")
        refuse_flags(parsed, ScoreConfig, "is for --data. Remove it.", only=of_logs)
    if not config.wants_scores:
        reason = "is for scores. Remove it, or add --scores."
        refuse_flags(parsed, ScoreConfig, reason, only=("keep", "split"))


def _model(parsed: argparse.Namespace, config: ScoreConfig) -> ModelRef:
    from recmill.stages.score.models import bundle_ref, checkpoint_ref

    models = ["retrieval"] if config.embeddings or config.recall else []
    models += ["ranking"] if config.wants_scores else []
    if parsed.bundle:
        return bundle_ref(parsed.bundle, models, parsed.trust_code)
    return checkpoint_ref(parsed.checkpoint, config.which, models)


def _rows(parsed: argparse.Namespace, config: ScoreConfig, model: ModelRef) -> Input:
    from recmill.dataset.table import Table
    from recmill.stages.score.inputs import LogInput, TableInput
    from recmill.stages.score.models import open_models

    models = open_models(model)
    if parsed.table:
        return TableInput(models, Table.open(parsed.table), config.split, config.keep)
    return LogInput(
        models,
        parsed.data,
        config.keep,
        not config.without_labels,
        config.max_bad,
        config.memory,
        config.partitions,
    )


def say_scored(scored: ScoreResult, source: str | None, say: Say) -> None:
    manifest, outputs = scored.manifest, scored.outputs
    model = manifest["model"]
    steps = "   ".join(f"{name} step {step:,}" for name, step in model["steps"].items())
    say(f"model  {model['path']}   {steps}".rstrip())
    if scored.was_complete:
        say(f"found  {scored.path}   nothing to do")
    elif "scores" in outputs:
        seconds = outputs["scores"]["seconds"]
        rate = f"{manifest['rows_read'] / max(1e-9, seconds):,.0f} rows/s"
        how = "went on with unfinished work" if scored.went_on else rate
        say(f"read   {source}   {manifest['rows_read']:,} rows in {seconds:.1f} s   {how}")
    _say_missing_rows(scored, say)
    if scored.metrics is not None:
        _say_metrics(scored.metrics, say)
    for name, output in outputs.items():
        files = counted(len(output["files"]), "file")
        say(
            f"wrote  {scored.path / name}   {output['rows']:,} {_WORDS[name]}   {files}   {output['seconds']:.1f} s"
        )
    first = next(iter(outputs))
    say(f'next   polars.scan_parquet("{scored.path / first}/*.parquet"), or any other reader of Parquet')


def _say_metrics(metrics: Mapping[str, float], say: Say) -> None:
    if "r2" in metrics:
        say_numbers(metrics, say)
        return
    if "auc_margin" in metrics:
        margin = f"95% CI +-{metrics['auc_margin']:.4f}"
        say(f"AUC {metrics['auc']:.4f}   {margin}   {metrics['rows']:,.0f} rows with a label")
    else:
        say(f"AUC unknown: all {metrics['rows']:,.0f} labels are the same")
    calibration = f"   calibration {metrics['calibration']:.3f}" if "calibration" in metrics else ""
    say(f"log loss {metrics['log_loss']:.4f}   accuracy {metrics['accuracy']:.4f}{calibration}")


def _say_missing_rows(scored: ScoreResult, say: Say) -> None:
    bad = sum(scored.manifest["rows_rejected"].values())
    if bad:
        reasons = ", ".join(
            f"{count:,} {reason}" for reason, count in scored.manifest["rows_rejected"].items()
        )
        say(f"bad    {bad:,} rows set aside in {scored.path / 'rejected'}: {reasons}")
    if scored.manifest["rows_left_out"]:
        say(f"left   {scored.manifest['rows_left_out']:,} rows that [[rows]] of the recipe drops")


def scored_json(scored: ScoreResult) -> dict[str, Any]:
    names = ("model", "rows_read", "rows_rejected", "rows_left_out", "metrics", "outputs")
    return {
        "scores": str(scored.path),
        "was_complete": scored.was_complete,
        **{name: scored.manifest[name] for name in names},
    }
