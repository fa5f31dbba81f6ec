"""What `recmill bench prepare` runs in processes: `python -m recmill.stages.bench.contestants NAME ...`."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

HELD_OUT = 1 / 7
MIN_COUNT = 2


def recmill(log: Path, into: Path, recipe: str, memory: int, workers: int | None) -> dict[str, Any]:
    """prepare, from the raw file to the published Table."""
    from recmill.recipe.load import load_recipe
    from recmill.stages.prepare.prepare import PrepareConfig, prepare

    loaded = load_recipe(recipe, [f'log.files=["{log.name}"]'])
    started = time.perf_counter()
    prepared = prepare(loaded, str(log.parent), into, PrepareConfig(workers=workers, memory=memory))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "seconds_fit": prepared.seconds_fit, "digest": prepared.table.digest}


def polars_read(log: Path) -> dict[str, Any]:
    """The floor: a bare multi-threaded `read_csv` of the same file, which keeps nothing and writes nothing."""
    import polars as pl

    started = time.perf_counter()
    rows = pl.read_csv(log, separator="\t", has_header=False, infer_schema_length=10_000).height
    return {"seconds": time.perf_counter() - started, "rows": rows}


def pandas_script(log: Path, into: Path) -> dict[str, Any]:
    """The notebook way to do what the recipe does: whole log in memory, value counts on the training rows, map, log."""
    import numpy as np
    import pandas as pd

    ints = [f"i{number}" for number in range(1, 14)]
    ids = [f"c{number}" for number in range(1, 27)]
    started = time.perf_counter()
    rows = pd.read_csv(log, sep="\t", names=["label", *ints, *ids], header=None)
    rows[ints] = np.log1p(rows[ints].fillna(0).clip(lower=0)).astype("float32")
    num_train = len(rows) - round(len(rows) * HELD_OUT)
    for name in ids:
        counts = rows[name].iloc[:num_train].value_counts()
        known = counts[counts >= MIN_COUNT].index
        vocabulary = pd.Series(np.arange(1, len(known) + 1, dtype="int32"), index=known)
        rows[name] = rows[name].map(vocabulary).fillna(0).astype("int32")
    into.mkdir(parents=True, exist_ok=True)
    rows.iloc[:num_train].to_parquet(into / "train.parquet", compression="lz4")
    rows.iloc[num_train:].to_parquet(into / "held_out.parquet", compression="lz4")
    return {"seconds": time.perf_counter() - started, "rows": len(rows)}


def main(arguments: list[str]) -> None:
    name, options = arguments[0], json.loads(arguments[1])
    paths = {key: Path(options.pop(key)) for key in ("log", "into") if key in options}
    contestant = {"recmill": recmill, "polars_read": polars_read, "pandas_script": pandas_script}[name]
    result = contestant(**paths, **options)  # type: ignore[operator]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**result, "peak_bytes": peak}))


if __name__ == "__main__":
    main(sys.argv[1:])
