"""The outputs of the served evaluation: recall.json, which export reads, and a section of evaluation.json."""

from __future__ import annotations

import json
from typing import Any

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import write_whole
from recmill.reporting.progress import Progress
from recmill.stages.export.export import RECALL
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.replay import ServedResult, replay


def replay_and_write(
    folder: Checkpoint, data: str, config: ReplayConfig, gate: str | None, progress: Progress
) -> ServedResult:
    """Measure the served list, judge it by the gate, and write the recall parameters of later bundles."""
    result = replay(folder, data, config, progress).judged(gate)
    content = {"steps": result.steps, "parameters": result.fit.parameters.as_dict()}
    write_whole(folder.path / RECALL, json.dumps(content, indent=1) + "\n", contended=True)
    return result


def served_json(result: ServedResult) -> dict[str, Any]:
    """The section of evaluation.json and the report."""
    return {
        "split": result.split,
        "steps": result.steps,
        "users": result.sums.users,
        "metrics": result.metrics,
        "baselines": {name: sums.means() for name, sums in result.baselines.items()},
        "segments": {name: {"users": sums.users, **sums.means()} for name, sums in result.segments.items()},
        "facts": result.facts,
        "stages": result.losses,
        "left_out": result.left_out,
        "differences": {name: list(found) for name, found in result.differences.items()},
        "recall": result.fit.parameters.as_dict(),
        "gate": [str(verdict) for verdict in result.verdicts],
        "passed": result.passed,
    }
