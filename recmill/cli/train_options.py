"""What `recmill train` and `recmill run` ask and say about training."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recmill.cli.arguments import positive, size

if TYPE_CHECKING:
    from recmill.stages.train.train import TrainResult

TRACKERS = ("tensorboard", "mllog", "mlflow")


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
    from recmill.stages.train.train import TrainConfig

    return TrainConfig(
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


def note(line: str) -> None:
    print(f"note   {line}", file=sys.stderr)


def say_trained(trained: TrainResult, say: Callable[[str], None]) -> None:
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


def trained_json(trained: TrainResult) -> dict[str, Any]:
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


def _main_metrics(trained: TrainResult) -> dict[str, float]:
    wanted = ("auc", "log_loss", "normalised_entropy", "recall@10", "ndcg@10", "recall@50")
    return {name: trained.best.metrics[name] for name in wanted if name in trained.best.metrics}
