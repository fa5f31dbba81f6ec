"""`recmill checkpoint`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from recmill.cli.arguments import add_command, add_json, show_bytes
from recmill.cli.flags import UsageError, typed
from recmill.cli.train import describe_end
from recmill.config import COUNT


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "checkpoint",
        _checkpoint,
        "inspect checkpoints: show them, diff two of them, prune old ones",
        """
recmill checkpoint show runs/quickstart/checkpoint
recmill checkpoint diff runs/quickstart/checkpoint 1000 last --only ranking
recmill checkpoint prune runs/quickstart/checkpoint --keep 1
""",
    )
    parser.add_argument("act", choices=["show", "diff", "prune"], help="what to do")
    parser.add_argument("path", metavar="DIR", help="what `recmill train` wrote")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="diff: two of best, last or a step")
    parser.add_argument("--only", choices=["ranking", "retrieval"], help="this model (default: all)")
    parser.add_argument(
        "--keep", type=typed(COUNT), metavar="N", help="prune: how many of the last to keep (default: 1)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="show: read every file and compare it with its digest"
    )
    add_json(parser)


def _checkpoint(parsed: argparse.Namespace) -> None:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint

    _check_flags(parsed)
    folder = Checkpoint.open(parsed.path)
    models = [parsed.only] if parsed.only else folder.models
    act = {"show": _show, "diff": _diff, "prune": _prune}[parsed.act]
    result = {model: act(parsed, folder.of(model)) for model in models}
    if parsed.json:
        print(json.dumps(result))
        return
    for model, found in result.items():
        print(model)
        for line in _LINES[parsed.act](found):
            print(f"  {line}")


def _check_flags(parsed: argparse.Namespace) -> None:
    if parsed.act == "diff" and len(parsed.steps) != 2:
        raise UsageError("diff compares two checkpoints: name two steps, such as 1000 last.")
    if parsed.act == "prune" and "://" in parsed.path:
        raise UsageError(f"prune {parsed.path}: training prunes what it publishes. Give a directory.")
    if parsed.act != "diff" and parsed.steps:
        raise UsageError(f"{parsed.act} takes no steps; it is about all checkpoints.")
    for flag, act in (("keep", "prune"), ("verify", "show")):
        if getattr(parsed, flag) and parsed.act != act:
            raise UsageError(f"--{flag} is for {act}. Remove it.")


def _show(parsed: argparse.Namespace, checkpoints: Any) -> list[dict[str, Any]]:
    known, best = checkpoints.all(), checkpoints.find("best")
    if parsed.verify:
        for checkpoint in known:
            checkpoint.verify()
    return [
        {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "delta_of": checkpoint.delta_of,
            "num_bytes": checkpoint.num_bytes,
            "keys": sum(table["keys"] for table in checkpoint.manifest["tables"].values()),
            "metrics": checkpoint.metrics,
            "samples": checkpoint.state["samples"],
            "units": _units(checkpoint.state),
            "workers": checkpoint.state.get("workers", 1),
            "stopped_by": checkpoint.state["stopped_by"],
            "best": checkpoint.step == best.step,
            "verified": parsed.verify,
        }
        for checkpoint in known
    ]


def _units(state: dict[str, Any]) -> str | None:
    """How much of an epoch is done; None for checkpoints without that information."""
    units = state.get("units")
    return f"{state['cursor']['unit']}/{units} of epoch {state['cursor']['epoch']}" if units else None


def _diff(parsed: argparse.Namespace, checkpoints: Any) -> dict[str, Any]:
    from recmill.artifacts.checkpoint.compare import diff

    first, second = (checkpoints.find(step) for step in parsed.steps)
    return diff(checkpoints, first, second)


def _prune(parsed: argparse.Namespace, checkpoints: Any) -> dict[str, Any]:
    from recmill.artifacts.lock import lock_folder

    with lock_folder(checkpoints.folder.parent):  # a run that saves relies on its previous checkpoint
        gone = checkpoints.prune(parsed.keep or 1)
    return {
        "removed": [checkpoint.step for checkpoint in gone],
        "kept": [checkpoint.step for checkpoint in checkpoints.all()],
        "num_bytes": sum(checkpoint.num_bytes for checkpoint in gone),
    }


def _show_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'step':>10}  {'kind':<24} {'keys':>12} {'size':>10}  done and metrics"]
    for entry in found:
        kind = "full" if entry["delta_of"] is None else f"delta of {entry['delta_of']}"
        wanted = ("auc", "log_loss", "recall@10", "ndcg@10", "recall@50")
        metrics = "  ".join(
            f"{name} {entry['metrics'][name]:.4f}" for name in wanted if name in entry["metrics"]
        )
        marks = "  best" * entry["best"] + (
            f"  {describe_end(entry['stopped_by'])}" if entry["stopped_by"] else ""
        )
        size = show_bytes(entry["num_bytes"])
        done = f"units {entry['units']}" if entry["units"] else ""
        workers = f"  {entry['workers']} workers" if entry["workers"] > 1 else ""
        lines.append(
            f"{entry['step']:>10,}  {kind:<24} {entry['keys']:>12,} {size:>10}  {done}{workers}  {metrics}{marks}"
        )
    return lines


def _diff_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{'table':<28} {'added':>10} {'removed':>10} {'changed':>10} {'mean change':>12}"]
    for name, table in found["tables"].items():
        lines.append(
            f"{name:<28} {table['added']:>10,} {table['removed']:>10,} {table['changed']:>10,} "
            f"{table['mean_change']:>12.5f}"
        )
    lines.append(f"{'dense weights':<28} {'mean change':>12}")
    lines += [f"{name:<28} {value:>12.6f}" for name, value in found["dense"].items()]
    return lines


def _prune_lines(found: dict[str, Any]) -> list[str]:
    def steps(which: str) -> str:
        return ", ".join(f"{step:,}" for step in found[which]) or "none"

    return [f"removed {steps('removed')}   {show_bytes(found['num_bytes'])}", f"kept    {steps('kept')}"]


_LINES: dict[str, Any] = {"show": _show_lines, "diff": _diff_lines, "prune": _prune_lines}
