"""What every model is put to: a small planted log, one line for each model, and what workers do with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recmill.dataset.batch import Batch
from recmill.dataset.table import Table
from recmill.distributed.parallel import distribute
from recmill.distributed.slices import SliceSizes
from recmill.distributed.workers import Workers
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.saved import new_learner
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict
from recmill.stages.train.source import TableData

NUM_USERS, NUM_ITEMS, NUM_ROWS, STEPS = 20, 30, 700, 30
TRAIN: dict[str, Any] = {
    "batch_size": 64,
    "epochs": 9,
    "max_steps": STEPS,
    "evaluations": 1,
    "dense": {"name": "adam", "learning_rate": 0.02},
    "sparse": {"name": "adagrad", "learning_rate": 0.1},
    "schedule": {"decay_from": 1},  # so that a shorter run is the beginning of a longer one
}


TREES = {"features": ["price", "rate"], "rounds": 10, "depth": 3, "min_rows": 10}
TREES_TRAIN = {"batch_size": NUM_ROWS * 9 // 10 // STEPS, "max_steps": STEPS}  # one epoch, as trees take
FEATURES = ["user", "item", "recent", "tags", "price", "shape", "small", "large"]
ONE_DIM = FEATURES[:6]


def ranking(model: str, **given: Any) -> dict[str, Any]:
    label = {} if "tasks" in given else {"label": "clicked"}
    base = {"model": model, "features": FEATURES, "embedding_dim": 4, "train": TRAIN}
    return {"ranking": {**base, **label, **given}}


def tasks(model: str, **given: Any) -> dict[str, Any]:
    """A ranker of both labels."""
    of_tasks = {"labels": ["clicked", "bought"], "tower": [4], **given}
    return ranking(model, bottom=[8, 4], top=[8], tasks=of_tasks)


def retrieval(**given: Any) -> dict[str, Any]:
    base = {
        "label": "clicked",
        "user": ["user", "recent"],
        "item": ["item", "price", "tags", "shape", "large"],
    }
    return {"retrieval": {**base, "embedding_dim": 4, "temperature": 0.2, "train": TRAIN, **given}}


# One line, and a model has joined.
MODELS: dict[str, dict[str, Any]] = {
    "lr": ranking("lr", embedding_dim=1, features=ONE_DIM),
    "fm": ranking("fm", wide=["user", "item"]),
    "deepfm": ranking("deepfm", hidden=[8]),
    "wide_deep": ranking("wide_deep", hidden=[8], wide=["item", "tags"]),
    "dlrm, dot": ranking("dlrm", bottom=[8, 4], top=[8]),
    "dlrm, cat": ranking("dlrm", bottom=[8], top=[8], interaction="cat"),
    "dlrm, cross": ranking("dlrm", bottom=[8, 4], top=[8], interaction="cross", cross_layers=2, cross_rank=3),
    "dcn": ranking("dcn", hidden=[8], cross_layers=2),
    "masknet": ranking("masknet", hidden=[8], mask_blocks=2, mask_width=8),
    "din": ranking("din", hidden=[8], sequences=["recent"]),
    "bst": ranking("bst", hidden=[8], sequences=["recent"]),
    "shared_bottom": tasks("shared_bottom"),
    "mmoe": tasks("mmoe", experts=2),
    "ple": tasks("ple", experts=2, levels=2),
    "esmm": tasks("esmm"),
    "mmoe, uncertainty": tasks("mmoe", uncertainty=True),
    "squared": ranking("wide_deep", hidden=[8], label="paid", loss="squared"),
    "huber": ranking("din", hidden=[8], sequences=["recent"], label="paid", loss="huber"),
    "squared_log": ranking("dcn", hidden=[8], label="paid", loss="squared_log", average=2),
    "weighted_logistic": ranking("dlrm", bottom=[8, 4], top=[8], label="paid", loss="weighted_logistic"),
    "mmoe, a number": tasks("mmoe", experts=2, labels=["clicked", "paid"], losses={"paid": "squared"}),
    "weighted rows": ranking("wide_deep", hidden=[8], weight="worth"),
    "averaged": ranking("dcn", hidden=[8], cross_layers=2, wide=["item"], average=2),
    "averaged din": ranking("din", hidden=[8], sequences=["recent"], average=2),
    "trees": ranking("trees", trees=TREES, features=[], embedding_dim=16, train=TREES_TRAIN),
    "wide_deep and trees": ranking("wide_deep", hidden=[8], trees=TREES),
    "own ranker": ranking("own_models:Gated", hidden=[8]),
    "own loss": ranking("wide_deep", hidden=[8], loss="own_models:focal"),
    "own towers": retrieval(model="own_models:Narrow", hidden=[4]),
    "two_tower": retrieval(hidden=[8, 4]),
    "two_tower, bce": retrieval(hidden=[8], loss="bce"),
    "two_tower, no layers": retrieval(hidden=[]),
    "sasrec": retrieval(model="sasrec", user=["recent"], item=["item"], blocks=1, negatives=20, dropout=0.0),
}


def recipe_of(name: str) -> r.Recipe:
    return recipe_from_dict({**_BASE, **MODELS[name]})


_BASE: dict[str, Any] = {
    "name": "contract",
    "log": {
        "files": ["events.tsv"],
        "user": "user",
        "item": "item",
        "time": "time",
        "columns": [
            {"name": "user", "type": "int"},
            {"name": "item", "type": "int"},
            {"name": "time", "type": "int"},
            {"name": "price", "type": "float", "of": "item"},
            {"name": "tags", "type": "text", "of": "item"},
            {"name": "vector", "type": "text", "of": "item"},
            {"name": "click", "type": "int"},
            {"name": "buy", "type": "int"},
        ],
    },
    "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "where": "click = 1"}}],
    "split": {"by": "time", "column": "time", "held_out": 0.1},
    "labels": [
        {"name": "clicked", "columns": "click"},
        {"name": "bought", "columns": "buy"},
        {
            "name": "paid",
            "columns": "price, buy",
            "steps": [{"expression": {"sql": "1.0 + 10 * price * buy"}}],
        },
        {"name": "worth", "columns": "buy", "steps": [{"expression": {"sql": "1.0 + 2 * buy"}}]},
    ],
    "features": [
        {"columns": "user", "steps": ["vocabulary"]},
        {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
        {"name": "recent", "columns": "item_history", "steps": [{"lookup": "item"}]},
        {"columns": "tags", "steps": [{"split": ","}, "vocabulary"]},
        {"name": "shape", "columns": "vector", "steps": [{"split": ";"}, {"cast": "float"}, {"pad": 3}]},
        {"name": "small", "columns": "item", "steps": ["vocabulary"], "dim": 2},
        {"name": "large", "columns": "tags", "steps": [{"split": ","}, "vocabulary"], "dim": 6},
        {"columns": "price", "steps": ["standardise"]},
        {"name": "rate", "columns": "item", "steps": [{"target": "clicked"}]},
    ],
    "table": {"order": "shuffle", "keep": ["user", "item"]},
}


def write_log(folder: Path) -> None:
    """A third of the items is clicked by nearly everybody, the others by few; a part of clicks is bought."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, NUM_USERS, NUM_ROWS), random.integers(0, NUM_ITEMS, NUM_ROWS)
    clicks = random.random(NUM_ROWS) < np.where(items % 3 == 0, 0.9, 0.1)
    buys = clicks & (random.random(NUM_ROWS) < np.where(items % 2 == 0, 0.7, 0.1))
    lines = [
        f"{user}\t{item}\t{time}\t{item % 7}\tt{item % 3},t{item % 5}\t{item / 9:.2f};{item % 2}\t"
        f"{int(click)}\t{int(buy)}\n"
        for time, (user, item, click, buy) in enumerate(zip(users, items, clicks, buys, strict=True))
    ]
    folder.mkdir(parents=True)
    (folder / "events.tsv").write_text("".join(lines))


def learner_of(name: str, table: Table, num_threads: int = 1) -> Ranker | Retriever:
    (model,) = MODELS[name]
    return new_learner(recipe_of(name), model, table.columns, num_threads)


def batches(learner: Ranker | Retriever, table: Table, number: int) -> list[Batch]:
    return [batch for batch, _ in islice(TableData(table).batches(learner).read(), number)]


def losses_of_workers(workers: Workers, path: Path, names: Sequence[str], steps: int) -> list[list[float]]:
    """The losses of each model's first steps, learned by all workers together."""
    found, sizes = [], SliceSizes(workers.size)
    table = Table.open(path)
    for name in names:
        learner = learner_of(name, table)
        rows = batches(learner, table, steps)
        learner.start(rows[0])
        distribute(learner, workers)
        found.append([learner.step(sizes.slice_batch(batch, workers.rank)).loss for batch in rows])
    return found
