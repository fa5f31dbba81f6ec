"""Fit and apply a vocabulary of many values with tasks in another process; prints what this one, the driver, took."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_cluster import ProcessCluster, SizedEngine

from recmill.engines.join import join
from recmill.features.stored import StoredValueTable
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import POSITION, SPLIT
from recmill.stages.prepare.prepare import fit

RECIPE = {
    "name": "many",
    "log": {"files": ["log.tsv"], "columns": [{"name": "user", "type": "text"}]},
    "features": [{"name": "user", "columns": "user", "steps": ["vocabulary"]}],
}
NUM_UNITS = 8


@dataclass(frozen=True)
class Users:
    """Every user once, and some of them twice."""

    num_values: int

    def units(self) -> range:
        return range(NUM_UNITS)

    def unit_bytes(self, unit: int) -> int:
        return 24 * self.num_values // NUM_UNITS

    def first_position(self, unit: int) -> int:
        return unit * self.num_values

    def max_offset(self) -> int:
        return NUM_UNITS * self.num_values

    def read(self, unit: int) -> Iterator[pl.DataFrame]:
        numbers = np.arange(unit, self.num_values, NUM_UNITS)
        for start in range(0, len(numbers), 1 << 15):
            batch = np.concatenate([numbers[start : start + (1 << 15)], numbers[start : start + 100]])
            users = pl.Series("user", batch * 7919 % (1 << 40)).cast(pl.String)
            yield pl.DataFrame(
                [
                    ("user-" + users).alias("user"),
                    pl.Series(POSITION, self.first_position(unit) + start + np.arange(len(batch))),
                    pl.Series(SPLIT, np.zeros(len(batch), np.int8)),
                ]
            )


def main() -> None:
    num_values, work, small_bytes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    engine = SizedEngine(work, small_bytes, ProcessCluster(work / "wire"), task_memory=16 << 20)
    frame = engine.read(Users(num_values))
    plan = fit(engine, frame, recipe_from_dict(RECIPE))
    plan.save(work / "plan")
    keyed = plan.tables["user"]
    features = engine.map(frame, plan.apply)
    if plan.joins():
        function = plan.joined(attrgetter("apply"))
        features = join(engine, frame, plan.stored, plan.joins(), function, "answers")
    shards = engine.write(features, work / "table", "log", seed=0)
    engine.close()
    found = {
        "known": len(keyed),
        "stored": isinstance(keyed, StoredValueTable),
        "rows": sum(shard.rows for shard in shards),
        "digest": plan.digest(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
