"""Conditions that were made at random, damaged or hostile: each is refused, or evaluated as a slow evaluation says.

    python benchmarks/fuzz_where.py [--inputs 100000] [--seed 1] [--rows 1024]

The slow evaluation goes row by row in plain Python (tests/where_oracle.py). Prints how many were refused and evaluated,
the slowest input, the memory that came on top, and how many answers differ; the exit code is 1 when any does.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as in servers; read when Polars is imported
import polars as pl

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from where_oracle import KINDS, ROWS, Writer, meets, some_input

from recmill.errors import ExpressionError
from recmill.features.expressions import compiled
from recmill.features.numeric import dtype_of
from recmill.recipe.expressions import parse_condition, parse_expression

SLOWEST_MS = 200.0  # of CPU that an input may take


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_024)
    parsed = parser.parse_args()
    writer = Writer(random.Random(parsed.seed))
    schema = {name: dtype_of(kind) for name, kind in KINDS.items()}
    few = pl.DataFrame(ROWS, schema=schema)
    frame = pl.concat([few] * max(1, parsed.rows // len(ROWS))).rechunk()
    counts: Counter[str] = Counter()
    slowest, slowest_text = 0.0, ""
    frame.select(compiled(parse_condition("n > 1", KINDS)))
    memory = peak_mb()
    for number in range(parsed.inputs):
        text = some_input(writer)
        began = time.process_time()
        outcome = tried(text, frame)
        took = (time.process_time() - began) * 1_000
        if took > slowest:
            slowest, slowest_text = took, text
        counts[outcome] += 1
        if outcome == "differs":
            print(f"differs: {text!r}")
        if number % 10 == 0:
            tried_as_expression(text, few, counts)
        if number % 10_000 == 9_999:
            print(f"{number + 1:,} inputs", file=sys.stderr)
    print(f"inputs {parsed.inputs:,}  refused {counts['refused']:,}  evaluated {counts['evaluated']:,}")
    tenth = f"refused {counts['expression refused']:,}  evaluated {counts['expression evaluated']:,}"
    print(f"every tenth as an expression: {tenth}")
    print(f"slowest {slowest:.1f} ms of CPU over {frame.height:,} rows: {slowest_text[:80]!r}")
    print(f"memory {peak_mb() - memory:+.0f} MB at most")
    print(f"mismatches {counts['differs']:,}")
    return 1 if counts["differs"] or slowest > SLOWEST_MS else 0


def tried(text: str, frame: pl.DataFrame) -> str:
    """refused, evaluated, or differs."""
    try:
        tree = parse_condition(text, KINDS)
    except ExpressionError:
        return "refused"
    met = frame.select(compiled(tree).fill_null(False).alias("met"))["met"].to_list()
    expected = [meets(tree, row) for row in ROWS]
    times = frame.height // len(ROWS)
    if len(met) == 1:  # no column is read
        met, times = met * len(ROWS), 1
    return "evaluated" if met == expected * times else "differs"


def tried_as_expression(text: str, frame: pl.DataFrame, counts: Counter[str]) -> None:
    try:
        frame.select(compiled(parse_expression(text, KINDS)))
        counts["expression evaluated"] += 1
    except ExpressionError:
        counts["expression refused"] += 1


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
