"""`recmill client`: score a CSV file over the Open Inference Protocol; throughput, latency and accuracy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.errors import RecmillError
from recmill.metrics import exact_auc
from recmill.reporting.latency import LatencyHistogram
from recmill.stages.bench.contest import Result
from recmill.stages.bench.serve.config import CsvClientConfig
from recmill.stages.bench.serve.inference import Scorer, error_of, parse_column, scorer_for
from recmill.stages.bench.serve.transports import ask, precise_loop

Array = np.ndarray[Any, np.dtype[Any]]
LABELS = ("label", "click", "clicked")  # default names of the label column


@dataclass
class _Batch:
    """`size` rows from `start` on, their request, and their scores."""

    start: int
    size: int
    request: bytes
    seconds: float = 0.0
    scores: Array | None = None


def score_file(options: CsvClientConfig) -> Result:
    """Send the file batch by batch; throughput, latencies, and accuracy and AUC if it has labels."""
    frame = read_rows(options)
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(_score(frame, options))


def read_rows(options: CsvClientConfig) -> pl.DataFrame:
    """The file's columns as text; the server's model decides their types."""
    try:
        frame = pl.read_csv(
            options.data_file,
            separator=options.separator,
            has_header=not options.columns,
            new_columns=list(options.columns) or None,
            infer_schema=False,
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RecmillError(f"{options.data_file} cannot be read as CSV: {error}") from None
    if not frame.height:
        raise RecmillError(f"{options.data_file} holds no rows.")
    return frame


async def _score(frame: pl.DataFrame, options: CsvClientConfig) -> Result:
    protocol = scorer_for(options.transport, options.server, options.deadline_seconds)
    datatypes = await protocol.inputs()
    known = [name for name in frame.columns if name in datatypes]
    if not known:
        raise RecmillError(
            f"{options.data_file} has none of the model's columns: {', '.join(datatypes)}. "
            f"It has: {', '.join(frame.columns)}. A file without a header needs --columns."
        )
    rows = frame.select(parse_column(frame[name], datatypes[name]) for name in known)
    batches = [
        _Batch(start, size, protocol.request(rows[start : start + size], datatypes))
        for start, size in batch_ranges(rows.height, options)
    ]
    await _send(protocol, batches, options.clients)
    result = _timings(batches, options) | _quality(batches, _labels(frame, options))
    result["columns"] = {"sent": known, "not_in_the_file": [name for name in datatypes if name not in known]}
    if options.out is not None:
        _write_scores(options.out, batches)
    return result


def batch_ranges(num_rows: int, options: CsvClientConfig) -> Iterator[tuple[int, int]]:
    """(start, size) of each batch; a file that is too short repeats."""
    if options.num_batches == 0:
        yield from (
            (start, min(options.batch_size, num_rows - start))
            for start in range(0, num_rows, options.batch_size)
        )
        return
    size = min(options.batch_size, num_rows)
    whole = num_rows // size
    for number in range(options.num_batches):
        yield number % whole * size, size


async def _send(protocol: Scorer, batches: list[_Batch], clients: int) -> None:
    transport = protocol.transport()
    await transport.open()
    queue = iter(batches)

    async def client() -> None:
        for batch in queue:
            began = time.perf_counter()
            problem, body = await ask(transport, batch.request)
            batch.seconds = time.perf_counter() - began
            if problem:
                raise RecmillError(
                    f"Rows from {batch.start + 1:,} on were not scored: {error_of(problem, body)}"
                )
            batch.scores = protocol.scores(body)

    try:
        await asyncio.gather(*(client() for _ in range(clients)))
    finally:
        transport.close()
        await asyncio.sleep(0)


def _timings(batches: list[_Batch], options: CsvClientConfig) -> Result:
    timed = batches[options.warm_up_iteration :] if options.num_batches else batches
    seconds = np.array([batch.seconds for batch in timed])
    rows = sum(batch.size for batch in timed)
    return {
        "batches": len(timed),
        "batch_size": options.batch_size,
        "rows": rows,
        "rows_per_second": round(rows * options.clients / seconds.sum(), 1),
        "latency": LatencyHistogram.of(seconds).as_dict(),
    }


def _labels(frame: pl.DataFrame, options: CsvClientConfig) -> Array | None:
    name = options.label or next((name for name in LABELS if name in frame.columns), None)
    if name is None:
        return None
    if name not in frame.columns:
        raise RecmillError(f'{options.data_file} has no column "{name}"; it has: {", ".join(frame.columns)}.')
    return parse_column(frame[name], "FP64").fill_null(0.0).to_numpy()


def _quality(batches: list[_Batch], labels: Array | None) -> Result:
    if labels is None:
        return {}
    known = np.concatenate([labels[batch.start : batch.start + batch.size] for batch in batches])
    scores = np.concatenate([batch.scores for batch in batches if batch.scores is not None])
    return {
        "accuracy": round(float(((scores >= 0.5) == (known > 0.5)).mean()), 5),
        "positive_rate": round(float((known > 0.5).mean()), 5),
        "auc": round(exact_auc(known, scores), 5),
    }


def _write_scores(path: Path, batches: list[_Batch]) -> None:
    scores = [batch.scores for batch in batches if batch.scores is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame({"probability": np.concatenate(scores)}).write_csv(path)


def describe(result: Result) -> str:
    latency = result["latency"]
    times = "  ".join(f"{name} {latency[f'{name}_ms']:.2f}" for name in ("p50", "p90", "p99", "p99.9", "max"))
    lines = [
        f"scored      {result['rows']:,} rows in {result['batches']:,} batches of {result['batch_size']:,}",
        f"throughput  {result['rows_per_second']:,.1f} rows/s",
        f"latency     {times} ms",
    ]
    if "auc" in result:
        lines.append(
            f"quality     AUC {result['auc']:.4f}  accuracy {result['accuracy']:.4f}  "
            f"(never a click: {1 - result['positive_rate']:.4f})"
        )
    if result["columns"]["not_in_the_file"]:
        lines.append(f"missing     {', '.join(result['columns']['not_in_the_file'])}: treated as unknown")
    return "\n".join(lines)
