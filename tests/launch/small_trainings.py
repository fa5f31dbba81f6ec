"""A small log in several files, a recipe that trains on it in a second, and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.dataset.batch import Batch
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe

NUM_ROWS = 1_500
NUM_FILES = 6


def recipe_of(split: Mapping[str, Any] | None = None, **train: Any) -> Recipe:
    """Keys and a number, no fitting; even users click even items."""
    return recipe_from_dict(
        {
            "name": "parity",
            "log": {
                "files": ["events*.tsv"],
                "columns": [
                    {"name": "user", "type": "int"},
                    {"name": "item", "type": "int"},
                    {"name": "price", "type": "float"},
                    {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
                ],
            },
            "split": split or {"by": "tail", "held_out": 0.2},
            "labels": [{"name": "click", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["key"]},
                {"columns": "item", "steps": ["key"]},
                {"columns": "price", "steps": [{"fill": 0}]},
            ],
            "ranking": {
                "model": "dlrm",
                "label": "click",
                "embedding_dim": 4,
                "bottom": [8, 4],
                "top": [8],
                "train": {
                    "batch_size": 64,
                    "epochs": 2,
                    "evaluations": 3,
                    "saving": {"every_steps": 5, "full_every": 3, "keep": 2},
                    "dense": {"name": "adam", "learning_rate": 0.01},
                    "sparse": {"name": "adagrad", "learning_rate": 0.2},
                    **train,
                },
            },
        }
    )


def write_log(folder: Path, num_rows: int = NUM_ROWS, num_files: int = NUM_FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    rows = [
        f"{user}\t{item}\t{price:.3f}\t{int((user + item) % 2 == 0)}\n"
        for user, item, price in zip(
            random.integers(0, 40, num_rows),
            random.zipf(1.6, num_rows) % 300,
            random.normal(size=num_rows),
            strict=True,
        )
    ]
    for number in range(num_files):
        part = rows[number * num_rows // num_files : (number + 1) * num_rows // num_files]
        (folder / f"events{number}.tsv").write_text("".join(part))
    return folder


def signature(batch: Batch) -> Any:
    """Everything in a batch as plain values."""
    keys = {
        name: (found.values.tolist(), None if found.offsets is None else found.offsets.tolist())
        for name, found in {**batch.keys, **batch.lists}.items()
    }
    return batch.size, batch.numbers.tolist(), keys, {name: y.tolist() for name, y in batch.labels.items()}


def sightings(folder: Path, model: str = "ranking") -> dict[str, dict[int, int]]:
    """How often each table has seen each key, as of the last checkpoint: exact when every row was learned once."""
    checkpoints = Checkpoint.open(folder).of(model)
    found: dict[str, dict[int, int]] = {}
    for part in checkpoints.chain(checkpoints.find("last")):
        for table in part.manifest["tables"]:
            counts = found.setdefault(table, {})
            for records in part.records(table):
                counts |= dict(zip(records.keys.tolist(), records.counts.tolist(), strict=True))
    return found


def last_state(folder: Path, model: str = "ranking") -> dict[str, Any]:
    return Checkpoint.open(folder).of(model).find("last").state
