"""A small planted log with every kind of feature, and recipes of each kind of model over one Table of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recmill.dataset.table import Table
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict
from recmill.stages.prepare.prepare import prepare

NUM_USERS, NUM_ITEMS, NUM_ROWS, BATCH = 60, 400, 1500, 109
# 1200 rows train: the last batch has one row, so that most workers have none of it.
_TRAIN = {
    "batch_size": BATCH,
    "evaluations": 2,
    "dense": {"name": "adam", "learning_rate": 0.01},
    "sparse": {"name": "rowwise_adagrad", "learning_rate": 0.05},
}


def recipe_of(**models: Any) -> r.Recipe:
    return recipe_from_dict(
        {
            "name": "even-odd",
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
                    {"name": "click", "type": "int"},
                ],
            },
            "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "where": "click = 1"}}],
            "split": {"by": "time", "column": "time", "held_out": 0.2, "halve": True},
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
                {"name": "recent", "columns": "item_history", "steps": [{"lookup": "item"}]},
                {"name": "item_key", "columns": "item", "steps": ["key"]},
                {"name": "user_key", "columns": "user", "steps": ["key"]},
                {"columns": "price", "steps": ["standardise"]},
            ],
            "table": {"order": "shuffle", "keep": ["item"]},
            **models,
        }
    )


def _ranking(**given: Any) -> dict[str, Any]:
    base = {"model": "dlrm", "label": "clicked", "embedding_dim": 8, "bottom": [8], "top": [16]}
    return {"ranking": {**base, "train": _TRAIN, **given}}


def _retrieval(**given: Any) -> dict[str, Any]:
    base = {"label": "clicked", "user": ["user", "recent"], "item": ["item", "price"], "embedding_dim": 8}
    hidden = {} if "model" in given else {"hidden": [16, 8]}
    return {"retrieval": {**base, **hidden, "temperature": 0.2, "train": _TRAIN, **given}}


FIXED = ["user", "item", "recent", "price"]
KEYS = ["user_key", "item_key", "price"]
MODELS: dict[str, dict[str, Any]] = {
    "fixed": _ranking(features=FIXED, train={**_TRAIN, "micro_batches": 3}),
    # Without decay: its runs end at different steps and go on from there.
    "dynamic": _ranking(
        features=KEYS,
        train={**_TRAIN, "schedule": {"decay_from": 1}},
        dynamic={
            "admit_after": 2,
            "shared_rows": 7,
            "evict_every_steps": 5,
            "evict_after_steps": 6,
            "evict_below_norm": 0.005,
            "capacity": 90,
        },
    ),
    "wide": _ranking(
        model="wide_deep",
        features=FIXED,
        wide=["user", "item_key"],
        hidden=[16],
        bottom=[],
        top=[],
        wide_optimizer={"name": "ftrl", "learning_rate": 0.05},
    ),
    "lists": _ranking(model="din", features=FIXED, sequences=["recent"], hidden=[16], bottom=[], top=[]),
    "sasrec": _retrieval(
        model="sasrec",
        user=["recent"],
        item=["item"],
        blocks=1,
        negatives=50,
        dropout=0.0,
        train={**_TRAIN, "batch_size": 117, "sparse": {"name": "adam", "learning_rate": 0.01}},
    ),
    "softmax": _retrieval(train={**_TRAIN, "batch_size": 117}),  # 586 clicks: again one in the last batch
    "bce": _retrieval(
        loss="bce",
        user=["user_key", "recent"],
        item=["item_key", "price"],
        # So many counters that no key is admitted early.
        dynamic={"admit_after": 2, "bloom_counters": 1 << 17, "evict_every_steps": 4, "capacity": 50},
    ),
}


def recipe_named(name: str) -> r.Recipe:
    return recipe_of(**MODELS[name])


def with_training(recipe: r.Recipe, **training: Any) -> r.Recipe:
    """The same ranker, trained otherwise."""
    assert recipe.ranking is not None
    return replace(recipe, ranking=replace(recipe.ranking, train=replace(recipe.ranking.train, **training)))


def prepare_table(folder: Path) -> Table:
    """Users are shown anything, popular items more often, and click what is even or odd as they are."""
    random = np.random.default_rng(0)
    users = random.integers(0, NUM_USERS, NUM_ROWS)
    items = (NUM_ITEMS * random.random(NUM_ROWS) ** 2).astype(int)
    rows = zip(users, items, range(NUM_ROWS), strict=True)
    text = [f"{user}\t{item}\t{time}\t{item / 4}\t{int(user % 2 == item % 2)}\n" for user, item, time in rows]
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "events.tsv").write_text("".join(text))
    return prepare(recipe_named("fixed"), str(folder / "log"), folder / "table").table
