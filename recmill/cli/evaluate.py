"""`recmill evaluate`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
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
from recmill.stages.replay.config import ReplayConfig

if TYPE_CHECKING:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.reporting.progress import Progress
    from recmill.stages.evaluate.evaluate import EvaluateResult
    from recmill.stages.replay.replay import ServedResult


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
recmill evaluate movielens --checkpoint c --table t --served --gate "served.recall@10>=popular"
recmill evaluate quickstart --checkpoint c --requests requests --data /data/shop   what was served, and then clicked
""",
    )
    add_recipe(parser)
    add_folder(parser, "--checkpoint", "what `recmill train` wrote", required=True)
    rows = parser.add_mutually_exclusive_group(required=True)
    add_folder(rows, "--table", "the Table with held-out rows")
    add_folder(rows, "--requests", "what `recmill serve --request-log` wrote; needs --data")
    add_folder(
        parser,
        "--data",
        "with --requests: the log with the clicks that followed; with --served: the log (default: the Table's)",
    )
    parser.add_argument(
        "--served",
        action="store_true",
        help="also fit how channels are merged on eval, and measure the list that users will be served",
    )
    parser.add_argument(
        "--window",
        type=typed(SECONDS),
        metavar="SECONDS",
        help="with --requests: how long after a request a click counts (default: 86400)",
    )
    add_flags(parser, EvaluateConfig)
    add_flags(parser, ReplayConfig)
    parser.add_argument(
        "--verdict",
        metavar="FILE",
        help="with --gate: write passed, improving or failed to this file, and exit with 0",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="file of the HTML report (default: report.html in the checkpoint)",
    )
    add_output_options(parser)


def _evaluate(parsed: argparse.Namespace) -> int:

    config = read_config(parsed, EvaluateConfig)
    _check_flags(parsed, config)
    recipe = load(parsed)
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.storage.workspace import written

    with written(parsed.checkpoint) as target:
        folder = Checkpoint.open(target.path)
        folder = folder if config.split in ("train", "eval") else folder.to_serve(config.which)
        code = _evaluate_in(parsed, config, recipe, folder)
        target.push()
    return code


def _evaluate_in(
    parsed: argparse.Namespace, config: EvaluateConfig, recipe: Recipe, folder: Checkpoint
) -> int:
    from pathlib import Path

    from recmill.artifacts.manifest import write_whole
    from recmill.dataset.table import Table
    from recmill.reporting.progress import Progress
    from recmill.stages.evaluate.evaluate import evaluate
    from recmill.stages.evaluate.write import write_evaluation
    from recmill.stages.replay.write import served_json

    if folder.recipe.name != recipe.name:
        raise UsageError(
            f'Checkpoint {parsed.checkpoint} is of recipe "{folder.recipe.name}", not of "{recipe.name}".'
        )
    if parsed.requests:
        return _evaluate_requests(parsed, folder)
    table, progress = Table.open(parsed.table), Progress(parsed.quiet)
    served = _replay(parsed, folder, table, config, progress) if parsed.served else None
    evaluated = evaluate(folder, table, config, progress)
    report = Path(parsed.report) if parsed.report else folder.path / "report.html"
    content = served_json(served) if served is not None else None
    written = write_evaluation(folder, evaluated, report, content)
    if served is not None:
        say_served(served, say_of(parsed))
    say_evaluated(evaluated, report, say_of(parsed))
    if parsed.json:
        print(json.dumps(written))
    if parsed.verdict:
        write_whole(Path(parsed.verdict), written["outcome"])
        return 0
    return 0 if written["passed"] else 1


def _replay(
    parsed: argparse.Namespace, folder: Checkpoint, table: Table, config: EvaluateConfig, progress: Progress
) -> ServedResult:
    from recmill.stages.replay.write import replay_and_write

    data = parsed.data or table.manifest["data"]
    if data is None:
        raise UsageError(
            "--served reads the log again, and the Table does not have its address: add --data DIR."
        )
    options = read_config(parsed, ReplayConfig, which=config.which, threads=config.threads)
    return replay_and_write(folder, data, options, config.gate, progress)


def _check_flags(parsed: argparse.Namespace, config: EvaluateConfig) -> None:
    if parsed.requests and not parsed.data:
        raise UsageError("--requests and --data go together.")
    if parsed.data and not (parsed.requests or parsed.served):
        raise UsageError("--data is for --requests and for --served. Add one of them, or remove --data.")
    if not parsed.served:
        refuse_flags(parsed, ReplayConfig, "is for --served. Add it, or remove this one.")
        if "served." in (config.gate or ""):
            raise UsageError("Conditions on served lists need --served. Add it, or change --gate.")
    if parsed.requests:
        refuse(parsed, ("served",), "is for --table. Remove it.")
        refuse_flags(parsed, EvaluateConfig, "is for --table. Remove it.")
        refuse(parsed, ("verdict", "report"), "is for --table. Remove it.")
    else:
        refuse(parsed, ("window",), "is for --requests. Remove it.")
    if config.live and not config.gate:
        raise UsageError("--live is for gates such as ne<=live; add --gate, or remove it.")
    if parsed.verdict and not config.gate:
        raise UsageError("--verdict writes the result of --gate; add --gate, or remove it.")
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


def say_served(served: ServedResult, say: Say) -> None:
    """Print the metrics of the served list, next to simpler ones."""
    metrics, baselines = served.metrics, {name: sums.means() for name, sums in served.baselines.items()}
    best = served.best_baseline
    popular = baselines["popular"]["recall@10"]
    say(
        f"served recall@10 {metrics['recall@10']:.4f}   popular {popular:.4f}   "
        f"best baseline {best} {baselines[best]['recall@10']:.4f}"
    )
    say(f"  95% CI +-{metrics['recall@10_margin']:.4f}   {served.sums.users:,} users of {served.split}")
    for name, means in {"served": metrics, **baselines}.items():
        shown = "   ".join(
            f"{metric} {means[metric]:.4f}" for metric in ("recall@10", "ndcg@10", "hit@10", "mrr@10")
        )
        gain = "" if name == "served" else "   served {:+.4f} +-{:.4f}".format(*served.differences[name])
        say(f"  {name:<16} {shown}{gain}")
    for name, sums in served.segments.items():
        if sums.users:
            say(f"  {name:<16} recall@10 {sums.means()['recall@10']:.4f}   {sums.users:,} users")
    say("  kept   " + "   ".join(f"{name} {part:.1%}" for name, part in served.losses.items()))
    say("  lists   " + "   ".join(f"{name} {value:.3g}" for name, value in served.facts.items()))
    weights = served.fit.parameters.fusion.weights
    say("  channels   " + "   ".join(f"{name} {weight:g}" for name, weight in weights.items()))
    left_out = {name: number for name, number in served.left_out.items() if number}
    if left_out:
        say("  left out   " + "   ".join(f"{number:,} {name}" for name, number in left_out.items()))
    for verdict in served.verdicts:
        say(str(verdict))
    if not served.passed:
        say(
            "FAIL   the served list is worse than its gate or than the most popular items: it will not be published"
        )


def say_evaluated(evaluated: list[EvaluateResult], report: Any, say: Say) -> None:
    for model in evaluated:
        metrics = model.metrics
        say(f"{model.model}   step {model.checkpoint.step:,}   {model.split} rows")
        if "auc" in metrics:
            simple = {name: found["auc"] for name, found in model.baselines.items() if ": " not in name}
            beside = "".join(f"   {name} {auc:.4f}" for name, auc in simple.items())
            margin, rows = metrics["auc_margin"], metrics["rows"]
            say(f"AUC {metrics['auc']:.4f}{beside}   95% CI +-{margin:.4f}   {rows:,.0f} rows")
            say(
                f"log loss {metrics['log_loss']:.4f}   normalised entropy {metrics['normalised_entropy']:.4f}"
            )
            say(
                f"accuracy {metrics['accuracy']:.4f}   constant predictor {metrics['constant_accuracy']:.4f}   "
                f"PR-AUC {metrics['pr_auc']:.4f}   calibration {metrics['calibration']:.3f}"
            )
            _say_tasks(metrics, say)
        elif "rmse" in metrics:
            simple = {name: found["r2"] for name, found in model.baselines.items()}
            say_numbers(metrics, say, "".join(f"   {name} {r2:.4f}" for name, r2 in simple.items()))
        elif "r2" not in metrics:
            _say_retrieval(model, say)
        _say_number_tasks(metrics, say)
        for part in model.segments:
            _say_segments(part, say)
        for verdict in model.verdicts:
            say(str(verdict))
    say(f"report {report}")


def say_numbers(metrics: Mapping[str, float], say: Say, beside: str = "") -> None:
    """Print the metrics of a numeric label."""
    say(f"R2 {metrics['r2']:.4f}{beside}   {metrics['rows']:,.0f} rows")
    say(
        f"RMSE {metrics['rmse']:.4g}   constant predictor {metrics['constant_rmse']:.4g}   MAE {metrics['mae']:.4g}"
    )
    say(f"rank correlation {metrics['rank_correlation']:.4f}   calibration {metrics['calibration']:.3f}")


def _say_tasks(metrics: dict[str, float], say: Say) -> None:
    """One line per task; the lines above are their mean."""
    tasks = [name.removesuffix(".auc") for name in metrics if name.endswith(".auc")]
    if tasks:
        say(
            f"{'task':<28} {'rate':>8} {'AUC':>8} {'log loss':>9} {'PR-AUC':>8} {'RCE':>8} {'calibration':>12}"
        )
    for task in tasks:
        found = {
            name: metrics[f"{task}.{name}"] for name in ("auc", "log_loss", "pr_auc", "rce", "calibration")
        }
        say(
            f"  {task:<26} {metrics[f'{task}.positive_rate']:>8.4f} {found['auc']:>8.4f} {found['log_loss']:>9.4f} "
            f"{found['pr_auc']:>8.4f} {found['rce']:>8.3f} {found['calibration']:>12.3f}"
        )


def _say_number_tasks(metrics: dict[str, float], say: Say) -> None:
    """One line per numeric label."""
    tasks = [name.removesuffix(".r2") for name in metrics if name.endswith(".r2")]
    names = ("r2", "rmse", "constant_rmse", "mae", "rank_correlation", "calibration")
    titles = ("R2", "RMSE", "constant", "MAE", "rank corr.", "calibration")
    if tasks:
        say(f"{'number':<28} " + " ".join(f"{title:>11}" for title in titles))
    for task in tasks:
        say(f"  {task:<26} " + " ".join(f"{metrics[f'{task}.{name}']:>11.4g}" for name in names))


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
