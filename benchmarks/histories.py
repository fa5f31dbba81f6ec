"""What models that read histories cost a request: a sequence tower and target attention over a large catalogue.

    python benchmarks/histories.py --into runs/histories [--items 1000000] [--ranker din] [--requests 300]

Makes a log with so many items and users with long histories, trains a few steps of sasrec and of the ranker (what a
request costs does not depend on what was learned), exports, and asks the bundle in this process, on one thread, one
user at a time. Folders that are there are used again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import recmill
from recmill import Checkpoint, Table
from recmill.artifacts.bundle.features import FeatureRows
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Recipe
from recmill.stages.bench.contest import header, pinned_to
from recmill.stages.serve.messages import Recommend

NUM_USERS, EVENTS_OF_USER = 5_000, 60
DIM, LENGTH, K, CANDIDATES = 64, 50, 50, 500


def write_log(folder: Path, num_items: int) -> None:
    """Every item once, by users of one event each, and 5,000 users with 60 events."""
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(NUM_USERS), EVENTS_OF_USER)
    items = random.integers(0, num_items, len(users))
    folder.mkdir(parents=True)
    pl.DataFrame(
        {
            "user": np.concatenate([np.arange(num_items) % 100 + NUM_USERS, users]),
            "item": np.concatenate([np.arange(num_items), items]),
            "time": np.arange(num_items + len(users)),
            "category": np.concatenate([np.arange(num_items), items]) % 100,
        }
    ).write_parquet(folder / "events.parquet")


def recipe_of(ranker: str) -> Recipe:
    columns = [{"name": name, "type": "int"} for name in ("user", "time")]
    columns += [{"name": name, "type": "int", "of": "item"} for name in ("item", "category")]
    train = {"batch_size": 64, "max_steps": 10, "sparse": {"name": "adam", "learning_rate": 0.01}}
    reads = {"sequences": ["before"]} if ranker in ("din", "bst") else {}
    return recipe_from_dict(
        {
            "name": f"histories-{ranker}",
            "log": {
                "files": ["events.parquet"],
                "format": "parquet",
                "user": "user",
                "item": "item",
                "time": "time",
                "columns": columns,
            },
            "rows": [{"history": {"columns": ["item"], "by": "user", "order": "time", "max_length": LENGTH}}],
            "labels": [
                {
                    "name": "seen",
                    "columns": "item",
                    "steps": [{"expression": {"sql": "item >= 0", "type": "int"}}],
                }
            ],
            "features": [
                {"columns": "user", "steps": ["vocabulary"]},
                {"columns": "item", "steps": [{"vocabulary": {"named": "item"}}]},
                {"columns": "category", "steps": ["vocabulary"]},
                {"name": "before", "columns": "item_history", "steps": [{"lookup": "item"}]},
            ],
            "table": {"keep": ["user", "item"]},
            "retrieval": {
                "model": "sasrec",
                "label": "seen",
                "user": "before",
                "item": "item",
                "embedding_dim": DIM,
                "train": train,
            },
            "ranking": {
                "model": ranker,
                "label": "seen",
                "embedding_dim": 16,
                "hidden": [256, 128],
                **reads,
                "train": train,
            },
        }
    )


def bundle_of(ranker: str, num_items: int, into: Path) -> Path:
    data, recipe, run = into / "log", recipe_of(ranker), into / ranker
    if not data.exists():
        write_log(data, num_items)
    if not (run / "bundles").exists():
        table = recmill.prepare(recipe, data, into=run / "table", quiet=True)
        recmill.train(recipe, Table.open(table.path), into=run / "checkpoint", threads=1, quiet=True)
        recmill.export(Checkpoint.open(run / "checkpoint"), data=data, into=run / "bundles", quiet=True)
    return run / "bundles"


def alone(served: recmill.Recommender, num_requests: int) -> dict[str, float]:
    """Milliseconds of CPU of the user tower for one history, and of the ranker for 500 items and one history."""
    tower = served.recaller.tower
    random = np.random.default_rng(0)
    features = [served.lookup.user_row(Recommend(user=user, k=K)).features for user in range(num_requests)]
    catalogue = served.recaller.items
    chosen = random.integers(0, len(catalogue), (20, CANDIDATES))
    items = [FeatureRows.of(catalogue.features(indices), catalogue.layout) for indices in chosen]
    acts = {
        "tower_alone_cpu_ms": lambda number: tower.vectors(features[number].batch(tower.layout)),
        "ranker_alone_cpu_ms": lambda number: served.ranker.rank(features[number], items[number % 20]),
    }
    return {name: round(cpu_ms(act, num_requests), 2) for name, act in acts.items()}


def cpu_ms(act: Callable[[int], object], number: int) -> float:
    passed = []
    for index in range(number):
        began = time.process_time()
        act(index)
        passed.append(1e3 * (time.process_time() - began))
    return float(np.median(passed))


def measure(bundle: Path, num_requests: int) -> dict[str, Any]:
    """Milliseconds of a request, by wall and CPU time, and of its stages: medians."""
    served = recmill.open_bundle(bundle)
    stages: dict[str, list[float]] = {}
    wall, cpu = [], []
    for number in range(num_requests + 20):
        request = Recommend(user=number % NUM_USERS, k=K, candidates=CANDIDATES, trace=True)
        began, cpu_began = time.perf_counter(), time.process_time()
        answer = served.recommend(request)
        if number >= 20:  # those before warm up
            wall.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - cpu_began))
            assert answer.trace is not None
            for name, passed in answer.trace.stages.items():
                stages.setdefault(name, []).append(passed)
    return {
        **alone(served, num_requests),
        "wall_ms": round(float(np.median(wall)), 2),
        "wall_ms_p90": round(float(np.quantile(wall, 0.9)), 2),
        "cpu_ms": round(float(np.median(cpu)), 2),
        "stages_ms": {name: round(float(np.median(passed)), 2) for name, passed in stages.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--ranker", action="append", choices=("din", "bst", "wide_deep"))
    parser.add_argument("--requests", type=int, default=300)
    parsed = parser.parse_args()
    rankers = parsed.ranker or ["din", "wide_deep"]
    bundles = {ranker: bundle_of(ranker, parsed.items, parsed.into) for ranker in rankers}
    with pinned_to(1):
        found = {ranker: measure(bundle, parsed.requests) for ranker, bundle in bundles.items()}
    print(json.dumps({**header("histories", 1), "items": parsed.items, "requests": found}, indent=1))


if __name__ == "__main__":
    main()
