"""bench embeddings: nanoseconds and bytes of a key in lookup and update, for tables in memory and on disk.

Shapes: B rows of a batch, F features, D embedding dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recmill.embeddings.collection import EmbeddingCollection, EmbeddingFeature
from recmill.embeddings.table import Array, DiskTier, EmbeddingTable, KeyRecords, TableSpec
from recmill.reporting.machine import available_cores
from recmill.stages.bench.config import EmbeddingsBenchConfig
from recmill.stages.bench.contest import Result, header
from recmill.synthetic.draw import zipf

NUM_TABLES = 26
DEFAULT_KEYS = 100_000, 10_000_000
ZIPF_EXPONENT = 1.05
LOAD_KEYS = 1 << 17
BATCHES = 10
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so that different ranks give different keys
Draw = Callable[[np.random.Generator, int, int], Array]


def bench_embeddings(config: EmbeddingsBenchConfig) -> Result:
    """Time pooled lookup and update. When the records take more than `memory` bytes, a disk tier holds the rest."""
    threads = config.threads or available_cores()
    return {
        **header("embeddings", threads),
        "dim": config.dim,
        "optimizer": "rowwise_adagrad",
        "tables": NUM_TABLES,
        "batch": config.batch,
        "repeat": config.repeat,
        "sizes": [_bench_size(size, config, threads) for size in config.keys or DEFAULT_KEYS],
    }


def _bench_size(num_keys: int, config: EmbeddingsBenchConfig, threads: int) -> Result:
    dim, batch, memory, repeat = config.dim, config.batch, config.memory, config.repeat
    specs = [TableSpec(f"t{i}", dim, seed=i) for i in range(NUM_TABLES)]
    payload = (dim + EmbeddingTable(specs[0]).num_states) * 4
    spills = memory is not None and num_keys * payload > memory
    disk = DiskTier(config.data or Path.cwd(), memory) if memory is not None and spills else None
    tables = [EmbeddingTable(spec, disk=disk) for spec in specs]
    features = [EmbeddingFeature(spec.name, spec.name) for spec in specs]
    collection = EmbeddingCollection(tables, features, threads)
    per_table = max(1, num_keys // NUM_TABLES)
    started = time.perf_counter()
    for table in tables:
        _fill(table, per_table)
    load_seconds = time.perf_counter() - started
    table_statistics = [table.statistics() for table in tables]
    held = sum(each.keys for each in table_statistics)
    # The last keys loaded are the rarest, so a disk tier needs many batches until its memory holds frequent ones.
    warm_up = BATCHES * (50 if spills else 1)
    return {
        "keys": held,
        "memory_bound": memory if spills else None,
        "load_ns": round(load_seconds / held * 1e9),
        "payload_bytes": payload,
        "record_bytes": round(sum(each.record_bytes for each in table_statistics) / held, 1),
        "index_bytes": round(sum(each.index_bytes for each in table_statistics) / held, 1),
        "zipf": _bench_traffic(collection, zipf_ranks, per_table, batch, warm_up, repeat),
        "uniform": _bench_traffic(collection, uniform_ranks, per_table, batch, BATCHES, repeat),
        "resident_mb": round(sum(table.statistics().resident_bytes for table in tables) / 2**20),
    }


def _fill(table: EmbeddingTable, num_keys: int) -> None:
    """Give every key a row, in the order in which Zipf traffic would insert them."""
    random = np.random.default_rng(table.spec.seed)
    arrival = random.standard_exponential(num_keys, np.float32)
    arrival *= np.arange(1, num_keys + 1, dtype=np.float32) ** np.float32(ZIPF_EXPONENT)
    order = np.argsort(arrival)
    for begin in range(0, num_keys, LOAD_KEYS):
        ranks = order[begin : begin + LOAD_KEYS]
        size = len(ranks)
        rows = random.standard_normal((size, table.spec.dim), np.float32) * np.float32(0.01)
        states = np.ones((size, table.num_states), np.float32)
        ones = np.ones(size, np.uint32)
        table.load(KeyRecords(_keys(ranks), rows, states, ones, ones))


def _keys(ranks: Array) -> Array:
    return (ranks.astype(np.uint64) * SPREAD).view(np.int64)


def uniform_ranks(random: np.random.Generator, num_keys: int, size: int) -> Array:
    return random.integers(0, num_keys, size)


def zipf_ranks(random: np.random.Generator, num_keys: int, size: int) -> Array:
    return zipf(random.random(size), num_keys, ZIPF_EXPONENT)


def _bench_traffic(
    collection: EmbeddingCollection, draw: Draw, num_keys: int, batch: int, warm_up: int, repeat: int
) -> Result:
    random = np.random.default_rng(0)
    num_rows = batch // NUM_TABLES
    grads_BFD = random.standard_normal((num_rows, NUM_TABLES, collection.dim), np.float32)
    steps = _steps(collection, lambda size: _keys(draw(random, num_keys, size)), grads_BFD)
    for _ in range(warm_up):
        next(steps)
    runs = [[next(steps) for _ in range(BATCHES)] for _ in range(repeat)]
    means = [np.mean(run, axis=0) / (num_rows * NUM_TABLES) * 1e9 for run in runs]
    lookup, update = (statistics.median(float(mean[i]) for mean in means) for i in range(2))
    return {"lookup_ns": round(lookup, 1), "update_ns": round(update, 1)}


def _steps(
    collection: EmbeddingCollection, draw: Callable[[int], Array], grads_BFD: Array
) -> Iterator[tuple[float, float]]:
    """The seconds that lookup and update took, batch after batch without end."""
    while True:
        columns: Any = {feature.name: (draw(len(grads_BFD)), None) for feature in collection.features}
        started = time.perf_counter()
        looked = collection.lookup(columns, train=True)
        between = time.perf_counter()
        collection.update(looked, grads_BFD, 0.01)
        yield between - started, time.perf_counter() - between


def describe(result: Result) -> str:
    """The result as a table for people."""
    machine = result["machine"]
    lines = [
        f"{result['tables']} tables of dim {result['dim']}, {result['optimizer']}, {result['batch']:,} keys a batch, "
        f"{machine['cores']} cores of {machine['processor']}, median of {result['repeat']}; ns and bytes per key",
        f"{'':<13}{'':>10}{'--- zipf ---':>20}{'-- uniform --':>20}{'':>9}{'---- bytes ----':>26}",
        f"{'keys':>13}{'bound':>10}{'lookup':>10}{'update':>10}{'lookup':>10}{'update':>10}{'load':>9}"
        f"{'payload':>10}{'record':>8}{'index':>8}",
    ]
    for size in result["sizes"]:
        bound = "none" if size["memory_bound"] is None else f"{size['memory_bound'] / 2**30:.1f} GB"
        times = (
            size[traffic][f"{act}_ns"] for traffic in ("zipf", "uniform") for act in ("lookup", "update")
        )
        lines.append(
            f"{size['keys']:>13,}{bound:>10}"
            + "".join(f"{value:>10,.0f}" for value in times)
            + f"{size['load_ns']:>9,}{size['payload_bytes']:>10}{size['record_bytes']:>8}{size['index_bytes']:>8}"
        )
    return "\n".join(lines)
