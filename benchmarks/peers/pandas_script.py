"""What a notebook does to prepare Criteo rows: the log in memory, value counts of training rows, map, log, Parquet.

python -m benchmarks.peers.pandas_script LOG INTO
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HELD_OUT = 1 / 7
MIN_COUNT = 2


def prepare(log: Path, into: Path) -> dict[str, Any]:
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
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    print(json.dumps(prepare(Path(sys.argv[1]), Path(sys.argv[2]))))
