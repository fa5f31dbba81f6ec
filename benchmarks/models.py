"""Samples a second of every model in training, on one thread and on two.

    python benchmarks/models.py [--threads 1,2] [--seconds 3] [--only dlrm,din]

Steps of a learner over four batches in memory: tables, dense part, loss, optimizers, without reading. Rankers have the
shape of the DLRM in `recmill bench train`: 13 numbers, 26 ids of 100,000 values each, dim 16, batches of 2048 rows;
those that read histories have one of 50 items beside them, and a part of 8 ids instead of 26. A row of sasrec is a
history of 100 items, of which each is predicted: its samples are items. Threads and models take turns, several rounds
each; a number is the best round, by wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `train` sets it, before torch loads OpenMP
import torch

from recmill.dataset.batch import Batch, Keys
from recmill.features.chain import ColumnInfo
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.learner.sequences import SequenceRetriever
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict
from recmill.stages.bench.contest import header
from recmill.stages.train.threads import keep_freed_memory

ROWS, NUM_IDS, NUM_NUMBERS, LISTED, STATES = 2048, 100_000, 13, 50, 100
IDS = [f"c{number}" for number in range(26)]
HISTORY_IDS = IDS[:8]
LABELS = ("label", "second")
TRAIN = r.Training(
    batch_size=ROWS, dense=r.Optimizer("adam", 0.001), sparse=r.Optimizer("rowwise_adagrad", 0.02)
)
COLUMNS = [
    *(ColumnInfo(f"i{number}", "number", "feature") for number in range(NUM_NUMBERS)),
    *(ColumnInfo(name, "id", "feature", size=NUM_IDS) for name in IDS),
    ColumnInfo("before", "ids", "feature", size=NUM_IDS, vocabulary="c0"),
    *(ColumnInfo(name, "number", "label") for name in LABELS),
]
MLPS = {"bottom": (512, 256, 64, 16), "top": (512, 256)}
SETTINGS: dict[str, dict[str, Any]] = {
    "lr": {"embedding_dim": 1},
    "fm": {"wide": tuple(IDS)},
    "deepfm": {"hidden": (512, 256), "wide": tuple(IDS)},
    "wide_deep": {"hidden": (512, 256), "wide": tuple(IDS)},
    "dlrm": {**MLPS, "interaction": "cat"},
    "dcn": {"hidden": (512, 256), "cross_rank": 64},
    "masknet": {"hidden": (512, 256)},
    "din": {"hidden": (512, 256), "sequences": ("before",)},
    "bst": {"hidden": (512, 256), "sequences": ("before",)},
    **{name: {**MLPS, "interaction": "cat", "tasks": r.Tasks(LABELS, tower=(64,))} for name in r.MULTI_TASK},
}


def ranker(name: str, num_threads: int) -> Ranker:
    settings = SETTINGS[name]
    numbers = tuple(f"i{number}" for number in range(NUM_NUMBERS))
    features = (*numbers, *(HISTORY_IDS if "sequences" in settings else IDS))
    label = "" if "tasks" in settings else "label"
    return Ranker(r.Ranking(name, label, features=features, train=TRAIN, **settings), COLUMNS, num_threads)


def tower(name: str, num_threads: int) -> Retriever:
    of_sequence = name == "sasrec"
    section: dict[str, Any] = {"label": "label", "user": ["c1", "before"], "item": ["c0", "c3"]}
    section |= {"hidden": [128, 64], "train": {"batch_size": ROWS}}
    if of_sequence:
        section = {"label": "label", "model": name, "user": "before", "item": "c0", "embedding_dim": 64}
    recipe = recipe_from_dict(
        {
            "name": name,
            "log": {
                "files": ["x"],
                "user": "c1",
                "item": "c0",
                "time": "time",
                "columns": [
                    {"name": one, "type": "int", "of": "item" if one == "c3" else "context"}
                    for one in (*IDS, "time", "y")
                ],
            },
            "rows": [{"history": {"columns": ["c0"], "by": "c1", "order": "time", "max_length": STATES}}],
            "labels": [{"name": "label", "columns": "y"}],
            "features": [
                {"columns": "c0", "steps": [{"vocabulary": {"named": "c0"}}]},
                {"columns": IDS[1:], "steps": ["vocabulary"]},
                {"name": "before", "columns": "c0_history", "steps": [{"lookup": "c0"}]},
            ],
            "retrieval": section,
        }
    )
    return (SequenceRetriever if of_sequence else Retriever)(recipe, COLUMNS, num_threads)


def batches(learner: Ranker | Retriever, seed: int, rows: int, length: int) -> list[Batch]:
    """Ids in proportion to 1 / rank, as in clicks; every row is positive for towers, a quarter for rankers."""
    random = np.random.default_rng(seed)
    share = 1.0 if isinstance(learner, Retriever) else 0.25

    def ids(number: int) -> np.ndarray:
        return np.minimum(random.zipf(1.2, number), NUM_IDS - 1)

    def one() -> Batch:
        keys = {name: Keys(ids(rows)) for name in IDS}
        keys["before"] = Keys(ids(rows * length), np.arange(rows + 1) * length)
        labels = {name: (random.random(rows) < share).astype(np.float32) for name in LABELS}
        labels["second"] *= labels["label"]  # esmm: what follows a click
        numbers = random.random((rows, len(learner.layout.number_columns)), dtype=np.float32)
        return Batch(rows, numbers, keys, {}, labels)

    return [one() for _ in range(4)]


Step = Callable[[], int]


def step_of(name: str, num_threads: int) -> Step:
    """One step of the model, and how many samples it has."""
    is_tower = name in ("two_tower", "sasrec")
    learner = (tower if is_tower else ranker)(name, num_threads)
    rows, length = (32, STATES) if name == "sasrec" else (ROWS, LISTED)
    data = batches(learner, 0, rows, length)
    samples = rows * (length + 1) if name == "sasrec" else rows
    learner.start(data[0])
    following: Iterator[Batch] = cycle(data)

    def step() -> int:
        learner.step(next(following))
        return samples

    step()
    return step


def speed(step: Step, seconds: float) -> float:
    began, samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        samples += step()
    return samples / passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each model and number of threads")
    parser.add_argument("--only", help="models, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    names = parsed.only.split(",") if parsed.only else [*SETTINGS, "two_tower", "sasrec"]
    threads = [int(number) for number in parsed.threads.split(",")]
    found: dict[str, dict[str, int]] = {}
    for name in names:
        steps = {number: step_of(name, number) for number in threads}
        rounds = [
            {number: speed(step, parsed.seconds / parsed.rounds) for number, step in steps.items()}
            for _ in range(parsed.rounds)
        ]
        found[name] = {str(number): round(max(one[number] for one in rounds)) for number in threads}
    print(json.dumps({**header("models", max(threads)), "samples_per_second": found}, indent=1))


if __name__ == "__main__":
    main()
