"""`recmill evaluate`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import (
    Say,
    add_command,
    add_folder,
    add_output_options,
    add_recipe,
    load,
    refuse,
    say_of,
)
from recmill.cli.flags import UsageError, add_flags, read_config, refuse_flags, typed
from recmill.config import SECONDS
from recmill.stages.evaluate.config import EvaluateConfig

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
    add_folder(parser, "--checkpoint", "what `recmill train` wrote", required=True)
    rows = parser.add_mutually_exclusive_group(required=True)
    add_folder(rows, "--table", "the Table with held-out rows")
    add_folder(rows, "--requests", "what `recmill serve --request-log` wrote; needs --data")
    add_folder(parser, "--data", "with --requests: the log with what users clicked then")
    parser.add_argument(
        "--window",
        type=typed(SECONDS),
        metavar="SECONDS",
        help="with --requests: how long after a request a click counts (default: 86400)",
    )
    add_flags(parser, EvaluateConfig)
    parser.add_argument(
        "--verdict",
        metavar="FILE",
        help="with --gate: write passed, improving (than before) or failed there, and exit with 0",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="where the HTML report lands (default: report.html in the checkpoint)",
    )
    add_output_options(parser)


def _evaluate(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    config = read_config(parsed, EvaluateConfig)
    _check_flags(parsed, config)
    recipe = load(parsed)
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.artifacts.manifest import write_whole
    from recmill.dataset.table import Table
    from recmill.reporting.progress import Progress
    from recmill.stages.evaluate.evaluate import evaluate
    from recmill.stages.evaluate.write import write_evaluation

    folder = Checkpoint.open(parsed.checkpoint)
    if folder.recipe.name != recipe.name:
        raise UsageError(
            f'Checkpoint {parsed.checkpoint} is of recipe "{folder.recipe.name}", not of "{recipe.name}".'
        )
    if parsed.requests:
        return _evaluate_requests(parsed, folder)
    evaluated = evaluate(folder, Table.open(parsed.table), config, Progress(parsed.quiet))
    report = Path(parsed.report) if parsed.report else folder.path / "report.html"
    written = write_evaluation(folder, evaluated, report)
    say_evaluated(evaluated, report, say_of(parsed))
    if parsed.json:
        print(json.dumps(written))
    if parsed.verdict:
        write_whole(Path(parsed.verdict), written["outcome"])
        return 0
    return 0 if written["passed"] else 1


def _check_flags(parsed: argparse.Namespace, config: EvaluateConfig) -> None:
    if bool(parsed.requests) != bool(parsed.data):
        raise UsageError("--requests and --data go together.")
    if parsed.requests:
        refuse_flags(parsed, EvaluateConfig, "is for --table. Remove it.")
        refuse(parsed, ("verdict", "report"), "is for --table. Remove it.")
    else:
        refuse(parsed, ("window",), "is for --requests. Remove it.")
    if config.live and not config.gate:
        raise UsageError("--live is for gates such as ne<=live; add --gate, or remove it.")
    if parsed.verdict and not config.gate:
        raise UsageError("--verdict is what --gate finds; add --gate, or remove it.")
    if config.allow_no_live and not config.live:
        raise UsageError("--allow-no-live is about --live DIR; add it, or remove --allow-no-live.")


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


def say_evaluated(evaluated: list[EvaluateResult], report: Any, say: Say) -> None:
    for model in evaluated:
        metrics = model.metrics
        say(f"{model.model}   step {model.checkpoint.step:,}   {model.split} rows")
        if "auc" in metrics:
            beside = "".join(f"   {name} {found['auc']:.4f}" for name, found in model.baselines.items())
            margin, rows = metrics["auc_margin"], metrics["rows"]
            say(f"AUC {metrics['auc']:.4f}{beside}   95% CI +-{margin:.4f}   {rows:,.0f} rows")
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


def _say_retrieval(model: EvaluateResult, say: Say) -> None:
    metrics, protocol = model.metrics, model.protocol
    for name in (name for name in metrics if "@" in name and not name.endswith("_margin")):
        say(f"{name:<10} {metrics[name]:.4f}   95% CI +-{metrics[f'{name}_margin']:.4f}")
    if protocol is None:
        return
    say(f"protocol {protocol.name}   {metrics['users']:,.0f} eval queries")
    for note in model.notes:
        say(f"note   {note}: published numbers do not compare")
    if not model.notes:
        for who, found in protocol.published.items():
            say(f"  {who:<12} " + "   ".join(f"{name} {value:.4f}" for name, value in found.items()))


def _say_segments(part: Any, say: Say) -> None:
    say(f"{part.column:<28} {'rows':>10} {'rate':>8} {'AUC':>8} {'NE':>8} {'calibration':>12}")
    for name, found in part.metrics():
        say(
            f"  {name:<26} {found.rows:>10,} {found.positive_rate:>8.4f} {found.auc:>8.4f} "
            f"{found.normalised_entropy:>8.4f} {found.calibration:>12.3f}"
        )
