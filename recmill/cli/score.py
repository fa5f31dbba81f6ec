"""`recmill score`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_engine_options,
    add_output_options,
    add_trust_code,
    counted,
    engine_settings,
    positive,
    share,
    silent,
)

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
    model.add_argument("--checkpoint", metavar="DIR", help="what `recmill train` wrote")
    model.add_argument("--bundle", metavar="DIR", help="what `recmill export` wrote; torch is not needed")
    add_trust_code(parser)
    parser.add_argument(
        "--step", default="best", metavar="best|last|N", help="which step of the checkpoint (default: best)"
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--data", metavar="DIR", help="the log's directory or URL; features by the model's own Plan"
    )
    rows.add_argument("--table", metavar="DIR", help="a Table that was prepared with the model's Plan")
    parser.add_argument(
        "--split",
        choices=["test", "eval", "train"],
        help="which rows of the Table to score (default: test, or eval without test rows)",
    )
    parser.add_argument("--into", required=True, metavar="DIR", help="where all that is written lands")
    parser.add_argument(
        "--keep",
        type=_names,
        metavar="COLUMN,...",
        help="raw columns to write beside scores (default: user and item, if the recipe names them)",
    )
    parser.add_argument(
        "--without-labels", action="store_true", help="the log lacks the columns that labels are made of"
    )
    parser.add_argument(
        "--scores", action="store_true", help="write scores (default when nothing else is asked for)"
    )
    parser.add_argument(
        "--embeddings",
        type=_sides,
        default=(),
        metavar="user,item",
        help="write vectors of users, items or both",
    )
    parser.add_argument("--recall", type=positive, metavar="K", help="write the best K items for every user")
    parser.add_argument(
        "--without-seen", action="store_true", help="with --recall: leave out what a user has clicked"
    )
    parser.add_argument(
        "--max-bad",
        type=share,
        default="0.1%",
        metavar="SHARE",
        help="share of bad rows that is an error (default: 0.1%%)",
    )
    parser.add_argument(
        "--partitions", type=positive, metavar="N", help="cut the log into about N pieces (default: by size)"
    )
    add_engine_options(parser)
    add_output_options(parser)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sides(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or any(name not in ("user", "item") for name in names):
        raise argparse.ArgumentTypeError(f"must be user, item or user,item, got {text}")
    return tuple(dict.fromkeys(names))


def _score(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    _check_flags(parsed)
    from recmill.dataset.table import Table
    from recmill.reporting.progress import Progress
    from recmill.stages.score.score import ScoreConfig, score

    model = _model(parsed)
    of_table = parsed.checkpoint and (parsed.embeddings or parsed.recall)
    scored = score(
        model,
        _rows(parsed, model) if _wants_scores(parsed) else None,
        Table.open(parsed.table) if of_table else None,
        Path(parsed.into),
        ScoreConfig(
            embeddings=parsed.embeddings,
            recall=parsed.recall,
            without_seen=parsed.without_seen,
            **engine_settings(parsed),
        ),
        Progress(parsed.quiet),
    )
    say_scored(scored, parsed.data or parsed.table, silent if parsed.json else print)
    if parsed.json:
        print(json.dumps(scored_json(scored)))


def _wants_scores(parsed: argparse.Namespace) -> bool:
    return bool(parsed.scores or not (parsed.embeddings or parsed.recall))


def _check_flags(parsed: argparse.Namespace) -> None:
    """Say what does not go together before anything heavy is loaded."""
    wants_scores, others = _wants_scores(parsed), parsed.embeddings or parsed.recall
    if parsed.trust_code and not parsed.bundle:
        raise UsageError("--trust-code is for --bundle; code of a checkpoint is your own. Remove it.")
    if parsed.bundle and parsed.step != "best":
        raise UsageError("--step is for --checkpoint; a bundle is of one step. Remove it.")
    if wants_scores and not (parsed.data or parsed.table):
        raise UsageError("Which rows? Add --data DIR, a log, or --table DIR.")
    if parsed.checkpoint and others and not parsed.table:
        raise UsageError(
            "--embeddings and --recall read the users and items of a Table: add --table DIR instead of --data. "
            "For users and items as of the end of a log, export a bundle and use --bundle."
        )
    if parsed.bundle and not wants_scores and (parsed.data or parsed.table):
        raise UsageError(
            "A bundle has its own users and items: remove --data and --table, or add --scores for scores of them."
        )
    if parsed.without_seen and not parsed.recall:
        raise UsageError("--without-seen is for --recall. Remove it.")
    for flag in ("split",) if parsed.data else ("without_labels", "partitions"):
        if getattr(parsed, flag):
            word = "--table" if parsed.data else "--data"
            raise UsageError(f"--{flag.replace('_', '-')} is for {word}. Remove it.")
    for flag in () if wants_scores else ("keep", "split"):
        if getattr(parsed, flag):
            raise UsageError(f"--{flag} is for scores. Remove it, or add --scores.")


def _model(parsed: argparse.Namespace) -> ModelRef:
    from recmill.stages.score.models import bundle_ref, checkpoint_ref

    models = [*(["retrieval"] if parsed.embeddings or parsed.recall else [])]
    models += ["ranking"] if _wants_scores(parsed) else []
    if parsed.bundle:
        return bundle_ref(parsed.bundle, models, parsed.trust_code)
    return checkpoint_ref(parsed.checkpoint, parsed.step, models)


def _rows(parsed: argparse.Namespace, model: ModelRef) -> Input:
    from recmill.dataset.table import Table
    from recmill.stages.score.inputs import LogInput, TableInput
    from recmill.stages.score.models import open_models

    models = open_models(model)
    if parsed.table:
        return TableInput(models, Table.open(parsed.table), parsed.split, parsed.keep)
    return LogInput(
        models,
        parsed.data,
        parsed.keep,
        not parsed.without_labels,
        parsed.max_bad,
        parsed.memory,
        parsed.partitions,
    )


def say_scored(scored: ScoreResult, source: str | None, say: Callable[[str], None]) -> None:
    manifest, outputs = scored.manifest, scored.outputs
    model = manifest["model"]
    steps = "   ".join(f"{name} step {step:,}" for name, step in model["steps"].items())
    say(f"model  {model['path']}   {steps}".rstrip())
    if scored.was_there:
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


def _say_metrics(metrics: Mapping[str, float], say: Callable[[str], None]) -> None:
    if "auc_margin" in metrics:
        margin = f"within {metrics['auc_margin']:.4f}"
        say(f"AUC {metrics['auc']:.4f}   {margin}   {metrics['rows']:,.0f} rows with a label")
    else:
        say(f"AUC unknown: all {metrics['rows']:,.0f} labels are the same")
    calibration = f"   calibration {metrics['calibration']:.3f}" if "calibration" in metrics else ""
    say(f"log loss {metrics['log_loss']:.4f}   accuracy {metrics['accuracy']:.4f}{calibration}")


def _say_missing_rows(scored: ScoreResult, say: Callable[[str], None]) -> None:
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
        "was_there": scored.was_there,
        **{name: scored.manifest[name] for name in names},
    }
