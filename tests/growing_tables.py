"""A small log and recipe in log order, and a writer that lets a finished Table grow again, part by part."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.artifacts.manifest import MANIFEST, WORK, write_whole
from recmill.artifacts.work import write_record
from recmill.dataset.batch import Batch
from recmill.dataset.table import Table
from recmill.learner.saved import open_learner
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe

NUM_ROWS = 1_200


def small_recipe(order: str = "log", **train: Any) -> Recipe:
    """Even users click even items. The last fifth of the log is held out."""
    return recipe_from_dict(
        {
            "name": "small",
            "log": {
                "files": ["events*.tsv"],
                "columns": [
                    {"name": "user", "type": "int"},
                    {"name": "item", "type": "int"},
                    {"name": "price", "type": "float"},
                    {"name": "click", "type": "int", "allowed": [0, 1], "required": True},
                ],
            },
            "split": {"by": "tail", "held_out": 0.2},
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": ["key"]},
                {"columns": "price", "steps": [{"fill": 0}]},
            ],
            "table": {"order": order},
            "ranking": {
                "model": "dlrm",
                "label": "clicked",
                "embedding_dim": 4,
                "bottom": [8, 4],
                "top": [8],
                "train": {
                    "batch_size": 64,
                    "epochs": 2,
                    "dense": {"name": "adam", "learning_rate": 0.01},
                    "sparse": {"name": "adagrad", "learning_rate": 0.2},
                    **train,
                },
            },
        }
    )


def write_log(folder: Path, num_rows: int = NUM_ROWS, num_files: int = 4) -> Path:
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    users, items = random.integers(0, 40, num_rows), random.integers(0, 60, num_rows)
    rows = [
        f"{user}\t{item}\t{price:.3f}\t{int((user + item) % 2 == 0)}\n"
        for user, item, price in zip(users, items, random.normal(size=num_rows), strict=True)
    ]
    for number in range(num_files):
        (folder / f"events{number}.tsv").write_text("".join(rows[number::num_files]))
    return folder


class Replay:
    """Writes a finished Table once more, as prepare does: the Plan first, then part by part, then the manifest."""

    def __init__(self, finished: Table, into: Path) -> None:
        self.finished, self.into, self.work = finished, into, into / WORK
        self.parts: dict[int, list[Any]] = defaultdict(list)
        for shard in finished.manifest["shards"]:
            self.parts[int(Path(shard["file"]).name.split("-")[1])].append(shard)
        (self.work / "done").mkdir(parents=True)
        (self.work / "job").write_text(finished.manifest["job"])
        shutil.copytree(finished.path / "plan", self.work / "plan")

    def write_part(self, number: int) -> None:
        for shard in self.parts[number]:
            (self.into / shard["split"]).mkdir(exist_ok=True)
            shutil.copy(self.finished.path / shard["file"], self.into / shard["file"])
        write_record(self.work / "done" / f"parquet-{number:06d}.json", self.parts[number])

    def finish(self) -> None:
        (self.work / "plan").rename(self.into / "plan")
        write_whole(self.into / MANIFEST, (self.finished.path / MANIFEST).read_text())
        shutil.rmtree(self.work)


def plain(batch: Batch) -> Any:
    """Everything in a batch as plain values."""
    keys = {name: found.values.tolist() for name, found in batch.keys.items()}
    return batch.numbers.tolist(), keys, {name: values.tolist() for name, values in batch.labels.items()}


def weights(folder: Path) -> dict[str, bytes]:
    """Every bit of what was learned."""
    learner = open_learner(Checkpoint.open(folder), "ranking", "last").learner
    found = {name: value.tobytes() for name, value in learner.arrays().items()}
    for name, table in learner.tables.items():
        with table.begin_snapshot() as snapshot:
            pieces = list(snapshot)
        keys = np.concatenate([piece.keys for piece in pieces])
        order = np.argsort(keys)
        found[f"{name} keys"] = keys[order].tobytes()
        for part in ("rows", "states", "counts"):
            found[f"{name} {part}"] = np.concatenate([getattr(piece, part) for piece in pieces])[
                order
            ].tobytes()
    return found
