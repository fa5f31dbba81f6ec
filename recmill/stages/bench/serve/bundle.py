"""A bundle to measure a server with, made by our own stages from a generated log: prepare, train, export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from recmill.artifacts.manifest import write_whole
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.bench.serve.log import (
    CONTEXT_KINDS,
    CONTEXT_NUMBERS,
    ITEM_KINDS,
    LABELS,
    USER_KINDS,
    USER_NUMBERS,
    Size,
    write_log,
)

RowsDtype = Literal["float32", "float16", "int8"]
_TOOK = "took.json"


def make_bundle(
    items: int, into: Path, rows_dtype: RowsDtype = "float32", say: Callable[[str], None] = lambda line: None
) -> Path:
    """The bundle of DeepRec's DLRM and two towers over so many items; made once, found again after.

    Seconds of each stage are in `took.json`; `log/` has `labels.parquet` and `context.parquet` for requests.
    """
    folder = into / f"dlrm-deeprec-{items}"
    bundle = folder / f"bundle-{rows_dtype}"
    if not (bundle / "current").is_file():
        _make(folder, bundle, Size.of(items), rows_dtype, say)
    return bundle


def _make(folder: Path, bundle: Path, size: Size, rows_dtype: RowsDtype, say: Callable[[str], None]) -> None:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.stages.export import export as exporting
    from recmill.stages.prepare.prepare import prepare
    from recmill.stages.train import train as training
    from recmill.stages.train.source import TableData

    recipe, log = bench_recipe(), folder / "log"
    stages: Mapping[str, Callable[[], Any]] = {
        "log": lambda: None if (log / LABELS).is_file() else write_log(size, log),
        "prepare": lambda: prepare(recipe, str(log), folder / "table"),
        "train": lambda: training.train(
            recipe,
            TableData(Table.open(folder / "table")),
            folder / "checkpoint",
            training.TrainConfig(resume=True),
        ),
        f"export {rows_dtype}": lambda: exporting.export(
            Checkpoint.open(folder / "checkpoint"),
            str(log),
            bundle,
            exporting.ExportConfig(rows=rows_dtype),
        ),
    }
    took = {}
    for name, work in stages.items():
        started = time.perf_counter()
        work()
        took[name] = round(time.perf_counter() - started, 1)
        say(f"{name:<16} {took[name]:,.1f} s")
    _keep_times(folder / _TOOK, took)


def _keep_times(path: Path, took: dict[str, float]) -> None:
    """What was there already took no time now; what it took when it was made stays."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    longest = {name: max(seconds, before.get(name, 0.0)) for name, seconds in took.items()}
    write_whole(path, json.dumps({**before, **longest}) + "\n")


def bench_recipe() -> Recipe:
    """DLRM with DeepRec's layers over 13 numbers and 26 kinds of ids, and two towers for recall."""
    user_ids, item_ids = ["user_id", *USER_KINDS], ["item_id", *ITEM_KINDS]
    train = {
        "batch_size": 2048,
        "epochs": 1,
        "dense": {"name": "adam", "learning_rate": 0.001},
        "sparse": {"name": "rowwise_adagrad", "learning_rate": 0.1},
    }
    return recipe_from_dict(
        {
            "name": "bench-serve",
            "description": "What `recmill bench serve` serves: DeepRec's DLRM and two towers over a generated log.",
            "log": {
                "files": ["log.parquet"],
                "format": "parquet",
                "user": "user_id",
                "item": "item_id",
                "time": "time",
                "columns": _columns(),
            },
            "rows": [
                {
                    "history": {
                        "columns": ["item_id"],
                        "by": "user_id",
                        "order": "time",
                        "where": "click = 1",
                        "max_length": 20,
                    }
                }
            ],
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {
                    "columns": [*USER_NUMBERS, *CONTEXT_NUMBERS],
                    "steps": [{"fill": 0}, {"clip": {"min": 0}}, "log"],
                },
                {"columns": ["user_id", *USER_KINDS, *CONTEXT_KINDS, *ITEM_KINDS], "steps": ["key"]},
                {"columns": "item_id", "steps": [{"key": "item"}]},
                {"name": "recent_items", "columns": "item_id_history", "steps": [{"key": "item"}]},
            ],
            "table": {"order": "shuffle"},
            "retrieval": {
                "label": "clicked",
                "user": [*user_ids, "recent_items"],
                "item": item_ids,
                "embedding_dim": 32,
                "hidden": [128, 64],
                "temperature": 0.1,
                "train": train,
            },
            "ranking": {
                "model": "dlrm",
                "label": "clicked",
                "features": [*USER_NUMBERS, *CONTEXT_NUMBERS, *user_ids, *CONTEXT_KINDS, *item_ids],
                "embedding_dim": 16,
                "bottom": [512, 256, 64, 16],
                "top": [512, 256],
                "interaction": "cat",
                "train": train,
            },
        }
    )


def _columns() -> list[dict[str, Any]]:
    def columns(names: Any, type_: str, of: str) -> list[dict[str, Any]]:
        return [{"name": name, "type": type_, "of": of} for name in names]

    return [
        {"name": "time", "type": "int", "required": True},
        {"name": "user_id", "type": "int", "required": True},
        {"name": "item_id", "type": "int", "required": True},
        {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
        *columns(USER_NUMBERS, "float", "user"),
        *columns(CONTEXT_NUMBERS, "float", "context"),
        *columns(USER_KINDS, "int", "user"),
        *columns(CONTEXT_KINDS, "int", "context"),
        *columns(ITEM_KINDS, "int", "item"),
    ]
