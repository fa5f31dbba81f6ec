"""What workers are asked to do in tests of whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.table import Table
from recmill.distributed.workers import Workers
from recmill.recipe import recipe as r
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import TrainContext, train
from recmill.stages.train.trainer import TrainProgress


@dataclass(frozen=True)
class Ran:
    """How a run looked from one worker."""

    losses: list[float]
    metrics: dict[str, float]
    steps: int
    reports: list[tuple[int, str]]
    wire_bytes: int
    state: Any


def run(workers: Workers, recipe: r.Recipe, table: Path, into: Path, **options: Any) -> Ran:
    losses: list[float] = []
    reports: list[tuple[int, str]] = []

    def saw(model: str, progress: TrainProgress) -> None:
        losses.append(progress.loss)

    def reported(metrics: Any, path: Path | None) -> None:
        assert path is not None
        assert (path / "manifest.json").is_file()
        reports.append((int(metrics["step"]), path.name))

    config = TrainConfig(threads=1, **options)
    context = TrainContext(workers, on_step=saw, on_report=reported)
    (trained,) = train(recipe, TableData(Table.open(table)), into, config, context=context)
    return Ran(losses, trained.best.metrics, trained.best.step, reports, trained.wire_bytes, trained.state)


def contents(into: Path, model: str = "ranking") -> dict[str, dict[int, tuple[Any, int, int]]]:
    """Of each table of the last checkpoint: key -> row, count, step."""
    checkpoints = Checkpoint.open(into).of(model)
    found: dict[str, dict[int, tuple[Any, int, int]]] = {}
    for part in checkpoints.chain(checkpoints.find("last")):
        admission = part.admission()
        for name in part.manifest["tables"]:
            keys = found.setdefault(name, {})
            for key in admission[f"{name}.removed"].tolist():
                keys.pop(key, None)
            for records in part.records(name):
                for place, key in enumerate(records.keys.tolist()):
                    keys[key] = (
                        records.rows[place].copy(),
                        int(records.counts[place]),
                        int(records.steps[place]),
                    )
    return found


def waiting(into: Path, model: str = "ranking") -> dict[str, dict[int, tuple[int, int]]]:
    """Of each table of the last checkpoint: keys without a row -> count, step."""
    last = Checkpoint.open(into).of(model).find("last")
    admission = last.admission()
    return {
        name: dict(
            zip(
                admission[f"{name}.keys"].tolist(),
                zip(admission[f"{name}.counts"].tolist(), admission[f"{name}.steps"].tolist(), strict=True),
                strict=True,
            )
        )
        for name in last.manifest["tables"]
    }


def assert_same_tables(found: Path, expected: Path, model: str = "ranking", tolerance: float = 2e-4) -> None:
    """Keys, counts and steps to the last one; rows within rounding."""
    ours, theirs = contents(found, model), contents(expected, model)
    assert ours.keys() == theirs.keys()
    for name, keys in theirs.items():
        assert ours[name].keys() == keys.keys(), name
        assert {key: value[1:] for key, value in ours[name].items()} == {
            key: value[1:] for key, value in keys.items()
        }, name
        order = sorted(keys)
        rows = [np.stack([part[name][key][0] for key in order]) for part in (ours, theirs)]
        np.testing.assert_allclose(rows[0], rows[1], atol=tolerance, err_msg=name)
    assert waiting(found, model) == waiting(expected, model)


def in_turn(workers: Workers, tasks: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Several things in the same processes, which take seconds to start."""
    return [function(workers, *arguments, **options) for function, arguments, options in tasks]
