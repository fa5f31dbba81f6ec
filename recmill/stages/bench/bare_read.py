"""The floor of bench prepare: a bare multi-threaded `read_csv` of the log, which transforms and writes nothing."""

from __future__ import annotations

import json
import sys
import time

import polars as pl

if __name__ == "__main__":
    started = time.perf_counter()
    rows = pl.read_csv(sys.argv[1], separator="\t", has_header=False, infer_schema_length=10_000).height
    print(json.dumps({"seconds": time.perf_counter() - started, "rows": rows}))
