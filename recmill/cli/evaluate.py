"""`recmill evaluate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    UsageError,
    add_command,
    add_output_options,
    add_recipe,
    load,
    positive,
    seconds,
    silent,
)

if TYPE_CHECKING:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.stages.evaluate.evaluate import EvaluateResult


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "evaluate",
        _evaluate,
        "measure a checkpoint on held-out rows: numbers, a report with plots, and the gate",
        """
recmill evaluate quickstart --checkpoint runs/quickstart/checkpoint --table runs/quickstart/table
recmill evaluate criteo-dlrm --checkpoint c --table t --gate "auc>=0.80,ne<=live" --live runs/live/checkpoint
recmill evaluate quickstart --checkpoint c --table t --gate "ne<=live" --live bundles --allow-no-live --verdict v
recmill evaluate quickstart --checkpoint c --table t --only ranking --by device --by price
recmill evaluate quickstart --checkpoint c --requests requests --data /data/shop   what was served, and then clicked
""",
    )
    add_recipe(parser)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="what `recmill train` wrote")
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--table", metavar="DIR", help="the Table with held-out rows")
    rows.add_argument(
        "--requests", metavar="DIR", help="what `recmill serve --request-log` wrote; needs --data"
    )
    parser.add_argument("--data", metavar="DIR", help="with --requests: the log with what users clicked then")
    parser.add_argument(
        "--window",
        type=seconds,
        metavar="SECONDS",
        help="with --requests: how long after a request a click counts (default: 86400)",
    )
    parser.add_argument(
        "--split",
        choices=["test", "eval", "train"],
        help="which rows (default: test, or eval without test rows)",
    )
    parser.add_argument(
        "--which", default="best", metavar="best|last|STEP", help="which checkpoint (default: best)"
    )
    parser.add_argument("--only", choices=["ranking", "retrieval"], help="measure this model (default: all)")
    parser.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="COLUMN",
        help="also measure each value of a column; may be repeated",
    )
    _add_gate_options(parser)
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="where the HTML report lands (default: report.html in the checkpoint)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads (default: all cores)")
    add_output_options(parser)


def _add_gate_options(parser: Any) -> None:
    parser.add_argument(
        "--gate",
        metavar="CONDITIONS",
        help='exit with 1 unless all hold, such as "auc>=0.80,ne<=live,accuracy>=constant"; '
        "a ranker must always beat the constant predictor",
    )
    parser.add_argument(
        "--live",
        metavar="DIR",
        help="the live model, measured on the same rows: its checkpoint, or where `recmill export` published it",
    )
    parser.add_argument(
        "--allow-no-live",
        action="store_true",
        help="with --live: leave out conditions on it while nothing is published there",
    )
    parser.add_argument(
        "--verdict",
        metavar="FILE",
        help="with --gate: write passed, improving (than before) or failed there, and exit with 0",
    )


def _evaluate(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    recipe = load(parsed)
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.artifacts.manifest import write_whole
    from recmill.dataset.table import Table
    from recmill.reporting.machine import available_cores
    from recmill.reporting.progress import Progress
    from recmill.stages.evaluate.evaluate import EvaluateConfig, evaluate
    from recmill.stages.evaluate.gate import parse_gate
    from recmill.stages.evaluate.write import write_evaluation

    _check_requests_flags(parsed)
    folder = Checkpoint.open(parsed.checkpoint)
    if folder.recipe.name != recipe.name:
        raise UsageError(
            f'Checkpoint {parsed.checkpoint} is of recipe "{folder.recipe.name}", not of "{recipe.name}".'
        )
    if parsed.requests:
        return _evaluate_requests(parsed, folder)
    _check_gate_flags(parsed)
    options = EvaluateConfig(
        split=parsed.split,
        which=parsed.which,
        models=(parsed.only,) if parsed.only else (),
        by=tuple(parsed.by),
        gate=tuple(parse_gate(parsed.gate)) if parsed.gate else (),
        live=Path(parsed.live) if parsed.live else None,
        allow_no_live=parsed.allow_no_live,
        num_threads=parsed.threads or available_cores(),
    )
    evaluated = evaluate(folder, Table.open(parsed.table), options, Progress(parsed.quiet))
    report = Path(parsed.report) if parsed.report else folder.path / "report.html"
    written = write_evaluation(folder, evaluated, report)
    say_evaluated(evaluated, report, silent if parsed.json else print)
    if parsed.json:
        print(json.dumps(written))
    if parsed.verdict:
        write_whole(Path(parsed.verdict), written["outcome"])
        return 0
    return 0 if written["passed"] else 1


def _check_gate_flags(parsed: argparse.Namespace) -> None:
    if parsed.live and not parsed.gate:
        raise UsageError("--live is for gates such as ne<=live; add --gate, or remove it.")
    if parsed.verdict and not parsed.gate:
        raise UsageError("--verdict is what --gate finds; add --gate, or remove it.")
    if parsed.allow_no_live and not parsed.live:
        raise UsageError("--allow-no-live is about --live DIR; add it, or remove --allow-no-live.")


def _check_requests_flags(parsed: argparse.Namespace) -> None:
    if bool(parsed.requests) != bool(parsed.data):
        raise UsageError("--requests and --data go together.")
    if parsed.window is not None and not parsed.requests:
        raise UsageError("--window is for --requests. Remove it.")
    of_tables = ("split", "only", "by", "gate", "live", "allow_no_live", "verdict", "report")
    wrong = [name for name in of_tables if getattr(parsed, name) and parsed.requests]
    if wrong:
        raise UsageError(f"--{wrong[0].replace('_', '-')} is for --table. Remove it.")


def _evaluate_requests(parsed: argparse.Namespace, folder: Checkpoint) -> int:
    from dataclasses import asdict
    from pathlib import Path

    from recmill.stages.evaluate.requests import evaluate_requests

    window = 86_400.0 if parsed.window is None else parsed.window
    found = evaluate_requests(folder, Path(parsed.requests), parsed.data, window)
    if parsed.json:
        print(json.dumps([asdict(shown) for shown in found]))
        return 0
    for shown in found:
        name = shown.version if shown.channel is None else f"  {shown.channel}"
        auc = "" if shown.auc is None else f"   AUC {shown.auc:.4f}"
        print(
            f"{name:20s} {shown.requests:,} requests   {shown.items:,} items   {shown.clicks:,} clicks   "
            f"finds {shown.find_rate:.4f}   click rate {shown.click_rate:.4f}{auc}"
        )
    return 0


def say_evaluated(evaluated: list[EvaluateResult], report: Any, say: Callable[[str], None]) -> None:
    for model in evaluated:
        metrics = model.metrics
        say(f"{model.model}   step {model.checkpoint.step:,}   {model.split} rows")
        if "auc" in metrics:
            say(
                f"AUC {metrics['auc']:.4f}   within {metrics['auc_margin']:.4f}   {metrics['rows']:,.0f} rows"
            )
            say(
                f"log loss {metrics['log_loss']:.4f}   normalised entropy {metrics['normalised_entropy']:.4f}"
            )
            say(
                f"accuracy {metrics['accuracy']:.4f}   constant predictor {metrics['constant_accuracy']:.4f}   "
                f"PR-AUC {metrics['pr_auc']:.4f}   calibration {metrics['calibration']:.3f}"
            )
        else:
            _say_retrieval(model, say)
        for part in model.segments:
            _say_segments(part, say)
        for verdict in model.verdicts:
            say(str(verdict))
    say(f"report {report}")


def _say_retrieval(model: EvaluateResult, say: Callable[[str], None]) -> None:
    metrics, protocol = model.metrics, model.protocol
    for name in (name for name in metrics if "@" in name and not name.endswith("_margin")):
        say(f"{name:<10} {metrics[name]:.4f}   within {metrics[f'{name}_margin']:.4f}")
    if protocol is None:
        return
    say(f"protocol {protocol.name}   {metrics['users']:,.0f} questions")
    for note in model.notes:
        say(f"note   {note}: published numbers do not compare")
    if not model.notes:
        for who, found in protocol.published.items():
            say(f"  {who:<12} " + "   ".join(f"{name} {value:.4f}" for name, value in found.items()))


def _say_segments(part: Any, say: Callable[[str], None]) -> None:
    say(f"{part.column:<28} {'rows':>10} {'rate':>8} {'AUC':>8} {'NE':>8} {'calibration':>12}")
    for name, found in part.metrics():
        say(
            f"  {name:<26} {found.rows:>10,} {found.positive_rate:>8.4f} {found.auc:>8.4f} "
            f"{found.normalised_entropy:>8.4f} {found.calibration:>12.3f}"
        )
